// SPDX-License-Identifier: Apache-2.0
//
// Proves that results reach their fields, that bytes move instead of being copied, that batches keep the order of their
// requests, and that no reply grows over its limit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "server/core/error.h"
#include "server/core/limits.h"
#include "server/rpc/codec.h"
#include "tests/server/rpc/messages.h"

namespace ctkvr::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Answer FullAnswer() {
  Answer answer;
  answer.epoch = 9;
  answer.counts = {1, 2};
  answer.ids = std::string(100, 'i');  // long enough not to live inside the string
  answer.scores = std::string(100, 's');
  answer.keys = std::string(100, 'k');
  answer.values = std::string(100, 'v');
  answer.row_format = RowFormat::kStorage;
  answer.codec = RowCodec{.format = Format::kK6V4,
                          .code_generation = 1,
                          .rotation_seed = 5,
                          .key_mean = {1, 2, 3, 4, 5, 6},
                          .key_row_bytes = 7,
                          .value_row_bytes = 8};
  answer.code_generation = 1;
  answer.used.k_tokens = 77;
  answer.source = Source::kSketch;
  answer.length = 10;
  answer.indexed_length = 6;
  answer.bytes_read = 11;
  answer.always_tokens = 12;
  answer.cache_version = 13;
  answer.slots = std::string(100, 'l');
  answer.new_counts = {2, 1};
  answer.new_slots = std::string(100, 'n');
  return answer;
}

TEST(EncodeAnswerTest, EveryFieldIsThere) {
  v1::Answer message;
  EncodeAnswer(FullAnswer(), 3, &message);
  EXPECT_THAT(message.counts(), ElementsAre(1, 2));
  EXPECT_EQ(message.ids(), std::string(100, 'i'));
  EXPECT_EQ(message.scores(), std::string(100, 's'));
  EXPECT_EQ(message.keys(), std::string(100, 'k'));
  EXPECT_EQ(message.values(), std::string(100, 'v'));
  EXPECT_EQ(message.row_format(), v1::ROW_FORMAT_STORAGE);
  EXPECT_EQ(message.codec().format(), v1::FORMAT_K6V4);
  EXPECT_EQ(message.codec().rotation_seed(), 5u);
  EXPECT_EQ(message.codec().key_row_bytes(), 7u);
  EXPECT_EQ(message.codec().value_row_bytes(), 8u);
  EXPECT_EQ(message.codec().key_mean().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(message.codec().key_mean().dims(), ElementsAre(2, 3));
  float last;
  std::memcpy(&last, message.codec().key_mean().data().data() + 20, sizeof last);
  EXPECT_EQ(last, 6);
  EXPECT_EQ(message.code_generation(), 1u);
  EXPECT_EQ(message.used().k_tokens(), 77u);
  EXPECT_EQ(message.source(), v1::SOURCE_SKETCH);
  EXPECT_EQ(message.length(), 10u);
  EXPECT_EQ(message.indexed_length(), 6u);
  EXPECT_EQ(message.bytes_read(), 11u);
  EXPECT_EQ(message.always_tokens(), 12u);
  EXPECT_EQ(message.cache_version(), 13u);
  EXPECT_EQ(message.slots(), std::string(100, 'l'));
  EXPECT_THAT(message.new_counts(), ElementsAre(2, 1));
  EXPECT_EQ(message.new_slots(), std::string(100, 'n'));
}

TEST(EncodeAnswerTest, AttentionIsThere) {
  v1::Answer message;
  EncodeAnswer(FullAnswer(), 3, &message);
  EXPECT_FALSE(message.has_output());
  EXPECT_FALSE(message.has_log_sum_exp());
  Answer answer;
  answer.attention = PartialAttention{.positions = 2,
                                      .q_heads = 3,
                                      .value_dim = 8,
                                      .dtype = DType::kBF16,
                                      .output = std::string(96, 'o'),
                                      .log_sum_exp = std::string(24, 'l')};
  EXPECT_EQ(AnswerBytes(answer), 96u + 24);
  const char* output = answer.attention->output.data();
  EncodeAnswer(std::move(answer), 3, &message);
  EXPECT_EQ(message.output().dtype(), v1::DTYPE_BF16);
  EXPECT_THAT(message.output().dims(), ElementsAre(2, 3, 8));
  EXPECT_EQ(message.output().data(), std::string(96, 'o'));
  EXPECT_EQ(message.output().data().data(), output);
  EXPECT_EQ(message.log_sum_exp().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(message.log_sum_exp().dims(), ElementsAre(2, 3));
  EXPECT_EQ(message.log_sum_exp().data(), std::string(24, 'l'));
}

TEST(EncodeAnswerTest, BytesMoveWithoutACopy) {
  Answer answer = FullAnswer();
  const char* keys = answer.keys.data();
  const char* scores = answer.scores.data();
  v1::Answer message;
  EncodeAnswer(std::move(answer), 3, &message);
  EXPECT_EQ(message.keys().data(), keys);
  EXPECT_EQ(message.scores().data(), scores);
}

TEST(EncodeTest, EveryEnumHasItsWireValue) {
  EXPECT_EQ(EncodeFormat(Format::kF32), v1::FORMAT_F32);
  EXPECT_EQ(EncodeFormat(Format::kK8V8), v1::FORMAT_K8V8);
  EXPECT_EQ(EncodeSource(Source::kDense), v1::SOURCE_DENSE);
  EXPECT_EQ(EncodeSource(Source::kQueryCentroids), v1::SOURCE_QUERY_CENTROIDS);
  EXPECT_EQ(EncodeDType(DType::kBF16), v1::DTYPE_BF16);
  EXPECT_EQ(EncodeRowFormat(RowFormat::kBF16), v1::ROW_FORMAT_BF16);
}

// Three items, the second of which did not decode.
class EncodeRetrieveTest : public ::testing::Test {
 protected:
  EncodeRetrieveTest() {
    for (int i = 0; i < 3; ++i) *request_.add_items() = testing::MakeRetrieve("a", 0, 0).items(0);
    steps_.items = {0, 2};
    steps_.statuses = {absl::OkStatus(), absl::InvalidArgumentError("bad"), absl::OkStatus()};
  }
  v1::RetrieveRequest request_;
  RetrieveSteps steps_;
  v1::RetrieveReply reply_;
};

TEST_F(EncodeRetrieveTest, RepliesComeInTheOrderOfItems) {
  std::vector<StepResult> results(2);
  results[0].answer = FullAnswer();
  results[1].answer = MakeError(absl::StatusCode::kNotFound, "gone", kReasonSessionClosed);
  EXPECT_TRUE(EncodeRetrieve(request_, steps_, std::move(results), &reply_).ok());
  ASSERT_EQ(reply_.items_size(), 3);
  EXPECT_EQ(reply_.items(0).status().code(), 0);
  EXPECT_EQ(reply_.items(0).session_epoch(), 9u);
  EXPECT_EQ(reply_.items(1).status().message(), "bad");
  EXPECT_EQ(reply_.items(2).status().reason(), "SESSION_CLOSED");
  EXPECT_FALSE(reply_.items(2).has_answer());
}

TEST_F(EncodeRetrieveTest, AnAnswerThatDoesNotFitTheReplyIsRefusedAlone) {
  std::vector<StepResult> results(2);
  Answer large;
  large.keys = std::string(limits::kReplyBytesMax, 'k');
  results[0].answer = std::move(large);
  results[1].answer = FullAnswer();
  EXPECT_TRUE(EncodeRetrieve(request_, steps_, std::move(results), &reply_).ok());
  EXPECT_EQ(reply_.items(0).status().code(), 0);
  EXPECT_EQ(reply_.items(2).status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(reply_.items(2).status().message(), HasSubstr(std::to_string(limits::kReplyBytesMax)));
}

TEST_F(EncodeRetrieveTest, TheErrorOfTheOnlyItemIsReturned) {
  request_.mutable_items()->DeleteSubrange(1, 2);
  steps_.items = {0};
  steps_.statuses = {absl::OkStatus()};
  std::vector<StepResult> results(1);
  results[0].answer = absl::NotFoundError("gone");
  EXPECT_EQ(EncodeRetrieve(request_, steps_, std::move(results), &reply_).code(), absl::StatusCode::kNotFound);
}

TEST(EncodeDecodeTest, AppendAndAnswerHaveTheirOwnStatus) {
  v1::DecodeRequest request = testing::MakeDecode("a", 0, 0, 42);
  for (int i = 0; i < 2; ++i) *request.add_items() = request.items(0);
  request.mutable_items(2)->clear_chunk();
  std::vector<StepResult> results(3);
  results[0].append = AppendResult{.epoch = 3, .length = 4, .repeated = true};
  results[0].answer = absl::InternalError("odd");
  results[1].append = absl::OutOfRangeError("a gap");
  results[1].answer = absl::OutOfRangeError("a gap");
  results[2].answer = FullAnswer();
  v1::DecodeReply reply;
  EncodeDecode(request, std::move(results), &reply);
  EXPECT_EQ(reply.sequence(), 42u);
  ASSERT_EQ(reply.items_size(), 3);
  EXPECT_EQ(reply.items(0).append_status().code(), 0);
  EXPECT_EQ(reply.items(0).length(), 4u);
  EXPECT_TRUE(reply.items(0).repeated());
  EXPECT_EQ(reply.items(0).session_epoch(), 3u);
  EXPECT_EQ(reply.items(0).status().message(), "odd");
  EXPECT_EQ(reply.items(1).append_status().message(), "a gap");
  EXPECT_EQ(reply.items(1).status().message(), "a gap");
  EXPECT_EQ(reply.items(2).append_status().code(), 0);
  EXPECT_EQ(reply.items(2).status().code(), 0);
  EXPECT_EQ(reply.items(2).length(), 10u);
  EXPECT_EQ(reply.items(2).session_epoch(), 9u);
}

TEST(EncodeListPageTest, AFullPageNamesItsLastSession) {
  const std::vector<SessionSummary> two = {
      {.id = "a", .epoch = 1, .held_bytes = 2, .reserved_bytes = 3},
      {.id = "b", .length_max = 4, .token_limit = 5, .lease_remaining_seconds = 6}};
  v1::ListSessionsReply full;
  EncodeListPage(two, 2, &full);
  EXPECT_EQ(full.next_page_token(), "b");
  EXPECT_EQ(full.sessions(0).epoch(), 1u);
  EXPECT_EQ(full.sessions(0).held_bytes(), 2u);
  EXPECT_EQ(full.sessions(0).reserved_bytes(), 3u);
  EXPECT_EQ(full.sessions(1).length_max(), 4u);
  EXPECT_EQ(full.sessions(1).token_limit(), 5u);
  EXPECT_EQ(full.sessions(1).lease_remaining_seconds(), 6u);
  v1::ListSessionsReply last;
  EncodeListPage(two, 3, &last);
  EXPECT_EQ(last.next_page_token(), "");
}

TEST(EncodeSessionInfoTest, AnAbsentLayerHasNoCodec) {
  SessionInfo info;
  info.id = "a";
  info.config.layers.resize(2);
  for (LayerConfig& layer : info.config.layers) {
    layer.q_heads = layer.kv_heads = 1;
    layer.head_dim = layer.value_dim = 16;
  }
  info.config.layers[0].absent = true;
  info.layers.resize(2);
  v1::SessionInfo message;
  EncodeSessionInfo(info, &message);
  EXPECT_TRUE(message.layers(0).absent());
  EXPECT_FALSE(message.layers(0).has_codec());
  EXPECT_TRUE(message.layers(1).has_codec());
  // Nothing is held, so nothing is divided by.
  EXPECT_EQ(message.memory().share_of_f32(), 0);
}

}  // namespace
}  // namespace ctkvr::rpc
