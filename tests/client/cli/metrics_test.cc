// SPDX-License-Identifier: Apache-2.0
//
// Proves the figures of a replay on cases small enough to work out by hand.
#include "client/cli/metrics.h"

#include <cmath>

#include "gmock/gmock.h"

namespace ctkvr::cli {
namespace {

// Scores whose softmax, at scale 1, is the given weights.
std::vector<float> Logs(const std::vector<double>& weights) {
  std::vector<float> out;
  for (const double w : weights) out.push_back(static_cast<float>(std::log(w)));
  return out;
}

// Two heads over six tokens. Token 0 is a sink, token 5 the window; tokens 1 to 4 compete.
class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() : scores_(Logs({0.40, 0.30, 0.05, 0.05, 0.10, 0.10, /**/ 0.50, 0.02, 0.08, 0.20, 0.05, 0.15})) {}

  SetObservation Set(std::span<const uint32_t> chosen) const {
    return {.heads = 2,
            .tokens = 6,
            .scores = scores_,
            .stride = 6,
            .softmax_scale = 1,
            .chosen = chosen,
            .k_tokens = 2,
            .force_below = 1,
            .force_from = 5,
            .needle_begin = 1,
            .needle_end = 5};
  }

  std::vector<float> scores_;
};

TEST_F(MetricsTest, PerfectSelection) {
  // Sums over the heads of tokens 1 to 4: 0.32, 0.13, 0.25, 0.15: the best two are 1 and 3.
  const uint32_t chosen[] = {0, 1, 3, 5};
  Metrics metrics(2);
  metrics.Add(Set(chosen));
  EXPECT_DOUBLE_EQ(*metrics.recall(), 1);
  EXPECT_EQ(metrics.needles(), 2u);  // token 1 of head 0, token 3 of head 1
  EXPECT_EQ(metrics.needles_found(), 2u);
  EXPECT_DOUBLE_EQ(*metrics.needle_share(), 1);
  EXPECT_NEAR(*metrics.mass(), ((0.40 + 0.30 + 0.05 + 0.10) + (0.50 + 0.02 + 0.20 + 0.15)) / 2, 1e-6);
  EXPECT_DOUBLE_EQ(*metrics.tokens_chosen(), 4);
  EXPECT_FALSE(metrics.worst_head());  // too few needles to tell
}

TEST_F(MetricsTest, AMissedNeedleCountsForItsHead) {
  const uint32_t chosen[] = {0, 2, 3, 5};
  Metrics metrics(2);
  metrics.Add(Set(chosen));
  EXPECT_DOUBLE_EQ(*metrics.recall(), 0.5);
  EXPECT_EQ(metrics.needles(), 2u);
  EXPECT_EQ(metrics.needles_found(), 1u);
}

TEST_F(MetricsTest, MaximumRanksOtherwise) {
  // Maxima of tokens 1 to 4: 0.30, 0.08, 0.20, 0.10.
  const uint32_t chosen[] = {0, 1, 4, 5};
  SetObservation set = Set(chosen);
  set.reduction = v1::GROUP_REDUCTION_MAX_SOFTMAX;
  Metrics metrics(2);
  metrics.Add(set);
  EXPECT_DOUBLE_EQ(*metrics.recall(), 0.5);
}

TEST_F(MetricsTest, EqualRanksPreferTheLowerPosition) {
  scores_.assign(12, 1.0f);
  const uint32_t lower[] = {0, 1, 2, 5}, higher[] = {0, 3, 4, 5};
  Metrics metrics(2);
  metrics.Add(Set(lower));
  EXPECT_DOUBLE_EQ(*metrics.recall(), 1);
  Metrics other(2);
  other.Add(Set(higher));
  EXPECT_DOUBLE_EQ(*other.recall(), 0);
}

TEST_F(MetricsTest, RanksFarBelowFloatAreToldApart) {
  scores_ = {0, -200, -201, -202, -203, 0, 0, -200, -201, -202, -203, 0};  // exp(-200) is no binary32
  const uint32_t chosen[] = {0, 1, 2, 5};
  Metrics metrics(2);
  metrics.Add(Set(chosen));
  EXPECT_DOUBLE_EQ(*metrics.recall(), 1);
}

TEST_F(MetricsTest, KAboveTheTokensIsAllOfThem) {
  const uint32_t chosen[] = {0, 1, 2, 3, 5};
  SetObservation set = Set(chosen);
  set.k_tokens = 100;
  Metrics metrics(2);
  metrics.Add(set);
  EXPECT_DOUBLE_EQ(*metrics.recall(), 0.75);
}

TEST_F(MetricsTest, OnlyTheRangeAskedForHoldsNeedles) {
  const uint32_t chosen[] = {0};
  SetObservation set = Set(chosen);
  set.needle_begin = 2;
  set.needle_end = 100;  // cut at what is visible
  Metrics metrics(2);
  metrics.Add(set);
  // Head 0: the heaviest of tokens 2 to 5 has 0.10, not over it; head 1: token 3.
  EXPECT_EQ(metrics.needles(), 1u);
  EXPECT_EQ(metrics.needles_found(), 0u);
}

TEST_F(MetricsTest, NothingToCompareWithIsNothing) {
  Metrics metrics(2);
  EXPECT_FALSE(metrics.recall());
  EXPECT_FALSE(metrics.needle_share());
  EXPECT_FALSE(metrics.mass());
  SetObservation set = Set({});
  set.force_from = 1;  // everything is always included
  metrics.Add(set);
  EXPECT_FALSE(metrics.recall());
}

TEST_F(MetricsTest, TheWorstHeadIsAmongThoseWithEnoughNeedles) {
  const uint32_t both[] = {0, 1, 3, 5}, first[] = {0, 1, 2, 5};
  Metrics one(2), two(2);
  for (int i = 0; i < 15; ++i) one.Add(Set(both));
  for (int i = 0; i < 5; ++i) two.Add(Set(first));
  one.Merge(two);
  EXPECT_EQ(one.needles(), 40u);
  EXPECT_DOUBLE_EQ(*one.worst_head(), 0.75);
  EXPECT_DOUBLE_EQ(*one.needle_share(), 35.0 / 40);
}

TEST_F(MetricsTest, HeadsOfASetAreCountedWhereTheyBelong) {
  const uint32_t chosen[] = {0, 3, 5};
  SetObservation set = Set(chosen);
  set.first_head = 4;
  Metrics metrics(6);
  for (int i = 0; i < 20; ++i) metrics.Add(set);
  EXPECT_DOUBLE_EQ(*metrics.worst_head(), 0);  // head 4 misses token 1, head 5 finds token 3
  EXPECT_DOUBLE_EQ(*metrics.needle_share(), 0.5);
}

}  // namespace
}  // namespace ctkvr::cli
