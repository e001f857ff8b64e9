// SPDX-License-Identifier: Apache-2.0
//
// What an exact repeat says of an answer, held to brute force in float64 over the rows that a client would fetch.

#include "server/core/shadow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

constexpr uint32_t kTokens = 2500;  // more than a slice

// Attention sharp enough that every step has needles, and an estimate coarse enough to miss some.
SessionConfig SharpConfig(Source source) {
  LayerConfig layer = SmallLayer(Format::kK8V4, source);
  layer.softmax.scale = 0.8f;
  layer.softmax.sink_logits = {0, 1, 2, 3};
  layer.selection.k_tokens = 12;
  layer.selection.candidate_tokens = 12;
  layer.selection.refine_planes = 0;
  layer.tokens_per_cluster = 16;
  SessionConfig config = SmallConfig(layer, 4096);
  config.first_planes = 1;
  return config;
}

class ShadowTest : public ::testing::TestWithParam<bool> {
 protected:
  ShadowTest()
      : harness_({.shares_host_memory = GetParam(),
                  .engine = {.lanes = 1,
                             .arena_bytes = size_t{48} << 20,
                             .scratch_bytes = size_t{8} << 20,
                             .queue_items_max = 64,
                             .sessions_max = 64,
                             .truth_share = 1,
                             .truth_budget = 1,
                             .threads = false}}) {}

  void Fill(const SessionConfig& config) {
    config_ = config;
    tokens_.emplace(config.layers[0], config.dtype, 5);
    ASSERT_THAT(harness_.Open("s", config), IsOk());
    // A query may not lie before what the index has taken in.
    ASSERT_THAT(harness_.Append("s", tokens_->Append(0, kTokens - 8, 64)), IsOk());
    ASSERT_THAT(harness_.Maintain("s"), IsOk());
    ASSERT_THAT(harness_.Append("s", tokens_->Append(kTokens - 8, 8)), IsOk());
    stored_ = ReadLayer(harness_, "s", config);
  }

  // Retrieves, lets the repeat run, and returns what the session says since.
  TruthInfo Repeat(const OwnedQuery& query) {
    harness_.RunAll();
    const TruthInfo before = harness_.Get(Ref("s"))->truth;
    answer_ = harness_.Retrieve("s", query);
    EXPECT_THAT(answer_, IsOk());
    harness_.RunAll();
    TruthInfo truth = harness_.Get(Ref("s"))->truth;
    EXPECT_EQ(truth.samples, before.samples + 1);
    truth.needles -= before.needles;
    truth.needles_found -= before.needles_found;
    truth.best_tokens -= before.best_tokens;
    truth.best_chosen -= before.best_chosen;
    truth.heads -= before.heads;
    truth.mass_sum -= before.mass_sum;
    truth.output_error_sum -= before.output_error_sum;
    return truth;
  }

  // The same by brute force, for the last position of `query`, with the ids of answer_.
  TruthInfo Expected(const OwnedQuery& owned) const;

  Harness harness_;
  SessionConfig config_;
  std::optional<Tokens> tokens_;
  StoredLayer stored_;
  absl::StatusOr<Answer> answer_;
};
INSTANTIATE_TEST_SUITE_P(Memory, ShadowTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TruthInfo ShadowTest::Expected(const OwnedQuery& owned) const {
  const Query& query = owned.query;
  const LayerConfig& layer = config_.layers[0];
  const Selection& used = answer_->used;
  const uint32_t heads = used.reduction == Reduction::kPerHead ? 1 : layer.group_heads();
  const uint32_t position = query.position + query.positions - 1, seen = position + 1;
  const uint32_t begin = query.local_sinks, end = query.local_begin.value_or(seen);
  std::vector<AnswerSet> sets = SplitAnswer(*answer_, heads);
  sets.erase(sets.begin(), sets.end() - layer.q_heads / heads);
  // Always included, as the answer itself counts them: the tail's length follows.
  const uint32_t always_below = std::max(begin, used.sink_tokens);
  const uint32_t always_from = end - (answer_->always_tokens - (std::max(begin, used.sink_tokens) - begin));
  const oracle::Matrix queries = tokens_->Queries(position);
  TruthInfo truth;
  for (uint32_t s = 0; s < sets.size(); ++s) {
    const std::vector<uint32_t>& chosen = sets[s].ids;
    const auto is_chosen = [&](uint32_t t) { return std::binary_search(chosen.begin(), chosen.end(), t); };
    const uint32_t kv_head = s * heads / layer.group_heads();
    const oracle::Matrix keys(stored_.keys[kv_head].begin(), stored_.keys[kv_head].begin() + seen);
    oracle::Row group(seen);
    for (uint32_t h = s * heads; h < (s + 1) * heads; ++h) {
      const oracle::Matrix scores = oracle::Scores({queries[h]}, keys);
      const oracle::Softmax softmax{
          .scale = layer.softmax.scale, .softcap = 0, .sink_logits = {layer.softmax.sink_logits[h]}};
      const oracle::Row shares = oracle::LogShares(scores, softmax)[0];
      uint32_t heaviest = always_below;
      double all = 0, kept = 0;
      oracle::Matrix served_scores(1), served_values, chosen_scores(1), chosen_values;
      for (uint32_t t = 0; t < seen; ++t) {
        const double share = std::exp(shares[t]);
        const bool local = t < begin || t >= end;
        all += share;
        if (local || is_chosen(t)) kept += share;
        if (t >= always_below && t < always_from && shares[t] > shares[heaviest]) heaviest = t;
        group[t] = used.reduction == Reduction::kMaxSoftmax ? std::max(group[t], share) : group[t] + share;
        if (local) continue;
        served_scores[0].push_back(scores[0][t]);
        served_values.push_back(stored_.values[kv_head][t]);
        if (!is_chosen(t)) continue;
        chosen_scores[0].push_back(scores[0][t]);
        chosen_values.push_back(stored_.values[kv_head][t]);
      }
      const bool needle = std::exp(shares[heaviest]) > 0.1;
      truth.needles += needle;
      truth.needles_found += needle && is_chosen(heaviest);
      truth.mass_sum += kept / all;
      const oracle::Attention exact = oracle::Attend(served_scores, served_values, softmax, layer.value_dim);
      oracle::Attention answered = oracle::Attend(chosen_scores, chosen_values, softmax, layer.value_dim);
      if (answer_->remainder.has_value()) {
        const oracle::Attention rest = AttentionAt(*answer_->remainder, query.positions - 1);
        answered = oracle::Merge({answered, {.output = {rest.output[h]}, .log_sum_exp = {rest.log_sum_exp[h]}}});
      }
      double error = 0, norm = 0;
      for (uint32_t i = 0; i < layer.value_dim; ++i) {
        error += std::pow(answered.output[0][i] - exact.output[0][i], 2);
        norm += std::pow(exact.output[0][i], 2);
      }
      truth.output_error_sum += std::sqrt(error / norm);
      ++truth.heads;
    }
    const oracle::Row others(group.begin() + always_below, group.begin() + always_from);
    for (size_t i : oracle::TopK(others, used.k_tokens)) {
      ++truth.best_tokens;
      truth.best_chosen += is_chosen(always_below + static_cast<uint32_t>(i));
    }
  }
  return truth;
}

void ExpectSame(const TruthInfo& actual, const TruthInfo& expected) {
  EXPECT_EQ(actual.needles, expected.needles);
  EXPECT_EQ(actual.needles_found, expected.needles_found);
  EXPECT_EQ(actual.best_tokens, expected.best_tokens);
  EXPECT_EQ(actual.best_chosen, expected.best_chosen);
  EXPECT_EQ(actual.heads, expected.heads);
  EXPECT_NEAR(actual.mass_sum, expected.mass_sum, 1e-3);
  EXPECT_NEAR(actual.output_error_sum, expected.output_error_sum, 1e-3);
}

TEST_P(ShadowTest, ItSaysWhatBruteForceSays) {
  uint64_t needles = 0, missed = 0, best = 0, best_missed = 0;
  for (Source source : {Source::kSketch, Source::kQueryCentroids, Source::kExact}) {
    for (Reduction reduction : {Reduction::kSumSoftmax, Reduction::kMaxSoftmax, Reduction::kPerHead}) {
      SCOPED_TRACE(::testing::Message() << SourceName(source) << ", reduction " << static_cast<int>(reduction));
      Fill(SharpConfig(source));
      for (uint32_t positions : {1u, 3u}) {
        OwnedQuery query = tokens_->Ask(kTokens - positions, positions);
        query.query.selection.reduction = reduction;
        const TruthInfo truth = Repeat(query);
        ExpectSame(truth, Expected(query));
        needles += truth.needles;
        missed += truth.needles - truth.needles_found;
        best += truth.best_tokens;
        best_missed += truth.best_tokens - truth.best_chosen;
        EXPECT_TRUE(source != Source::kExact || truth.best_chosen == truth.best_tokens);
      }
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
  // Else the cases above prove little.
  EXPECT_GT(needles, 10u);
  EXPECT_GT(missed, 0u);
  EXPECT_GT(best_missed, 0u);
  EXPECT_LT(best_missed, best);
}

TEST_P(ShadowTest, WhatTheWorkerAttendsItselfIsKept) {
  Fill(SharpConfig(Source::kSketch));
  OwnedQuery query = tokens_->Ask(kTokens - 1);
  query.query.local_begin = kTokens - 100;
  query.query.local_sinks = 6;
  const TruthInfo truth = Repeat(query);
  ExpectSame(truth, Expected(query));
}

TEST_P(ShadowTest, TheErrorIsThatOfTheAnswerWithItsRemainder) {
  Fill(SharpConfig(Source::kSketch));
  OwnedQuery query = tokens_->Ask(kTokens - 1);
  const TruthInfo without = Repeat(query);
  query.query.answer.remainder = true;
  const TruthInfo with = Repeat(query);
  ExpectSame(with, Expected(query));
  EXPECT_NE(with.output_error_sum, without.output_error_sum);
}

TEST_P(ShadowTest, TheModeOfTheAnswerMakesNoDifference) {
  SessionConfig config = SharpConfig(Source::kSketch);
  config.cache_slots = 128;
  Fill(config);
  OwnedQuery query = tokens_->Ask(kTokens - 1);
  const TruthInfo scores = Repeat(query);
  ASSERT_GT(scores.needles, 0u);
  for (AnswerMode mode : {AnswerMode::kIds, AnswerMode::kRows, AnswerMode::kNewRows, AnswerMode::kAttention}) {
    SCOPED_TRACE(static_cast<int>(mode));
    query.query.answer = {.mode = mode, .row_format = RowFormat::kF32};
    ExpectSame(Repeat(query), scores);
  }
}

TEST_P(ShadowTest, WhatAFilterLeftOutWasNotToBeFound) {
  SessionConfig config = SharpConfig(Source::kExact);
  config.layers[0].selection.top_p = 0.5f;
  Fill(config);
  const TruthInfo truth = Repeat(tokens_->Ask(kTokens - 1));
  EXPECT_EQ(truth.best_chosen, truth.best_tokens);
  EXPECT_LT(truth.best_tokens, config.layers[0].selection.k_tokens * config.layers[0].kv_heads);
}

TEST(ShadowQueryTest, ItCountsWhatARepeatHolds) {
  ShadowQuery query;
  query.set_heads = 16;
  query.seen = 1000000;
  query.queries.resize(100);
  query.chosen = {{1, 2, 3}, {4}};
  EXPECT_EQ(query.bytes(), 64000000u + 100 + 4 * 4);
  EXPECT_LT(query.bytes(), limits::kShadowBytesMax);
  query.remainder = PartialAttention{.output = std::string(30, 'x'), .log_sum_exp = std::string(8, 'x')};
  EXPECT_EQ(query.bytes(), 64000000u + 100 + 4 * 4 + 38);
}

TEST_P(ShadowTest, AnAnswerThatHoldsEverythingIsNotRepeated) {
  SessionConfig config = SharpConfig(Source::kSketch);
  config.layers[0].selection.dense_below_tokens = kTokens;
  Fill(config);
  ASSERT_THAT(harness_.Retrieve("s", tokens_->Ask(kTokens - 1)), IsOk());
  EXPECT_FALSE(harness_.Get(Ref("s"))->shadow_pending);
}

}  // namespace
}  // namespace ctkvr::testing
