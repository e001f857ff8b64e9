// SPDX-License-Identifier: Apache-2.0
//
// Queries of retrievals as centroids: a session that retrieves answers like one whose appends carried the same queries.

#include "server/core/query_feed.h"

#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

constexpr uint32_t kPrompt = 600;

class QueryFeedTest : public ::testing::TestWithParam<std::tuple<bool, Placement>> {
 protected:
  QueryFeedTest() : harness_({.shares_host_memory = std::get<0>(GetParam())}) {}

  static SessionConfig Config(bool retrieved_queries) {
    LayerConfig layer = SmallLayer(Format::kK8V4, Source::kQueryCentroids);
    layer.query_centroids.placement = std::get<1>(GetParam());
    layer.query_centroids.retrieved_queries = retrieved_queries;
    return SmallConfig(layer);
  }
  // A prompt with queries at its end.
  void Open(const std::string& id, bool retrieved_queries) {
    ASSERT_THAT(harness_.Open(id, Config(retrieved_queries)), IsOk());
    ASSERT_THAT(harness_.Append(id, tokens_.Append(0, kPrompt, 24)), IsOk());
  }
  void Append(const std::string& id, uint32_t position, bool with_query) {
    ASSERT_THAT(harness_.Append(id, tokens_.Append(position, 1, with_query ? 1 : 0)), IsOk());
  }
  void Ask(const std::string& id, uint32_t position, uint64_t variant = 0, uint32_t positions = 1) {
    ASSERT_THAT(harness_.Retrieve(id, tokens_.Ask(position, positions, variant)), IsOk());
  }
  // "a" and "b" are taken in and answer alike, whatever the question. REQUIRES: equal tokens.
  void ExpectEqual(uint32_t length) {
    for (const char* id : {"a", "b"}) ASSERT_THAT(harness_.Maintain(id), IsOk());
    EXPECT_EQ(harness_.Get(Ref("a"))->layers[0].query_centroids, harness_.Get(Ref("b"))->layers[0].query_centroids);
    for (uint64_t variant = 0; variant < 8; ++variant) {
      OwnedQuery query = tokens_.Ask(length, 1, variant);
      query.query.selection.probes = 1;
      const auto a = harness_.Retrieve("a", query), b = harness_.Retrieve("b", query);
      ASSERT_THAT(a, IsOk());
      ASSERT_THAT(b, IsOk());
      EXPECT_EQ(a->source, Source::kQueryCentroids);
      EXPECT_EQ(a->ids, b->ids) << "variant " << variant;
    }
  }

  Harness harness_;
  const Tokens tokens_{Config(true).layers[0], Config(true).dtype, 1};
};
INSTANTIATE_TEST_SUITE_P(Feed, QueryFeedTest,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(Placement::kLast, Placement::kStrided,
                                                                                 Placement::kClustered)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) ? "SharedWithHost" : "OfItsOwn") +
                                  (std::get<1>(param.param) == Placement::kLast      ? "Last"
                                   : std::get<1>(param.param) == Placement::kStrided ? "Strided"
                                                                                     : "Clustered");
                         });

TEST_P(QueryFeedTest, RetrievedQueriesAreCentroidsLikeAppendedOnes) {
  Open("a", true);
  Open("b", false);
  for (uint32_t p = kPrompt; p < kPrompt + 40; ++p) {
    Append("a", p, false);
    Append("b", p, true);
    Ask("a", p);
    Ask("b", p, 5);
  }
  ExpectEqual(kPrompt + 40);
}

TEST_P(QueryFeedTest, WhereTheyAreNotWantedTheyChangeNothing) {
  Open("a", false);
  Open("b", false);
  for (const char* id : {"a", "b"}) Append(id, kPrompt, false);
  for (uint64_t variant = 1; variant < 5; ++variant) Ask("a", kPrompt, variant);
  ExpectEqual(kPrompt + 1);
}

TEST_P(QueryFeedTest, TheFirstQueryOfAPositionCounts) {
  Open("a", true);
  Open("b", false);
  for (uint32_t p = kPrompt; p < kPrompt + 30; ++p) {
    Append("a", p, p % 2 == 0);
    Append("b", p, true);
    Ask("a", p, p % 2 == 0 ? 3 : 0);  // known from the append, or new
    Ask("a", p, 4);                   // again
    Ask("a", p - 3, 5);               // before
    Ask("a", p + 2, 6);               // past the end
  }
  ExpectEqual(kPrompt + 30);
}

TEST_P(QueryFeedTest, DraftsEnterAndGoWithTruncation) {
  Open("a", true);
  Open("b", false);
  for (uint32_t p = kPrompt; p < kPrompt + 24; p += 4) {
    for (const char* id : {"a", "b"}) ASSERT_THAT(harness_.Append(id, tokens_.Append(p, 4, 0, 9)), IsOk());
    Ask("a", p, 9, 4);
    for (const char* id : {"a", "b"}) ASSERT_THAT(harness_.Truncate(id, p), IsOk());
    ASSERT_THAT(harness_.Append("a", tokens_.Append(p, 4)), IsOk());
    ASSERT_THAT(harness_.Append("b", tokens_.Append(p, 4, 4)), IsOk());
    Ask("a", p, 0, 4);
  }
  ExpectEqual(kPrompt + 24);
}

TEST_P(QueryFeedTest, QueriesOfOneBatchEnterInTheirOrder) {
  Open("a", true);
  Open("b", false);
  for (uint32_t p = kPrompt; p < kPrompt + 24; ++p) Append("a", p, false);
  for (uint32_t p = kPrompt; p < kPrompt + 24; ++p) Append("b", p, true);
  std::vector<OwnedQuery> queries;
  for (uint32_t p = kPrompt; p < kPrompt + 24; ++p) {
    queries.push_back(tokens_.Ask(p));
    queries.push_back(tokens_.Ask(p, 1, 7));
  }
  std::vector<StepRequest> requests;
  for (const OwnedQuery& query : queries) requests.push_back({.session = Ref("a"), .chunk = {}, .query = query.query});
  for (const StepResult& result : harness_.Step(std::move(requests))) ASSERT_THAT(result.answer, IsOk());
  ExpectEqual(kPrompt + 24);
}

}  // namespace
}  // namespace ctkvr::testing
