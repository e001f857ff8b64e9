// SPDX-License-Identifier: Apache-2.0
//
// What answers and sessions say of why they were served as they were, through the engine; and a quality target that
// moves a layer, no further than it must.

#include "server/core/explain.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

EngineOptions Options(double share) {
  return {.lanes = 1,
          .arena_bytes = size_t{48} << 20,
          .scratch_bytes = size_t{8} << 20,
          .queue_items_max = 4,
          .sessions_max = 64,
          .truth_share = share,
          .truth_budget = 1,
          .threads = false};
}

class ExplainTest : public ::testing::Test {
 protected:
  // A session "s" of `tokens` tokens; REQUIRES: none of that name is open.
  void Fill(const LayerConfig& layer, uint32_t tokens) {
    config_ = SmallConfig(layer, 4096);
    tokens_.emplace(layer, config_.dtype, 3);
    ASSERT_THAT(harness_->Open("s", config_), IsOk());
    ASSERT_THAT(harness_->Append("s", tokens_->Append(0, tokens, std::min(tokens, 40u))), IsOk());
    length_ = tokens;
  }
  Answer Explained() {
    OwnedQuery query = tokens_->Ask(length_ - 2, 2);
    query.query.answer.explain = true;
    const auto answer = harness_->Retrieve("s", query);
    EXPECT_THAT(answer, IsOk());
    const LayerInfo info = harness_->Get(Ref("s"))->layers[0];
    EXPECT_EQ(info.served, answer->source);
    EXPECT_EQ(info.reason, answer->explanation->reason);
    return *answer;
  }
  SelectionReason Reason(const LayerConfig& layer, uint32_t tokens) {
    Fill(layer, tokens);
    const SelectionReason reason = Explained().explanation->reason;
    EXPECT_THAT(harness_->Close(Ref("s")), IsOk());
    return reason;
  }

  std::optional<Harness> harness_ = std::make_optional<Harness>(HarnessOptions{.engine = Options(0)});
  SessionConfig config_;
  std::optional<Tokens> tokens_;
  uint32_t length_ = 0;
};

TEST_F(ExplainTest, EveryReasonIsGivenWhereItHolds) {
  const LayerConfig sketch = SmallLayer(Format::kK8V4, Source::kSketch);
  LayerConfig automatic = SmallLayer(Format::kK8V4, Source::kAuto), layer = sketch;
  EXPECT_EQ(Reason(sketch, 700), SelectionReason::kAsked);
  EXPECT_EQ(Reason(sketch, 400), SelectionReason::kNotCoded) << "raw keys";
  EXPECT_EQ(Reason(sketch, 20), SelectionReason::kEverythingFits);
  EXPECT_EQ(Reason(SmallLayer(Format::kF16, Source::kQueryCentroids), 700), SelectionReason::kNoIndex);
  EXPECT_EQ(Reason(automatic, 700), SelectionReason::kMiddle);
  EXPECT_EQ(Reason(automatic, 400), SelectionReason::kNotCoded);
  EXPECT_EQ(Reason(SmallLayer(Format::kF16, Source::kAuto), 700), SelectionReason::kNotCoded);
  automatic.selection.dense_below_tokens = 700;
  EXPECT_EQ(Reason(automatic, 700), SelectionReason::kShort);
  layer.dense = true;
  EXPECT_EQ(Reason(layer, 700), SelectionReason::kDense);
  layer = sketch;
  layer.selection.candidate_tokens = 695;
  EXPECT_EQ(Reason(layer, 700), SelectionReason::kAllAreCandidates);
}

TEST_F(ExplainTest, StagesAreCountedForTheLastPosition) {
  LayerConfig layer = SmallLayer(Format::kK8V4, Source::kSketch);
  layer.selection.keep_share = 0.25f;
  Fill(layer, 700);
  const Answer answer = Explained();
  // Two KV heads, 12 tokens always included, k 16, 64 candidates.
  EXPECT_EQ(answer.explanation->scanned, 2u * 700);
  EXPECT_EQ(answer.explanation->survivors, 2u * (175 + 12));
  EXPECT_EQ(answer.explanation->candidates, 2u * (64 + 12));
  EXPECT_EQ(answer.explanation->scored, 2u * (64 + 12));
  EXPECT_EQ(answer.explanation->chosen, 2u * (16 + 12));
  const auto plain = harness_->Retrieve("s", tokens_->Ask(699));
  EXPECT_FALSE(plain->explanation.has_value()) << "nobody asked";
}

TEST_F(ExplainTest, ListsAreCountedAsTheyWereRead) {
  Fill(SmallLayer(Format::kF16, Source::kQueryCentroids), 700);
  ASSERT_THAT(harness_->Maintain("s"), IsOk());
  OwnedQuery query = tokens_->Ask(699);
  query.query.answer.explain = true;
  const auto answer = harness_->Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->explanation->reason, SelectionReason::kAsked);
  EXPECT_EQ(answer->explanation->scanned, answer->explanation->scored);
  EXPECT_GE(answer->explanation->scanned, answer->explanation->chosen);
  EXPECT_LE(answer->explanation->scanned, 2u * (4 * 32 + 12));
}

TEST_F(ExplainTest, AutoTakesTwiceKAndLessUnderLoad) {
  Fill(SmallLayer(Format::kK8V4, Source::kAuto), 700);
  const Answer answer = Explained();
  EXPECT_EQ(answer.source, Source::kSketch);
  EXPECT_EQ(answer.used.source, Source::kSketch);
  EXPECT_EQ(answer.used.candidate_tokens, 32u);
  const OwnedQuery query = tokens_->Ask(699);
  std::vector<float> shares;
  for (int i = 0; i < 3; ++i) {
    harness_->engine().Step(
        {{.session = Ref("s"), .chunk = std::nullopt, .query = query.query}}, {},
        [&](const std::vector<StepResult>& results) { shares.push_back(results[0].answer->used.keep_share); });
  }
  harness_->clock().Advance(std::chrono::seconds(10));  // so long they waited
  harness_->engine().RunLane(0);
  EXPECT_EQ(shares, std::vector<float>(3, 0.1f));
}

TEST_F(ExplainTest, ATargetMovesALayerStepByStepAndNoFurther) {
  harness_.emplace(HarnessOptions{.engine = Options(1)});
  LayerConfig layer = SmallLayer(Format::kK8V4, Source::kQueryCentroids);
  layer.softmax.scale = 0.35f;  // sharp: every step has needles
  layer.query_centroids = {.centroids = 24, .list_tokens = 8, .name = ""};
  layer.selection.probes = 1;
  config_ = SmallConfig(layer, 4096);
  config_.needle_share_target = 0.9f;
  tokens_.emplace(layer, config_.dtype, 3);
  ASSERT_THAT(harness_->Open("s", config_), IsOk());
  ASSERT_THAT(harness_->Append("s", tokens_->Append(0, 700, 40)), IsOk());
  ASSERT_THAT(harness_->Maintain("s"), IsOk());
  std::vector<uint32_t> strengths;
  for (int i = 0; i < 200; ++i) {
    OwnedQuery query = tokens_->Ask(699, 1, static_cast<uint64_t>(i));
    query.query.answer.explain = true;
    const uint32_t strength = harness_->Get(Ref("s"))->layers[0].strength;
    const auto answer = harness_->Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->explanation->reason, strength == 0 ? SelectionReason::kAsked : SelectionReason::kQuality);
    if (strengths.empty() || strengths.back() != strength) strengths.push_back(strength);
    harness_->RunAll();
  }
  // Random queries: lists of others find next to nothing, so the sketch it is, which finds enough.
  EXPECT_EQ(strengths, (std::vector<uint32_t>{0, 1, 2, 3}));
  const auto answer = harness_->Retrieve("s", tokens_->Ask(699));
  EXPECT_EQ(answer->used.source, Source::kSketch);
  EXPECT_GE(answer->used.probes, layer.selection.probes);
  const Stats& stats = harness_->engine().stats();
  EXPECT_EQ(stats.quality_steps[0], 1u);
  EXPECT_EQ(stats.quality_steps[2], 1u);
  EXPECT_EQ(stats.quality_steps[3], 0u);
}

TEST_F(ExplainTest, ATargetNeedsTruth) {
  config_ = SmallConfig(SmallLayer());
  config_.needle_share_target = 0.9f;
  EXPECT_THAT(harness_->Open("s", config_), StatusIs(absl::StatusCode::kInvalidArgument));
  harness_.emplace(HarnessOptions{.engine = Options(0.5)});
  EXPECT_THAT(harness_->Open("s", config_), IsOk());
  config_.needle_share_target = 1.5f;
  EXPECT_THAT(harness_->Open("t", config_), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ctkvr::testing
