// SPDX-License-Identifier: Apache-2.0
//
// Answers of every source against the oracle: brute force in float64 over the rows that a client would fetch. On a
// backend that shares host memory and on one that does not.

#include "server/core/retriever.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/server/core/retriever_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Memory, RetrieverTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(RetrieverTest, ExactEqualsBruteForceInEveryFormatAndReduction) {
  for (Format format : kAllFormats) {
    SCOPED_TRACE(FormatName(format));
    Fill(SmallConfig(SmallLayer(format, Source::kExact)));
    for (Reduction reduction : {Reduction::kSumSoftmax, Reduction::kMaxSoftmax, Reduction::kPerHead}) {
      OwnedQuery query = tokens_->Ask(kLength);
      query.query.selection.reduction = reduction;
      const auto answer = harness_.Retrieve("s", query);
      ASSERT_THAT(answer, IsOk());
      EXPECT_EQ(answer->source, Source::kExact);
      EXPECT_EQ(answer->counts.size(), reduction == Reduction::kPerHead ? 4u : 2u);
      EXPECT_EQ(answer->counts[0], 16u + 4 + 8);
      EXPECT_EQ(answer->always_tokens, 12u);
      ExpectExact(query, *answer);
    }
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverTest, RawKeysAreServedExactlyWhateverTheSource) {
  Fill(SmallConfig(SmallLayer()), 300);
  const OwnedQuery query = tokens_->Ask(300);
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kExact);
  EXPECT_EQ(answer->used.source, Source::kSketch);
  EXPECT_EQ(answer->bytes_read, 2u * 300 * 32 * 2);  // whole lines as it is
  ExpectExact(query, *answer);
}

TEST_P(RetrieverTest, SinkLogitsAndSoftcapEnterTheRanking) {
  LayerConfig layer = SmallLayer(Format::kF32, Source::kExact);
  layer.softmax.softcap = 2;
  layer.softmax.scale = 0.5f;
  layer.softmax.sink_logits = {3, -1, 0, 5};
  Fill(SmallConfig(layer));
  for (Reduction reduction : {Reduction::kSumSoftmax, Reduction::kMaxSoftmax}) {
    OwnedQuery query = tokens_->Ask(kLength);
    query.query.selection.reduction = reduction;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    ExpectExact(query, *answer);
  }
}

// The best 16 of 700 by codes of 8 bits, found through planes: as exact, but for what the passes drop.
TEST_P(RetrieverTest, SketchFindsWhatExactFinds) {
  for (Format format : {Format::kK8V8, Format::kK8V4, Format::kK6V4}) {
    for (uint32_t first_planes : {1u, 2u}) {
      for (uint32_t refine_planes : {0u, 4u}) {
        SCOPED_TRACE(std::string(FormatName(format)) + " " + std::to_string(first_planes) +
                     std::to_string(refine_planes));
        SessionConfig config = SmallConfig(SmallLayer(format));
        config.first_planes = first_planes;
        config.layers[0].selection.refine_planes = refine_planes;
        config.layers[0].selection.candidate_tokens = 128;
        Fill(config);
        size_t found = 0, wanted = 0;
        for (uint32_t step = 0; step < 8; ++step) {
          OwnedQuery query = tokens_->Ask(kLength + step);
          const auto sketch = harness_.Retrieve("s", query);
          query.query.selection.source = Source::kExact;
          const auto exact = harness_.Retrieve("s", query);
          ASSERT_THAT(sketch, IsOk());
          ASSERT_THAT(exact, IsOk());
          EXPECT_EQ(sketch->source, Source::kSketch);
          EXPECT_LT(sketch->bytes_read, exact->bytes_read);
          const auto a = SplitAnswer(*sketch, 2), b = SplitAnswer(*exact, 2);
          for (size_t s = 0; s < a.size(); ++s) {
            EXPECT_EQ(a[s].ids.size(), b[s].ids.size());
            std::vector<uint32_t> both;
            std::set_intersection(a[s].ids.begin(), a[s].ids.end(), b[s].ids.begin(), b[s].ids.end(),
                                  std::back_inserter(both));
            found += both.size();
            wanted += b[s].ids.size();
          }
        }
        EXPECT_GE(found, wanted * 9 / 10) << found << " of " << wanted;
        ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
      }
    }
  }
}

// With candidates and survivors for all but a few tokens, the passes may drop only the clearly worst.
TEST_P(RetrieverTest, SketchWithAlmostAllCandidatesIsExact) {
  SessionConfig config = SmallConfig(SmallLayer());
  config.layers[0].selection.candidate_tokens = 650;
  config.layers[0].selection.keep_share = 0.97f;
  Fill(config);
  const OwnedQuery query = tokens_->Ask(kLength);
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kSketch);
  ExpectExact(query, *answer);
}

TEST_P(RetrieverTest, CandidatesThatAreEverythingAreServedExactly) {
  SessionConfig config = SmallConfig(SmallLayer());
  config.layers[0].selection.candidate_tokens = kLength - 12;
  Fill(config);
  const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength));
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kExact);
}

// ---- Query centroids -----------------------------------------------------------------------------------------------

// Lists and centroids by the oracle, from the queries appended and the rows stored.
std::vector<std::vector<uint32_t>> OracleCandidates(const LayerConfig& layer, const StoredLayer& stored,
                                                    const Tokens& tokens, std::pair<uint32_t, uint32_t> centroids,
                                                    uint32_t indexed, const oracle::Matrix& query, uint32_t probes) {
  std::vector<std::vector<uint32_t>> candidates;
  for (uint32_t h = 0; h < layer.kv_heads; ++h) {
    const uint32_t heads = layer.group_heads();
    std::vector<oracle::Matrix> directions;
    oracle::Row norms(heads);
    for (uint32_t p = centroids.first; p < centroids.second; ++p) {
      const oracle::Matrix all = tokens.Queries(p);
      oracle::Matrix group(all.begin() + h * heads, all.begin() + (h + 1) * heads);
      for (uint32_t r = 0; r < heads; ++r) {
        const double norm = std::sqrt(oracle::Dot(group[r], group[r]));
        norms[r] += norm / (centroids.second - centroids.first);
        for (double& x : group[r]) x = oracle::FromF16(F16FromF32(static_cast<float>(x / norm)));
      }
      directions.push_back(std::move(group));
    }
    const oracle::Matrix own(query.begin() + h * heads, query.begin() + (h + 1) * heads);
    const std::vector<size_t> nearest = oracle::TopK(oracle::CentroidCosines(own, directions), probes);
    std::vector<uint32_t> merged;
    oracle::Matrix keys(stored.keys[h].begin() + layer.selection.sink_tokens, stored.keys[h].begin() + indexed);
    for (size_t c : nearest) {
      oracle::Matrix scaled = directions[c];
      for (uint32_t r = 0; r < heads; ++r) {
        for (double& x : scaled[r]) x *= norms[r];
      }
      const oracle::Matrix shares = oracle::LogShares(oracle::Scores(scaled, keys),
                                                      {.scale = layer.softmax.scale, .softcap = 0, .sink_logits = {}});
      for (size_t i :
           oracle::TopK(oracle::GroupRanks(shares, GroupReduction::kSumSoftmax), layer.query_centroids.list_tokens)) {
        merged.push_back(static_cast<uint32_t>(i) + layer.selection.sink_tokens);
      }
    }
    std::sort(merged.begin(), merged.end());
    merged.erase(std::unique(merged.begin(), merged.end()), merged.end());
    candidates.push_back(std::move(merged));
  }
  return candidates;
}

// Differences are counted, for float32 scores may order near-equal tokens of a list otherwise.
TEST_P(RetrieverTest, QueryCentroidsEqualTheOracleButForTiesInLists) {
  Fill(SmallConfig(SmallLayer(Format::kK8V4, Source::kQueryCentroids)), kLength, 40);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  ASSERT_THAT(harness_.Append("s", tokens_->Append(kLength, 30)), IsOk());
  stored_ = ReadLayer(harness_, "s", config_);
  size_t right = 0;
  const uint32_t steps = 12;
  for (uint32_t step = 0; step < steps; ++step) {
    const uint32_t position = kLength + 29 + step;
    const auto answer = harness_.Retrieve("s", tokens_->Ask(position));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, Source::kQueryCentroids);
    EXPECT_EQ(answer->indexed_length, kLength);
    EXPECT_EQ(answer->always_tokens, 4u + 30);
    const oracle::Matrix query = tokens_->Queries(position);
    AnswerCheck check{.layer = &layer(), .selection = answer->used, .position = position, .local_begin = {}};
    check.candidates = OracleCandidates(layer(), stored_, *tokens_, {kLength - 24, kLength}, kLength, query, 4);
    check.tail_begin = kLength;
    right += static_cast<bool>(IsExactAnswer(SplitAnswer(*answer, 2), stored_, query, check));
  }
  EXPECT_GE(right, steps - 1);
}

TEST_P(RetrieverTest, WithoutAnIndexQueryCentroidsAreServedExactly) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids)), kLength, 40);
  const OwnedQuery query = tokens_->Ask(kLength);
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kExact);
  EXPECT_EQ(answer->indexed_length, 0u);
  ExpectExact(query, *answer);
}

TEST_P(RetrieverTest, AQueryBeforeTheIndexIsOutOfRangeAndExactServesIt) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids)), kLength, 40);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  OwnedQuery query = tokens_->Ask(kLength - 2);
  const auto refused = harness_.Retrieve("s", query);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("reaches to 700")));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonBeforeIndex);
  EXPECT_EQ(GetErrorDetail(refused.status()).metadata.at("indexed_length"), "700");
  // The last indexed token's own query sees all of the index.
  EXPECT_THAT(harness_.Retrieve("s", tokens_->Ask(kLength - 1)), IsOk());
  query.query.selection.source = Source::kExact;
  const auto exact = harness_.Retrieve("s", query);
  ASSERT_THAT(exact, IsOk());
  ExpectExact(query, *exact);
}

TEST_P(RetrieverTest, ProbesAreClampedToTheCentroidsThereAre) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids)), kLength, 10);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.selection.probes = 100;
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->used.probes, 10u);
}

TEST_P(RetrieverTest, PerHeadSelectionSearchesTheGroupsLists) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids)), kLength, 24);
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  OwnedQuery query = tokens_->Ask(kLength);
  const auto grouped = harness_.Retrieve("s", query);
  query.query.selection.reduction = Reduction::kPerHead;
  query.query.selection.k_tokens = 8192;  // everything the lists hold
  const auto single = harness_.Retrieve("s", query);
  ASSERT_THAT(grouped, IsOk());
  ASSERT_THAT(single, IsOk());
  ASSERT_EQ(single->counts.size(), 4u);
  const auto sets = SplitAnswer(*single, 1);
  EXPECT_EQ(sets[0].ids, sets[1].ids);
  EXPECT_EQ(sets[2].ids, sets[3].ids);
  const auto groups = SplitAnswer(*grouped, 2);
  for (size_t s = 0; s < 2; ++s) {
    EXPECT_TRUE(
        std::includes(sets[2 * s].ids.begin(), sets[2 * s].ids.end(), groups[s].ids.begin(), groups[s].ids.end()));
  }
}

// ---- Dense, empty, borders -----------------------------------------------------------------------------------------

TEST_P(RetrieverTest, DenseAnswersHoldEveryTokenWithItsScores) {
  for (const bool by_layer : {true, false}) {
    SessionConfig config = SmallConfig(SmallLayer());
    config.layers[0].dense = by_layer;
    if (!by_layer) config.layers[0].selection.dense_below_tokens = kLength;
    Fill(config);
    const OwnedQuery query = tokens_->Ask(kLength);
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, Source::kDense);
    EXPECT_EQ(answer->counts, (std::vector<uint32_t>{kLength, kLength}));
    for (const AnswerSet& set : SplitAnswer(*answer, 2)) {
      std::vector<uint32_t> all(kLength);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(set.ids, all);
    }
    Selection everything = answer->used;
    everything.k_tokens = kLength;
    EXPECT_TRUE(IsExactAnswer(
        SplitAnswer(*answer, 2), stored_, tokens_->Queries(kLength),
        {.layer = &layer(), .selection = everything, .position = kLength, .local_begin = {}, .candidates = {}}));
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverTest, DenseBelowCountsTheVisibleTokens) {
  SessionConfig config = SmallConfig(SmallLayer());
  config.layers[0].selection.dense_below_tokens = 600;
  Fill(config);
  EXPECT_EQ(harness_.Retrieve("s", tokens_->Ask(599))->source, Source::kDense);
  EXPECT_EQ(harness_.Retrieve("s", tokens_->Ask(600))->source, Source::kSketch);
  OwnedQuery local = tokens_->Ask(699);
  local.query.local_begin = 600;
  EXPECT_EQ(harness_.Retrieve("s", local)->source, Source::kDense);
}

TEST_P(RetrieverTest, KThatReachesEveryTokenIsDense) {
  Fill(SmallConfig(SmallLayer(Format::kF16, Source::kExact)));
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.selection.k_tokens = kLength - 13;
  EXPECT_EQ(harness_.Retrieve("s", query)->source, Source::kExact);
  query.query.selection.k_tokens = kLength - 12;
  EXPECT_EQ(harness_.Retrieve("s", query)->source, Source::kDense);
  // A filter still has something to leave out.
  query.query.selection.min_score = 1e9f;
  const auto filtered = harness_.Retrieve("s", query);
  EXPECT_EQ(filtered->source, Source::kExact);
  EXPECT_EQ(filtered->counts[0], 12u);
}

TEST_P(RetrieverTest, AnEmptyLayerAnswersWithNothing) {
  const SessionConfig config = SmallConfig(SmallLayer());
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const auto answer = harness_.Retrieve("s", Tokens(config.layers[0], config.dtype, 1).Ask(0, 3));
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->counts, std::vector<uint32_t>(6, 0));
  EXPECT_EQ(answer->ids + answer->scores, "");
  EXPECT_EQ(answer->length, 0u);
  EXPECT_EQ(answer->bytes_read, 0u);
}

TEST_P(RetrieverTest, NothingVisibleAnswersWithNothing) {
  Fill(SmallConfig(SmallLayer()));
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.local_begin = 0;
  EXPECT_EQ(harness_.Retrieve("s", query)->counts, std::vector<uint32_t>(2, 0));
  query.query.local_begin = 10;
  query.query.local_sinks = 500;
  EXPECT_EQ(harness_.Retrieve("s", query)->counts, std::vector<uint32_t>(2, 0));
}

TEST_P(RetrieverTest, LocalPositionsAreLeftOut) {
  Fill(SmallConfig(SmallLayer(Format::kK8V4, Source::kExact)));
  for (const auto& [begin, sinks] :
       {std::pair{650u, 0u}, std::pair{699u, 4u}, std::pair{650u, 9u}, std::pair{9999u, 2u}}) {
    OwnedQuery query = tokens_->Ask(kLength);
    query.query.local_begin = begin;
    query.query.local_sinks = sinks;
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    ExpectExact(query, *answer);
    for (const AnswerSet& set : SplitAnswer(*answer, 2)) {
      EXPECT_GE(set.ids.front(), sinks);
      EXPECT_LT(set.ids.back(), begin);
    }
  }
}

TEST_P(RetrieverTest, SeveralPositionsAreCausalAmongThemselves) {
  for (Source source : {Source::kExact, Source::kSketch}) {
    Fill(SmallConfig(SmallLayer(Format::kK8V4, source)));
    const OwnedQuery together = tokens_->Ask(kLength - 6, 8);
    const auto answer = harness_.Retrieve("s", together);
    ASSERT_THAT(answer, IsOk());
    ASSERT_EQ(answer->counts.size(), 16u);
    std::string ids, scores;
    for (uint32_t p = 0; p < 8; ++p) {
      const auto alone = harness_.Retrieve("s", tokens_->Ask(kLength - 6 + p));
      ASSERT_THAT(alone, IsOk());
      ids += alone->ids;
      scores += alone->scores;
    }
    EXPECT_EQ(answer->ids, ids);
    EXPECT_EQ(answer->scores, scores);
    if (source == Source::kExact) ExpectExact(together, *answer);
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverTest, FiltersActOnTheLastSelectionAlone) {
  LayerConfig steep = SmallLayer(Format::kF32, Source::kExact);
  steep.softmax.scale = 0.7f;
  Fill(SmallConfig(steep));
  for (int filter = 0; filter < 3; ++filter) {
    SCOPED_TRACE(filter);
    OwnedQuery filtered = tokens_->Ask(kLength);
    oracle::SelectOptions options{.k = 16, .force_below = 4, .force_from = kLength - 8};
    options.softmax.scale = layer().softmax.scale;
    if (filter == 0) filtered.query.selection.min_score = 18.0f, options.min_score = 18;
    if (filter == 1) filtered.query.selection.min_share = 0.02f, options.min_share = 0.02f;
    if (filter == 2) filtered.query.selection.top_p = 0.3f, options.top_p = 0.3f;
    const auto answer = harness_.Retrieve("s", filtered);
    ASSERT_THAT(answer, IsOk());
    const auto sets = SplitAnswer(*answer, 2);
    std::vector<uint32_t> all(kLength);
    std::iota(all.begin(), all.end(), 0);
    const oracle::Matrix queries = tokens_->Queries(kLength);
    for (size_t s = 0; s < 2; ++s) {
      const oracle::Matrix own(queries.begin() + s * 2, queries.begin() + s * 2 + 2);
      EXPECT_EQ(sets[s].ids, oracle::Select(oracle::Scores(own, stored_.keys[s]), all, options));
    }
    EXPECT_LT(sets[0].ids.size() + sets[1].ids.size(), 56u) << "the filter left nothing out";
  }
}

TEST_P(RetrieverTest, EqualKeysAreChosenByLowerPosition) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 3);
  OwnedChunk chunk = tokens.Append(0, 200);
  for (size_t t = 1; t < 200; ++t) std::copy_n(chunk.keys.begin(), 128, chunk.keys.begin() + t * 128);
  ASSERT_THAT(harness_.Append("s", chunk), IsOk());
  const auto answer = harness_.Retrieve("s", tokens.Ask(200));
  ASSERT_THAT(answer, IsOk());
  std::vector<uint32_t> expected(28);
  std::iota(expected.begin(), expected.begin() + 20, 0);
  std::iota(expected.begin() + 20, expected.end(), 192);
  for (const AnswerSet& set : SplitAnswer(*answer, 2)) EXPECT_EQ(set.ids, expected);
}

}  // namespace
}  // namespace ctkvr::testing
