// SPDX-License-Identifier: Apache-2.0
//
// Time as the core sees it, so that tests can drive it. Thread-safe.

#pragma once

#include <chrono>

namespace ctkvr {

using TimePoint = std::chrono::steady_clock::time_point;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
};

class RealClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace ctkvr
