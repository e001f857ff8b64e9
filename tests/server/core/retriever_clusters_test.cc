// SPDX-License-Identifier: Apache-2.0
//
// Candidates from key clusters: what is found, what is always included, and where another source serves instead. On a
// backend that shares host memory and on one that does not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "server/core/retriever.h"
#include "tests/server/core/retriever_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSinks = 4, kWindow = 8, kChosen = 16;  // of SmallLayer

LayerConfig ClusteredLayer(Format format, Source source) {
  LayerConfig layer = SmallLayer(format, source);
  layer.tokens_per_cluster = 16;
  layer.selection.open_share = 0.1f;  // 240 of 700 tokens
  layer.selection.candidate_tokens = source == Source::kKeyCentroids ? 240 : 100;
  return layer;
}

class RetrieverClustersTest : public RetrieverTest {
 protected:
  void FillClustered(Format format, Source source, uint32_t tail = 0) {
    FillClustered(ClusteredLayer(format, source), tail);
  }
  void FillClustered(const LayerConfig& layer, uint32_t tail, uint32_t cache_slots = 0) {
    SessionConfig config = SmallConfig(layer);
    config.cache_slots = cache_slots;
    config.token_limit = 2048;
    Fill(config, kLength - tail);
    ASSERT_THAT(harness_.Maintain("s"), IsOk());
    if (tail == 0) return;
    ASSERT_THAT(harness_.Append("s", tokens_->Append(kLength - tail, tail)), IsOk());
    stored_ = ReadLayer(harness_, "s", config_);
  }

  // A query whose heads all point where the stored key of `token` does.
  OwnedQuery AskLike(uint32_t token) {
    OwnedQuery query = tokens_->Ask(kLength);
    const DType dtype = config_.dtype;
    for (uint32_t h = 0; h < layer().q_heads; ++h) {
      const oracle::Row& key = stored_.keys[h / layer().group_heads()][token];
      const double norm = std::sqrt(oracle::Dot(key, key));
      for (uint32_t i = 0; i < layer().head_dim; ++i) {
        StoreElement(query.bytes.data(), dtype, h * layer().head_dim + i, static_cast<float>(8 * key[i] / norm));
      }
    }
    return query;
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, RetrieverClustersTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(RetrieverClustersTest, FindWhatTheQueryPointsAtWithItsTrueScores) {
  for (const auto& [format, source] :
       {std::pair{Format::kK8V4, Source::kKeyCentroidsSketch}, std::pair{Format::kK6V4, Source::kKeyCentroidsSketch},
        std::pair{Format::kK8V8, Source::kKeyCentroids}, std::pair{Format::kF32, Source::kKeyCentroids}}) {
    for (const Reduction reduction : {Reduction::kSumSoftmax, Reduction::kMaxSoftmax, Reduction::kPerHead}) {
      SCOPED_TRACE(::testing::Message() << FormatName(format) << " " << SourceName(source) << " "
                                        << static_cast<int>(reduction));
      FillClustered(format, source);
      size_t found = 0, sets = 0;
      for (uint32_t token = 10; token < 680; token += 30) {
        OwnedQuery query = AskLike(token);
        query.query.selection.reduction = reduction;
        const auto answer = harness_.Retrieve("s", query);
        ASSERT_THAT(answer, IsOk());
        EXPECT_EQ(answer->source, source);
        EXPECT_EQ(answer->always_tokens, kSinks + kWindow);
        query.query.selection.source = Source::kDense;
        const auto all = harness_.Retrieve("s", query);
        ASSERT_THAT(all, IsOk());
        EXPECT_LT(answer->bytes_read, all->bytes_read);
        const std::vector<AnswerSet> own = SplitAnswer(*answer, set_heads(*answer));
        const std::vector<AnswerSet> every = SplitAnswer(*all, set_heads(*all));
        for (size_t s = 0; s < own.size(); ++s, ++sets) {
          ASSERT_EQ(own[s].ids.size(), kChosen + kSinks + kWindow);
          ASSERT_TRUE(std::is_sorted(own[s].ids.begin(), own[s].ids.end()));
          found += std::binary_search(own[s].ids.begin(), own[s].ids.end(), token);
          for (size_t n = 0; n < own[s].ids.size(); ++n) {
            for (size_t r = 0; r < own[s].scores.size(); ++r) {
              ASSERT_NEAR(own[s].scores[r][n], every[s].scores[r][own[s].ids[n]], 1e-3);
            }
          }
        }
      }
      // Keys without structure: by chance it would be a third.
      EXPECT_GE(found, sets * 80 / 100) << found << " of " << sets;
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(RetrieverClustersTest, TheTailIsAlwaysIncluded) {
  for (const Source source : {Source::kKeyCentroids, Source::kKeyCentroidsSketch}) {
    FillClustered(Format::kK8V4, source, 50);
    const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, source);
    EXPECT_EQ(answer->always_tokens, kSinks + 50);
    for (const AnswerSet& set : SplitAnswer(*answer, 2)) {
      for (uint32_t token = 0; token < kLength; ++token) {
        if (token >= kSinks && token < kLength - 50) continue;
        EXPECT_TRUE(std::binary_search(set.ids.begin(), set.ids.end(), token)) << token;
      }
    }
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

// While clusters are built, most of a layer is tail.
TEST_P(RetrieverClustersTest, ALongTailIsServedByPlanes) {
  for (const uint32_t tail : {512u, 513u}) {
    LayerConfig layer = ClusteredLayer(Format::kK8V4, Source::kKeyCentroidsSketch);
    layer.selection.open_share = 0.01f;
    layer.selection.candidate_tokens = 20;
    FillClustered(layer, 0);
    ASSERT_THAT(harness_.Append("s", tokens_->Append(kLength, tail)), IsOk());
    const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength + tail));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, tail == 512 ? Source::kKeyCentroidsSketch : Source::kSketch);
    EXPECT_EQ(answer->always_tokens, kSinks + (tail == 512 ? tail : kWindow));
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverClustersTest, ATailThatSlotsCannotHoldIsServedByPlanes) {
  for (const uint32_t slots : {78u, 77u}) {  // 16 chosen, 4 sinks, a window of 8, a tail of 50
    FillClustered(ClusteredLayer(Format::kK8V4, Source::kKeyCentroidsSketch), 50, slots);
    OwnedQuery query = tokens_->Ask(kLength);
    query.query.answer.mode = AnswerMode::kNewRows;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, slots == 78 ? Source::kKeyCentroidsSketch : Source::kSketch);
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverClustersTest, LocalPositionsAreLeftOut) {
  for (const Source source : {Source::kKeyCentroids, Source::kKeyCentroidsSketch}) {
    FillClustered(Format::kK8V4, source);
    OwnedQuery query = tokens_->Ask(kLength);
    query.query.local_sinks = 37;
    query.query.local_begin = 640;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, source);
    for (const AnswerSet& set : SplitAnswer(*answer, 2)) {
      ASSERT_EQ(set.ids.size(), kChosen);
      EXPECT_GE(set.ids.front(), 37u);
      EXPECT_LT(set.ids.back(), 640u);
    }
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverClustersTest, WithoutClustersOthersServe) {
  for (const auto& [source, instead] :
       {std::pair{Source::kKeyCentroids, Source::kExact}, std::pair{Source::kKeyCentroidsSketch, Source::kSketch}}) {
    Fill(SmallConfig(ClusteredLayer(Format::kK8V4, source)));
    const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, instead);
    EXPECT_EQ(answer->used.source, source);
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverClustersTest, AQueryBeforeTheClustersSeesNothingOfThem) {
  FillClustered(Format::kK8V4, Source::kKeyCentroids);
  OwnedQuery query = tokens_->Ask(kLength - 2);
  const absl::Status refused = harness_.Retrieve("s", query).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the key clusters of the layer reach to 700"));
  query.query.selection.source = Source::kKeyCentroidsSketch;
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kSketch);
  const OwnedQuery last = tokens_->Ask(kLength - 1);
  EXPECT_THAT(harness_.Retrieve("s", last), IsOk());
  ASSERT_THAT(harness_.Truncate("s", 600), IsOk());
  const auto truncated = harness_.Retrieve("s", query);
  ASSERT_THAT(truncated, IsOk());
  EXPECT_EQ(truncated->source, Source::kSketch) << "the block is gone with its tokens";
}

TEST_P(RetrieverClustersTest, OpeningEverythingIsServedWithoutClusters) {
  FillClustered(Format::kK8V4, Source::kKeyCentroids);
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.selection.candidate_tokens = kLength - kSinks - kWindow;
  const auto exact = harness_.Retrieve("s", query);
  ASSERT_THAT(exact, IsOk());
  EXPECT_EQ(exact->source, Source::kExact);
  ExpectExact(query, *exact);
  query.query.selection.candidate_tokens = kLength - kSinks - kWindow - 1;
  const auto almost = harness_.Retrieve("s", query);
  ASSERT_THAT(almost, IsOk());
  EXPECT_EQ(almost->source, Source::kKeyCentroids);
  query.query.selection.source = Source::kKeyCentroidsSketch;
  query.query.selection.candidate_tokens = 100;
  query.query.selection.open_share = 1;
  const auto sketch = harness_.Retrieve("s", query);
  ASSERT_THAT(sketch, IsOk());
  EXPECT_EQ(sketch->source, Source::kSketch);
}

// The remainder from logits that choosing left behind is the one that reads the means itself.
TEST_P(RetrieverClustersTest, TheRemainderIsThatOfTheTokensNotChosen) {
  FillClustered(Format::kK8V4, Source::kKeyCentroids, 30);
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.answer.remainder = true;
  query.query.selection.k_tokens = 1;
  query.query.selection.min_score = 1e9f;  // nothing beside what is always included, whatever the source
  const auto clusters = harness_.Retrieve("s", query);
  query.query.selection.source = Source::kSketch;
  const auto sketch = harness_.Retrieve("s", query);
  ASSERT_THAT(clusters, IsOk());
  ASSERT_THAT(sketch, IsOk());
  EXPECT_EQ(clusters->source, Source::kKeyCentroids);
  EXPECT_EQ(clusters->ids, sketch->ids);
  const oracle::Attention a = AttentionAt(*clusters->remainder, 0), b = AttentionAt(*sketch->remainder, 0);
  for (size_t h = 0; h < a.log_sum_exp.size(); ++h) {
    EXPECT_NEAR(a.log_sum_exp[h], b.log_sum_exp[h], 1e-4);
    for (size_t i = 0; i < a.output[h].size(); ++i) EXPECT_NEAR(a.output[h][i], b.output[h][i], 1e-4);
  }
}

TEST_P(RetrieverClustersTest, BytesReadAreThoseOfMeansAndOpenedTokens) {
  FillClustered(Format::kK8V4, Source::kKeyCentroidsSketch);
  const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength));
  ASSERT_THAT(answer, IsOk());
  // Lines: 64 means of 32 dimensions, their scales, spreads and ends; 240 of 700 tokens' planes, scales and places;
  // 112 records of 26 bytes. What is opened lies together, but for the ends of runs.
  const uint64_t means = 32 + 3 * 2, records = 112 * 26 / 64, opened = 240 * (8 + 2 + 2) / 64;
  const uint64_t all = 700 * (8 + 2 + 2) / 64 + 112;
  EXPECT_GE(answer->bytes_read, 2 * 64 * (means + opened + records));
  EXPECT_LE(answer->bytes_read, 2 * 64 * (means + all));
}

}  // namespace
}  // namespace ctkvr::testing
