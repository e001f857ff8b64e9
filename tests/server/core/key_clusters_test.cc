// SPDX-License-Identifier: Apache-2.0
//
// Key clusters and the remainder through the engine: chosen and remainder together cover every visible position once,
// approximate full attention, and hold nothing of positions that were truncated. The parameter says whether the backend
// shares host memory.

#include "server/core/key_clusters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "server/core/session.h"
#include "tests/server/core/core_fixture.h"
#include "tests/testing/compare.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

LayerConfig ClusteredLayer(Format format = Format::kK8V4, Source source = Source::kExact) {
  LayerConfig layer = SmallLayer(format, source);
  layer.tokens_per_cluster = 16;
  return layer;
}
// Every token weighs the same, so sums of exp count positions and outputs are means of values. Few are chosen: the
// means stay when tokens are taken out of them.
LayerConfig FlatLayer(Format format = Format::kK8V4, Source source = Source::kExact) {
  LayerConfig layer = ClusteredLayer(format, source);
  layer.softmax.scale = 1e-9f;
  layer.selection.k_tokens = 2;
  layer.selection.window_tokens = 1;
  return layer;
}

class KeyClustersTest : public ::testing::TestWithParam<bool> {
 protected:
  KeyClustersTest() : harness_({.shares_host_memory = GetParam()}) {}

  void Open(const LayerConfig& layer, uint32_t token_limit = 4096, Maintenance maintenance = Maintenance::kManual) {
    config_ = SmallConfig(layer, token_limit);
    config_.maintenance = maintenance;
    tokens_.emplace(layer, config_.dtype, 5);
    ASSERT_THAT(harness_.Open("s", config_), IsOk());
  }
  // The text of variant `variant` up to `length`.
  void Grow(uint32_t length, uint64_t variant = 0) {
    const auto held = static_cast<uint32_t>(variants_.size());
    ASSERT_THAT(harness_.Append("s", tokens_->Append(held, length - held, 0, variant)), IsOk());
    variants_.resize(length, variant);
  }
  void Truncate(uint32_t length) {
    ASSERT_THAT(harness_.Truncate("s", length), IsOk());
    variants_.resize(length);
  }
  uint32_t clustered_length() { return harness_.Get(Ref("s"))->layers[0].clustered_length; }

  OwnedQuery Ask(uint32_t position, uint32_t positions = 1) {
    OwnedQuery query = tokens_->Ask(position, positions);
    query.query.answer = {.mode = AnswerMode::kAttention, .row_format = RowFormat::kF32, .remainder = true};
    return query;
  }

  static oracle::Attention Merged(const Answer& answer, uint32_t position) {
    return oracle::Merge({AttentionAt(*answer.attention, position), AttentionAt(*answer.remainder, position)});
  }

  // Attention over [begin, end) of what the layer holds, as it was appended.
  oracle::Attention Full(uint32_t begin, uint32_t end, uint32_t position) const {
    const LayerConfig& layer = config_.layers[0];
    std::vector<oracle::Matrix> keys(layer.kv_heads), values(layer.kv_heads);
    for (uint32_t p = begin; p < end; ++p) {
      const oracle::Matrix key = tokens_->Keys(p, variants_[p]), value = tokens_->Values(p, variants_[p]);
      for (uint32_t g = 0; g < layer.kv_heads; ++g) {
        keys[g].push_back(key[g]);
        values[g].push_back(value[g]);
      }
    }
    const oracle::Matrix queries = tokens_->Queries(position);
    oracle::Attention attention;
    for (uint32_t h = 0; h < layer.q_heads; ++h) {
      const uint32_t g = h / layer.group_heads();
      const oracle::Attention own =
          oracle::Attend(oracle::Scores({queries[h]}, keys[g]), values[g],
                         {.scale = layer.softmax.scale, .softcap = layer.softmax.softcap}, layer.value_dim);
      attention.output.push_back(own.output[0]);
      attention.log_sum_exp.push_back(own.log_sum_exp[0]);
    }
    return attention;
  }

  // Of a flat layer: every position of [begin, end) counts once, and with its own value, as far as means are theirs:
  // where many are chosen or local, the mean of their clusters is not that of the tokens left.
  void ExpectCovers(const Answer& answer, uint32_t index, uint32_t begin, uint32_t end, uint32_t position,
                    double output_bound = 0.01) {
    SCOPED_TRACE(::testing::Message() << "position " << position << " sees " << begin << " to " << end);
    const oracle::Attention merged = Merged(answer, index), full = Full(begin, end, position);
    for (uint32_t h = 0; h < config_.layers[0].q_heads; ++h) {
      EXPECT_TRUE(IsWithin(std::exp(merged.log_sum_exp[h]), end - begin, 0.1)) << "head " << h;
      for (uint32_t i = 0; i < config_.layers[0].value_dim; ++i) {
        EXPECT_TRUE(IsWithin(merged.output[h][i], full.output[h][i], output_bound))
            << "head " << h << " dimension " << i;
      }
    }
  }
  void AskAndExpectCovers(uint32_t position) {
    const auto answer = harness_.Retrieve("s", Ask(position));
    ASSERT_THAT(answer, IsOk());
    ExpectCovers(*answer, 0, 0, position + 1, position);
    EXPECT_THAT(AttentionAt(*answer->remainder, 0).log_sum_exp, Each(::testing::Gt(0)));
  }

  Harness harness_;
  SessionConfig config_;
  std::optional<Tokens> tokens_;
  std::vector<uint64_t> variants_;  // [length]
};

TEST_P(KeyClustersTest, ChosenAndRemainderCoverEveryPositionOnce) {
  for (const auto& [format, source] : {std::pair{Format::kK8V4, Source::kSketch},
                                       {Format::kK6V4, Source::kExact},
                                       {Format::kF16, Source::kExact},
                                       {Format::kK8V4, Source::kQueryCentroids}}) {
    SCOPED_TRACE(FormatName(format));
    Open(FlatLayer(format, source));
    Grow(2500);
    ASSERT_THAT(harness_.Maintain("s"), IsOk());
    EXPECT_EQ(clustered_length(), 2500u);
    Grow(2640);
    AskAndExpectCovers(2639);
    AskAndExpectCovers(2499);
    for (const Reduction reduction : {Reduction::kPerHead, Reduction::kMaxSoftmax}) {
      OwnedQuery query = Ask(2600, 3);
      query.query.selection.reduction = reduction;
      query.query.selection.sink_tokens = 0;
      const auto answer = harness_.Retrieve("s", query);
      ASSERT_THAT(answer, IsOk());
      for (uint32_t p = 0; p < 3; ++p) ExpectCovers(*answer, p, 0, 2601 + p, 2600 + p);
    }
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    variants_.clear();
  }
}

TEST_P(KeyClustersTest, WhatTheWorkerAttendsItselfIsLeftOut) {
  Open(FlatLayer());
  Grow(2500);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  for (const auto& [sinks, begin] : {std::pair{4u, 2490u}, {0u, 1500u}, {1100u, 2300u}, {3u, 40u}, {0u, 3u}}) {
    OwnedQuery query = Ask(2499);
    query.query.local_sinks = sinks;
    query.query.local_begin = begin;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    ExpectCovers(*answer, 0, sinks, begin, 2499, begin > 2400 ? 0.01 : kInfinity);
  }
  OwnedQuery all_local = Ask(2499);
  all_local.query.local_begin = 0;
  const auto answer = harness_.Retrieve("s", all_local);
  ASSERT_THAT(answer, IsOk());
  EXPECT_THAT(AttentionAt(*answer->remainder, 0).log_sum_exp, Each(-kInfinity));
}

TEST_P(KeyClustersTest, ApproximatesFullAttention) {
  // Tokens near one of 16 centres, which clusters tell apart.
  Open(ClusteredLayer());
  const LayerConfig& layer = config_.layers[0];
  const RandomKv kv = MakeRandomKv({.tokens = 2400,
                                    .kv_heads = layer.kv_heads,
                                    .group_heads = layer.group_heads(),
                                    .head_dim = layer.head_dim,
                                    .value_dim = layer.value_dim,
                                    .query_positions = 8},
                                   KvPattern::kClustered, 11);
  OwnedChunk chunk = tokens_->Append(0, 2400);
  chunk.keys = ToBytes(kv.keys, config_.dtype);
  chunk.values = ToBytes(kv.values, config_.dtype);
  chunk.chunk.keys = chunk.keys;
  chunk.chunk.values = chunk.values;
  ASSERT_THAT(harness_.Append("s", chunk), IsOk());
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  OwnedQuery query = Ask(2399, 8);
  query.bytes = ToBytes(kv.queries, config_.dtype);
  query.query.queries = query.bytes;
  const auto answer = harness_.Retrieve("s", query);
  query.query.selection.source = Source::kDense;
  const auto full = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  ASSERT_THAT(full, IsOk());
  double squared_with = 0, squared_without = 0;
  for (uint32_t p = 0; p < 8; ++p) {
    const oracle::Attention expected = AttentionAt(*full->attention, p), chosen = AttentionAt(*answer->attention, p);
    const oracle::Attention merged = Merged(*answer, p);
    EXPECT_THAT(AttentionAt(*full->remainder, p).log_sum_exp, Each(-kInfinity));
    for (uint32_t h = 0; h < layer.q_heads; ++h) {
      EXPECT_TRUE(IsWithin(merged.log_sum_exp[h], expected.log_sum_exp[h], 0.1));
      for (uint32_t i = 0; i < layer.value_dim; ++i) {
        squared_with += std::pow(merged.output[h][i] - expected.output[h][i], 2);
        squared_without += std::pow(chosen.output[h][i] - expected.output[h][i], 2);
      }
    }
  }
  EXPECT_LT(std::sqrt(squared_with / (8 * layer.q_heads * layer.value_dim)), 0.02);  // of values of variance 1
  EXPECT_LT(squared_with, 0.2 * squared_without);
}

TEST_P(KeyClustersTest, IsEmptyWhenEverythingIsChosen) {
  Open(FlatLayer());
  Grow(1500);
  const auto expect_empty = [&](const OwnedQuery& query) {
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    const oracle::Attention rest = AttentionAt(*answer->remainder, 0);
    EXPECT_THAT(rest.log_sum_exp, Each(-kInfinity));
    EXPECT_THAT(rest.output, Each(Each(0)));
    ExpectCovers(*answer, 0, 0, 1500, 1499);
  };
  expect_empty(Ask(1499));  // all of it is tail
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  OwnedQuery all = Ask(1499);
  all.query.selection.k_tokens = 1500;
  expect_empty(all);
  all.query.selection.min_share = 1e-9f;  // a filter, so that the tokens are selected
  expect_empty(all);
}

TEST_P(KeyClustersTest, TruncationLeavesNothingBehind) {
  Open(FlatLayer());
  Grow(3000);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  Truncate(2990);
  EXPECT_EQ(clustered_length(), 2 * kClusterBlockTokens);
  AskAndExpectCovers(2989);
  Truncate(kClusterBlockTokens);  // at a block's border
  EXPECT_EQ(clustered_length(), kClusterBlockTokens);
  Grow(2500, 1);
  AskAndExpectCovers(2499);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  EXPECT_EQ(clustered_length(), 2500u);
  AskAndExpectCovers(2499);
  Truncate(3);
  EXPECT_EQ(clustered_length(), 0u);
  EXPECT_EQ(harness_.Get(Ref("s"))->memory.index_bytes, 0u);
  Grow(1200, 2);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  AskAndExpectCovers(1199);
  Grow(1300, 2);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());  // the last block anew, with what follows
  EXPECT_EQ(clustered_length(), 1300u);
  AskAndExpectCovers(1299);
}

TEST_P(KeyClustersTest, RefusesQueriesThatClustersReachPast) {
  Open(FlatLayer());
  Grow(1200);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  EXPECT_THAT(harness_.Retrieve("s", Ask(1199)), IsOk());
  const auto early = harness_.Retrieve("s", Ask(1198, 2));
  EXPECT_THAT(early, StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("reach to 1200")));
  OwnedQuery without = Ask(1198);
  without.query.answer.remainder = false;
  EXPECT_THAT(harness_.Retrieve("s", without), IsOk());
}

TEST_P(KeyClustersTest, RefusesTheRemainderOfALayerWithoutClusters) {
  Open(SmallLayer());
  Grow(600);
  EXPECT_EQ(harness_.Retrieve("s", Ask(599)).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(KeyClustersTest, AnswersInTheTypeAskedForBesideAnyMode) {
  Open(ClusteredLayer());
  Grow(1400);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  const auto wide = harness_.Retrieve("s", Ask(1399));
  ASSERT_THAT(wide, IsOk());
  for (const AnswerMode mode : {AnswerMode::kIds, AnswerMode::kScores, AnswerMode::kRows}) {
    OwnedQuery query = Ask(1399);
    query.query.answer.mode = mode;
    query.query.answer.remainder_dtype = DType::kBF16;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_FALSE(answer->attention.has_value());
    const oracle::Attention narrow = AttentionAt(*answer->remainder, 0), expected = AttentionAt(*wide->remainder, 0);
    EXPECT_EQ(narrow.log_sum_exp, expected.log_sum_exp);
    for (uint32_t h = 0; h < 4; ++h) {
      for (uint32_t i = 0; i < 16; ++i) {
        EXPECT_TRUE(IsWithin(narrow.output[h][i], expected.output[h][i], std::abs(expected.output[h][i]) / 256));
      }
    }
    // Two KV heads of two blocks: the mean key of every cluster that has tokens, some mean values.
    OwnedQuery alone = Ask(1399);
    alone.query.answer = {.mode = mode};
    const auto plain = harness_.Retrieve("s", alone);
    ASSERT_THAT(plain, IsOk());
    EXPECT_GT(answer->bytes_read, plain->bytes_read + 2 * 2 * 32 * 32u);
    EXPECT_FALSE(plain->remainder.has_value());
  }
}

TEST_P(KeyClustersTest, MaintenanceTakesInTheTailOfItsOwnAccord) {
  LayerConfig layer = FlatLayer();
  layer.selection.dense_below_tokens = 1000;
  Open(layer, 4096, Maintenance::kAuto);
  Grow(999);
  harness_.RunAll();
  EXPECT_EQ(clustered_length(), 0u);
  Grow(1000);
  harness_.RunAll();
  EXPECT_EQ(clustered_length(), 1000 - limits::kQueryPositionsMax);
  Grow(1191);
  harness_.RunAll();
  EXPECT_EQ(clustered_length(), 936u);
  Grow(1192);  // kClusterTailTokens more
  harness_.RunAll();
  EXPECT_EQ(clustered_length(), 1024u);  // the first block is full; what is left is too little for another
  AskAndExpectCovers(1192 - limits::kQueryPositionsMax);
  AskAndExpectCovers(1191);
}

// Every backend call of a build and of a retrieval fails once.
TEST_P(KeyClustersTest, FaultsChangeNothing) {
  Open(FlatLayer());
  Grow(1200);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  Grow(1300);
  const auto look = [&] {
    const auto answer = harness_.Retrieve("s", Ask(1299));
    EXPECT_THAT(answer, IsOk());
    return answer->remainder->output + answer->remainder->log_sum_exp + answer->attention->output;
  };
  const std::string before = look();
  const uint64_t held = harness_.Get(Ref("s"))->memory.held_bytes();
  for (const bool after_work : {false, true}) {
    uint64_t nth = 0;
    for (bool failed = true; failed; ++nth) {
      harness_.backend().Fail({.first = nth, .after_work = after_work});
      failed = !harness_.Retrieve("s", Ask(1299)).ok();
      harness_.backend().StopFailing();
      EXPECT_EQ(look(), before) << "call " << nth;
    }
    EXPECT_GT(nth, 4u);
  }
  // Calls that build a KV head's block, then those that arrange sketch blocks: until all succeed, nothing is published.
  uint64_t nth = 0;
  for (; clustered_length() == 1200; ++nth) {
    EXPECT_EQ(harness_.Get(Ref("s"))->memory.held_bytes(), held);
    EXPECT_EQ(look(), before) << "call " << nth;
    harness_.backend().Fail({.first = nth / 2, .after_work = nth % 2 == 1});
    const bool done = harness_.Maintain("s").ok();
    EXPECT_EQ(done, harness_.backend().failed_call().empty());
    harness_.backend().StopFailing();
  }
  EXPECT_GT(nth / 2, 5u);
  EXPECT_EQ(clustered_length(), 1300u);
  AskAndExpectCovers(1299);
}

// Sketch blocks of a session with clusters lie in their order, those of its twin in that of positions: whatever is
// appended, clustered and truncated, both answer the same.
TEST_P(KeyClustersTest, TheOrderOfTokensChangesNoAnswer) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(TestSeed()));
  for (const uint32_t tokens_per_cluster : {16u, 5u}) {
    LayerConfig layer = ClusteredLayer(Format::kK8V4, Source::kQueryCentroids);
    layer.tokens_per_cluster = tokens_per_cluster;
    Open(layer);
    SessionConfig twin = config_;
    twin.layers[0].tokens_per_cluster = 0;
    ASSERT_THAT(harness_.Open("twin", twin), IsOk());
    std::mt19937_64 random = MakeRandom(tokens_per_cluster);
    uint32_t length = 0;
    for (int step = 0; step < 14; ++step) {
      if (length > 3100) {
        length = 1700;
        for (const char* id : {"s", "twin"}) ASSERT_THAT(harness_.Truncate(id, length), IsOk());
      }
      const auto grown = static_cast<uint32_t>(length + 3 + random() % (step == 0 ? 2500 : 900));
      const OwnedChunk chunk = tokens_->Append(length, grown - length, 3, step);
      for (const char* id : {"s", "twin"}) {
        ASSERT_THAT(harness_.Append(id, chunk), IsOk());
        if (step % 4 == 3) continue;
        ASSERT_THAT(harness_.Maintain(id), IsOk());
      }
      length = grown;
      const uint32_t kept = length - random() % std::min(length, step % 3 == 0 ? 1500u : 60u);
      if (step % 2 == 1) {
        length = kept;
        for (const char* id : {"s", "twin"}) ASSERT_THAT(harness_.Truncate(id, length), IsOk());
      }
      SCOPED_TRACE(::testing::Message() << "step " << step << " length " << length);
      EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config_), ReadRows(harness_, "twin", twin)));
      for (const auto& [source, refine_planes] : {std::pair{Source::kExact, 0u},
                                                  {Source::kSketch, 0u},
                                                  {Source::kSketch, 4u},
                                                  {Source::kQueryCentroids, 0u}}) {
        OwnedQuery query = tokens_->Ask(length);
        query.query.selection.source = source;
        query.query.selection.refine_planes = refine_planes;
        query.query.local_sinks = step % 5;
        const auto own = harness_.Retrieve("s", query), other = harness_.Retrieve("twin", query);
        ASSERT_THAT(own, IsOk());
        ASSERT_THAT(other, IsOk());
        EXPECT_EQ(own->source, other->source);
        EXPECT_TRUE(own->ids == other->ids && own->scores == other->scores) << static_cast<int>(source);
      }
    }
    for (const char* id : {"s", "twin"}) ASSERT_THAT(harness_.Close(Ref(id)), IsOk());
  }
}

// Bytes of blocks that the text of key_clusters.h gives.
TEST_P(KeyClustersTest, MemoryIsTheFormulasAndAdmittedAtOpen) {
  Open(ClusteredLayer());
  Grow(4096);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  const SessionInfo info = *harness_.Get(Ref("s"));
  const uint64_t block_bytes = (1024 / 16) * (32 + 16 + 8) + 1024 * 2;
  EXPECT_EQ(info.memory.index_bytes, 2 * 4 * block_bytes);
  SessionConfig without = config_;
  without.layers[0].tokens_per_cluster = 0;
  // One block a KV head more, to build in, and one to arrange a sketch block in.
  const uint64_t sketch_bytes = 1024 * (2 * 32 / 8 + 2);
  EXPECT_EQ(Session::PlannedBytes(config_), Session::PlannedBytes(without) + 2 * (5 * block_bytes + sketch_bytes));
}

// Of a whole model, what builds blocks included.
TEST(KeyClustersMemory, IsAShareOfFloat32WithinWhatTheServicePromises) {
  struct Case {
    Format format;
    double promise;
    uint32_t tokens_per_cluster, token_limit;
  };
  for (const Case& c : {Case{Format::kK8V4, 0.225, 17, 131072}, Case{Format::kK8V4, 0.225, 17, 1u << 20},
                        Case{Format::kK8V4, 0.225, 17, 32768}, Case{Format::kK6V4, 0.195, 16, 32768}}) {
    LayerConfig layer = SmallLayer(c.format);
    layer.q_heads = 32;
    layer.kv_heads = 8;
    layer.head_dim = layer.value_dim = 128;
    layer.tokens_per_cluster = c.tokens_per_cluster;
    SessionConfig config = SmallConfig(layer, c.token_limit, 32);
    config.first_planes = 1;
    MemoryPlan plan;
    uint64_t raw_bytes = 0;  // of the first tokens, given back
    for (size_t i = 0; i < config.layers.size(); ++i) {
      const LayerRequests requests = PlanLayer(config.layers[i], config, {.clusters = i == 0}, plan);
      const Arena::Request& raw = plan.requests()[requests.raw_pages];
      raw_bytes += raw.block_bytes * raw.count;
    }
    const double f32 = 32.0 * c.token_limit * layer.kv_heads * 2 * 128 * sizeof(float);
    EXPECT_LE((plan.bytes() - raw_bytes) / f32, c.promise)
        << FormatName(c.format) << " " << c.tokens_per_cluster << " " << c.token_limit;
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, KeyClustersTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "shared" : "separate"; });

}  // namespace
}  // namespace ctkvr::testing
