// SPDX-License-Identifier: Apache-2.0
//
// Proves, over a real connection, every code that proto/ctkvr/v1/cache.proto promises for Append and Retrieve, and that
// answers carry what was appended.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

float FloatAt(const std::string& data, size_t index) {
  float value;
  std::memcpy(&value, data.data() + index * sizeof(float), sizeof(float));
  return value;
}

std::vector<uint32_t> Ids(const std::string& data) {
  std::vector<uint32_t> ids(data.size() / sizeof(uint32_t));
  std::memcpy(ids.data(), data.data(), data.size());
  return ids;
}

class CacheServiceDataTest : public SessionTest {};

// ---- Append ------------------------------------------------------------------------------------------------------

TEST_F(CacheServiceDataTest, AnAppendAnswersTheLength) {
  OpenWithTokens("a", 3);
  EXPECT_EQ(appended_.length(), 3u);
  EXPECT_FALSE(appended_.repeated());
  EXPECT_EQ(appended_.header().session_epoch(), opened_.session().epoch());
  ASSERT_THAT(Append(MakeAppend("a", 0, 3, 2)), IsRpcOk());
  EXPECT_EQ(appended_.length(), 5u);
}

TEST_F(CacheServiceDataTest, ARepeatedAppendIsAcknowledgedAndOtherBytesAreRefused) {
  OpenWithTokens("a", 3);
  ASSERT_THAT(Append(MakeAppend("a", 0, 0, 3)), IsRpcOk());
  EXPECT_TRUE(appended_.repeated());
  EXPECT_EQ(appended_.length(), 3u);
  v1::AppendRequest other = MakeAppend("a", 0, 0, 3);
  *other.mutable_chunk()->mutable_keys() = MakeTensor({3, kKvHeads, kHeadDim}, 999);
  const grpc::Status status = Append(other);
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::ALREADY_EXISTS, ""));
  EXPECT_EQ(ReasonOf(status), "DIFFERENT_BYTES");
}

TEST_F(CacheServiceDataTest, AGapAndAStraddlingChunkSayTheExpectedPosition) {
  OpenWithTokens("a", 3);
  for (uint32_t first : {4u, 2u, 4294967295u}) {
    const grpc::Status status = Append(MakeAppend("a", 0, first, 3));
    EXPECT_THAT(status, IsRpc(grpc::StatusCode::OUT_OF_RANGE, "3")) << first;
    EXPECT_EQ(ReasonOf(status), "WRONG_POSITION") << first;
    EXPECT_EQ(MetadataOf(status, "expected_position"), "3") << first;
  }
}

TEST_F(CacheServiceDataTest, TheTokenLimitAndAMissingLayerAreOutOfRange) {
  OpenWithTokens("a", kTokenLimit);
  const grpc::Status full = Append(MakeAppend("a", 0, kTokenLimit, 1));
  EXPECT_THAT(full, IsRpc(grpc::StatusCode::OUT_OF_RANGE, "2048"));
  EXPECT_EQ(ReasonOf(full), "TOKEN_LIMIT");
  EXPECT_THAT(Append(MakeAppend("a", kLayers, 0, 1)), IsRpc(grpc::StatusCode::OUT_OF_RANGE, "layer"));
}

TEST_F(CacheServiceDataTest, ABadChecksumIsDataLossAndNothingIsKept) {
  OpenWithTokens("a", 0);
  v1::AppendRequest request = MakeAppend("a", 0, 0, 3);
  request.set_checksum(Checksum(request.chunk()) + 1);
  EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::DATA_LOSS, "checksum"));
  ASSERT_THAT(Get("a"), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
  request.set_checksum(Checksum(request.chunk()));
  EXPECT_THAT(Append(request), IsRpcOk());
}

TEST_F(CacheServiceDataTest, NumbersThatAreNotFiniteOrTooLargeAreRefusedByIndex) {
  OpenWithTokens("a", 0);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -2e15f}) {
    v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
    std::memcpy(request.mutable_chunk()->mutable_values()->mutable_data()->data() + 7 * sizeof(float), &bad,
                sizeof bad);
    EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "7")) << bad;
  }
  ASSERT_THAT(Get("a"), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
}

TEST_F(CacheServiceDataTest, AChunkOfAnotherGeometryOrTypeIsRefused) {
  OpenWithTokens("a", 0);
  v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
  *request.mutable_chunk()->mutable_keys() = MakeTensor({2, kKvHeads, kHeadDim + 8}, 1);
  EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "40"));
  request = MakeAppend("a", 0, 0, 2);
  for (v1::Tensor* tensor : {request.mutable_chunk()->mutable_keys(), request.mutable_chunk()->mutable_values()}) {
    tensor->set_dtype(v1::DTYPE_F16);
    tensor->mutable_data()->resize(tensor->data().size() / 2);
  }
  EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "f16"));
}

// ---- Retrieve ----------------------------------------------------------------------------------------------------

TEST_F(CacheServiceDataTest, AnExactAnswerHoldsTheRowsAndTheirInnerProducts) {
  constexpr uint32_t kTokens = 100;
  OpenWithTokens("a", kTokens);
  v1::RetrieveRequest request = MakeRetrieve("a", 0, kTokens - 1);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_ROWS);
  request.mutable_answer()->set_row_format(v1::ROW_FORMAT_F32);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  ASSERT_EQ(retrieved_.items_size(), 1);
  EXPECT_EQ(retrieved_.header().session_epoch(), opened_.session().epoch());
  EXPECT_EQ(retrieved_.items(0).session_epoch(), opened_.session().epoch());
  const v1::Answer& answer = retrieved_.items(0).answer();
  EXPECT_EQ(answer.source(), v1::SOURCE_EXACT);
  EXPECT_EQ(answer.length(), kTokens);
  EXPECT_EQ(answer.row_format(), v1::ROW_FORMAT_F32);
  EXPECT_EQ(answer.used().k_tokens(), 8u);
  ASSERT_EQ(answer.counts_size(), static_cast<int>(kKvHeads));
  const v1::Chunk chunk = MakeChunk(0, 0, kTokens);
  const std::string& queries = request.items(0).query().queries().data();
  const std::vector<uint32_t> ids = Ids(answer.ids());
  constexpr uint32_t kGroup = kQHeads / kKvHeads;
  size_t row = 0;
  size_t score = 0;
  for (uint32_t g = 0; g < kKvHeads; ++g) {
    const uint32_t count = answer.counts(static_cast<int>(g));
    EXPECT_EQ(count, 4u + 4u + 8u);  // sinks, window, k
    for (uint32_t r = 0; r < kGroup; ++r) {
      for (uint32_t i = 0; i < count; ++i) {
        double expected = 0;
        for (uint32_t d = 0; d < kHeadDim; ++d) {
          expected += double{FloatAt(queries, (g * kGroup + r) * kHeadDim + d)} *
                      FloatAt(chunk.keys().data(), (size_t{ids[row + i]} * kKvHeads + g) * kHeadDim + d);
        }
        EXPECT_NEAR(FloatAt(answer.scores(), score++), expected, 1e-4);
      }
    }
    for (uint32_t i = 0; i < count; ++i, ++row) {
      ASSERT_LT(ids[row], kTokens);
      EXPECT_EQ(answer.keys().substr(row * kHeadDim * 4, kHeadDim * 4),
                chunk.keys().data().substr((size_t{ids[row]} * kKvHeads + g) * kHeadDim * 4, kHeadDim * 4));
      EXPECT_EQ(answer.values().substr(row * kValueDim * 4, kValueDim * 4),
                chunk.values().data().substr((size_t{ids[row]} * kKvHeads + g) * kValueDim * 4, kValueDim * 4));
    }
  }
  EXPECT_EQ(row, ids.size());
}

TEST_F(CacheServiceDataTest, AnAnswerCarriesOnlyWhatItsModeAsksFor) {
  OpenWithTokens("a", 50);
  v1::RetrieveRequest request = MakeRetrieve("a", 0, 49);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_IDS);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_NE(retrieved_.items(0).answer().ids(), "");
  EXPECT_EQ(retrieved_.items(0).answer().scores(), "");
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_UNSPECIFIED);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_NE(retrieved_.items(0).answer().scores(), "");
  EXPECT_EQ(retrieved_.items(0).answer().keys(), "");
}

TEST_F(CacheServiceDataTest, StorageRowsComeWithTheirCodecUnlessItIsKnown) {
  OpenWithTokens("a", 1000, v1::FORMAT_K6V4);
  v1::RetrieveRequest request = MakeRetrieve("a", 0, 999);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_ROWS);
  request.mutable_answer()->set_row_format(v1::ROW_FORMAT_STORAGE);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  const v1::Answer& answer = retrieved_.items(0).answer();
  ASSERT_TRUE(answer.has_codec());
  EXPECT_EQ(answer.codec().format(), v1::FORMAT_K6V4);
  EXPECT_EQ(answer.codec().code_generation(), answer.code_generation());
  EXPECT_THAT(answer.codec().key_mean().dims(), ElementsAre(kKvHeads, kHeadDim));
  const size_t rows = answer.ids().size() / 4;
  EXPECT_EQ(answer.keys().size(), rows * answer.codec().key_row_bytes());
  EXPECT_EQ(answer.values().size(), rows * answer.codec().value_row_bytes());
  request.mutable_answer()->set_known_code_generation(answer.code_generation());
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_FALSE(retrieved_.items(0).answer().has_codec());
}

TEST_F(CacheServiceDataTest, TheOnlyItemsErrorIsTheCalls) {
  OpenWithTokens("a", 10);
  EXPECT_THAT(Retrieve(MakeRetrieve("a", kLayers, 0)), IsRpc(grpc::StatusCode::OUT_OF_RANGE, "layer"));
  v1::RetrieveRequest request = MakeRetrieve("a", 0, 9);
  request.mutable_items(0)->mutable_query()->mutable_selection()->set_k_tokens(0);
  EXPECT_THAT(Retrieve(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "k_tokens is 0"));
  EXPECT_THAT(Retrieve(v1::RetrieveRequest()), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "items is 0"));
}

TEST_F(CacheServiceDataTest, ItemsOfABatchFailEachByItself) {
  OpenWithTokens("a", 10);
  v1::RetrieveRequest request = MakeRetrieve("a", 0, 9);
  *request.add_items() = MakeRetrieve("nobody", 0, 9).items(0);
  *request.add_items() = MakeRetrieve("a", kLayers, 9).items(0);
  *request.add_items() = MakeRetrieve("a", 0, 9).items(0);
  request.mutable_items(3)->mutable_query()->clear_queries();
  *request.add_items() = MakeRetrieve("a", 0, 9).items(0);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  ASSERT_EQ(retrieved_.items_size(), 5);
  EXPECT_EQ(retrieved_.items(0).status().code(), 0);
  EXPECT_EQ(retrieved_.items(1).status().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(retrieved_.items(1).status().reason(), "SESSION_UNKNOWN");
  EXPECT_EQ(retrieved_.items(2).status().code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(retrieved_.items(3).status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(retrieved_.items(3).status().message(), HasSubstr("items[3].query.queries is missing"));
  EXPECT_EQ(retrieved_.items(4).status().code(), 0);
  EXPECT_EQ(retrieved_.items(4).answer().ids(), retrieved_.items(0).answer().ids());
  EXPECT_FALSE(retrieved_.items(1).has_answer());
}

TEST_F(CacheServiceDataTest, ABatchOfBadItemsOnlyIsAnswered) {
  v1::RetrieveRequest request;
  request.add_items();
  request.add_items();
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  ASSERT_EQ(retrieved_.items_size(), 2);
  for (const auto& item : retrieved_.items()) EXPECT_EQ(item.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(CacheServiceDataTest, AQueryBeforeTheIndexedLengthIsOutOfRange) {
  v1::OpenSessionRequest open = MakeOpen("a");
  open.mutable_options()->mutable_selection()->set_source(v1::SOURCE_QUERY_CENTROIDS);
  v1::QueryCentroidOptions* set = open.mutable_options()->add_query_centroids();
  set->set_centroids(16);
  set->set_list_tokens(16);
  ASSERT_THAT(Open(open), IsRpcOk());
  v1::AppendRequest append = MakeAppend("a", 0, 0, 200);
  *append.mutable_chunk()->mutable_queries() = MakeTensor({32, kQHeads, kHeadDim}, 5);
  ASSERT_THAT(Append(append), IsRpcOk());
  v1::MaintainSessionReply maintained;
  ASSERT_THAT(Call(&Stub::MaintainSession, WithSession<v1::MaintainSessionRequest>("a"), &maintained), IsRpcOk());
  ASSERT_GT(maintained.indexed_length(0), 100u);
  const grpc::Status status = Retrieve(MakeRetrieve("a", 0, 50));
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::OUT_OF_RANGE, std::to_string(maintained.indexed_length(0))));
  EXPECT_EQ(ReasonOf(status), "BEFORE_INDEX");
  EXPECT_THAT(Retrieve(MakeRetrieve("a", 0, 199)), IsRpcOk());
  EXPECT_EQ(retrieved_.items(0).answer().source(), v1::SOURCE_QUERY_CENTROIDS);
}

TEST_F(CacheServiceDataTest, NewRowsComeOnceToWhoeverHandsTheVersionBack) {
  OpenWithTokens("without", 10);
  v1::RetrieveRequest request = MakeRetrieve("without", 0, 9);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_NEW_ROWS);
  EXPECT_THAT(Retrieve(request), IsRpc(grpc::StatusCode::FAILED_PRECONDITION, "opened with cache_slots 0"));

  v1::OpenSessionRequest open = MakeOpen("with");
  open.mutable_options()->set_cache_slots(16);
  ASSERT_THAT(Open(open), IsRpcOk());
  EXPECT_EQ(opened_.session().options().cache_slots(), 16u);
  EXPECT_GT(opened_.session().memory().slot_table_bytes(), 0u);
  ASSERT_THAT(Append(MakeAppend("with", 0, 0, 10)), IsRpcOk());
  request = MakeRetrieve("with", 0, 9);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_NEW_ROWS);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  const v1::Answer first = retrieved_.items(0).answer();
  EXPECT_THAT(first.counts(), Each(10));
  EXPECT_THAT(first.new_counts(), Each(10));
  request.mutable_items(0)->mutable_query()->set_cache_version(first.cache_version());
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_THAT(retrieved_.items(0).answer().new_counts(), Each(0));
  EXPECT_EQ(retrieved_.items(0).answer().slots(), first.slots());
  EXPECT_NE(retrieved_.items(0).answer().cache_version(), first.cache_version());
  // The version of before the last answer.
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_THAT(retrieved_.items(0).answer().new_counts(), Each(10));
}

}  // namespace
}  // namespace ctkvr::testing
