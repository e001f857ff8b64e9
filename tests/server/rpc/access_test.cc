// SPDX-License-Identifier: Apache-2.0
//
// Proves who a caller is taken for, that rules follow their file while a bad one changes nothing, that quotas of calls
// hold, and that streams end with their caller's right to them.

#include "server/rpc/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "server/core/error.h"
#include "server/core/limits.h"
#include "tests/server/rpc/callers.h"
#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(AccessOffTest, EverybodyIsTheDefaultTenantAndMayAdminister) {
  rpc::Access access;
  const auto caller = access.Authenticate({}, {});
  ASSERT_TRUE(caller.ok());
  EXPECT_EQ(caller->tenant.id, kDefaultTenant);
  EXPECT_EQ(caller->tenant.name, "default");
  EXPECT_TRUE(access.AuthoriseAdmin(*caller).ok());
  EXPECT_TRUE(access.TakeCall(*caller, TimePoint()).ok());
  ASSERT_EQ(access.Tenants().size(), 1u);
  EXPECT_EQ(access.FindTenant("default"), kDefaultTenant);
  EXPECT_FALSE(access.FindTenant("somebody").has_value());
}

TEST(AccessOffTest, ARoleThatMayNotIsRefusedAndCounted) {
  rpc::Access access;
  EXPECT_EQ(access.AuthoriseAdmin({.role = rpc::Role::kData}).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(access.Sample({}).refusals[static_cast<size_t>(obs::AccessRefusal::kNotAdmin)], 1u);
}

// ---- Rules that change ---------------------------------------------------------------------------------------------

class Changing {
 public:
  TestServerOptions Options() {
    TestServerOptions options;
    options.access = [this]() -> absl::StatusOr<rpc::AccessRules> { return rules_; };
    options.wall_time = [this] { return now_; };
    return options;
  }

  absl::StatusOr<rpc::AccessRules> rules_ = MakeRules();
  rpc::WallTime now_ = rpc::WallTime() + std::chrono::hours(1);
};

class AccessTest : protected Changing, public SessionTest {
 protected:
  AccessTest() : SessionTest(Changing::Options()) {}

  absl::StatusOr<rpc::Caller> Ask(const std::string& token) {
    return server_.access().Authenticate({"Bearer " + token}, {});
  }
  // What the file says from now on.
  void Say(absl::StatusOr<rpc::AccessRules> rules) {
    rules_ = std::move(rules);
    server_.access().Refresh();
  }
  static rpc::AccessRules Without(const std::string& name) {
    rpc::AccessRules rules = MakeRules();
    std::erase_if(rules.tenants, [&](const rpc::TenantRule& rule) { return rule.name == name; });
    return rules;
  }
};

TEST_F(AccessTest, ATokenNamesItsTenantAndRole) {
  EXPECT_EQ(Ask(kRedToken)->tenant.name, "red");
  EXPECT_EQ(Ask(kRedToken)->role, rpc::Role::kData);
  EXPECT_EQ(Ask(kAdminToken)->tenant.name, "operators");
  EXPECT_EQ(Ask(kAdminToken)->role, rpc::Role::kAdmin);
  EXPECT_NE(Ask(kRedToken)->tenant.id, Ask(kBlueToken)->tenant.id);
  EXPECT_NE(Ask(kRedToken)->tenant.id, kDefaultTenant);
  for (const char* token : {kUnknownToken, kExpiredToken}) {
    EXPECT_EQ(Ask(token).status(), absl::UnauthenticatedError(rpc::Access::kRefusal)) << token;
  }
}

TEST_F(AccessTest, NamesOfTwoTenantsAreNobodys) {
  rpc::AccessRules rules = MakeRules();
  rules.tenants[1].certificates = {"blue.example"};
  Say(rules);
  EXPECT_EQ(server_.access().Authenticate({}, {"other", "red.example"})->tenant.name, "red");
  EXPECT_EQ(server_.access().Authenticate({}, {"red.example", "blue.example"}).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(server_.access().Authenticate({}, {"RED.example"}).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessTest, ATokenIsGoodUntilItsTime) {
  rpc::AccessRules rules = MakeRules();
  rules.tenants[0].tokens[0].expires = now_ + std::chrono::seconds(1);
  Say(rules);
  EXPECT_TRUE(Ask(kRedToken).ok());
  now_ += std::chrono::seconds(1);
  EXPECT_FALSE(Ask(kRedToken).ok());
}

TEST_F(AccessTest, RulesFollowTheFileAndABadOneChangesNothing) {
  const TenantId red = Ask(kRedToken)->tenant.id;
  Say(absl::InvalidArgumentError("access.toml:3: something is wrong"));
  Say(absl::InvalidArgumentError("access.toml:3: something is wrong"));
  EXPECT_EQ(Ask(kRedToken)->tenant.id, red);
  const std::string log = server_.log_text();
  EXPECT_THAT(log, HasSubstr("access.toml:3: something is wrong"));
  EXPECT_EQ(log.find("something is wrong"), log.rfind("something is wrong")) << "said once";
  Say(Without("blue"));
  EXPECT_FALSE(Ask(kBlueToken).ok());
  EXPECT_EQ(Ask(kRedToken)->tenant.id, red) << "the same tenant as before";
  EXPECT_THAT(server_.log_text(), HasSubstr("access_file_taken"));
  Say(MakeRules());
  EXPECT_TRUE(Ask(kBlueToken).ok());
}

TEST_F(AccessTest, ATenantThatComesBackHasItsSessions) {
  ASSERT_THAT(stub_->OpenSession(ContextOf(kRedToken).get(), MakeOpen("s"), &opened_), IsRpcOk());
  Say(Without("red"));
  server_.access().Refresh();
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("ctkvr_tenant_sessions{tenant=\"red\"} 1\n"));
  EXPECT_EQ(stub_->GetSession(ContextOf(kRedToken).get(), WithSession<v1::GetSessionRequest>("s"), &got_).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  Say(MakeRules());
  EXPECT_THAT(stub_->GetSession(ContextOf(kRedToken).get(), WithSession<v1::GetSessionRequest>("s"), &got_), IsRpcOk());
}

TEST_F(AccessTest, ATenantThatHoldsNothingLeavesNoSeries) {
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tenant=\"red\""));
  Say(Without("red"));
  server_.access().Refresh();
  EXPECT_THAT(server_.metrics().Text(), Not(HasSubstr("tenant=\"red\"")));
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tenant=\"blue\""));
  EXPECT_FALSE(server_.access().FindTenant("red").has_value());
}

// ---- Quotas --------------------------------------------------------------------------------------------------------

TEST_F(AccessTest, CallsAreHeldToTheRate) {
  rpc::AccessRules rules = MakeRules();
  rules.tenants[0].calls_per_second = 0.001;
  rules.tenants[0].calls_burst = 3;
  Say(rules);
  v1::GetServerInfoReply info;
  for (int i = 0; i < 3; ++i) ASSERT_THAT(stub_->GetServerInfo(ContextOf(kRedToken).get(), {}, &info), IsRpcOk());
  const grpc::Status refused = stub_->GetServerInfo(ContextOf(kRedToken).get(), {}, &info);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(refused), "RATE_QUOTA");
  const double seconds = RetrySecondsOf(refused);
  EXPECT_GT(seconds, 0);
  EXPECT_LE(seconds, 1000);
  EXPECT_THAT(stub_->GetServerInfo(ContextOf(kBlueToken).get(), {}, &info), IsRpcOk());
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("ctkvr_tenant_refusals_total{tenant=\"red\",quota=\"rate\"} 1\n"));
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("ctkvr_tenant_calls_total{tenant=\"red\"} 3\n"));
}

TEST_F(AccessTest, MessagesOfAStreamAreHeldToTheRate) {
  ASSERT_THAT(stub_->OpenSession(ContextOf(kRedToken).get(), MakeOpen("s"), &opened_), IsRpcOk());
  rpc::AccessRules rules = MakeRules();
  rules.tenants[0].calls_per_second = 0.001;
  rules.tenants[0].calls_burst = 1;
  Say(rules);
  const auto context = ContextOf(kRedToken);
  const auto stream = stub_->Decode(context.get());
  ASSERT_TRUE(stream->Write(MakeDecode("s", 0, 0, 1)));
  ASSERT_TRUE(stream->Write(MakeDecode("s", 0, 1, 2)));
  v1::DecodeReply first;
  v1::DecodeReply second;
  ASSERT_TRUE(stream->Read(&first));
  ASSERT_TRUE(stream->Read(&second));
  EXPECT_EQ(first.items(0).status().code(), 0) << first.items(0).status().message();
  EXPECT_EQ(second.items(0).status().code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_EQ(second.items(0).status().reason(), "RATE_QUOTA");
  EXPECT_EQ(second.items(0).status().metadata().count("retry_ms"), 1u);
  stream->WritesDone();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

TEST_F(AccessTest, SessionsAndMemoryAreHeldToTheQuota) {
  rpc::AccessRules rules = MakeRules();
  rules.tenants[0].quota = {.memory_bytes = 1};
  rules.tenants[1].quota = {.sessions = 1};
  Say(rules);
  const auto open = [&](const char* token, const char* id) {
    return stub_->OpenSession(ContextOf(token).get(), MakeOpen(id), &opened_);
  };
  const grpc::Status memory = open(kRedToken, "a");
  EXPECT_EQ(ReasonOf(memory), "MEMORY_QUOTA");
  EXPECT_GT(RetrySecondsOf(memory), 0);
  ASSERT_THAT(open(kBlueToken, "a"), IsRpcOk());
  const grpc::Status sessions = open(kBlueToken, "b");
  EXPECT_EQ(sessions.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(sessions), "SESSION_QUOTA");
  EXPECT_GT(RetrySecondsOf(sessions), 0);
}

// ---- Streams -------------------------------------------------------------------------------------------------------

TEST_F(AccessTest, ADecodeStreamEndsWithItsTokenOnceWhatWasReadIsAnswered) {
  ASSERT_THAT(stub_->OpenSession(ContextOf(kRedToken).get(), MakeOpen("s"), &opened_), IsRpcOk());
  const auto red_context = ContextOf(kRedToken);
  const auto red = stub_->Decode(red_context.get());
  const auto blue_context = ContextOf(kBlueToken);
  const auto blue = stub_->Decode(blue_context.get());
  v1::DecodeReply reply;
  ASSERT_TRUE(red->Write(MakeDecode("s", 0, 0, 1)));
  ASSERT_TRUE(red->Read(&reply));
  server_.AwaitMetric("ctkvr_rpc_in_flight{method=\"Decode\"}", 2);
  Say(Without("red"));
  EXPECT_FALSE(red->Read(&reply));
  EXPECT_EQ(red->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  server_.access().Refresh();
  ASSERT_TRUE(blue->Write(MakeDecode("s", 0, 0, 1)));
  ASSERT_TRUE(blue->Read(&reply)) << "another's stream goes on";
  EXPECT_EQ(reply.items(0).status().reason(), "SESSION_UNKNOWN");
  blue->WritesDone();
  EXPECT_THAT(blue->Finish(), IsRpcOk());
}

TEST_F(AccessTest, AnUploadEndsWhenItsTokensTimeIsOver) {
  rpc::AccessRules rules = MakeRules();
  rules.tenants[0].tokens[0].expires = now_ + std::chrono::hours(1);
  Say(rules);
  ASSERT_THAT(stub_->OpenSession(ContextOf(kRedToken).get(), MakeOpen("s"), &opened_), IsRpcOk());
  const auto context = ContextOf(kRedToken);
  v1::AppendStreamReply reply;
  const auto stream = stub_->AppendStream(context.get(), &reply);
  ASSERT_TRUE(stream->Write(MakeAppend("s", 0, 0, 10)));
  server_.AwaitMetric("ctkvr_rpc_message_seconds_count{method=\"AppendStream\"}", 1);
  now_ += std::chrono::hours(2);
  server_.access().Refresh();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

// ---- The file ------------------------------------------------------------------------------------------------------

TEST(AccessFromFileTest, TheFileIsReadAgainByItself) {
  const std::string path = ::testing::TempDir() + "/access_test." + std::to_string(::getpid());
  std::ofstream(path) << "red";
  TestServer server;
  obs::Log log({.level = obs::LogLevel::kOff});
  const auto parse = [](const std::string& text, const std::string&) -> absl::StatusOr<rpc::AccessRules> {
    rpc::AccessRules rules;
    rules.tenants.push_back({.name = text, .certificates = {text}});
    return rules;
  };
  {
    const auto access = rpc::Access::Create({.file = path, .parse = parse}, server.engine(), log);
    ASSERT_TRUE(access.ok());
    EXPECT_TRUE((*access)->FindTenant("red").has_value());
    std::ofstream(path + ".new") << "blue";
    std::filesystem::rename(path + ".new", path);
    while (!(*access)->FindTenant("blue").has_value()) std::this_thread::yield();
  }
  std::ofstream(path) << std::string(limits::kAccessFileBytesMax + 1, 'x');
  EXPECT_THAT(std::string(rpc::Access::Create({.file = path, .parse = parse}, server.engine(), log).status().message()),
              HasSubstr("the limit is"));
  std::filesystem::remove(path);
  EXPECT_THAT(std::string(rpc::Access::Create({.file = path, .parse = parse}, server.engine(), log).status().message()),
              HasSubstr("cannot be read"));
}

}  // namespace
}  // namespace ctkvr::testing
