// SPDX-License-Identifier: Apache-2.0

#include "server/core/stats.h"

#include <algorithm>

namespace ctkvr {

const char* StageName(Stage stage) {
  switch (stage) {
    case Stage::kWait:
      return "wait";
    case Stage::kPrepare:
      return "prepare";
    case Stage::kCandidates:
      return "candidates";
    case Stage::kSelect:
      return "select";
    case Stage::kGather:
      return "gather";
    case Stage::kAppend:
      return "append";
    case Stage::kMaintenance:
      return "maintenance";
    case Stage::kShadow:
      return "shadow";
  }
  return "?";
}

const char* SessionEndName(SessionEnd end) {
  switch (end) {
    case SessionEnd::kClosed:
      return "closed";
    case SessionEnd::kExpired:
      return "expired";
    case SessionEnd::kDrained:
      return "drained";
  }
  return "?";
}

const char* ShadowSkipName(ShadowSkip skip) {
  switch (skip) {
    case ShadowSkip::kBusy:
      return "busy";
    case ShadowSkip::kTooLarge:
      return "too_large";
    case ShadowSkip::kChanged:
      return "changed";
    case ShadowSkip::kClosed:
      return "closed";
    case ShadowSkip::kError:
      return "error";
  }
  return "?";
}

void DurationHistogram::Observe(std::chrono::nanoseconds duration) {
  // A clock that tests turn back must not count as centuries.
  const int64_t nanoseconds = std::max<int64_t>(duration.count(), 0);
  const double seconds = static_cast<double>(nanoseconds) / 1e9;  // divided: exact bounds stay exact
  const auto bucket = std::lower_bound(kDurationBuckets.begin(), kDurationBuckets.end(), seconds);
  counts_[static_cast<size_t>(bucket - kDurationBuckets.begin())].fetch_add(1, std::memory_order_relaxed);
  sum_nanoseconds_.fetch_add(static_cast<uint64_t>(nanoseconds), std::memory_order_relaxed);
}

DurationHistogram::Snapshot DurationHistogram::Read() const {
  Snapshot snapshot;
  for (size_t i = 0; i < counts_.size(); ++i) snapshot.counts[i] = counts_[i].load(std::memory_order_relaxed);
  snapshot.sum_seconds = static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  return snapshot;
}

void NoteDeviceError(Stats& stats, const absl::Status& status) {
  const bool lost = status.code() == absl::StatusCode::kUnavailable;
  if (!lost && status.code() != absl::StatusCode::kInternal) return;
  stats.device_errors.fetch_add(1, std::memory_order_relaxed);
  if (lost) stats.device_lost.store(true, std::memory_order_relaxed);
}

}  // namespace ctkvr
