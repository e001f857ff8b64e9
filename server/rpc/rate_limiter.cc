// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/rate_limiter.h"

#include <algorithm>
#include <cmath>

namespace ctkvr::rpc {

void RateLimiter::Set(double rate, uint64_t burst) {
  interval_ = std::chrono::nanoseconds(rate > 0 ? std::llround(1e9 / rate) : 0);
  depth_ = interval_ * static_cast<int64_t>(burst);
}

std::chrono::nanoseconds RateLimiter::Take(TimePoint now) {
  const int64_t at = std::chrono::nanoseconds(now.time_since_epoch()).count();
  if (interval_.count() == 0) return {};
  int64_t full_at = full_at_.load(std::memory_order_relaxed);
  int64_t next = 0;
  do {
    next = std::max(full_at, at) + interval_.count();
    if (next - at > depth_.count()) return std::chrono::nanoseconds(next - at - depth_.count());
  } while (!full_at_.compare_exchange_weak(full_at, next, std::memory_order_relaxed));
  return {};
}

}  // namespace ctkvr::rpc
