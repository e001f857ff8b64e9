// SPDX-License-Identifier: Apache-2.0
//
// When a layer takes a step: never on too little, at once on much, and never more steps than there are.

#include "server/core/quality.h"

#include <gtest/gtest.h>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

TEST(QualityControlTest, TooFewNeedlesSayNothing) {
  QualityControl control;
  for (uint64_t i = 0; i + 1 < limits::kQualityNeedlesMin; ++i) EXPECT_FALSE(control.Add(1, 0, 0.99));
  EXPECT_TRUE(control.Add(1, 0, 0.99));
  EXPECT_EQ(control.strength(), 1u);
  // What was known of the weaker setting is forgotten.
  EXPECT_FALSE(control.Add(1, 0, 0.99));
}

TEST(QualityControlTest, AShareThatMayStillReachTheTargetWaits) {
  QualityControl control;
  // 63 of 64: the upper bound is 0.997.
  EXPECT_FALSE(control.Add(64, 63, 0.99));
  EXPECT_EQ(control.strength(), 0u);
  // 56 of 64: the upper bound is 0.927.
  QualityControl low;
  EXPECT_FALSE(low.Add(64, 56, 0.92));
  QualityControl lower;
  EXPECT_TRUE(lower.Add(64, 56, 0.93));
}

TEST(QualityControlTest, ASmallShortfallIsSeenInTheEnd) {
  QualityControl control;
  uint64_t needles = 0;
  while (control.strength() == 0 && needles < 10 * limits::kQualityNeedlesMax) {
    control.Add(100, 98, 0.985);
    needles += 100;
  }
  EXPECT_EQ(control.strength(), 1u);
  EXPECT_LE(needles, limits::kQualityNeedlesMax + 100);
}

TEST(QualityControlTest, ATargetThatIsMetIsLeftAlone) {
  QualityControl control;
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(control.Add(100, 99, 0.985));
}

TEST(QualityControlTest, OldNeedlesAreForgotten) {
  QualityControl control;
  for (int i = 0; i < 100; ++i) ASSERT_FALSE(control.Add(100, 100, 0.9));
  // Of 10,000 that were found no more than kQualityNeedlesMax count against the text of the day.
  uint64_t needles = 0;
  while (!control.Add(10, 0, 0.9)) needles += 10;
  EXPECT_LE(needles, limits::kQualityNeedlesMax / 4);
}

TEST(QualityControlTest, StepsEnd) {
  QualityControl control;
  uint32_t steps = 0;
  for (int i = 0; i < 1000; ++i) steps += control.Add(100, 0, 1);
  EXPECT_EQ(steps, limits::kStrengthMax);
  EXPECT_EQ(control.strength(), limits::kStrengthMax);
}

}  // namespace
}  // namespace ctkvr
