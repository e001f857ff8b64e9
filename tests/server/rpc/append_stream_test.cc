// SPDX-License-Identifier: Apache-2.0
//
// Proves that chunks of a stream are appended in order, that the first error ends it and leaves what came before, that
// the reply says where each layer stands, and that a client that leaves stops the work.

#include "server/rpc/append_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/core/limits.h"
#include "tests/server/rpc/raw_call.h"
#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;

class AppendStreamTest : public SessionTest {
 protected:
  // Sends all and returns how the stream ended.
  grpc::Status Send(const std::vector<v1::AppendRequest>& requests) {
    grpc::ClientContext context;
    const auto stream = stub_->AppendStream(&context, &reply_);
    for (const v1::AppendRequest& request : requests) {
      if (!stream->Write(request)) break;
    }
    stream->WritesDone();
    return stream->Finish();
  }
  std::vector<uint32_t> Lengths() {
    EXPECT_THAT(Get("a"), IsRpcOk());
    std::vector<uint32_t> lengths;
    for (const auto& layer : got_.session().layers()) lengths.push_back(layer.length());
    return lengths;
  }
  v1::AppendStreamReply reply_;
};

TEST_F(AppendStreamTest, ChunksOfAllLayersAreAppendedInOrder) {
  OpenWithTokens("a", 0);
  std::vector<v1::AppendRequest> requests;
  for (uint32_t first = 0; first < 300; first += 10) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      requests.push_back(MakeAppend("a", layer, first, 10));
      requests.back().set_checksum(Checksum(requests.back().chunk()));
    }
  }
  ASSERT_THAT(Send(requests), IsRpcOk());
  EXPECT_THAT(reply_.lengths(), ElementsAre(300, 300));
  EXPECT_EQ(reply_.chunks(), 60u);
  EXPECT_EQ(reply_.repeated_chunks(), 0u);
  EXPECT_EQ(reply_.header().boot_id(), server_.engine().boot_id());
  EXPECT_EQ(reply_.header().session_epoch(), opened_.session().epoch());
  server_.AwaitMetric("ctkvr_rpc_message_seconds_count{method=\"AppendStream\"}", 60);
}

TEST_F(AppendStreamTest, AResentStreamIsAcknowledgedNotRepeated) {
  OpenWithTokens("a", 0);
  const std::vector<v1::AppendRequest> requests = {MakeAppend("a", 0, 0, 10), MakeAppend("a", 0, 10, 10)};
  ASSERT_THAT(Send(requests), IsRpcOk());
  ASSERT_THAT(Send(requests), IsRpcOk());
  EXPECT_THAT(reply_.lengths(), ElementsAre(20, 0));
  EXPECT_EQ(reply_.chunks(), 2u);
  EXPECT_EQ(reply_.repeated_chunks(), 2u);
}

TEST_F(AppendStreamTest, TheFirstErrorEndsTheStreamAndWhatCameBeforeStays) {
  OpenWithTokens("a", 0);
  const grpc::Status status = Send({MakeAppend("a", 0, 0, 10), MakeAppend("a", 0, 11, 10), MakeAppend("a", 1, 0, 10)});
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::OUT_OF_RANGE, ""));
  EXPECT_EQ(MetadataOf(status, "expected_position"), "10");
  EXPECT_THAT(Lengths(), ElementsAre(10, 0));
}

TEST_F(AppendStreamTest, ABadChecksumEndsTheStream) {
  OpenWithTokens("a", 0);
  std::vector<v1::AppendRequest> requests = {MakeAppend("a", 0, 0, 10), MakeAppend("a", 0, 10, 10),
                                             MakeAppend("a", 0, 20, 10)};
  requests[1].set_checksum(Checksum(requests[1].chunk()) ^ 1);
  EXPECT_THAT(Send(requests), IsRpc(grpc::StatusCode::DATA_LOSS, "checksum"));
  EXPECT_THAT(Lengths(), ElementsAre(10, 0));
}

TEST_F(AppendStreamTest, AMalformedChunkEndsTheStream) {
  OpenWithTokens("a", 0);
  std::vector<v1::AppendRequest> requests = {MakeAppend("a", 0, 0, 10), MakeAppend("a", 0, 10, 10)};
  requests[1].mutable_chunk()->clear_values();
  EXPECT_THAT(Send(requests), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "chunk.values is missing"));
  EXPECT_THAT(Lengths(), ElementsAre(10, 0));
}

TEST_F(AppendStreamTest, BytesThatAreNoMessageEndTheStreamWithAnError) {
  // session {session_id: "\xff"}: no UTF-8
  const RawReply reply = RawCall(server_.NewChannel(), "/ctkvr.v1.Cache/AppendStream", "\x0a\x03\x0a\x01\xff");
  EXPECT_THAT(reply.status, IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "cannot be parsed as ctkvr.v1.AppendRequest"));
}

TEST_F(AppendStreamTest, AMessageOverTheSizeLimitEndsTheStreamWithAnError) {
  OpenWithTokens("a", 0);
  std::vector<v1::AppendRequest> requests = {MakeAppend("a", 0, 0, 10), MakeAppend("a", 0, 10, 10)};
  requests[1].mutable_chunk()->mutable_keys()->mutable_data()->resize(limits::kMessageBytesMax);
  EXPECT_THAT(Send(requests), IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "67108864"));
}

TEST_F(AppendStreamTest, AStreamGoesToOneSession) {
  ASSERT_THAT(Open(MakeOpen("b")), IsRpcOk());
  OpenWithTokens("a", 0);
  EXPECT_THAT(Send({MakeAppend("a", 0, 0, 10), MakeAppend("b", 0, 0, 10)}),
              IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "all chunks of a stream go to one session, \"a\""));
}

TEST_F(AppendStreamTest, AStreamWithoutChunksIsRefused) {
  EXPECT_THAT(Send({}), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "at least 1"));
}

class DrivenAppendStreamTest : public DrivenSessionTest {};

// One chunk at the engine at a time: a chunk behind a failing one is never tried.
TEST_F(DrivenAppendStreamTest, AChunkWaitsForTheOneBefore) {
  OpenDriven("a");
  grpc::ClientContext context;
  v1::AppendStreamReply reply;
  const auto stream = stub_->AppendStream(&context, &reply);
  ASSERT_TRUE(stream->Write(MakeAppend("a", 0, 5, 10)));  // a gap
  ASSERT_TRUE(stream->Write(MakeAppend("a", 1, 0, 10)));
  stream->WritesDone();
  server_.AwaitQueued(1);
  auto finished = std::async(std::launch::async, [&stream] { return stream->Finish(); });
  while (finished.wait_for(std::chrono::seconds(0)) != std::future_status::ready) RunLanes();
  EXPECT_THAT(finished.get(), IsRpc(grpc::StatusCode::OUT_OF_RANGE, ""));
  ASSERT_THAT(Drive([this] { return Get("a"); }), IsRpcOk());
  EXPECT_EQ(got_.session().layers(1).length(), 0u);
}

TEST_F(DrivenAppendStreamTest, AClientThatLeavesStopsTheWork) {
  OpenDriven("a");
  grpc::ClientContext context;
  v1::AppendStreamReply reply;
  const auto stream = stub_->AppendStream(&context, &reply);
  ASSERT_TRUE(stream->Write(MakeAppend("a", 0, 0, 10)));
  server_.AwaitQueued(1);
  context.TryCancel();
  server_.AwaitMetric("ctkvr_rpc_cancelled_total{method=\"AppendStream\"}", 1);
  RunLanes();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"CANCELLED\",method=\"AppendStream\"}", 1);
  ASSERT_THAT(Drive([this] { return Get("a"); }), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
