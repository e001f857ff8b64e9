// SPDX-License-Identifier: Apache-2.0
//
// Proves the streaming calls: splitting, order, bounds on what is in flight, sending and receiving from two threads,
// and how a stream ends.
#include "ctkvr/client/streams.h"

#include <thread>

#include "ctkvr/client/client.h"
#include "tests/client/fake_server.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::RichError;
using testing::StatusIs;

constexpr size_t kTokenBytes = 8 * 2;

class StreamsTest : public ::testing::Test {
 protected:
  StreamsTest() : bytes_(100 * kTokenBytes) {
    v1::ServerLimits limits;
    limits.set_append_tokens_max(40);
    server_.cache().SetLimits(limits);
    auto client = Client::Connect({.address = server_.address()});
    EXPECT_THAT(client, IsOk());
    client_ = *std::move(client);
    session_ = std::make_unique<Session>(Open());
    entry_.session = session_.get();
  }

  Session Open() {
    v1::SessionOptions options;
    options.mutable_geometry()->set_layers(1);
    options.mutable_geometry()->set_q_heads(1);
    options.mutable_geometry()->set_kv_heads(1);
    options.mutable_geometry()->set_head_dim(8);
    options.mutable_geometry()->set_dtype(v1::DTYPE_F16);
    auto session = client_->OpenSession(options);
    EXPECT_THAT(session, IsOk());
    return *std::move(session);
  }

  ChunkView Chunk(uint32_t first, uint32_t tokens) const {
    return {.first_position = first,
            .tokens = tokens,
            .keys = std::span(bytes_).first(tokens * kTokenBytes),
            .values = std::span(bytes_).first(tokens * kTokenBytes)};
  }

  FakeServer server_;
  std::vector<std::byte> bytes_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
  DecodeEntry entry_;
};

TEST_F(StreamsTest, AppendStreamSplitsAndReportsLengths) {
  const auto stream = session_->StartAppend();
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Write(Chunk(0, 100)), IsOk());
  ASSERT_THAT((*stream)->Write(Chunk(100, 1)), IsOk());
  const auto result = (*stream)->Finish();
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->chunks, 4u);
  EXPECT_THAT(result->lengths, ElementsAre(101));
  for (const auto& request : server_.cache().appends()) EXPECT_NE(request.checksum(), 0u);
}

TEST_F(StreamsTest, AppendStreamEndsWithTheFirstFailure) {
  server_.cache().Script("AppendStream", {grpc::Status::OK, RichError(grpc::StatusCode::DATA_LOSS, "checksum", "")});
  const auto stream = session_->StartAppend();
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Write(Chunk(0, 10)), IsOk());
  // How many writes still succeed is up to timing; the end is not.
  for (uint32_t i = 1; i < 10; ++i) {
    if (!(*stream)->Write(Chunk(10 * i, 10)).ok()) break;
  }
  EXPECT_THAT((*stream)->Finish(), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT((*stream)->Write(Chunk(0, 1)), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_EQ(server_.cache().appends().size(), 1u);
}

TEST_F(StreamsTest, AppendStreamOfAnotherBootIsARestart) {
  const auto stream = session_->StartAppend();
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Write(Chunk(0, 10)), IsOk());
  server_.cache().SetBootId(0xb002);
  EXPECT_TRUE(IsServerRestarted((*stream)->Finish().status()));
}

TEST_F(StreamsTest, AppendStreamRefusesAWrongChunkAndGoesOn) {
  const auto stream = session_->StartAppend();
  ASSERT_THAT(stream, IsOk());
  ChunkView wrong = Chunk(0, 10);
  wrong.keys = wrong.keys.first(3);
  EXPECT_THAT((*stream)->Write(wrong), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT((*stream)->Write(Chunk(0, 10)), IsOk());
  EXPECT_THAT((*stream)->Finish(), IsOk());
  EXPECT_THAT((*stream)->Write(Chunk(10, 10)), StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_F(StreamsTest, AnUnfinishedAppendStreamIsCancelled) {
  const auto stream = session_->StartAppend();
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Write(Chunk(0, 10)), IsOk());
}

TEST_F(StreamsTest, DecodeAnswersInOrderWithSeveralInFlight) {
  const auto stream = client_->StartDecode();
  server_.cache().HoldReplies();
  for (uint64_t i = 1; i <= 5; ++i) {
    const auto sequence = stream->Send({&entry_, 1}, {});
    ASSERT_THAT(sequence, IsOk());
    EXPECT_EQ(*sequence, i);
  }
  EXPECT_EQ(stream->in_flight(), 5u);
  server_.cache().ReleaseReplies();
  for (uint64_t i = 1; i <= 5; ++i) {
    const auto reply = stream->Receive();
    ASSERT_THAT(reply, IsOk());
    EXPECT_EQ(reply->sequence(), i);
  }
  EXPECT_EQ(stream->in_flight(), 0u);
  EXPECT_THAT(stream->Finish(), IsOk());
}

TEST_F(StreamsTest, DecodeSendsAndReceivesFromTwoThreads) {
  const auto stream = client_->StartDecode({.in_flight_max = 8});
  constexpr uint64_t kMessages = 500;
  std::thread sender([&] {
    for (uint64_t sent = 0; sent < kMessages;) {
      const auto sequence = stream->Send({&entry_, 1}, {});
      if (sequence.ok()) {
        ++sent;
      } else {
        ASSERT_THAT(sequence, StatusIs(absl::StatusCode::kResourceExhausted));
        std::this_thread::yield();
      }
    }
  });
  for (uint64_t received = 0; received < kMessages;) {
    const auto reply = stream->Receive();
    if (reply.ok()) {
      EXPECT_EQ(reply->sequence(), ++received);
    } else {
      ASSERT_THAT(reply, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("nothing is in flight")));
      std::this_thread::yield();
    }
  }
  sender.join();
}

TEST_F(StreamsTest, DecodeBoundsWhatIsInFlight) {
  const auto stream = client_->StartDecode({.in_flight_max = 2});
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  EXPECT_THAT(stream->Send({&entry_, 1}, {}), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("limit is 2")));
  ASSERT_THAT(stream->Receive(), IsOk());
  EXPECT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
}

TEST_F(StreamsTest, DecodeRefusesWhatCannotBeSent) {
  const auto stream = client_->StartDecode();
  EXPECT_THAT(stream->Send({}, {}), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(stream->Receive(), StatusIs(absl::StatusCode::kFailedPrecondition));
  DecodeEntry wrong = entry_;
  wrong.chunk = Chunk(0, 2);
  wrong.chunk->values = {};
  EXPECT_THAT(stream->Send({&wrong, 1}, {}), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(stream->in_flight(), 0u);
  wrong.chunk = Chunk(0, 2);
  EXPECT_THAT(stream->Send({&wrong, 1}, {}), IsOk());
}

TEST_F(StreamsTest, DecodeReplyOfAnotherBootIsARestart) {
  const auto stream = client_->StartDecode();
  server_.cache().SetBootId(0xb002);
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  EXPECT_TRUE(IsServerRestarted(stream->Receive().status()));
  const Session other = Open();
  DecodeEntry mixed[] = {entry_, {.session = &other}};
  EXPECT_THAT(stream->Send(mixed, {}), StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_F(StreamsTest, DecodeReplyOutOfOrderIsAnError) {
  server_.cache().SetSequenceOffset(1);
  const auto stream = client_->StartDecode();
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  EXPECT_THAT(stream->Receive(), StatusIs(absl::StatusCode::kInternal, HasSubstr("in place of 1")));
}

TEST_F(StreamsTest, DecodeSaysHowTheStreamEnded) {
  server_.cache().Script("Decode", {RichError(grpc::StatusCode::INVALID_ARGUMENT, "malformed", "BAD")});
  const auto stream = client_->StartDecode();
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  const auto reply = stream->Receive();
  EXPECT_THAT(reply, StatusIs(absl::StatusCode::kInvalidArgument, "malformed"));
  EXPECT_EQ(DetailOf(reply.status()).reason, "BAD");
  EXPECT_THAT(stream->Receive(), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(stream->Send({&entry_, 1}, {}), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(stream->Finish(), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(StreamsTest, CancelEndsAWaitingReceive) {
  server_.cache().HoldReplies();
  const auto stream = client_->StartDecode();
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  std::thread canceller([&stream] { stream->Cancel(); });
  EXPECT_THAT(stream->Receive(), StatusIs(absl::StatusCode::kCancelled));
  canceller.join();
}

TEST_F(StreamsTest, AStoppedServerEndsTheStream) {
  const auto stream = client_->StartDecode();
  ASSERT_THAT(stream->Send({&entry_, 1}, {}), IsOk());
  ASSERT_THAT(stream->Receive(), IsOk());
  server_.Stop();
  // The connection's end may be noticed by the send or by the receive.
  if (stream->Send({&entry_, 1}, {}).ok()) {
    EXPECT_FALSE(stream->Receive().ok());
  } else {
    EXPECT_THAT(stream->Receive(), ::testing::Not(IsOk()));
  }
}

}  // namespace
}  // namespace ctkvr::client
