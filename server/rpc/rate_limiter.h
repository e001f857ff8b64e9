// SPDX-License-Identifier: Apache-2.0
//
// So many calls a second, and so many at once: a token bucket in one number, the time at which the bucket is full again
// (the generic cell rate algorithm of ITU-T I.371, virtual scheduling form). Thread-safe, without a lock: Take. Set is
// for one thread while nobody takes.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "server/core/clock.h"

namespace ctkvr::rpc {

class RateLimiter {
 public:
  // A full bucket of `burst` calls, filled at `rate` calls a second. 0: no limit. REQUIRES: burst > 0 with a rate.
  void Set(double rate, uint64_t burst);

  // 0: the call may go, and is counted. Else nothing is, and it may go after so long, if no other goes before it.
  std::chrono::nanoseconds Take(TimePoint now);

 private:
  std::chrono::nanoseconds interval_{0};  // between two calls on average
  std::chrono::nanoseconds depth_{0};     // what the bucket holds, as time
  std::atomic<int64_t> full_at_{INT64_MIN};
};

}  // namespace ctkvr::rpc
