// SPDX-License-Identifier: Apache-2.0
//
// The planner's choices at their borders, and that each step of a quality target is stronger than the one before and
// never weaker than what was asked.

#include "server/core/auto_planner.h"

#include <gtest/gtest.h>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

Selection Auto(uint32_t k_tokens = 256) {
  Selection selection;
  selection.source = Source::kAuto;
  selection.k_tokens = k_tokens;
  return selection;
}

TEST(AutoPlannerTest, ANamedSourceIsLeftAlone) {
  for (Source source : {Source::kDense, Source::kExact, Source::kSketch, Source::kQueryCentroids}) {
    Selection asked;
    asked.source = source;
    asked.candidate_tokens = 300;
    const PlannedSelection planned = PlanSelection(asked, {.length = 1u << 20, .key_planes = 8, .load = 1});
    EXPECT_EQ(planned.selection, asked);
    EXPECT_EQ(planned.reason, SelectionReason::kAsked);
  }
}

TEST(AutoPlannerTest, FloatKeysAreExactAndCodedOnesSketched) {
  const PlannedSelection floats = PlanSelection(Auto(), {.length = 9000});
  EXPECT_EQ(floats.selection.source, Source::kExact);
  EXPECT_EQ(floats.reason, SelectionReason::kNotCoded);
  const PlannedSelection coded = PlanSelection(Auto(64), {.length = 9000, .key_planes = 8});
  EXPECT_EQ(coded.selection.source, Source::kSketch);
  EXPECT_EQ(coded.selection.candidate_tokens, 128u);
  EXPECT_EQ(coded.selection.keep_share, Selection().keep_share);
  EXPECT_EQ(coded.reason, SelectionReason::kMiddle);
}

TEST(AutoPlannerTest, LongLayersOpenClustersWhereThereAreSome) {
  PlannerFacts facts{.length = limits::kLongTokens, .key_planes = 8};
  EXPECT_EQ(PlanSelection(Auto(), facts).reason, SelectionReason::kMiddle);
  facts.cluster_source = Source::kQueryCentroids;  // any that is not the sketch
  EXPECT_EQ(PlanSelection(Auto(), facts).selection.source, Source::kQueryCentroids);
  EXPECT_EQ(PlanSelection(Auto(), facts).reason, SelectionReason::kLong);
  --facts.length;
  EXPECT_EQ(PlanSelection(Auto(), facts).selection.source, Source::kSketch);
}

TEST(AutoPlannerTest, LoadMakesItCheaperUnlessATargetWantsMore) {
  PlannerFacts facts{.length = 9000, .key_planes = 8, .load = 0.9};
  const PlannedSelection loaded = PlanSelection(Auto(), facts);
  EXPECT_EQ(loaded.reason, SelectionReason::kLoad);
  EXPECT_FLOAT_EQ(loaded.selection.keep_share, Selection().keep_share / 2);
  facts.strength = 1;
  EXPECT_EQ(PlanSelection(Auto(), facts).reason, SelectionReason::kQuality);
  EXPECT_GE(PlanSelection(Auto(), facts).selection.keep_share, Selection().keep_share);
  EXPECT_EQ(PlanSelection(Auto(), {.length = 9000, .key_planes = 8, .load = 0.89}).reason, SelectionReason::kMiddle);
}

// How good a source is at finding needles, by the figures of DESIGN's kinds: lists, then the sketch, then exact.
int Rank(Source source) { return source == Source::kExact ? 2 : source == Source::kSketch ? 1 : 0; }

TEST(AutoPlannerTest, EachStepIsStrongerAndTheLastIsExact) {
  for (Source source : {Source::kQueryCentroids, Source::kSketch, Source::kAuto}) {
    for (uint32_t planes : {0u, 6u, 8u}) {
      if (source == Source::kSketch && planes == 0) continue;
      Selection asked;
      asked.source = source;
      asked.refine_planes = 0;
      asked.keep_share = 0.4f;
      Selection before = PlanSelection(asked, {.length = 9000, .key_planes = planes}).selection;
      for (uint32_t strength = 1; strength <= limits::kStrengthMax; ++strength) {
        const PlannedSelection planned =
            PlanSelection(asked, {.length = 9000, .key_planes = planes, .strength = strength});
        const Selection& now = planned.selection;
        SCOPED_TRACE(::testing::Message() << SourceName(source) << " planes " << planes << " step " << strength);
        EXPECT_GE(now.candidate_tokens, before.candidate_tokens);
        EXPECT_GE(now.probes, before.probes);
        EXPECT_GE(now.keep_share, before.keep_share);
        EXPECT_GE(now.refine_planes, before.refine_planes);
        EXPECT_GE(Rank(now.source), Rank(before.source));
        EXPECT_EQ(now.k_tokens, asked.k_tokens);
        EXPECT_LE(now.keep_share, 1);
        EXPECT_TRUE(planes == 0 || now.refine_planes <= planes);
        EXPECT_TRUE(before.source == Source::kExact || now != before) << "a step that does nothing";
        before = now;
      }
      EXPECT_EQ(before.source, Source::kExact);
    }
  }
}

TEST(AutoPlannerTest, CountsStayWithinTheirLimits) {
  Selection asked;
  asked.candidate_tokens = limits::kCandidateTokensMax;
  asked.probes = limits::kCentroidsMax;
  const Selection strong = PlanSelection(asked, {.key_planes = 8, .strength = 3}).selection;
  EXPECT_EQ(strong.candidate_tokens, limits::kCandidateTokensMax);
  EXPECT_EQ(strong.probes, limits::kCentroidsMax);
  EXPECT_EQ(PlanSelection(Auto(limits::kTokensMax), {.key_planes = 8}).selection.candidate_tokens,
            2 * limits::kTokensMax);
}

}  // namespace
}  // namespace ctkvr
