// SPDX-License-Identifier: Apache-2.0

#include "server/embedded/streams.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/server/embedded/calls.h"

namespace ctkvr::embedded {
namespace {

using ::testing::HasSubstr;
using namespace ctkvr::testing;  // NOLINT: the messages

class StreamsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* id : {"a", "b"}) ASSERT_TRUE(Call(*service_, "OpenSession", MakeOpen(id)).status.ok());
  }
  Outcome Append(AppendStream& stream, const v1::AppendRequest& request) {
    const std::string bytes = request.SerializeAsString();
    return Await([&](Done done) { stream.Append(bytes, std::move(done)); });
  }
  Outcome Finish(AppendStream& stream) {
    return Await([&](Done done) { stream.Finish(std::move(done)); });
  }
  void Write(DecodeStream& stream, const v1::DecodeRequest& request) { stream.Write(request.SerializeAsString()); }
  Outcome Read(DecodeStream& stream) {
    return Await([&](Done done) { stream.Read(std::move(done)); });
  }
  uint32_t Length(const std::string& id) {
    v1::GetSessionRequest request;
    request.mutable_session()->set_session_id(id);
    return As<v1::GetSessionReply>(Call(*service_, "GetSession", request)).session().layers(0).length();
  }

  const std::unique_ptr<Service> service_ = SmallService();
};

TEST_F(StreamsTest, ChunksAreCountedAndLengthsReported) {
  AppendStream stream(*service_, {});
  EXPECT_TRUE(Append(stream, MakeAppend("a", 0, 0, 10)).status.ok());
  EXPECT_TRUE(Append(stream, MakeAppend("a", 0, 10, 5)).status.ok());
  EXPECT_TRUE(Append(stream, MakeAppend("a", 0, 0, 10)).status.ok());
  const Outcome outcome = Finish(stream);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const auto& reply = As<v1::AppendStreamReply>(outcome);
  EXPECT_EQ(reply.chunks(), 3u);
  EXPECT_EQ(reply.repeated_chunks(), 1u);
  EXPECT_THAT(reply.lengths(), ::testing::ElementsAre(15u, 0u));
}

TEST_F(StreamsTest, TheFirstErrorEndsAnUpload) {
  AppendStream stream(*service_, {});
  EXPECT_TRUE(Append(stream, MakeAppend("a", 0, 0, 10)).status.ok());
  EXPECT_EQ(Append(stream, MakeAppend("a", 0, 20, 5)).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Append(stream, MakeAppend("a", 0, 10, 5)).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Finish(stream).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Length("a"), 10u);
}

TEST_F(StreamsTest, AnUploadGoesToOneSession) {
  AppendStream stream(*service_, {});
  EXPECT_TRUE(Append(stream, MakeAppend("a", 0, 0, 10)).status.ok());
  const Outcome outcome = Append(stream, MakeAppend("b", 0, 0, 10));
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("is \"b\" in chunk 1"));
  EXPECT_EQ(Length("b"), 0u);
}

TEST_F(StreamsTest, AnUploadWithoutAChunkIsRefused) {
  AppendStream stream(*service_, {});
  EXPECT_EQ(Finish(stream).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StreamsTest, RepliesComeInTheOrderOfMessagesHoweverManyWait) {
  DecodeStream stream(*service_, TimePoint::max());
  const uint32_t messages = 3 * DecodeStream::kMessagesMax;
  for (uint32_t i = 0; i < messages; ++i) Write(stream, MakeDecode(i % 2 == 0 ? "a" : "b", 0, i / 2, i + 1));
  stream.EndWrites();
  for (uint32_t i = 0; i < messages; ++i) {
    const Outcome outcome = Read(stream);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    const auto& reply = As<v1::DecodeReply>(outcome);
    EXPECT_EQ(reply.sequence(), i + 1);
    EXPECT_EQ(reply.header().boot_id(), service_->engine().boot_id());
    ASSERT_EQ(reply.items(0).status().code(), 0) << reply.items(0).status().message();
    EXPECT_EQ(reply.items(0).length(), i / 2 + 1);
  }
  const Outcome end = Read(stream);
  EXPECT_TRUE(end.status.ok());
  EXPECT_EQ(end.reply, nullptr);
}

TEST_F(StreamsTest, AReadMayComeBeforeItsMessage) {
  DecodeStream stream(*service_, TimePoint::max());
  std::thread writer;
  const Outcome outcome = Await([&](Done done) {
    stream.Read(std::move(done));
    writer = std::thread([&] { Write(stream, MakeDecode("a", 0, 0, 1)); });
  });
  writer.join();
  EXPECT_EQ(As<v1::DecodeReply>(outcome).sequence(), 1u);
}

TEST_F(StreamsTest, AMalformedMessageEndsTheStreamOnceThoseBeforeItAreAnswered) {
  DecodeStream stream(*service_, TimePoint::max());
  const uint32_t good = DecodeStream::kMessagesMax + 3;
  for (uint32_t i = 0; i < good; ++i) Write(stream, MakeDecode("a", 0, i, i + 1));
  Write(stream, v1::DecodeRequest());
  Write(stream, MakeDecode("a", 0, good, good + 2));
  for (uint32_t i = 0; i < good; ++i) EXPECT_TRUE(Read(stream).status.ok());
  EXPECT_EQ(Read(stream).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Read(stream).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Length("a"), good);
}

TEST_F(StreamsTest, BytesThatAreNoMessageEndTheStream) {
  DecodeStream stream(*service_, TimePoint::max());
  stream.Write("\x0f garbage");
  EXPECT_EQ(Read(stream).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StreamsTest, ACancelledStreamAnswersItsReaderAtOnce) {
  DecodeStream stream(*service_, TimePoint::max());
  const Outcome outcome = Await([&](Done done) {
    stream.Read(std::move(done));
    stream.Cancel();
  });
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kCancelled);
  Write(stream, MakeDecode("a", 0, 0, 1));
  EXPECT_EQ(Read(stream).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Length("a"), 0u);
}

TEST_F(StreamsTest, AStreamMayEndWhileItsMessagesRun) {
  for (uint32_t round = 0; round < 50; ++round) {
    DecodeStream stream(*service_, TimePoint::max());
    for (uint32_t i = 0; i < 8; ++i) Write(stream, MakeDecode("a", 0, 8 * round + i, i + 1));
  }
  EXPECT_LE(Length("a"), 400u);
}

}  // namespace
}  // namespace ctkvr::embedded
