// SPDX-License-Identifier: Apache-2.0
//
// Proves the session's calls: splitting and checksums, safe retries only, and that no reply of another boot or epoch is
// taken for the session's own.
#include "ctkvr/client/session.h"

#include "client/src/chunk.h"
#include "ctkvr/client/client.h"
#include "tests/client/fake_server.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using testing::IsOk;
using testing::RichError;
using testing::StatusIs;

const grpc::Status kGone(grpc::StatusCode::UNAVAILABLE, "connection reset");
const grpc::Status kAnswerLost(grpc::StatusCode::UNAVAILABLE, "answer lost");

constexpr size_t kTokenBytes = 8 * 2;

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() : keys_(100 * kTokenBytes), values_(100 * kTokenBytes), queries_(10 * 2 * kTokenBytes) {
    for (size_t i = 0; i < keys_.size(); ++i) keys_[i] = static_cast<std::byte>(i * 7);
    v1::ServerLimits limits;
    limits.set_append_tokens_max(40);
    server_.cache().SetLimits(limits);
    ConnectOptions options{.address = server_.address()};
    options.retry.sleep = [](std::chrono::milliseconds) {};
    auto client = Client::Connect(options);
    EXPECT_THAT(client, IsOk());
    client_ = *std::move(client);
  }

  Session Open(const OpenOptions& open = {}) {
    v1::SessionOptions options;
    options.mutable_geometry()->set_layers(2);
    options.mutable_geometry()->set_q_heads(2);
    options.mutable_geometry()->set_kv_heads(1);
    options.mutable_geometry()->set_head_dim(8);
    options.mutable_geometry()->set_dtype(v1::DTYPE_F16);
    auto session = client_->OpenSession(options, open);
    EXPECT_THAT(session, IsOk());
    return *std::move(session);
  }

  ChunkView Chunk(uint32_t tokens) const {
    return {.layer = 1,
            .first_position = 5,
            .tokens = tokens,
            .keys = std::span(keys_).first(tokens * kTokenBytes),
            .values = std::span(values_).first(tokens * kTokenBytes)};
  }

  FakeServer server_;
  std::vector<std::byte> keys_, values_, queries_;
  std::unique_ptr<Client> client_;
};

TEST_F(SessionTest, AppendSplitsByTheServersLimits) {
  const Session session = Open();
  ChunkView chunk = Chunk(100);
  chunk.query_positions = 10;
  chunk.queries = queries_;
  const auto result = session.Append(chunk);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->chunks, 3u);
  EXPECT_EQ(result->length, 105u);
  EXPECT_EQ(result->repeated_chunks, 0u);
  std::vector<uint32_t> firsts, tokens, query_positions;
  std::string keys;
  for (const v1::AppendRequest& request : server_.cache().appends()) {
    EXPECT_EQ(request.session().epoch(), session.epoch());
    firsts.push_back(request.chunk().first_position());
    tokens.push_back(request.chunk().keys().dims(0));
    query_positions.push_back(request.chunk().has_queries() ? request.chunk().queries().dims(0) : 0);
    keys += request.chunk().keys().data();
    const auto bytes = [](const std::string& data) { return std::as_bytes(std::span(data)); };
    EXPECT_EQ(request.checksum(), Checksum({.keys = bytes(request.chunk().keys().data()),
                                            .values = bytes(request.chunk().values().data()),
                                            .queries = bytes(request.chunk().queries().data())}));
  }
  EXPECT_THAT(firsts, ElementsAre(5, 45, 85));
  EXPECT_THAT(tokens, ElementsAre(40, 40, 20));
  EXPECT_THAT(query_positions, ElementsAre(0, 0, 10));
  EXPECT_EQ(keys, std::string(reinterpret_cast<const char*>(keys_.data()), keys_.size()));
}

TEST_F(SessionTest, AWrongChunkIsNotSent) {
  const Session session = Open();
  ChunkView chunk = Chunk(10);
  chunk.values = chunk.values.first(1);
  EXPECT_THAT(session.Append(chunk), StatusIs(absl::StatusCode::kInvalidArgument));
  chunk = Chunk(10);
  chunk.layer = 2;
  EXPECT_THAT(session.Append(chunk), StatusIs(absl::StatusCode::kOutOfRange));
  EXPECT_EQ(server_.cache().calls("Append"), 0u);
}

TEST_F(SessionTest, AppendIsTriedAgainAfterALostConnection) {
  const Session session = Open();
  server_.cache().Script("Append", {kGone, grpc::Status::OK, kGone});
  const auto result = session.Append(Chunk(80));
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->chunks, 2u);
  EXPECT_EQ(server_.cache().calls("Append"), 4u);
}

TEST_F(SessionTest, AFailedPartEndsTheAppend) {
  const Session session = Open();
  server_.cache().Script("Append", {grpc::Status::OK, RichError(grpc::StatusCode::OUT_OF_RANGE, "gap", "WRONG_POSITION",
                                                                {{"expected_position", "45"}})});
  const auto result = session.Append(Chunk(100));
  EXPECT_THAT(result, StatusIs(absl::StatusCode::kOutOfRange));
  EXPECT_EQ(DetailOf(result.status()).metadata.at("expected_position"), "45");
  EXPECT_EQ(server_.cache().calls("Append"), 2u);
}

TEST_F(SessionTest, TruncateIsNeverRepeatedAfterALostConnection) {
  const Session session = Open();
  server_.cache().Script("TruncateSession", {kGone});
  EXPECT_THAT(session.Truncate(3), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(server_.cache().calls("TruncateSession"), 1u);
  const auto removed = session.Truncate(3);
  ASSERT_THAT(removed, IsOk());
  EXPECT_THAT(*removed, ElementsAre(7));
}

TEST_F(SessionTest, TruncateWaitsForAFullQueue) {
  const Session session = Open();
  server_.cache().Script("TruncateSession",
                         {RichError(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", {}, 5)});
  EXPECT_THAT(session.Truncate(3), IsOk());
}

TEST_F(SessionTest, ACloseWhoseAnswerIsLostIsDone) {
  Session session = Open();
  server_.cache().Script("CloseSession", {kAnswerLost});
  const auto freed = session.Close();
  ASSERT_THAT(freed, IsOk());
  EXPECT_EQ(*freed, 0u);
  EXPECT_FALSE(server_.cache().open(session.id()));
  EXPECT_THAT(session.Close(), StatusIs(absl::StatusCode::kNotFound));  // a second close is the caller's mistake
}

TEST_F(SessionTest, DestroyingAHandleLeavesTheSessionOpenUnlessAsked) {
  std::string kept, closed;
  {
    const Session a = Open();
    const Session b = Open({.close_on_destroy = true});
    kept = a.id();
    closed = b.id();
  }
  EXPECT_TRUE(server_.cache().open(kept));
  EXPECT_FALSE(server_.cache().open(closed));
}

TEST_F(SessionTest, MovingAHandleClosesNothing) {
  Session a = Open({.close_on_destroy = true});
  const std::string id = a.id();
  Session b = std::move(a);
  EXPECT_TRUE(server_.cache().open(id));
  Session c = Open({.close_on_destroy = true});
  const std::string replaced = c.id();
  c = std::move(b);
  EXPECT_TRUE(server_.cache().open(id));
  EXPECT_FALSE(server_.cache().open(replaced));
}

TEST_F(SessionTest, ARestartedServerIsNeverTakenForTheOldOne) {
  Session session = Open();
  server_.cache().SetBootId(0xb002);
  // The fake keeps the session, as if a restarted server had one of the same name and epoch.
  EXPECT_TRUE(IsServerRestarted(session.Append(Chunk(1)).status()));
  EXPECT_TRUE(IsServerRestarted(session.Retrieve({}, {}).status()));
  EXPECT_TRUE(IsServerRestarted(session.Get().status()));
  EXPECT_TRUE(IsServerRestarted(session.KeepAlive().status()));
  EXPECT_TRUE(IsServerRestarted(session.Maintain().status()));
  EXPECT_TRUE(IsServerRestarted(session.Truncate(0).status()));
  const absl::Status status = session.Close().status();
  EXPECT_TRUE(IsServerRestarted(status));
  EXPECT_EQ(DetailOf(status).metadata.at("boot_id"), std::to_string(0xb002));
}

TEST_F(SessionTest, NotFoundOfARestartedServerSaysRestarted) {
  const Session session = Open();
  const grpc::Status unknown = RichError(grpc::StatusCode::NOT_FOUND, "no such session", "SESSION_UNKNOWN");
  server_.cache().Script("GetSession", {unknown, unknown});
  EXPECT_THAT(session.Get(), StatusIs(absl::StatusCode::kNotFound));  // the same boot: just not found
  server_.cache().SetBootId(0xb002);
  EXPECT_TRUE(IsServerRestarted(session.Get().status()));
}

TEST_F(SessionTest, AnotherSessionOfTheSameNameIsRefused) {
  Session session = Open({.session_id = "a"});
  const auto other = client_->AttachSession({.session_id = "a"});
  ASSERT_THAT(other, IsOk());
  ASSERT_THAT(session.Close(), IsOk());
  const Session later = Open({.session_id = "a"});
  EXPECT_THAT(other->Get(), StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_F(SessionTest, MaintainAndKeepAliveReturnWhatTheServerSays) {
  const Session session = Open();
  const auto indexed = session.Maintain();
  ASSERT_THAT(indexed, IsOk());
  EXPECT_THAT(*indexed, ElementsAre(42));
  const auto lease = session.KeepAlive();
  ASSERT_THAT(lease, IsOk());
  EXPECT_EQ(*lease, 600u);
}

TEST_F(SessionTest, RetrieveReportsTheItemsOwnError) {
  const Session session = Open();
  server_.cache().Script("Retrieve", {RichError(grpc::StatusCode::OUT_OF_RANGE, "before the index", "BEFORE_INDEX")});
  EXPECT_THAT(session.Retrieve({}, {}), StatusIs(absl::StatusCode::kOutOfRange));
}

}  // namespace
}  // namespace ctkvr::client
