// SPDX-License-Identifier: Apache-2.0
//
// Histograms put a duration into the right bucket, borders included, and every stage and end has a name.

#include "server/core/stats.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ctkvr {
namespace {

TEST(StatsTest, ADurationFallsIntoTheFirstBucketThatHoldsIt) {
  for (size_t bucket = 0; bucket < kDurationBuckets.size(); ++bucket) {
    DurationHistogram histogram;
    const auto bound = static_cast<int64_t>(kDurationBuckets[bucket] * 1e9 + 0.5);
    histogram.Observe(std::chrono::nanoseconds(bound));
    histogram.Observe(std::chrono::nanoseconds(bound + 1));
    const DurationHistogram::Snapshot snapshot = histogram.Read();
    EXPECT_EQ(snapshot.counts[bucket], 1u) << bucket;
    EXPECT_EQ(snapshot.counts[bucket + 1], 1u) << bucket;
    EXPECT_NEAR(snapshot.sum_seconds, 2 * kDurationBuckets[bucket], 2e-9);
  }
}

TEST(StatsTest, NothingAndLessThanNothingFallIntoTheFirstBucket) {
  DurationHistogram histogram;
  histogram.Observe(std::chrono::nanoseconds(0));
  histogram.Observe(std::chrono::nanoseconds(-5));
  EXPECT_EQ(histogram.Read().counts[0], 2u);
  EXPECT_EQ(histogram.Read().sum_seconds, 0);
}

TEST(StatsTest, NamesAreThereAndDiffer) {
  std::set<std::string> names;
  for (size_t i = 0; i < kStageCount; ++i) names.insert(StageName(static_cast<Stage>(i)));
  EXPECT_EQ(names.size(), kStageCount);
  EXPECT_FALSE(names.contains("?"));
  names.clear();
  for (size_t i = 0; i < kShadowSkipCount; ++i) names.insert(ShadowSkipName(static_cast<ShadowSkip>(i)));
  EXPECT_EQ(names.size(), kShadowSkipCount);
  EXPECT_FALSE(names.contains("?"));
  names.clear();
  for (size_t i = 0; i < kSessionEndCount; ++i) names.insert(SessionEndName(static_cast<SessionEnd>(i)));
  EXPECT_EQ(names.size(), kSessionEndCount);
  EXPECT_FALSE(names.contains("?"));
}

TEST(StatsTest, OnlyErrorsOfTheDeviceAreCountedAndALostOneIsRemembered) {
  Stats stats;
  NoteDeviceError(stats, absl::OkStatus());
  NoteDeviceError(stats, absl::InvalidArgumentError("x"));
  EXPECT_EQ(stats.device_errors, 0u);
  NoteDeviceError(stats, absl::InternalError("x"));
  EXPECT_EQ(stats.device_errors, 1u);
  EXPECT_FALSE(stats.device_lost);
  NoteDeviceError(stats, absl::UnavailableError("x"));
  EXPECT_EQ(stats.device_errors, 2u);
  EXPECT_TRUE(stats.device_lost);
}

}  // namespace
}  // namespace ctkvr
