// SPDX-License-Identifier: Apache-2.0
//
// Sums of exact repeats: of a layer, of several, of the server; and which head is the worst.

#include "server/core/truth.h"

#include <gtest/gtest.h>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Two query heads: the first finds its needle where `found`, the second has none.
TruthSample Sample(bool found) {
  return {.source = Source::kSketch,
          .heads = {{.needle = true, .found = found, .mass = 0.5, .output_error = 0.25}, {.mass = 1}},
          .best_tokens = 16,
          .best_chosen = 12};
}

TEST(TruthTest, ALayerSumsItsSamples) {
  TruthCounts counts;
  EXPECT_EQ(counts.Info().samples, 0u);
  counts.Add(Sample(true));
  counts.Add(Sample(false));
  const TruthInfo info = counts.Info();
  EXPECT_EQ(info.samples, 2u);
  EXPECT_EQ(info.needles, 2u);
  EXPECT_EQ(info.needles_found, 1u);
  EXPECT_EQ(info.best_tokens, 32u);
  EXPECT_EQ(info.best_chosen, 24u);
  EXPECT_EQ(info.heads, 4u);
  EXPECT_EQ(info.mass_sum, 3);
  EXPECT_EQ(info.output_error_sum, 0.5);
}

TEST(TruthTest, AHeadIsTheWorstOnceItHasEnoughNeedles) {
  TruthCounts counts;
  for (uint64_t i = 0; i + 1 < limits::kWorstHeadNeedles; ++i) counts.Add(Sample(i % 2 == 0));
  EXPECT_FALSE(counts.Info().worst_head.has_value());
  counts.Add(Sample(false));
  ASSERT_TRUE(counts.Info().worst_head.has_value());
  EXPECT_EQ(*counts.Info().worst_head, 0u);
  EXPECT_EQ(counts.Info().worst_head_share, 0.5);
}

TEST(TruthTest, TheWorstHeadOfAllLayersIsThatOfTheWorst) {
  TruthInfo good{.samples = 1, .needles = 30, .needles_found = 29, .worst_head = 1, .worst_head_share = 0.9};
  TruthInfo bad{.samples = 2, .needles = 30, .needles_found = 20, .worst_head = 7, .worst_head_share = 0.5};
  const TruthInfo sum = SumTruth({good, bad, TruthInfo()});
  EXPECT_EQ(sum.samples, 3u);
  EXPECT_EQ(sum.needles, 60u);
  EXPECT_EQ(sum.needles_found, 49u);
  EXPECT_EQ(sum.worst_head, 7u);
  EXPECT_EQ(sum.worst_head_share, 0.5);
}

TEST(TruthTest, TheServerCountsBySource) {
  Stats stats;
  CountTruth(Sample(true), stats);
  const TruthStats& sketch = stats.truth[static_cast<size_t>(Source::kSketch)];
  EXPECT_EQ(sketch.samples, 1u);
  EXPECT_EQ(sketch.needles, 1u);
  EXPECT_EQ(sketch.needles_found, 1u);
  EXPECT_EQ(sketch.best_tokens, 16u);
  EXPECT_EQ(sketch.best_chosen, 12u);
  EXPECT_EQ(sketch.heads, 2u);
  EXPECT_EQ(sketch.mass, 1.5);
  EXPECT_EQ(sketch.output_error, 0.25);
  EXPECT_EQ(stats.truth[static_cast<size_t>(Source::kExact)].samples, 0u);
}

}  // namespace
}  // namespace ctkvr
