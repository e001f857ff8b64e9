// SPDX-License-Identifier: Apache-2.0

#include "kernels/base/math.h"

#include <gtest/gtest.h>

#include <limits>

namespace ctkvr {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(MathTest, CeilDivRoundsUpWithoutOverflow) {
  EXPECT_EQ(CeilDiv(0u, 64u), 0u);
  EXPECT_EQ(CeilDiv(1u, 64u), 1u);
  EXPECT_EQ(CeilDiv(64u, 64u), 1u);
  EXPECT_EQ(CeilDiv(65u, 64u), 2u);
  EXPECT_EQ(CeilDiv(kMax, uint64_t{2}), kMax / 2 + 1);
}

TEST(MathTest, RoundUpReachesTheNextMultiple) {
  EXPECT_EQ(RoundUp(0u, 64u), 0u);
  EXPECT_EQ(RoundUp(1u, 64u), 64u);
  EXPECT_EQ(RoundUp(128u, 64u), 128u);
}

TEST(MathTest, CheckedProductSeesEveryOverflow) {
  EXPECT_EQ(CheckedProduct({}), 1u);
  EXPECT_EQ(CheckedProduct({3, 5, 7}), 105u);
  EXPECT_EQ(CheckedProduct({uint64_t{1} << 32, (uint64_t{1} << 32) - 1}), ((uint64_t{1} << 32) - 1) << 32);
  EXPECT_EQ(CheckedProduct({uint64_t{1} << 32, uint64_t{1} << 32}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, 2, 0}), std::nullopt);
  EXPECT_EQ(CheckedProduct({0, kMax, kMax}), 0u);
}

}  // namespace
}  // namespace ctkvr
