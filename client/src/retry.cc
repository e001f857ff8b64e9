// SPDX-License-Identifier: Apache-2.0
#include "client/src/retry.h"

#include <algorithm>
#include <random>
#include <string>
#include <thread>

#include "client/src/status.h"
#include "ctkvr/client/error.h"

namespace ctkvr::client {
namespace {

// So that clients refused together do not come back together.
double Jitter() {
  thread_local std::minstd_rand engine{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.8, 1.2)(engine);
}

std::chrono::milliseconds Backoff(uint32_t attempts, const RetryOptions& options) {
  double delay = static_cast<double>(options.backoff_initial.count());
  for (uint32_t i = 1; i < attempts; ++i) delay = std::min(2 * delay, static_cast<double>(options.backoff_max.count()));
  return std::chrono::milliseconds(static_cast<int64_t>(delay * Jitter()));
}

}  // namespace

std::optional<std::chrono::milliseconds> DelayBeforeRetry(const absl::Status& status, uint32_t attempts, Repeat repeat,
                                                          const RetryOptions& options) {
  if (attempts >= options.attempts_max) return std::nullopt;
  const ErrorDetail detail = DetailOf(status);
  const std::chrono::milliseconds backoff = Backoff(attempts, options);
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      // Without RetryInfo it is a limit that waiting does not lift.
      if (!detail.retry_delay) return std::nullopt;
      return std::max(*detail.retry_delay, backoff);
    case absl::StatusCode::kUnavailable:
      // A server that drains does not come back at this address before its sessions are gone.
      if (repeat == Repeat::kUnsafe || detail.reason == "DRAINING") return std::nullopt;
      return std::max(detail.retry_delay.value_or(std::chrono::milliseconds(0)), backoff);
    default:
      return std::nullopt;
  }
}

Outcome RunWithRetries(const RetryOptions& options, Deadline deadline, Repeat repeat,
                       const std::function<absl::Status(Deadline)>& attempt) {
  Outcome outcome;
  while (true) {
    outcome.status = attempt(deadline);
    ++outcome.attempts;
    if (outcome.status.ok()) return outcome;
    const auto delay = DelayBeforeRetry(outcome.status, outcome.attempts, repeat, options);
    if (!delay || std::chrono::system_clock::now() + *delay >= deadline) break;
    if (options.sleep) {
      options.sleep(*delay);
    } else {
      std::this_thread::sleep_for(*delay);
    }
  }
  if (outcome.attempts > 1) {
    outcome.status = Annotate(outcome.status, "after " + std::to_string(outcome.attempts) + " attempts");
  }
  return outcome;
}

}  // namespace ctkvr::client
