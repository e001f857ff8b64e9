// SPDX-License-Identifier: Apache-2.0
//
// Proves, over a real connection, that ANSWER_MODE_ATTENTION is what the rows of ANSWER_MODE_ROWS give, with its
// errors, and how few bytes it takes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<double> Floats(const std::string& data) {
  std::vector<float> floats(data.size() / sizeof(float));
  std::memcpy(floats.data(), data.data(), floats.size() * sizeof(float));
  return {floats.begin(), floats.end()};
}

class AttentionTest : public SessionTest {
 protected:
  v1::RetrieveRequest Request(v1::AnswerMode mode, v1::RowFormat format) {
    v1::RetrieveRequest request = MakeRetrieve("a", 0, 199);
    request.mutable_answer()->set_mode(mode);
    request.mutable_answer()->set_row_format(format);
    return request;
  }
  v1::Answer Ask(const v1::RetrieveRequest& request) {
    EXPECT_THAT(Retrieve(request), IsRpcOk());
    return retrieved_.items_size() == 1 ? retrieved_.items(0).answer() : v1::Answer();
  }
};

TEST_F(AttentionTest, ItIsWhatTheRowsGive) {
  OpenWithTokens("a", 200, v1::FORMAT_K8V4);
  const v1::Answer rows = Ask(Request(v1::ANSWER_MODE_ROWS, v1::ROW_FORMAT_F32));
  const v1::Answer attention = Ask(Request(v1::ANSWER_MODE_ATTENTION, v1::ROW_FORMAT_UNSPECIFIED));
  EXPECT_THAT(attention.counts(), ElementsAre(16, 16));  // 8 beside 4 sinks and a window of 4
  EXPECT_EQ(attention.ids() + attention.scores() + attention.keys() + attention.values(), "");
  EXPECT_EQ(attention.row_format(), v1::ROW_FORMAT_F32);
  EXPECT_EQ(attention.output().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(attention.output().dims(), ElementsAre(1, kQHeads, kValueDim));
  EXPECT_EQ(attention.log_sum_exp().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(attention.log_sum_exp().dims(), ElementsAre(1, kQHeads));
  EXPECT_FALSE(attention.has_remainder_output());
  const std::vector<double> output = Floats(attention.output().data());
  const std::vector<double> log_sum_exp = Floats(attention.log_sum_exp().data());
  const std::vector<double> scores = Floats(rows.scores()), values = Floats(rows.values());
  for (uint32_t h = 0; h < kQHeads; ++h) {
    const uint32_t kv_head = h / (kQHeads / kKvHeads);
    double sum = 0;
    std::vector<double> weighted(kValueDim);
    for (uint32_t t = 0; t < 16; ++t) {
      const double weight = std::exp(scores[h * 16 + t] / std::sqrt(double{kHeadDim}));
      sum += weight;
      for (uint32_t i = 0; i < kValueDim; ++i) weighted[i] += weight * values[(kv_head * 16 + t) * kValueDim + i];
    }
    EXPECT_NEAR(log_sum_exp[h], std::log(sum), 1e-5);
    for (uint32_t i = 0; i < kValueDim; ++i) EXPECT_NEAR(output[h * kValueDim + i], weighted[i] / sum, 1e-5);
  }
}

TEST_F(AttentionTest, ItComesInTheRowFormatAskedFor) {
  OpenWithTokens("a", 200);
  for (const auto& [format, dtype] :
       {std::pair{v1::ROW_FORMAT_F16, v1::DTYPE_F16}, {v1::ROW_FORMAT_BF16, v1::DTYPE_BF16}}) {
    const v1::Answer answer = Ask(Request(v1::ANSWER_MODE_ATTENTION, format));
    EXPECT_EQ(answer.row_format(), format);
    EXPECT_EQ(answer.output().dtype(), dtype);
    EXPECT_EQ(answer.output().data().size(), kQHeads * kValueDim * 2);
    EXPECT_EQ(answer.log_sum_exp().dtype(), v1::DTYPE_F32);
  }
}

TEST_F(AttentionTest, StorageIsNoFormOfIt) {
  OpenWithTokens("a", 200);
  EXPECT_THAT(Retrieve(Request(v1::ANSWER_MODE_ATTENTION, v1::ROW_FORMAT_STORAGE)),
              IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "row_format is storage"));
}

TEST_F(AttentionTest, AnOutputThatDoesNotFitIsTheErrorOfItsItem) {
  OpenWithTokens("a", 200);
  ASSERT_THAT(Open(MakeOpen("large")), IsRpcOk());
  v1::AppendRequest append = MakeAppend("large", 0, 0, 20);
  const float large = 1e6f;
  std::string& values = *append.mutable_chunk()->mutable_values()->mutable_data();
  for (size_t t = 0; t < 20; ++t) std::memcpy(&values[t * kKvHeads * kValueDim * 4], &large, sizeof(large));
  ASSERT_THAT(Append(append), IsRpcOk());
  v1::RetrieveRequest request = Request(v1::ANSWER_MODE_ATTENTION, v1::ROW_FORMAT_F16);
  *request.add_items() = MakeRetrieve("large", 0, 19).items(0);
  ASSERT_THAT(Retrieve(request), IsRpcOk());
  EXPECT_EQ(retrieved_.items(0).status().code(), 0);
  EXPECT_EQ(retrieved_.items(1).status().code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(retrieved_.items(1).status().reason(), "ROW_OVERFLOW");
  EXPECT_THAT(retrieved_.items(1).status().message(), HasSubstr("elements of the attention do not fit it"));
}

TEST_F(AttentionTest, TheRemainderComesBesideAnyMode) {
  v1::OpenSessionRequest open = MakeOpen("a", v1::FORMAT_K8V4);
  open.mutable_options()->mutable_key_clusters()->set_tokens_per_cluster(16);
  open.mutable_options()->set_cache_slots(512);
  ASSERT_THAT(Open(open), IsRpcOk());
  ASSERT_THAT(Append(MakeAppend("a", 0, 0, 1300)), IsRpcOk());
  v1::MaintainSessionReply maintained;
  ASSERT_THAT(Call(&Stub::MaintainSession, WithSession<v1::MaintainSessionRequest>("a"), &maintained), IsRpcOk());
  ASSERT_THAT(Get("a"), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).clustered_length(), 1300u);
  for (const v1::AnswerMode mode : {v1::ANSWER_MODE_IDS, v1::ANSWER_MODE_SCORES, v1::ANSWER_MODE_ROWS,
                                    v1::ANSWER_MODE_NEW_ROWS, v1::ANSWER_MODE_ATTENTION}) {
    v1::RetrieveRequest request = Request(mode, v1::ROW_FORMAT_BF16);
    request.mutable_items(0)->mutable_query()->set_position(1299);
    request.mutable_answer()->set_remainder(true);
    const v1::Answer answer = Ask(request);
    EXPECT_THAT(answer.remainder_output().dims(), ElementsAre(1, kQHeads, kValueDim));
    EXPECT_EQ(answer.remainder_output().dtype(), v1::DTYPE_BF16);
    EXPECT_EQ(answer.remainder_output().data().size(), kQHeads * kValueDim * 2);
    EXPECT_EQ(answer.remainder_log_sum_exp().dtype(), v1::DTYPE_F32);
    EXPECT_THAT(answer.remainder_log_sum_exp().dims(), ElementsAre(1, kQHeads));
    // About 1,284 tokens, none of which stands out.
    EXPECT_THAT(Floats(answer.remainder_log_sum_exp().data()), Each(::testing::DoubleNear(std::log(1284), 0.5)));
  }
  v1::RetrieveRequest early = Request(v1::ANSWER_MODE_SCORES, v1::ROW_FORMAT_UNSPECIFIED);
  early.mutable_answer()->set_remainder(true);
  EXPECT_THAT(Retrieve(early), IsRpc(grpc::StatusCode::OUT_OF_RANGE, "the key clusters of the layer reach to 1300"));
}

TEST_F(AttentionTest, ALayerWithoutClustersHasNoRemainder) {
  OpenWithTokens("a", 200);
  v1::RetrieveRequest request = Request(v1::ANSWER_MODE_SCORES, v1::ROW_FORMAT_UNSPECIFIED);
  request.mutable_answer()->set_remainder(true);
  EXPECT_THAT(Retrieve(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "the layer keeps no key clusters"));
}

// The figures of proto/README.md: one layer and step of Llama-3-8B, 1,024 tokens of every KV head.
TEST_F(AttentionTest, AReplyIsAFiveHundredthOfTheRows) {
  constexpr uint32_t kTokens = 1024;
  v1::OpenSessionRequest open = MakeOpen("a", v1::FORMAT_F16);
  v1::Geometry* geometry = open.mutable_options()->mutable_geometry();
  geometry->set_layers(1);
  geometry->set_q_heads(32);
  geometry->set_kv_heads(8);
  geometry->set_head_dim(128);
  geometry->set_value_dim(128);
  open.mutable_options()->mutable_selection()->set_source(v1::SOURCE_EXACT);
  open.mutable_options()->mutable_selection()->set_k_tokens(kTokens);
  open.mutable_options()->mutable_selection()->set_sink_tokens(0);
  open.mutable_options()->mutable_selection()->set_window_tokens(0);
  ASSERT_THAT(Open(open), IsRpcOk());
  v1::AppendRequest append;
  append.mutable_session()->set_session_id("a");
  *append.mutable_chunk()->mutable_keys() = MakeTensor({kTokens + 200, 8, 128}, 1);
  *append.mutable_chunk()->mutable_values() = MakeTensor({kTokens + 200, 8, 128}, 2);
  ASSERT_THAT(Append(append), IsRpcOk());
  size_t bytes[2];
  for (const bool rows : {false, true}) {
    v1::RetrieveRequest request = Request(rows ? v1::ANSWER_MODE_ROWS : v1::ANSWER_MODE_ATTENTION, v1::ROW_FORMAT_F16);
    request.mutable_items(0)->mutable_query()->set_position(kTokens + 199);
    *request.mutable_items(0)->mutable_query()->mutable_queries() = MakeTensor({1, 32, 128}, 3);
    ASSERT_THAT(Retrieve(request), IsRpcOk());
    EXPECT_THAT(retrieved_.items(0).answer().counts(), Each(kTokens));
    bytes[rows] = retrieved_.ByteSizeLong();
  }
  RecordProperty("attention_bytes", std::to_string(bytes[0]));
  RecordProperty("rows_bytes", std::to_string(bytes[1]));
  EXPECT_LE(bytes[0] * 500, bytes[1]) << bytes[0] << " and " << bytes[1];
  EXPECT_EQ(bytes[0] / 100, 84u) << bytes[0];
  EXPECT_EQ(bytes[1] / 10000, 435u) << bytes[1];
}

}  // namespace
}  // namespace ctkvr::testing
