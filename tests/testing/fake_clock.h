// SPDX-License-Identifier: Apache-2.0
//
// Time that tests move by hand. Thread-safe.

#pragma once

#include <atomic>
#include <chrono>

#include "server/core/clock.h"

namespace ctkvr::testing {

class FakeClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(std::chrono::nanoseconds(nanoseconds_.load())); }
  void Advance(std::chrono::nanoseconds duration) { nanoseconds_ += duration.count(); }

 private:
  // Not zero, so that a default TimePoint lies in the past.
  std::atomic<int64_t> nanoseconds_{1'000'000'000};
};

}  // namespace ctkvr::testing
