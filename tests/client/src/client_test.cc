// SPDX-License-Identifier: Apache-2.0
//
// Proves connecting, opening, attaching and listing against a server that fails as scripted.
#include "ctkvr/client/client.h"

#include "tests/client/fake_server.h"
#include "tests/testing/status_matchers.h"

// Debian's c-ares leaks the ten bytes of "localhost" when it resolves it; LeakSanitizer asks for this by name.
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares"; }

namespace ctkvr::client {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::RichError;
using ::testing::SizeIs;
using testing::StatusIs;

const grpc::Status kGone(grpc::StatusCode::UNAVAILABLE, "connection reset");
const grpc::Status kAnswerLost(grpc::StatusCode::UNAVAILABLE, "answer lost");

class ClientTest : public ::testing::Test {
 protected:
  ConnectOptions Options() {
    ConnectOptions options{.address = server_.address()};
    options.retry.sleep = [](std::chrono::milliseconds) {};
    return options;
  }
  std::unique_ptr<Client> Connect() {
    auto client = Client::Connect(Options());
    EXPECT_THAT(client, IsOk());
    return *std::move(client);
  }
  static v1::SessionOptions OneLayer() {
    v1::SessionOptions options;
    options.mutable_geometry()->set_layers(1);
    options.mutable_geometry()->set_q_heads(2);
    options.mutable_geometry()->set_kv_heads(1);
    options.mutable_geometry()->set_head_dim(8);
    options.mutable_geometry()->set_dtype(v1::DTYPE_F16);
    options.set_fingerprint("model");
    return options;
  }

  FakeServer server_;
};

TEST_F(ClientTest, ConnectAsksForTheServersLimits) {
  v1::ServerLimits limits;
  limits.set_append_tokens_max(99);
  server_.cache().SetLimits(limits);
  const auto client = Connect();
  const auto info = client->ServerInfo();
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->limits().append_tokens_max(), 99u);
  EXPECT_EQ(info->header().boot_id(), 0xb001u);
}

TEST_F(ClientTest, ConnectTriesAgainWhileTheServerStarts) {
  server_.cache().Script("GetServerInfo", {kGone, kGone});
  Connect();
  EXPECT_EQ(server_.cache().calls("GetServerInfo"), 3u);
}

TEST_F(ClientTest, NobodyAtTheAddressIsUnavailableAndNamed) {
  server_.Stop();
  const auto client = Client::Connect(Options());
  EXPECT_THAT(client, StatusIs(absl::StatusCode::kUnavailable, HasSubstr(server_.address())));
}

TEST_F(ClientTest, OpenNamesTheSessionItself) {
  const auto client = Connect();
  const auto first = client->OpenSession(OneLayer());
  const auto second = client->OpenSession(OneLayer());
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  EXPECT_NE(first->id(), second->id());
  EXPECT_EQ(first->boot_id(), 0xb001u);
  EXPECT_NE(first->epoch(), second->epoch());
  EXPECT_EQ(first->ref().fingerprint(), "model");
}

TEST_F(ClientTest, AnOpenWhoseAnswerIsLostIsNotOpenedTwice) {
  server_.cache().Script("OpenSession", {kAnswerLost});
  const auto client = Connect();
  const auto session = client->OpenSession(OneLayer());
  ASSERT_THAT(session, IsOk());
  EXPECT_EQ(server_.cache().calls("OpenSession"), 2u);
  const auto sessions = client->ListSessions();
  ASSERT_THAT(sessions, IsOk());
  EXPECT_THAT(*sessions, SizeIs(1));
  EXPECT_EQ(sessions->front().session_id(), session->id());
}

TEST_F(ClientTest, ANameInUseIsAnError) {
  const auto client = Connect();
  ASSERT_THAT(client->OpenSession(OneLayer(), {.session_id = "a"}), IsOk());
  EXPECT_THAT(client->OpenSession(OneLayer(), {.session_id = "a"}), StatusIs(absl::StatusCode::kAlreadyExists));
  // With the caller's own name a lost answer cannot be told from another's session.
  server_.cache().Script("OpenSession", {kAnswerLost});
  EXPECT_THAT(client->OpenSession(OneLayer(), {.session_id = "b"}), StatusIs(absl::StatusCode::kAlreadyExists));
  EXPECT_THAT(client->AttachSession({.session_id = "b"}), IsOk());
}

TEST_F(ClientTest, AFullArenaIsRetriedAsTheServerAsks) {
  server_.cache().Script("OpenSession",
                         {RichError(grpc::StatusCode::RESOURCE_EXHAUSTED, "no room", "ARENA_FULL", {}, 10)});
  const auto client = Connect();
  EXPECT_THAT(client->OpenSession(OneLayer()), IsOk());
  EXPECT_EQ(server_.cache().calls("OpenSession"), 2u);
}

TEST_F(ClientTest, RefusalsKeepTheServersWords) {
  server_.cache().Script("OpenSession",
                         {RichError(grpc::StatusCode::INVALID_ARGUMENT, "head_dim is 7", "BAD", {{"a", "b"}})});
  const auto client = Connect();
  const auto session = client->OpenSession(OneLayer());
  EXPECT_THAT(session, StatusIs(absl::StatusCode::kInvalidArgument, "head_dim is 7"));
  EXPECT_EQ(DetailOf(session.status()).metadata.at("a"), "b");
}

TEST_F(ClientTest, AttachGivesAHandleToTheSameSession) {
  const auto client = Connect();
  const auto opened = client->OpenSession(OneLayer(), {.session_id = "a"});
  ASSERT_THAT(opened, IsOk());
  const auto attached = client->AttachSession({.session_id = "a", .epoch = opened->epoch(), .fingerprint = "model"});
  ASSERT_THAT(attached, IsOk());
  EXPECT_EQ(attached->epoch(), opened->epoch());
  EXPECT_EQ(attached->options().geometry().head_dim(), 8u);
  EXPECT_THAT(client->AttachSession({.session_id = "a", .epoch = 1}), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(client->AttachSession({.session_id = "c"}), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(ClientTest, ListReadsEveryPage) {
  const auto client = Connect();
  for (const char* id : {"c", "a", "b"}) ASSERT_THAT(client->OpenSession(OneLayer(), {.session_id = id}), IsOk());
  const auto sessions = client->ListSessions();
  ASSERT_THAT(sessions, IsOk());
  std::vector<std::string> ids;
  for (const auto& entry : *sessions) ids.push_back(entry.session_id());
  EXPECT_THAT(ids, ElementsAre("a", "b", "c"));
  EXPECT_EQ(server_.cache().calls("ListSessions"), 3u);
}

TEST_F(ClientTest, RetrieveForSeveralSessionsKeepsTheirOrder) {
  const auto client = Connect();
  const auto a = client->OpenSession(OneLayer()), b = client->OpenSession(OneLayer());
  ASSERT_THAT(a, IsOk());
  ASSERT_THAT(b, IsOk());
  const RetrieveEntry entries[] = {{.session = &*a}, {.session = &*b}};
  const auto reply = client->Retrieve(entries, {});
  ASSERT_THAT(reply, IsOk());
  EXPECT_EQ(reply->items_size(), 2);
  EXPECT_THAT(client->Retrieve({}, {}), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(ClientTest, SessionsOfDifferentBootsDoNotMix) {
  const auto client = Connect();
  const auto old_session = client->OpenSession(OneLayer());
  server_.cache().SetBootId(0xb002);
  const auto new_session = client->OpenSession(OneLayer());
  ASSERT_THAT(new_session, IsOk());
  EXPECT_EQ(new_session->boot_id(), 0xb002u);
  const RetrieveEntry mixed[] = {{.session = &*old_session}, {.session = &*new_session}};
  EXPECT_THAT(client->Retrieve(mixed, {}), StatusIs(absl::StatusCode::kFailedPrecondition));
  const RetrieveEntry old_only[] = {{.session = &*old_session}};
  EXPECT_TRUE(IsServerRestarted(client->Retrieve(old_only, {}).status()));
}

TEST_F(ClientTest, RepliesBeyondFourMebibytesArrive) {
  v1::Answer answer;
  answer.set_keys(std::string(12u << 20, 'k'));
  server_.cache().SetAnswer(answer);
  const auto client = Connect();
  const auto session = client->OpenSession(OneLayer());
  ASSERT_THAT(session, IsOk());
  const auto got = session->Retrieve({}, {});
  ASSERT_THAT(got, IsOk());
  EXPECT_EQ(got->keys().size(), 12u << 20);
}

TEST_F(ClientTest, SessionsOutliveTheirClient) {
  auto client = Connect();
  const auto session = client->OpenSession(OneLayer());
  ASSERT_THAT(session, IsOk());
  client.reset();
  EXPECT_THAT(session->KeepAlive(), IsOk());
}

TEST(ClientTokenTest, ATokenDoesNotCrossANetworkInTheClear) {
  const auto connect = [](const std::string& address, const std::string& token) {
    ConnectOptions options{.address = address, .token = token};
    options.timeout = std::chrono::milliseconds(1);
    options.retry.attempts_max = 1;
    return Client::Connect(options).status();
  };
  for (const char* address : {"10.0.0.1:7420", "cache.example:7420", "127.example.org:7420"}) {
    EXPECT_THAT(connect(address, "secret"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(address)));
    EXPECT_THAT(std::string(connect(address, "secret").message()), ::testing::Not(HasSubstr("secret")));
  }
  EXPECT_THAT(connect("127.0.0.1:1", "two words"), StatusIs(absl::StatusCode::kInvalidArgument));
  for (const char* address : {"127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/nowhere"}) {
    EXPECT_NE(connect(address, "secret").code(), absl::StatusCode::kFailedPrecondition) << address;
  }
}

}  // namespace
}  // namespace ctkvr::client
