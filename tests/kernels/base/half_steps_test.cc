// SPDX-License-Identifier: Apache-2.0
//
// The exact binary16 bounds, by search over every binary16 and with bounds next to every one of them.

#include "kernels/base/half_steps.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/testing/random_kv.h"

namespace ctkvr {
namespace {

double Half(uint32_t bits) { return fp16_ieee_to_fp32_value(static_cast<uint16_t>(bits)); }

TEST(HalfStepsTest, CodeScaleIsTheSmallestBinary16ThatHolds) {
  for (float factor : {32.0f, 128.0f}) {
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
      const auto bound = static_cast<float>(Half(bits) * factor);
      ASSERT_EQ(SmallestHalfScale(bound, factor), bits);
      ASSERT_EQ(SmallestHalfScale(std::nextafter(bound, 3e38f), factor), bits + 1);
      if (bits > 0) {
        ASSERT_EQ(SmallestHalfScale(std::nextafter(bound, 0.0f), factor), bits);
      }
    }
    EXPECT_EQ(SmallestHalfScale(1e30f, factor), kHalfInfinity);
    EXPECT_EQ(SmallestHalfScale(1e-45f, factor), 1);
  }
}

TEST(HalfStepsTest, ZeroPointIsTheLargestBinary16NotAbove) {
  for (uint32_t bits = 1; bits < 0x7c00; ++bits) {
    const auto value = static_cast<float>(Half(bits));
    ASSERT_EQ(LargestHalfAtMost(value), bits);
    ASSERT_EQ(LargestHalfAtMost(std::nextafter(value, 3e38f)), bits);
    ASSERT_EQ(LargestHalfAtMost(std::nextafter(value, 0.0f)), bits - 1);
    ASSERT_EQ(LargestHalfAtMost(-value), bits | 0x8000);
    if (bits < 0x7bff) {
      ASSERT_EQ(LargestHalfAtMost(std::nextafter(-value, -3e38f)), (bits + 1) | 0x8000);
    }
    ASSERT_EQ(LargestHalfAtMost(std::nextafter(-value, 0.0f)), bits | 0x8000);
  }
  EXPECT_EQ(LargestHalfAtMost(0.0f), 0);
  EXPECT_EQ(LargestHalfAtMost(-0.0f), 0);
  EXPECT_EQ(LargestHalfAtMost(3e38f), 0x7bff);
}

TEST(HalfStepsTest, ValueScaleIsTheSmallestBinary16ThatReachesTheMaximum) {
  std::mt19937_64 random = testing::MakeRandom(11);
  SCOPED_TRACE(testing::TestSeed());
  for (int round = 0; round < 200000; ++round) {
    const uint32_t levels = round % 2 == 0 ? 15 : 255;
    const auto zero = static_cast<float>(Half(random() % 0x7c00) * (random() % 2 == 0 ? 1 : -1));
    // Next to a value that a scale reaches exactly, or anywhere above zero.
    const double reached = zero + Half(random() % 0x7c00) * levels;
    auto max = static_cast<float>(reached);
    if (random() % 3 == 0) max = std::nextafter(max, random() % 2 == 0 ? 3e38f : -3e38f);
    if (max < zero) max = zero;
    const uint16_t scale = SmallestValueScale(zero, max, levels);
    if (scale == kHalfInfinity) {
      ASSERT_LT(zero + 65504.0 * levels, max);
      continue;
    }
    ASSERT_GE(zero + Half(scale) * levels, max) << zero << " " << max << " " << levels;
    if (scale > 0) {
      ASSERT_LT(zero + Half(scale - 1u) * levels, max) << zero << " " << max << " " << levels;
    }
  }
  EXPECT_EQ(SmallestValueScale(0, 1e30f, 15), kHalfInfinity);
  EXPECT_EQ(SmallestValueScale(-65504.0f, -65504.0f, 15), 0);
  EXPECT_EQ(SmallestValueScale(65504.0f, 3e38f, 255), kHalfInfinity);
}

}  // namespace
}  // namespace ctkvr
