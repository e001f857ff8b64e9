// SPDX-License-Identifier: Apache-2.0
//
// Attention answered in place of tokens: over the chosen ones it is the oracle's, and with the parts a worker attends
// itself it merges to full attention over everything.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "server/core/retriever.h"
#include "tests/server/core/retriever_fixture.h"
#include "tests/testing/compare.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr AnswerOptions kAsAttention = {.mode = AnswerMode::kAttention, .row_format = RowFormat::kF32};

// Of float32 arithmetic, for the scores the server ranked by; see attention_ops.h.
constexpr double kOutputBound = 0x1p-14;
constexpr double kLogSumExpBound = 0x1p-16;
// Of scores that were summed in another order too, see core_fixture.cc.
constexpr double kWholeBound = 1e-3;

class RetrieverAttentionTest : public RetrieverTest {
 protected:
  oracle::Softmax softmax() const {
    return {.scale = layer().softmax.scale, .softcap = layer().softmax.softcap, .sink_logits = {}};
  }

  // Attention of every query head over the tokens of `listed`, by the keys and values a client would fetch.
  oracle::Attention Exact(const oracle::Matrix& queries, const std::vector<uint32_t>& listed) const {
    oracle::Attention attention;
    for (uint32_t h = 0; h < layer().q_heads; ++h) {
      const uint32_t kv_head = h / layer().group_heads();
      oracle::Matrix keys, values;
      for (const uint32_t token : listed) {
        keys.push_back(stored_.keys[kv_head][token]);
        values.push_back(stored_.values[kv_head][token]);
      }
      const oracle::Matrix scores = listed.empty() ? oracle::Matrix(1) : oracle::Scores({queries[h]}, keys);
      const oracle::Attention own = oracle::Attend(scores, values, softmax(), layer().value_dim);
      attention.output.push_back(own.output[0]);
      attention.log_sum_exp.push_back(own.log_sum_exp[0]);
    }
    return attention;
  }

  static void ExpectSame(const oracle::Attention& actual, const oracle::Attention& expected, double output_bound,
                         double log_sum_exp_bound) {
    ASSERT_EQ(actual.log_sum_exp.size(), expected.log_sum_exp.size());
    for (size_t h = 0; h < expected.log_sum_exp.size(); ++h) {
      SCOPED_TRACE(::testing::Message() << "query head " << h);
      if (std::isinf(expected.log_sum_exp[h])) {
        EXPECT_EQ(actual.log_sum_exp[h], expected.log_sum_exp[h]);
      } else {
        EXPECT_TRUE(IsWithin(actual.log_sum_exp[h], expected.log_sum_exp[h], log_sum_exp_bound));
      }
      for (size_t i = 0; i < expected.output[h].size(); ++i) {
        ASSERT_TRUE(IsWithin(actual.output[h][i], expected.output[h][i], output_bound)) << i;
      }
    }
  }

  // Asks for tokens and for attention, and holds the one to the other.
  void ExpectAttentionOfTheChosen(OwnedQuery& query) {
    query.query.answer = {.mode = AnswerMode::kScores};
    const auto tokens = harness_.Retrieve("s", query);
    query.query.answer = kAsAttention;
    const auto attention = harness_.Retrieve("s", query);
    ASSERT_THAT(tokens, IsOk());
    ASSERT_THAT(attention, IsOk());
    EXPECT_EQ(attention->counts, tokens->counts);
    EXPECT_EQ(attention->ids + attention->scores + attention->keys + attention->values, "");
    EXPECT_EQ(attention->source, tokens->source);
    EXPECT_EQ(attention->always_tokens, tokens->always_tokens);
    ASSERT_TRUE(attention->attention.has_value());
    EXPECT_FALSE(tokens->attention.has_value());
    EXPECT_EQ(attention->attention->positions, query.query.positions);
    EXPECT_EQ(attention->attention->q_heads, layer().q_heads);
    EXPECT_EQ(attention->attention->value_dim, layer().value_dim);
    EXPECT_EQ(attention->attention->dtype, DType::kF32);
    const uint32_t heads = set_heads(*tokens);
    const std::vector<AnswerSet> sets = SplitAnswer(*tokens, heads);
    const size_t per_position = sets.size() / query.query.positions;
    for (uint32_t p = 0; p < query.query.positions; ++p) {
      oracle::Attention expected;
      for (size_t s = 0; s < per_position; ++s) {
        const AnswerSet& set = sets[p * per_position + s];
        const size_t kv_head = s * heads / layer().group_heads();
        oracle::Matrix values;
        for (const uint32_t id : set.ids) values.push_back(stored_.values[kv_head][id]);
        const oracle::Attention own = oracle::Attend(set.scores, values, softmax(), layer().value_dim);
        expected.output.insert(expected.output.end(), own.output.begin(), own.output.end());
        expected.log_sum_exp.insert(expected.log_sum_exp.end(), own.log_sum_exp.begin(), own.log_sum_exp.end());
      }
      SCOPED_TRACE(::testing::Message() << "position " << p);
      ExpectSame(AttentionAt(*attention->attention, p), expected, kOutputBound, kLogSumExpBound);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, RetrieverAttentionTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(RetrieverAttentionTest, ItIsTheOraclesOverTheChosenTokens) {
  for (Format format : kAllFormats) {
    SCOPED_TRACE(FormatName(format));
    Fill(SmallConfig(SmallLayer(format, Source::kExact)));
    for (Reduction reduction : {Reduction::kSumSoftmax, Reduction::kMaxSoftmax, Reduction::kPerHead}) {
      OwnedQuery query = tokens_->Ask(kLength - 3, 3);
      query.query.selection.reduction = reduction;
      ExpectAttentionOfTheChosen(query);
    }
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverAttentionTest, EverySourceServesIt) {
  LayerConfig layer = SmallLayer(Format::kK8V4, Source::kQueryCentroids);
  layer.softmax.softcap = 2;
  layer.softmax.sink_logits = {3, -1, 0, 5};
  layer.tokens_per_cluster = 16;
  layer.selection.open_share = 0.1f;
  Fill(SmallConfig(layer), kLength, 60);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  for (Source source : {Source::kDense, Source::kExact, Source::kSketch, Source::kQueryCentroids, Source::kKeyCentroids,
                        Source::kKeyCentroidsSketch}) {
    SCOPED_TRACE(SourceName(source));
    OwnedQuery query = tokens_->Ask(kLength, 2);
    query.query.selection.source = source;
    ExpectAttentionOfTheChosen(query);
  }
}

TEST_P(RetrieverAttentionTest, RawKeysServeItToo) {
  Fill(SmallConfig(SmallLayer()), 100);
  OwnedQuery query = tokens_->Ask(100);
  ExpectAttentionOfTheChosen(query);
}

// The worker attends its first and last tokens itself. What it merges is full attention: nothing twice, none left out.
TEST_P(RetrieverAttentionTest, ChosenAndLocalPartsMergeToFullAttention) {
  LayerConfig layer = SmallLayer(Format::kK8V4, Source::kExact);
  layer.selection.k_tokens = 8192;
  layer.softmax.sink_logits = {2, -1, 0, 4};
  Fill(SmallConfig(layer));
  for (Reduction reduction : {Reduction::kSumSoftmax, Reduction::kPerHead}) {
    OwnedQuery query = tokens_->Ask(kLength - 1);
    query.query.selection.reduction = reduction;
    query.query.local_sinks = 3;
    query.query.local_begin = kLength - 50;
    query.query.answer = kAsAttention;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_THAT(answer->counts, Each(kLength - 53));
    const oracle::Matrix queries = tokens_->Queries(kLength - 1);
    std::vector<uint32_t> local, all;
    for (uint32_t t = 0; t < kLength; ++t) {
      all.push_back(t);
      if (t < 3 || t >= kLength - 50) local.push_back(t);
    }
    oracle::Attention sinks{.output = oracle::Matrix(4, oracle::Row(16, 0.0)), .log_sum_exp = {2, -1, 0, 4}};
    ExpectSame(oracle::Merge({AttentionAt(*answer->attention, 0), Exact(queries, local)}), Exact(queries, all),
               kWholeBound, kWholeBound);
    // With the sink logits, which the server leaves out.
    ExpectSame(oracle::Merge({AttentionAt(*answer->attention, 0), Exact(queries, local), sinks}),
               oracle::Merge({Exact(queries, all), sinks}), kWholeBound, kWholeBound);
  }
}

TEST_P(RetrieverAttentionTest, WhereNothingIsVisibleItIsEmpty) {
  Fill(SmallConfig(SmallLayer()));
  OwnedQuery query = tokens_->Ask(kLength - 1, 2);
  query.query.local_begin = 0;
  query.query.answer = {.mode = AnswerMode::kAttention, .row_format = RowFormat::kBF16};
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_THAT(answer->counts, Each(0u));
  EXPECT_EQ(answer->attention->output, std::string(2 * 4 * 16 * 2, '\0'));
  EXPECT_THAT(AttentionAt(*answer->attention, 1).log_sum_exp, Each(-std::numeric_limits<double>::infinity()));
}

// A filter may leave one set of several without a token.
TEST_P(RetrieverAttentionTest, ASetThatChoosesNothingIsEmptyAmongOthers) {
  LayerConfig layer = SmallLayer(Format::kF32, Source::kExact);
  layer.selection.sink_tokens = layer.selection.window_tokens = 0;
  Fill(SmallConfig(layer));
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.selection.reduction = Reduction::kPerHead;
  query.query.answer = {.mode = AnswerMode::kScores};
  const auto tokens = harness_.Retrieve("s", query);
  ASSERT_THAT(tokens, IsOk());
  double best = -std::numeric_limits<double>::infinity();
  for (const AnswerSet& set : SplitAnswer(*tokens, 1)) {
    for (const double score : set.scores[0]) best = std::max(best, score);
  }
  query.query.selection.min_score = static_cast<float>(best);
  ExpectAttentionOfTheChosen(query);
  query.query.answer = kAsAttention;
  EXPECT_THAT(harness_.Retrieve("s", query)->counts, ::testing::UnorderedElementsAre(0, 0, 0, 1));
}

TEST_P(RetrieverAttentionTest, SixteenBitOutputsAreTheFloatsRounded) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kExact)));
  OwnedQuery query = tokens_->Ask(kLength, 2);
  query.query.answer = kAsAttention;
  const auto floats = harness_.Retrieve("s", query);
  ASSERT_THAT(floats, IsOk());
  for (const auto& [format, dtype] : {std::pair{RowFormat::kF16, DType::kF16}, {RowFormat::kBF16, DType::kBF16}}) {
    query.query.answer.row_format = format;
    const auto rounded = harness_.Retrieve("s", query);
    ASSERT_THAT(rounded, IsOk());
    EXPECT_EQ(rounded->row_format, format);
    EXPECT_EQ(rounded->attention->dtype, dtype);
    EXPECT_EQ(rounded->attention->log_sum_exp, floats->attention->log_sum_exp);
    const size_t elements = 2 * 4 * 16;
    ASSERT_EQ(rounded->attention->output.size(), elements * 2);
    std::string expected(elements * 2, '\0');
    for (size_t i = 0; i < elements; ++i) {
      StoreElement(reinterpret_cast<std::byte*>(expected.data()), dtype, i,
                   LoadElement(reinterpret_cast<const std::byte*>(floats->attention->output.data()), DType::kF32, i));
    }
    EXPECT_EQ(rounded->attention->output, expected);
  }
}

TEST_P(RetrieverAttentionTest, AnOutputThatOverflowsItsFormatIsRefusedByName) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kF32, Source::kDense));
  config.dtype = DType::kF32;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OwnedChunk chunk = tokens.Append(0, 20);
  for (size_t t = 0; t < 20; ++t) StoreElement(chunk.values.data(), DType::kF32, t * 32 + 5, 1e6f);
  ASSERT_THAT(harness_.Append("s", chunk), IsOk());
  OwnedQuery query = tokens.Ask(20);
  query.query.answer = {.mode = AnswerMode::kAttention, .row_format = RowFormat::kF16};
  const auto answer = harness_.Retrieve("s", query);
  // The dimension of one KV head, for its two query heads.
  EXPECT_THAT(answer, StatusIs(absl::StatusCode::kFailedPrecondition,
                               HasSubstr("row_format is f16; 2 elements of the attention do not fit it")));
  EXPECT_EQ(GetErrorDetail(answer.status()).reason, kReasonRowOverflow);
  EXPECT_EQ(harness_.engine().stats().chosen_tokens, 0u);
  query.query.answer.row_format = RowFormat::kBF16;
  EXPECT_THAT(harness_.Retrieve("s", query), IsOk());
  EXPECT_EQ(harness_.engine().stats().chosen_tokens, 40u);
}

TEST_P(RetrieverAttentionTest, SetsThatDoNotFitTogetherFollowInRounds) {
  HarnessOptions options{.shares_host_memory = GetParam()};
  options.engine.scratch_bytes = size_t{56} << 10;
  Harness small(options);
  const SessionConfig config = SmallConfig(SmallLayer());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OwnedQuery query = tokens.Ask(kLength, 8);
  query.query.answer = kAsAttention;
  std::vector<absl::StatusOr<Answer>> answers;
  for (Harness* harness : {&small, &harness_}) {
    ASSERT_THAT(harness->Open("s", config), IsOk());
    ASSERT_THAT(harness->Append("s", tokens.Append(0, kLength)), IsOk());
    answers.push_back(harness->Retrieve("s", query));
    ASSERT_THAT(answers.back(), IsOk());
  }
  EXPECT_EQ(answers[0]->counts, answers[1]->counts);
  EXPECT_EQ(answers[0]->attention->output, answers[1]->attention->output);
  EXPECT_EQ(answers[0]->attention->log_sum_exp, answers[1]->attention->log_sum_exp);
}

TEST(RetrieverAttentionBatchTest, ItSharesABatchWithOtherModes) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  config.cache_slots = 256;
  const Tokens tokens(config.layers[0], config.dtype, 1);
  constexpr AnswerMode kModes[] = {AnswerMode::kIds, AnswerMode::kScores, AnswerMode::kRows, AnswerMode::kNewRows,
                                   AnswerMode::kAttention};
  std::vector<OwnedQuery> queries;
  std::vector<StepRequest> requests;
  std::vector<Answer> alone;
  for (uint32_t i = 0; i < 10; ++i) {
    const std::string id = std::to_string(i);
    ASSERT_THAT(harness.Open(id, config), IsOk());
    ASSERT_THAT(harness.Append(id, tokens.Append(0, 100 + i, 0, i)), IsOk());
    queries.push_back(tokens.Ask(200 + i));
    queries.back().query.answer = {.mode = kModes[i % 5], .row_format = RowFormat::kF32};
    requests.push_back({.session = Ref(id), .chunk = std::nullopt, .query = queries.back().query});
    alone.push_back(*harness.Retrieve(id, queries.back()));
  }
  const auto results = harness.Step(std::move(requests));
  for (uint32_t i = 0; i < 10; ++i) {
    ASSERT_THAT(results[i].answer, IsOk());
    EXPECT_EQ(results[i].answer->ids, alone[i].ids);
    EXPECT_EQ(results[i].answer->values, alone[i].values);
    const bool attends = kModes[i % 5] == AnswerMode::kAttention;
    ASSERT_EQ(results[i].answer->attention.has_value(), attends);
    if (attends) {
      EXPECT_EQ(results[i].answer->attention->output, alone[i].attention->output);
    }
  }
}

}  // namespace
}  // namespace ctkvr::testing
