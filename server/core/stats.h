// SPDX-License-Identifier: Apache-2.0
//
// What the engine counts: atomics written by lanes, read by anyone at any time without a lock. Counters only grow.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "server/core/limits.h"
#include "server/core/stages.h"
#include "server/core/types.h"

namespace ctkvr {

// Seconds, upper bounds of the buckets; the last bucket is everything above.
inline constexpr std::array<double, 18> kDurationBuckets = {1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4,
                                                            1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1, 5e-1, 1,      5};

class DurationHistogram {
 public:
  struct Snapshot {
    std::array<uint64_t, kDurationBuckets.size() + 1> counts{};  // not cumulative
    double sum_seconds = 0;
  };
  void Observe(std::chrono::nanoseconds duration);
  Snapshot Read() const;

 private:
  std::array<std::atomic<uint64_t>, kDurationBuckets.size() + 1> counts_{};
  std::atomic<uint64_t> sum_nanoseconds_{0};
};

// How a session ended.
enum class SessionEnd : uint8_t { kClosed, kExpired, kDrained };
inline constexpr size_t kSessionEndCount = 3;
const char* SessionEndName(SessionEnd end);

// Why a sampled retrieval was not repeated exactly.
enum class ShadowSkip : uint8_t {
  kBusy,      // the lane had one to repeat already
  kTooLarge,  // over limits::kShadowBytesMax
  kChanged,   // truncated, or its keys coded, before the repeat was done
  kClosed,    // its session ended
  kError      // of the device, or scratch was too small
};
inline constexpr size_t kShadowSkipCount = 5;
const char* ShadowSkipName(ShadowSkip skip);

// What exact repeats found, summed over sampled retrievals of one source (TruthInfo in types.h says of what).
struct TruthStats {
  std::atomic<uint64_t> samples{0};  // (layer, position)
  std::atomic<uint64_t> needles{0};
  std::atomic<uint64_t> needles_found{0};
  std::atomic<uint64_t> best_tokens{0};
  std::atomic<uint64_t> best_chosen{0};
  std::atomic<uint64_t> heads{0};  // (query head, sample): what the sums below are over
  std::atomic<double> mass{0};
  std::atomic<double> output_error{0};
};

struct Stats {
  std::atomic<uint64_t> sessions_opened{0};
  std::array<std::atomic<uint64_t>, kSessionEndCount> sessions_ended{};
  std::atomic<uint64_t> sessions_failed{0};  // device errors with unknown outcome
  std::atomic<uint64_t> appended_tokens{0};  // (layer, token)
  std::atomic<uint64_t> repeated_appends{0};
  std::atomic<uint64_t> append_bytes{0};                         // of keys, values and queries, as received
  std::array<std::atomic<uint64_t>, kSourceCount> retrievals{};  // (layer, position), by what served
  std::atomic<uint64_t> chosen_tokens{0};                        // summed over sets
  std::atomic<uint64_t> bytes_read{0};                           // to choose
  std::atomic<uint64_t> row_bytes{0};                            // keys and values answered
  std::atomic<uint64_t> batches{0};
  std::atomic<uint64_t> batch_items{0};
  std::atomic<uint64_t> expired_in_queue{0};   // deadline or cancellation noticed before work
  std::atomic<uint64_t> expired_in_flight{0};  // noticed before gathering
  std::atomic<uint64_t> queue_rejections{0};
  std::atomic<uint64_t> maintenance_steps{0};
  std::atomic<uint64_t> device_errors{0};  // calls of the backend that failed
  std::array<DurationHistogram, kStageCount> stages;
  std::array<TruthStats, kSourceCount> truth;
  std::array<std::atomic<uint64_t>, kShadowSkipCount> shadows_skipped{};
  std::array<std::atomic<uint64_t>, limits::kStrengthMax> quality_steps{};  // towards a needle share, by step
  // Gauges.
  std::atomic<int64_t> sessions{0};
  std::atomic<int64_t> queued_items{0};
  std::atomic<int64_t> tokens_held{0};   // (layer, token)
  std::atomic<int64_t> layers_held{0};   // that hold any token, of all sessions
  std::atomic<bool> device_lost{false};  // the backend said UNAVAILABLE, which is for good
};

// Counts `status` when it is an error that only a backend makes.
void NoteDeviceError(Stats& stats, const absl::Status& status);

}  // namespace ctkvr
