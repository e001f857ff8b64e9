// SPDX-License-Identifier: Apache-2.0
//
// The decisions before any work, at their borders, against the definitions written out once more: what is visible, what
// is always included, which source serves, how much is kept.

#include "server/core/retrieval_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

// A layer of `length` tokens that were never written: planning looks at lengths alone.
class RetrievalPlanTest : public ::testing::Test {
 protected:
  RetrievalPlanTest() : arena_(*Arena::Create(backend_, size_t{32} << 20)) {}

  void Make(const LayerConfig& layer, uint32_t length, uint32_t token_limit = 4096) {
    layer_.reset();
    reservations_.clear();
    config_ = SmallConfig(layer, token_limit);
    MemoryPlan plan;
    const LayerRequests requests = PlanLayer(config_.layers[0], config_, {}, plan);
    reservations_ = *arena_->Reserve(plan.requests());
    const auto at = [&](size_t i) { return i == MemoryPlan::kNone ? nullptr : &reservations_[i]; };
    layer_.emplace(config_.layers[0], config_,
                   Layer::Memory{.pages = at(requests.pages),
                                 .sketches = at(requests.sketches),
                                 .raw_pages = at(requests.raw_pages),
                                 .mean = at(requests.mean),
                                 .index = {},
                                 .signs = nullptr});
    layer_->Grow(length);
    if (layer_->coded() && length >= layer_->coding_length()) {
      layer_->MeanPlace(0);
      layer_->FixMean(std::vector<float>(64));
    }
    layer_->Commit(length);
  }
  OwnedQuery Ask(uint32_t position, uint32_t positions = 1) {
    return Tokens(config_.layers[0], config_.dtype, 1).Ask(position, positions);
  }
  PositionPlan Plan(const OwnedQuery& query) {
    const auto plan = PlanQuery(*layer_, config_, query.query);
    EXPECT_THAT(plan, IsOk());
    return plan.ok() ? plan->positions.back() : PositionPlan();
  }

  FakeBackend backend_;
  std::unique_ptr<Arena> arena_;
  SessionConfig config_;
  std::vector<Reservation> reservations_;
  std::optional<Layer> layer_;
};

TEST_F(RetrievalPlanTest, VisibleAndAlwaysIncludedAreAsDefined) {
  std::mt19937_64 random = MakeRandom(1);
  SCOPED_TRACE(TestSeed());
  for (int round = 0; round < 300; ++round) {
    LayerConfig layer = SmallLayer(Format::kF16, Source::kExact);
    layer.selection.sink_tokens = random() % 20;
    layer.selection.window_tokens = random() % 40;
    const uint32_t length = random() % 100;
    Make(layer, length, 128);
    OwnedQuery query = Ask(random() % 120);
    if (random() % 2) query.query.local_begin = random() % 120;
    if (random() % 2) query.query.local_sinks = random() % 30;
    const PositionPlan plan = Plan(query);
    uint32_t visible = 0, always = 0;
    for (uint32_t t = 0; t < length; ++t) {
      const bool seen =
          t <= query.query.position && t < query.query.local_begin.value_or(length) && t >= query.query.local_sinks;
      const uint32_t end = std::min(length, query.query.position + 1);
      const bool forced = t < layer.selection.sink_tokens || t + layer.selection.window_tokens >= end;
      EXPECT_EQ(t >= plan.begin && t < plan.end, seen);
      if (seen) {
        EXPECT_EQ(t < plan.force_below || t >= plan.force_from, forced) << t;
      }
      visible += seen;
      always += seen && forced;
    }
    EXPECT_EQ(plan.visible(), visible);
    EXPECT_EQ(plan.always, always);
    EXPECT_EQ(plan.path == Path::kEmpty, visible == 0);
  }
}

TEST_F(RetrievalPlanTest, KeepShareIsRoundedUpAndAtLeastTheCandidates) {
  for (const auto& [length, share, candidates, survivors] :
       {std::tuple{1000u, 0.2f, 64u, 200u}, std::tuple{1001u, 0.2f, 64u, 201u}, std::tuple{1000u, 0.2f, 300u, 300u},
        std::tuple{1000u, 1.0f, 64u, 1000u}, std::tuple{1000u, 0.0001f, 17u, 17u}}) {
    LayerConfig layer = SmallLayer();
    layer.selection.keep_share = share;
    layer.selection.candidate_tokens = candidates;
    Make(layer, length);
    const PositionPlan plan = Plan(Ask(length));
    EXPECT_EQ(plan.path, Path::kSketch);
    EXPECT_EQ(plan.survivors, survivors);
    EXPECT_EQ(plan.candidates, candidates);
    EXPECT_EQ(plan.scored_max, candidates + 12);
    EXPECT_EQ(plan.chosen_max, 16u + 12);
  }
  LayerConfig layer = SmallLayer();
  layer.selection.refine_planes = 0;
  Make(layer, 1000);
  EXPECT_EQ(Plan(Ask(1000)).survivors, 0u);
}

TEST_F(RetrievalPlanTest, TheSourceIsChosenAtItsBorders) {
  LayerConfig layer = SmallLayer();
  Make(layer, 515);
  EXPECT_EQ(Plan(Ask(9999)).path, Path::kExact) << "raw";
  Make(layer, 516);
  EXPECT_EQ(Plan(Ask(9999)).path, Path::kSketch);
  // 64 candidates and 12 always included.
  EXPECT_EQ(Plan(Ask(76)).path, Path::kSketch);
  EXPECT_EQ(Plan(Ask(75)).path, Path::kExact);
  // 16 chosen and 12 always included.
  EXPECT_EQ(Plan(Ask(28)).path, Path::kExact);
  EXPECT_EQ(Plan(Ask(27)).path, Path::kDense);
  OwnedQuery query = Ask(9999);
  query.query.selection.source = Source::kDense;
  EXPECT_EQ(Plan(query).path, Path::kDense);
  query.query.selection.source = Source::kExact;
  EXPECT_EQ(Plan(query).path, Path::kExact);
  query.query.selection.dense_below_tokens = 515;
  EXPECT_EQ(Plan(query).path, Path::kExact);
  query.query.selection.dense_below_tokens = 516;
  EXPECT_EQ(Plan(query).path, Path::kDense);
}

TEST_F(RetrievalPlanTest, LoadTakesNothingFromAQualityTarget) {
  LayerConfig layer = SmallLayer();
  layer.selection.k_tokens = 400;
  layer.selection.candidate_tokens = 400;
  Make(layer, 2000);
  config_.policies.load_adaptive_k = true;
  for (const auto& [target, delta, k] : {std::tuple{0.0f, -1.0, 256u}, std::tuple{0.0f, 1.0, 600u},
                                         std::tuple{0.99f, -1.0, 400u}, std::tuple{0.99f, 1.0, 600u}}) {
    config_.needle_share_target = target;
    const OwnedQuery query = Ask(1999);
    const auto plan = PlanQuery(*layer_, config_, query.query, {.policies = {.load_delta = delta}});
    ASSERT_THAT(plan, IsOk());
    EXPECT_EQ(plan->used.k_tokens, k) << target << " " << delta;
    EXPECT_EQ(plan->positions[0].k_tokens, k);
  }
}

TEST_F(RetrievalPlanTest, WrongShapesAreRefusedByName) {
  Make(SmallLayer(), 600);
  const auto expect = [&](const char* text, auto change) {
    SCOPED_TRACE(text);
    OwnedQuery query = Ask(600, 2);
    change(query.query);
    EXPECT_THAT(PlanQuery(*layer_, config_, query.query),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  expect("queries has 0 positions", [](Query& q) { q.positions = 0; });
  expect("queries has 65 positions; it must have 1 to 64", [](Query& q) { q.positions = 65; });
  expect("queries has q_heads 2", [](Query& q) { q.q_heads = 2; });
  expect("head_dim 64", [](Query& q) { q.head_dim = 64; });
  expect("dtype is bf16", [](Query& q) { q.dtype = DType::kBF16; });
  expect("queries has 510 bytes; its dims need 512", [](Query& q) { q.queries = q.queries.first(510); });
  expect("overflow 32 bits", [](Query& q) { q.position = 0xffffffff; });
  expect("k_tokens is 0", [](Query& q) { q.selection.k_tokens = 0; });
  expect("candidate_tokens is 64; the least is k_tokens, 65", [](Query& q) { q.selection.k_tokens = 65; });
  expect("centroid_set is \"no\"", [](Query& q) { q.selection.centroid_set = "no"; });
  expect("keeps no query centroids", [](Query& q) { q.selection.source = Source::kQueryCentroids; });
}

TEST_F(RetrievalPlanTest, AnswersMayTakeTheReplyLimitAndNoByteMore) {
  // 4 + 2 * 4 bytes a token with scores, two sets.
  Make(SmallLayer(Format::kF16, Source::kDense), 4096);
  OwnedQuery query = Ask(4096, 64);
  query.query.answer = {.mode = AnswerMode::kScores};
  EXPECT_THAT(PlanQuery(*layer_, config_, query.query), IsOk());
  query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kF32};
  // 12 + 192 bytes of 64 * 2 * 4096 tokens are under 256 MiB; of 64 heads they would not be.
  EXPECT_THAT(PlanQuery(*layer_, config_, query.query), IsOk());
  LayerConfig wide = SmallLayer(Format::kF16, Source::kDense);
  wide.q_heads = wide.kv_heads = 8;
  Make(wide, 4096);
  OwnedQuery many = Ask(4096, 64);
  many.query.answer = query.query.answer;
  EXPECT_THAT(PlanQuery(*layer_, config_, many.query), StatusIs(absl::StatusCode::kResourceExhausted));
  // Attention takes the same bytes for any number of tokens.
  many.query.answer.mode = AnswerMode::kAttention;
  EXPECT_THAT(PlanQuery(*layer_, config_, many.query), IsOk());
}

TEST_F(RetrievalPlanTest, AttentionHasNoStorageForm) {
  Make(SmallLayer(), 600);
  OwnedQuery query = Ask(600);
  query.query.answer = {.mode = AnswerMode::kAttention, .row_format = RowFormat::kStorage};
  EXPECT_THAT(PlanQuery(*layer_, config_, query.query),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row_format is storage")));
}

TEST_F(RetrievalPlanTest, RowsHaveTheSizesOfTheirFormat) {
  Make(SmallLayer(Format::kK6V4), 600);
  EXPECT_EQ(AnswerRowBytes(*layer_, {.row_format = RowFormat::kF32}).key, 128u);
  EXPECT_EQ(AnswerRowBytes(*layer_, {.row_format = RowFormat::kBF16}).value, 32u);
  EXPECT_EQ(AnswerRowBytes(*layer_, {.row_format = RowFormat::kStorage}).key, 6u * 4 + 2);
  EXPECT_EQ(AnswerRowBytes(*layer_, {.row_format = RowFormat::kStorage}).value, 4u + 8);
}

}  // namespace
}  // namespace ctkvr::testing
