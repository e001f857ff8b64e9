// SPDX-License-Identifier: Apache-2.0
//
// Proves that messages of a Decode stream are read while others run, that replies keep the order of requests even when
// lanes answer in another one, that a malformed message, a vanished client and a drain end the stream as the contract
// says, and that items fail each by itself.

#include "server/rpc/decode_reactor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "server/core/limits.h"
#include "tests/server/rpc/raw_call.h"
#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;
using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeReply>;

const char kMessages[] = "ctkvr_rpc_message_seconds_count{method=\"Decode\"}";

class DecodeTest : public SessionTest {
 protected:
  std::unique_ptr<Stream> Start() { return stub_->Decode(&context_); }
  grpc::ClientContext context_;
};

TEST_F(DecodeTest, AStepAppendsAndAnswersAtOnce) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  v1::DecodeReply reply;
  for (uint32_t position = 20; position < 30; ++position) {
    ASSERT_TRUE(stream->Write(MakeDecode("a", 0, position, position)));
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.sequence(), position);
    EXPECT_EQ(reply.header().boot_id(), server_.engine().boot_id());
    ASSERT_EQ(reply.items_size(), 1);
    const v1::DecodeReplyItem& item = reply.items(0);
    EXPECT_EQ(item.append_status().code(), 0);
    EXPECT_EQ(item.status().code(), 0) << item.status().message();
    EXPECT_EQ(item.length(), position + 1);
    EXPECT_EQ(item.session_epoch(), opened_.session().epoch());
    EXPECT_EQ(item.answer().length(), position + 1);
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

TEST_F(DecodeTest, ADecodeAnswerEqualsThatOfRetrieve) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 20, 1)));
  ASSERT_TRUE(stream->Read(&reply));
  ASSERT_THAT(Retrieve(MakeRetrieve("a", 0, 20)), IsRpcOk());
  v1::Answer decoded = reply.items(0).answer();
  EXPECT_EQ(decoded.SerializeAsString(), retrieved_.items(0).answer().SerializeAsString());
}

TEST_F(DecodeTest, ARetriedStepIsAcknowledgedNotRepeated) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  v1::DecodeReply first;
  v1::DecodeReply second;
  for (v1::DecodeReply* reply : {&first, &second}) {
    ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 20, 1)));
    ASSERT_TRUE(stream->Read(reply));
  }
  EXPECT_FALSE(first.items(0).repeated());
  EXPECT_TRUE(second.items(0).repeated());
  EXPECT_EQ(second.items(0).length(), 21u);
  EXPECT_EQ(second.items(0).answer().SerializeAsString(), first.items(0).answer().SerializeAsString());
}

TEST_F(DecodeTest, ItemsFailEachByItselfAndAFailedAppendStopsItsQuery) {
  OpenWithTokens("a", 20);
  v1::DecodeRequest request = MakeDecode("a", 0, 25, 1);  // a gap
  *request.add_items() = MakeDecode("nobody", 0, 0, 1).items(0);
  *request.add_items() = MakeDecode("a", 1, 0, 1).items(0);
  *request.add_items() = MakeDecode("a", 0, 19, 1).items(0);
  request.mutable_items(3)->clear_chunk();
  *request.add_items() = MakeDecode("a", 1, 1, 1).items(0);
  request.mutable_items(4)->clear_query();
  const auto stream = Start();
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&reply));
  ASSERT_EQ(reply.items_size(), 5);
  EXPECT_EQ(reply.items(0).append_status().code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(reply.items(0).append_status().metadata().at("expected_position"), "20");
  EXPECT_EQ(reply.items(0).status().code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_FALSE(reply.items(0).has_answer());
  EXPECT_EQ(reply.items(1).append_status().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(reply.items(1).status().reason(), "SESSION_UNKNOWN");
  EXPECT_EQ(reply.items(2).status().code(), 0) << reply.items(2).status().message();
  EXPECT_EQ(reply.items(2).length(), 1u);
  EXPECT_EQ(reply.items(3).status().code(), 0) << reply.items(3).status().message();
  EXPECT_EQ(reply.items(3).length(), 20u);
  EXPECT_EQ(reply.items(4).append_status().code(), 0);
  EXPECT_EQ(reply.items(4).length(), 2u);
  EXPECT_FALSE(reply.items(4).has_answer());
}

TEST_F(DecodeTest, AMalformedMessageEndsTheStreamAfterTheRepliesBeforeIt) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 20, 1)));
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 21, 2)));
  v1::DecodeRequest bad = MakeDecode("a", 0, 22, 3);
  bad.mutable_items(0)->mutable_chunk()->mutable_keys()->mutable_data()->pop_back();
  ASSERT_TRUE(stream->Write(bad));
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.sequence(), 1u);
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.sequence(), 2u);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_THAT(stream->Finish(), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "items[0].chunk.keys.data has 255 bytes"));
  ASSERT_THAT(Get("a"), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 22u);
}

// A message that is no protobuf looks to a typed stream like its end: the client would be told OK.
TEST_F(DecodeTest, BytesThatAreNoMessageEndTheStreamWithAnError) {
  // items {session {session_id: "\xff"}}: no UTF-8
  const RawReply reply = RawCall(server_.NewChannel(), "/ctkvr.v1.Cache/Decode", "\x12\x05\x0a\x03\x0a\x01\xff");
  EXPECT_THAT(reply.status, IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "cannot be parsed as ctkvr.v1.DecodeRequest"));
}

TEST_F(DecodeTest, AMessageOverTheSizeLimitEndsTheStreamWithAnError) {
  OpenWithTokens("a", 0);
  const auto stream = Start();
  v1::DecodeRequest large = MakeDecode("a", 0, 0, 1);
  large.mutable_items(0)->mutable_chunk()->mutable_keys()->mutable_data()->resize(limits::kMessageBytesMax);
  stream->Write(large);
  stream->WritesDone();
  v1::DecodeReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_THAT(stream->Finish(), IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "67108864"));
}

TEST_F(DecodeTest, AnOptionThatIsNotServedEndsTheStream) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  v1::DecodeRequest request = MakeDecode("a", 0, 20, 1);
  request.mutable_items(0)->mutable_chunk()->add_segments(1);
  ASSERT_TRUE(stream->Write(request));
  v1::DecodeReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_THAT(stream->Finish(), IsRpc(grpc::StatusCode::UNIMPLEMENTED, "segments"));
}

TEST_F(DecodeTest, AStreamWithoutMessagesEndsWell) {
  const auto stream = Start();
  stream->WritesDone();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

// Far more messages than the server holds at a time, written by one thread and read by another.
TEST_F(DecodeTest, ManyPipelinedMessagesAreAnsweredInOrder) {
  OpenWithTokens("a", 1);
  constexpr uint32_t kCount = 1000;
  static_assert(kCount > 10 * rpc::DecodeReactor::kMessagesMax);
  const auto stream = Start();
  std::thread writer([&stream] {
    for (uint32_t i = 1; i <= kCount; ++i) stream->Write(MakeDecode("a", 0, i, i));
    stream->WritesDone();
  });
  v1::DecodeReply reply;
  for (uint32_t i = 1; i <= kCount; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    ASSERT_EQ(reply.sequence(), i);
    ASSERT_EQ(reply.items(0).length(), i + 1) << reply.items(0).append_status().message();
  }
  EXPECT_FALSE(stream->Read(&reply));
  writer.join();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
  server_.AwaitMetric(kMessages, kCount);
  server_.AwaitMetric("ctkvr_rpc_items_total{code=\"OK\",method=\"Decode\"}", kCount);
}

// A client that never reads must not make the server read on: it holds a bounded number of messages, and goes on once
// replies are read.
TEST_F(DecodeTest, AClientThatDoesNotReadIsHeldBack) {
  OpenWithTokens("a", 1);
  // Replies of about 1 MiB: dense rows in F32, so that what is unread fills every window of the connection.
  ASSERT_THAT(Append(MakeAppend("a", 0, 1, kTokenLimit - 1)), IsRpcOk());
  v1::DecodeRequest request;
  v1::DecodeItem* item = request.add_items();
  item->mutable_session()->set_session_id("a");
  *item->mutable_query() = MakeQuery(0, kTokenLimit - 1);
  item->mutable_query()->mutable_selection()->set_source(v1::SOURCE_DENSE);
  request.mutable_answer()->set_mode(v1::ANSWER_MODE_ROWS);
  request.mutable_answer()->set_row_format(v1::ROW_FORMAT_F32);
  constexpr uint32_t kCount = 200;
  const auto stream = Start();
  std::atomic<uint32_t> written{0};
  std::thread writer([&] {
    for (uint32_t i = 0; i < kCount; ++i) {
      request.set_sequence(i);
      stream->Write(request);
      ++written;
    }
    stream->WritesDone();
  });
  // The server answers what it has read; then its count stands still at what it may hold, far below what waits.
  server_.AwaitMetric(kMessages, rpc::DecodeReactor::kMessagesMax);
  v1::DecodeReply reply;
  for (uint32_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    ASSERT_EQ(reply.sequence(), i);
    ASSERT_EQ(reply.items(0).status().code(), 0) << reply.items(0).status().message();
  }
  writer.join();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

TEST_F(DecodeTest, ADrainEndsAnIdleStream) {
  OpenWithTokens("a", 20);
  const auto stream = Start();
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 20, 1)));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_TRUE(server_.server().Drain(std::chrono::minutes(1)));
  EXPECT_FALSE(stream->Read(&reply));
  const grpc::Status status = stream->Finish();
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::UNAVAILABLE, "draining"));
  EXPECT_EQ(ReasonOf(status), "DRAINING");
}

class DrivenDecodeTest : public DrivenSessionTest {
 protected:
  DrivenDecodeTest() : DrivenSessionTest(/*lanes=*/2) {}
  grpc::ClientContext context_;
};

TEST_F(DrivenDecodeTest, MessagesAreReadWhileOthersWait) {
  OpenDriven("a");
  const auto stream = stub_->Decode(&context_);
  constexpr uint32_t kCount = 5;
  for (uint32_t i = 0; i < kCount; ++i) ASSERT_TRUE(stream->Write(MakeDecode("a", 0, i, i)));
  server_.AwaitQueued(kCount);  // all of them, although none is answered
  RunLanes();
  v1::DecodeReply reply;
  for (uint32_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.sequence(), i);
    EXPECT_EQ(reply.items(0).length(), i + 1);
  }
  stream->WritesDone();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

TEST_F(DrivenDecodeTest, NoMoreThanItsShareOfMessagesIsHeld) {
  OpenDriven("a");
  const auto stream = stub_->Decode(&context_);
  constexpr auto kMost = rpc::DecodeReactor::kMessagesMax;
  for (uint32_t i = 0; i < kMost + 8; ++i) ASSERT_TRUE(stream->Write(MakeDecode("a", 0, i, i)));
  server_.AwaitQueued(kMost);
  // One more call by another way shows that the server is not just slow: it has stopped reading this stream.
  auto other = std::async(std::launch::async, [this] { return Get("a"); });
  server_.AwaitQueued(kMost + 1);
  EXPECT_EQ(server_.engine().stats().queued_items.load(), static_cast<int64_t>(kMost + 1));
  while (other.wait_for(std::chrono::seconds(0)) != std::future_status::ready) RunLanes();
  EXPECT_THAT(other.get(), IsRpcOk());
  v1::DecodeReply reply;
  for (uint32_t i = 0; i < kMost + 8; ++i) {
    auto read = std::async(std::launch::async, [&] { return stream->Read(&reply); });
    while (read.wait_for(std::chrono::seconds(0)) != std::future_status::ready) RunLanes();
    ASSERT_TRUE(read.get());
    EXPECT_EQ(reply.sequence(), i);
  }
}

TEST_F(DrivenDecodeTest, RepliesKeepTheOrderOfRequestsWhenLanesDoNot) {
  OpenDriven("a");  // the sessions lie on different lanes: the second goes where less memory is planned
  OpenDriven("b");
  const auto stream = stub_->Decode(&context_);
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 0, 1)));
  ASSERT_TRUE(stream->Write(MakeDecode("b", 0, 0, 2)));
  server_.AwaitQueued(2);
  ASSERT_TRUE(server_.engine().RunLane(1));
  server_.AwaitMetric(kMessages, 1);  // the second message is answered, the first one waits
  EXPECT_EQ(server_.engine().stats().queued_items.load(), 1);
  ASSERT_TRUE(server_.engine().RunLane(0));
  v1::DecodeReply reply;
  for (uint64_t sequence : {1u, 2u}) {
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.sequence(), sequence);
  }
}

TEST_F(DrivenDecodeTest, AClientThatLeavesCancelsWhatWaits) {
  OpenDriven("a");
  const auto stream = stub_->Decode(&context_);
  for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(MakeDecode("a", 0, i, i)));
  server_.AwaitQueued(3);
  context_.TryCancel();
  server_.AwaitMetric("ctkvr_rpc_cancelled_total{method=\"Decode\"}", 1);
  RunLanes();
  EXPECT_EQ(server_.engine().stats().expired_in_queue.load(), 3u);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"CANCELLED\",method=\"Decode\"}", 1);
  ASSERT_THAT(Drive([this] { return Get("a"); }), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
}

TEST_F(DrivenDecodeTest, ADrainFinishesWhatWasReadAndNoMore) {
  OpenDriven("a");
  const auto stream = stub_->Decode(&context_);
  ASSERT_TRUE(stream->Write(MakeDecode("a", 0, 0, 1)));
  server_.AwaitQueued(1);
  auto drained = std::async(std::launch::async, [this] { return server_.server().Drain(std::chrono::minutes(1)); });
  server_.AwaitMetric("ctkvr_draining", 1);
  RunLanes();
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.sequence(), 1u);
  EXPECT_EQ(reply.items(0).length(), 1u);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_THAT(stream->Finish(), IsRpc(grpc::StatusCode::UNAVAILABLE, "draining"));
  EXPECT_TRUE(drained.get());
}

}  // namespace
}  // namespace ctkvr::testing
