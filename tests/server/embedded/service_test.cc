// SPDX-License-Identifier: Apache-2.0

#include "server/embedded/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/core/limits.h"
#include "tests/server/embedded/calls.h"

namespace ctkvr::embedded {
namespace {

using ::testing::HasSubstr;
using namespace ctkvr::testing;  // NOLINT: the messages

class ServiceTest : public ::testing::Test {
 protected:
  const std::unique_ptr<Service> service_ = SmallService();
};

TEST_F(ServiceTest, ASessionLivesFromOpenToClose) {
  const Outcome opened = Call(*service_, "OpenSession", MakeOpen("a"));
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  EXPECT_EQ(As<v1::OpenSessionReply>(opened).session().session_id(), "a");
  EXPECT_EQ(As<v1::OpenSessionReply>(opened).header().boot_id(), service_->engine().boot_id());

  const Outcome appended = Call(*service_, "Append", MakeAppend("a", 0, 0, 40));
  ASSERT_TRUE(appended.status.ok()) << appended.status;
  EXPECT_EQ(As<v1::AppendReply>(appended).length(), 40u);
  EXPECT_FALSE(As<v1::AppendReply>(appended).repeated());
  EXPECT_TRUE(As<v1::AppendReply>(Call(*service_, "Append", MakeAppend("a", 0, 0, 40))).repeated());

  const Outcome found = Call(*service_, "Retrieve", MakeRetrieve("a", 0, 39));
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_EQ(As<v1::RetrieveReply>(found).items(0).answer().counts_size(), static_cast<int>(kKvHeads));
  EXPECT_EQ(As<v1::RetrieveReply>(found).header().session_epoch(), As<v1::OpenSessionReply>(opened).session().epoch());

  v1::ListSessionsRequest list;
  EXPECT_EQ(As<v1::ListSessionsReply>(Call(*service_, "ListSessions", list)).sessions_size(), 1);
  v1::TruncateSessionRequest truncate;
  truncate.mutable_session()->set_session_id("a");
  EXPECT_EQ(As<v1::TruncateSessionReply>(Call(*service_, "TruncateSession", truncate)).removed_tokens(0), 40u);
  v1::CloseSessionRequest close;
  close.mutable_session()->set_session_id("a");
  EXPECT_GT(As<v1::CloseSessionReply>(Call(*service_, "CloseSession", close)).freed_bytes(), 0u);
  EXPECT_EQ(Call(*service_, "CloseSession", close).status.code(), absl::StatusCode::kNotFound);
}

TEST_F(ServiceTest, SaysItsVersionAndLimits) {
  const Outcome info = Call(*service_, "GetServerInfo", v1::GetServerInfoRequest());
  ASSERT_TRUE(info.status.ok());
  EXPECT_EQ(As<v1::GetServerInfoReply>(info).version(), "1.2.3");
  EXPECT_EQ(As<v1::GetServerInfoReply>(info).limits().message_bytes_max(), limits::kMessageBytesMax);
}

TEST_F(ServiceTest, AnUnknownCallIsNotServed) {
  const Outcome outcome = Call(*service_, "Dance", v1::GetServerInfoRequest());
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("Dance is not served"));
  EXPECT_EQ(outcome.reply, nullptr);
}

TEST_F(ServiceTest, BytesThatAreNoMessageAreRefused) {
  const Outcome outcome = Await([&](Done done) { service_->Call("Append", "\x0f garbage", {}, std::move(done)); });
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("cannot be parsed as ctkvr.v1.AppendRequest"));
}

TEST_F(ServiceTest, AMessageOverTheLimitIsRefusedBeforeItIsParsed) {
  const std::string bytes(limits::kMessageBytesMax + 1, '\0');
  const Outcome outcome = Await([&](Done done) { service_->Call("Append", bytes, {}, std::move(done)); });
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("67108865 vs. 67108864"));
}

TEST_F(ServiceTest, ADeadlineAndACancellationReachTheEngine) {
  ASSERT_TRUE(Call(*service_, "OpenSession", MakeOpen("a")).status.ok());
  const CallContext late = {.deadline = TimePoint::min()};
  EXPECT_EQ(Call(*service_, "Append", MakeAppend("a", 0, 0, 1), late).status.code(),
            absl::StatusCode::kDeadlineExceeded);
  const CallContext gone = {.cancelled = [] { return true; }};
  EXPECT_EQ(Call(*service_, "Append", MakeAppend("a", 0, 0, 1), gone).status.code(), absl::StatusCode::kCancelled);
}

TEST(ServiceSettingsTest, WrongSettingsAreNamed) {
  const auto refusal = [](const std::string& name, const std::string& text) {
    const auto service = Service::Create({{name, text}}, "1");
    EXPECT_EQ(service.status().code(), absl::StatusCode::kInvalidArgument) << name;
    return std::string(service.status().message());
  };
  EXPECT_THAT(refusal("listen_address", "a:1"), HasSubstr("\"listen_address\" is no setting of an engine"));
  EXPECT_THAT(refusal("lanes", "1000"), HasSubstr("lanes is \"1000\"; it must be"));
  EXPECT_THAT(refusal("arena_bytes", "much"), HasSubstr("arena_bytes"));
  EXPECT_THAT(refusal("backend", "abacus"), HasSubstr("abacus"));
}

}  // namespace
}  // namespace ctkvr::embedded
