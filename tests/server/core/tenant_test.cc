// SPDX-License-Identifier: Apache-2.0
//
// Proves that to a call there are no sessions but its tenant's: every call answers for another tenant's session word
// for word as for one that never was, and nothing happens to that session; and that quotas hold through the engine.

#include "server/core/tenant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/core/error.h"
#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

SessionConfig TinyConfig() { return SmallConfig(SmallLayer(), 256); }

class TenantTest : public ::testing::Test {
 protected:
  absl::StatusOr<SessionInfo> Open(TenantId tenant, const std::string& id) {
    return harness_.Await<SessionInfo>(
        [&](auto done) { engine().Open(id, TinyConfig(), {.tenant = tenant}, std::move(done)); });
  }
  absl::StatusOr<SessionInfo> Get(TenantId tenant, const std::string& id) {
    return harness_.Await<SessionInfo>([&](auto done) { engine().Get(Ref(id), {.tenant = tenant}, std::move(done)); });
  }
  std::vector<std::string> List(TenantId tenant) {
    const auto page = harness_.Await<std::vector<SessionSummary>>(
        [&](auto done) { engine().List("", 10, {.tenant = tenant}, std::move(done)); });
    std::vector<std::string> ids;
    for (const SessionSummary& summary : page.value()) ids.push_back(summary.id);
    return ids;
  }
  absl::Status Append(TenantId tenant, const SessionRef& session, uint32_t first, uint32_t tokens) {
    const OwnedChunk chunk = tokens_.Append(first, tokens);
    StepRequest request{.session = session};
    request.chunk = chunk.chunk;
    return harness_.Step({request}, {.tenant = tenant})[0].append.status();
  }
  // What every call that names a session answers.
  std::vector<absl::Status> AskEverything(TenantId tenant, const SessionRef& session) {
    const CallContext context{.tenant = tenant};
    const auto asked = tokens_.Ask(0);
    StepRequest question{.session = session};
    question.query = asked.query;
    return {
        Append(tenant, session, 0, 3),
        harness_.Step({question}, context)[0].answer.status(),
        harness_.Await<SessionInfo>([&](auto done) { engine().Get(session, context, std::move(done)); }).status(),
        harness_.Await<LeaseResult>([&](auto done) { engine().KeepAlive(session, context, std::move(done)); }).status(),
        harness_.Await<TruncateResult>([&](auto done) { engine().Truncate(session, 0, context, std::move(done)); })
            .status(),
        harness_.Await<MaintainResult>([&](auto done) { engine().Maintain(session, {}, context, std::move(done)); })
            .status(),
        harness_.Await<CloseResult>([&](auto done) { engine().Close(session, context, std::move(done)); }).status()};
  }
  Engine& engine() { return harness_.engine(); }

  Harness harness_;
  const Tokens tokens_{TinyConfig().layers[0], DType::kF16, 1};
};

TEST_F(TenantTest, AnothersSessionAnswersAsIfItHadNeverBeen) {
  const auto opened = Open(1, "s");
  ASSERT_THAT(opened, IsOk());
  ASSERT_THAT(Append(1, Ref("s"), 0, 5), IsOk());
  // What was overheard of the session is of no use either.
  SessionRef replayed = Ref("s");
  replayed.epoch = opened->epoch;
  for (const SessionRef& ref : {Ref("s"), replayed}) {
    SessionRef never = ref;
    never.id = "t";
    const std::vector<absl::Status> anothers = AskEverything(2, ref);
    const std::vector<absl::Status> nobodys = AskEverything(2, never);
    for (size_t call = 0; call < anothers.size(); ++call) {
      EXPECT_EQ(anothers[call].code(), absl::StatusCode::kNotFound) << call;
      std::string text(nobodys[call].message());
      text.replace(text.find("\"t\""), 3, "\"s\"");
      EXPECT_EQ(anothers[call].message(), text) << call;
      EXPECT_EQ(GetErrorDetail(anothers[call]).reason, kReasonSessionUnknown) << call;
      EXPECT_THAT(GetErrorDetail(anothers[call]).metadata, IsEmpty()) << call;
    }
  }
  EXPECT_THAT(List(2), IsEmpty());
  const auto info = Get(1, "s");
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->layers[0].length, 5u) << "nothing of it was changed";
  EXPECT_EQ(info->epoch, opened->epoch);
}

TEST_F(TenantTest, AnothersEndedSessionAnswersAsIfItHadNeverBeen) {
  ASSERT_THAT(Open(1, "s"), IsOk());
  const std::vector<absl::Status> own = AskEverything(1, Ref("s"));
  EXPECT_THAT(own.back(), IsOk()) << "closed";
  EXPECT_EQ(GetErrorDetail(Get(1, "s").status()).reason, kReasonSessionClosed);
  EXPECT_EQ(GetErrorDetail(Get(2, "s").status()).reason, kReasonSessionUnknown);
}

TEST_F(TenantTest, TwoTenantsHaveSessionsOfOneId) {
  ASSERT_THAT(Open(1, "s"), IsOk());
  ASSERT_THAT(Open(2, "s"), IsOk());
  EXPECT_THAT(Open(2, "s"), StatusIs(absl::StatusCode::kAlreadyExists));
  ASSERT_THAT(Open(2, "t"), IsOk());
  ASSERT_THAT(Append(1, Ref("s"), 0, 3), IsOk());
  ASSERT_THAT(Append(2, Ref("s"), 0, 7), IsOk());
  EXPECT_EQ(Get(1, "s")->layers[0].length, 3u);
  EXPECT_EQ(Get(2, "s")->layers[0].length, 7u);
  EXPECT_THAT(List(1), ElementsAre("s"));
  EXPECT_THAT(List(2), ElementsAre("s", "t"));
  EXPECT_THAT(List(kDefaultTenant), IsEmpty());
  EXPECT_THAT(AskEverything(1, Ref("s")).back(), IsOk());
  EXPECT_EQ(Get(2, "s")->layers[0].length, 7u);
}

TEST_F(TenantTest, MemoryAndSessionsAreHeldToTheQuota) {
  const uint64_t bytes = Open(1, "first")->memory.reserved_bytes;
  ASSERT_GT(bytes, 0u);
  engine().SetTenantQuotas({{1, {.memory_bytes = 2 * bytes}}, {2, {.sessions = 1}}});
  ASSERT_THAT(Open(1, "second"), IsOk());
  const auto full = Open(1, "third");
  EXPECT_THAT(full, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(GetErrorDetail(full.status()).reason, kReasonMemoryQuota);
  EXPECT_EQ(engine().tenant_usage().at(1).memory_bytes, 2 * bytes);
  ASSERT_THAT(Open(2, "first"), IsOk());
  EXPECT_EQ(GetErrorDetail(Open(2, "second").status()).reason, kReasonSessionQuota);
  EXPECT_THAT(Open(2, "first"), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(engine().tenant_usage().at(2).sessions, 1u) << "refused opens leave nothing";
  EXPECT_THAT(AskEverything(1, Ref("first")).back(), IsOk());
  EXPECT_THAT(Open(1, "third"), IsOk()) << "what a session held is there again once it is closed";
}

TEST_F(TenantTest, WhatALeaseEndsIsGivenBack) {
  engine().SetTenantQuotas({{1, {.sessions = 1}}});
  ASSERT_THAT(Open(1, "s"), IsOk());
  EXPECT_THAT(Open(1, "t"), StatusIs(absl::StatusCode::kResourceExhausted));
  harness_.clock().Advance(std::chrono::seconds(601));
  harness_.RunAll();
  EXPECT_THAT(Open(1, "t"), IsOk());
}

TEST_F(TenantTest, OneTenantsWaitingCallsLeaveRoomForOthers) {
  ASSERT_THAT(Open(1, "s"), IsOk());
  ASSERT_THAT(Open(2, "s"), IsOk());
  engine().SetTenantQuotas({{1, {.queued_calls = 2}}});
  std::vector<absl::Status> answers;
  const auto note = [&](const auto& result) { answers.push_back(result.status()); };
  for (int i = 0; i < 3; ++i) engine().Get(Ref("s"), {.tenant = 1}, note);
  ASSERT_EQ(answers.size(), 1u) << "the third is refused at once";
  EXPECT_EQ(GetErrorDetail(answers[0]).reason, kReasonQueueQuota);
  engine().Get(Ref("s"), {.tenant = 2}, note);
  harness_.RunAll();
  ASSERT_EQ(answers.size(), 4u);
  for (size_t i = 1; i < 4; ++i) EXPECT_THAT(answers[i], IsOk());
  EXPECT_EQ(engine().tenant_usage().at(1).queued_calls, 0u);
  engine().Get(Ref("s"), {.tenant = 1}, note);
  EXPECT_EQ(answers.size(), 4u) << "taken";
  harness_.RunAll();
}

}  // namespace
}  // namespace ctkvr::testing
