// SPDX-License-Identifier: Apache-2.0
//
// The stages of the work, and where the time of one call went. Thread-safe: lanes add while anyone reads.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ctkvr {

// Steps of a retrieval, timed a batch; maintenance and exact repeats, timed a step and a slice.
enum class Stage : uint8_t { kWait, kPrepare, kCandidates, kSelect, kGather, kAppend, kMaintenance, kShadow };
inline constexpr size_t kStageCount = 8;
const char* StageName(Stage stage);

// Nanoseconds by stage that the batches of one call took. A batch's time counts in full for every call in it, and that
// of several lanes adds up: the sum may exceed the call's own time.
class StageTimes {
 public:
  void Add(Stage stage, std::chrono::nanoseconds duration) {
    nanoseconds_[static_cast<size_t>(stage)].fetch_add(duration.count(), std::memory_order_relaxed);
  }
  std::chrono::nanoseconds Of(Stage stage) const {
    return std::chrono::nanoseconds(nanoseconds_[static_cast<size_t>(stage)].load(std::memory_order_relaxed));
  }

 private:
  std::array<std::atomic<int64_t>, kStageCount> nanoseconds_{};
};

}  // namespace ctkvr
