// SPDX-License-Identifier: Apache-2.0
//
// Runs a unary call, again where RetryOptions allows it. Thread-safe: no state.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "ctkvr/client/options.h"

namespace ctkvr::client {

using Deadline = std::chrono::system_clock::time_point;

// Whether a call that may have been done already can be sent again.
enum class Repeat { kSafe, kUnsafe };

struct Outcome {
  absl::Status status;    // of the last attempt
  uint32_t attempts = 0;  // made
};

// How long to wait before another attempt, or nothing when there must not be one. `attempts` have been made.
std::optional<std::chrono::milliseconds> DelayBeforeRetry(const absl::Status& status, uint32_t attempts, Repeat repeat,
                                                          const RetryOptions& options);

// `attempt` gets the deadline of the whole call. An error after several attempts says how many there were.
Outcome RunWithRetries(const RetryOptions& options, Deadline deadline, Repeat repeat,
                       const std::function<absl::Status(Deadline)>& attempt);

}  // namespace ctkvr::client
