// SPDX-License-Identifier: Apache-2.0
//
// Proves every call of service Admin over a connection: what it does, what it refuses, that it answers while lanes do
// not, and the line that each leaves in the log.

#include "server/rpc/admin_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using AdminStub = v1::Admin::Stub;

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// An Admin server beside a TestServer, and calls of it in one line.
class AdminCaller {
 public:
  explicit AdminCaller(TestServer& server) : server_(server) {
    auto admin = rpc::AdminServer::Start(
        {.address = "127.0.0.1:0", .version = "", .tls = {}}, server.edge(),
        {.version = "7.8.9", .drain = std::chrono::seconds(25), .start_drain = [this] { ++drains_; }});
    EXPECT_TRUE(admin.ok()) << admin.status();
    admin_ = *std::move(admin);
    stub_ = v1::Admin::NewStub(grpc::CreateChannel(admin_->address(), grpc::InsecureChannelCredentials()));
  }

  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (AdminStub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.AddMetadata("traceparent", kTraceparent);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    return ((*stub_).*method)(&context, request, reply);
  }
  // The last line of service Admin in the log.
  std::string LastAudit() {
    const std::string log = server_.log_text();
    const size_t at = log.rfind(" admin method=");
    return at == std::string::npos ? "" : log.substr(at, log.find('\n', at) - at);
  }
  int drains() const { return drains_; }

 private:
  TestServer& server_;
  std::atomic<int> drains_{0};
  std::unique_ptr<rpc::AdminServer> admin_;
  std::unique_ptr<AdminStub> stub_;
};

class AdminServiceTest : public SessionTest {
 protected:
  AdminServiceTest() : SessionTest({.slow_call = std::chrono::nanoseconds(1)}), admin_(server_) {}

  std::vector<std::string> Ids() {
    v1::ListTenantSessionsReply list;
    EXPECT_THAT(admin_.Call(&AdminStub::ListTenantSessions, v1::ListTenantSessionsRequest(), &list), IsRpcOk());
    std::vector<std::string> ids;
    for (const auto& session : list.sessions()) ids.push_back(session.session().session_id());
    return ids;
  }
  grpc::Status CloseIds(const std::vector<std::string>& ids, const std::string& tenant = "") {
    v1::CloseSessionsRequest request;
    request.set_tenant(tenant);
    request.mutable_session_ids()->Assign(ids.begin(), ids.end());
    close_.Clear();
    return admin_.Call(&AdminStub::CloseSessions, request, &close_);
  }

  AdminCaller admin_;
  v1::CloseSessionsReply close_;
};

TEST_F(AdminServiceTest, SessionsAreListedPageByPageWithTheirTenant) {
  for (const char* id : {"a", "b", "c"}) OpenWithTokens(id, 10);
  v1::ListTenantSessionsRequest request;
  request.set_tenant("default");
  request.set_page_size(2);
  v1::ListTenantSessionsReply list;
  ASSERT_THAT(admin_.Call(&AdminStub::ListTenantSessions, request, &list), IsRpcOk());
  ASSERT_EQ(list.sessions_size(), 2);
  EXPECT_EQ(list.sessions(0).tenant(), "default");
  EXPECT_EQ(list.sessions(0).session().session_id(), "a");
  EXPECT_EQ(list.sessions(0).session().length_max(), 10u);
  EXPECT_EQ(list.header().boot_id(), server_.engine().boot_id());
  request.set_page_token(list.next_page_token());
  ASSERT_THAT(admin_.Call(&AdminStub::ListTenantSessions, request, &list), IsRpcOk());
  ASSERT_EQ(list.sessions_size(), 1);
  EXPECT_EQ(list.sessions(0).session().session_id(), "c");
  EXPECT_EQ(list.next_page_token(), "");
  request.set_page_size(1001);
  EXPECT_THAT(admin_.Call(&AdminStub::ListTenantSessions, request, &list),
              IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "page_size"));
}

TEST_F(AdminServiceTest, SessionsAreClosedByIdAndTheRestIsSaid) {
  for (const char* id : {"a", "b", "c"}) OpenWithTokens(id, 10);
  const uint64_t reserved = server_.engine().memory().arena_reserved_bytes;
  ASSERT_THAT(CloseIds({"a", "nobody", "b"}), IsRpcOk());
  EXPECT_EQ(close_.closed(), 2u);
  EXPECT_EQ(close_.freed_bytes(), reserved - server_.engine().memory().arena_reserved_bytes);
  ASSERT_EQ(close_.failures_size(), 1);
  EXPECT_EQ(close_.failures(0).session_id(), "nobody");
  EXPECT_EQ(close_.failures(0).status().reason(), "SESSION_UNKNOWN");
  EXPECT_THAT(Ids(), ElementsAre("c"));
  EXPECT_THAT(Get("a"), IsRpc(grpc::StatusCode::NOT_FOUND, "was closed"));
}

// More than a page.
TEST_F(AdminServiceTest, ATenantsSessionsAreClosedAll) {
  constexpr int kSessions = 1001;
  for (int i = 0; i < kSessions; ++i) {
    v1::OpenSessionRequest open = MakeOpen("s" + std::to_string(i));
    open.mutable_options()->set_token_limit(1);
    const grpc::Status status = Open(open);
    if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) break;  // of this small arena
    ASSERT_THAT(status, IsRpcOk());
  }
  const auto open = static_cast<uint64_t>(server_.engine().stats().sessions.load());
  ASSERT_GT(open, 0u);
  ASSERT_THAT(CloseIds({}, "default"), IsRpcOk());
  EXPECT_EQ(close_.closed(), open);
  EXPECT_THAT(Ids(), ElementsAre());
  EXPECT_EQ(server_.engine().memory().arena_reserved_bytes, 0u);
}

TEST_F(AdminServiceTest, ClosingNothingInParticularIsRefused) {
  OpenWithTokens("a", 0);
  EXPECT_THAT(CloseIds({}), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "session_ids and tenant are empty"));
  EXPECT_THAT(CloseIds({"a", ""}), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "session_ids[1] is empty"));
  EXPECT_THAT(CloseIds({"a", std::string(129, 'x')}), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "session_ids[1]"));
  EXPECT_THAT(CloseIds({"a"}, "nobody"), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "tenant is \"nobody\""));
  EXPECT_THAT(CloseIds(std::vector<std::string>(1001, "a")),
              IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "session_ids is 1001; the limit is 1000"));
  EXPECT_THAT(Ids(), ElementsAre("a"));
}

TEST_F(AdminServiceTest, ADrainIsAskedForOnce) {
  OpenWithTokens("a", 0);
  v1::StartDrainReply reply;
  ASSERT_THAT(admin_.Call(&AdminStub::StartDrain, v1::StartDrainRequest(), &reply), IsRpcOk());
  EXPECT_FALSE(reply.draining_already());
  EXPECT_EQ(reply.drain_seconds(), 25u);
  EXPECT_EQ(reply.sessions(), 1u);
  ASSERT_THAT(admin_.Call(&AdminStub::StartDrain, v1::StartDrainRequest(), &reply), IsRpcOk());
  EXPECT_TRUE(reply.draining_already());
  EXPECT_EQ(admin_.drains(), 1);
}

TEST_F(AdminServiceTest, TheLogLevelIsSetAndAuditsStay) {
  v1::SetLogLevelRequest request;
  v1::SetLogLevelReply reply;
  for (int level : {0, 6, -1}) {
    request.set_level(static_cast<v1::LogLevel>(level));
    EXPECT_THAT(admin_.Call(&AdminStub::SetLogLevel, request, &reply),
                IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "level is " + std::to_string(level)));
  }
  request.set_level(v1::LOG_LEVEL_OFF);
  ASSERT_THAT(admin_.Call(&AdminStub::SetLogLevel, request, &reply), IsRpcOk());
  EXPECT_EQ(reply.previous(), v1::LOG_LEVEL_INFO);
  EXPECT_THAT(admin_.LastAudit(), HasSubstr("from info to off"));
  EXPECT_EQ(server_.edge().log.level(), obs::LogLevel::kOff);
  request.set_level(v1::LOG_LEVEL_INFO);
  ASSERT_THAT(admin_.Call(&AdminStub::SetLogLevel, request, &reply), IsRpcOk());
  EXPECT_EQ(reply.previous(), v1::LOG_LEVEL_OFF);
  EXPECT_THAT(admin_.LastAudit(), HasSubstr("from off to info"));
}

TEST_F(AdminServiceTest, TheStateIsTheEngines) {
  OpenWithTokens("a", 10);
  OpenWithTokens("b", 20);
  ASSERT_THAT(Retrieve(MakeRetrieve("b", 0, 19)), IsRpcOk());
  ASSERT_THAT(Close("a"), IsRpcOk());
  while (server_.slow_calls().count() < 6) std::this_thread::yield();  // a call's record comes after its reply
  v1::DumpStateReply state;
  ASSERT_THAT(admin_.Call(&AdminStub::DumpState, v1::DumpStateRequest(), &state), IsRpcOk());
  const EngineMemory memory = server_.engine().memory();
  EXPECT_EQ(state.version(), "7.8.9");
  EXPECT_EQ(state.device(), server_.engine().backend_info().device);
  EXPECT_GE(state.now().seconds(), state.start().seconds());
  EXPECT_FALSE(state.draining());
  EXPECT_TRUE(state.device_healthy());
  EXPECT_EQ(state.log_level(), v1::LOG_LEVEL_INFO);
  EXPECT_EQ(state.arena().bytes(), memory.arena_bytes);
  EXPECT_EQ(state.arena().free_bytes(), memory.arena_free_bytes);
  EXPECT_EQ(state.arena().reserved_bytes(), memory.arena_reserved_bytes);
  EXPECT_EQ(state.arena().held_bytes(), memory.arena_held_bytes);
  EXPECT_EQ(state.sessions().open(), 1u);
  EXPECT_EQ(state.sessions().opened(), 2u);
  EXPECT_EQ(state.sessions().closed(), 1u);
  EXPECT_EQ(state.held_tokens(), 20u);
  EXPECT_EQ(state.appended_tokens(), 30u);
  EXPECT_EQ(state.retrievals(), 1u);
  ASSERT_EQ(state.lanes_size(), 2);
  EXPECT_EQ(state.lanes(0).sessions() + state.lanes(1).sessions(), 1u);
  EXPECT_GT(state.lanes(0).planned_bytes() + state.lanes(1).planned_bytes(), 0u);
  EXPECT_GE(state.slow_calls(), 6u);
}

TEST_F(AdminServiceTest, SlowCallsSayWhereTheirTimeWent) {
  OpenWithTokens("a", 100);
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceparent);
  ASSERT_THAT(stub_->Retrieve(&context, MakeRetrieve("a", 7, 0), &retrieved_),
              IsRpc(grpc::StatusCode::OUT_OF_RANGE, ""));
  ASSERT_THAT(Retrieve(MakeRetrieve("a", 0, 99)), IsRpcOk());
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"OK\",method=\"Retrieve\"}", 1);
  v1::ListSlowCallsRequest request;
  request.set_method("Retrieve");
  v1::ListSlowCallsReply slow;
  do {
    ASSERT_THAT(admin_.Call(&AdminStub::ListSlowCalls, request, &slow), IsRpcOk());
  } while (slow.calls_size() < 2);  // a call's record comes after its reply
  const v1::SlowCall& good = slow.calls(0);
  EXPECT_EQ(good.method(), "Retrieve");
  EXPECT_EQ(good.code(), "OK");
  EXPECT_EQ(good.session_id(), "a");
  EXPECT_EQ(good.layer(), 0u);
  EXPECT_EQ(good.items(), 1u);
  EXPECT_EQ(good.trace_id(), "");
  EXPECT_GT(good.bytes_in(), 0u);
  EXPECT_GT(good.bytes_out(), 0u);
  std::vector<std::string> stages;
  uint64_t sum = 0;
  for (const auto& stage : good.stages()) {
    stages.push_back(stage.stage());
    sum += stage.us();
  }
  EXPECT_THAT(stages, UnorderedElementsAre("wait", "prepare", "candidates", "select", "gather"));
  EXPECT_LE(sum, good.duration_us());
  EXPECT_EQ(slow.calls(1).code(), "OUT_OF_RANGE");
  EXPECT_EQ(slow.calls(1).trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(slow.calls(1).span_id(), "00f067aa0ba902b7");
  EXPECT_THAT(server_.log_text(), HasSubstr("trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\" "
                                            "span_id=\"00f067aa0ba902b7\" message="));
  request.set_method("Nothing");
  EXPECT_THAT(admin_.Call(&AdminStub::ListSlowCalls, request, &slow),
              IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "method is \"Nothing\""));
}

TEST_F(AdminServiceTest, MessagesOfStreamsAreSlowCallsOfTheirOwn) {
  OpenWithTokens("a", 0);
  grpc::ClientContext append_context;
  v1::AppendStreamReply appended;
  auto writer = stub_->AppendStream(&append_context, &appended);
  for (uint32_t first : {0u, 10u}) ASSERT_TRUE(writer->Write(MakeAppend("a", 1, first, 10)));
  writer->WritesDone();
  ASSERT_THAT(writer->Finish(), IsRpcOk());
  grpc::ClientContext decode_context;
  auto stream = stub_->Decode(&decode_context);
  v1::DecodeReply reply;
  ASSERT_TRUE(stream->Write(MakeDecode("a", 1, 20, 1)));
  ASSERT_TRUE(stream->Read(&reply));
  v1::ListSlowCallsRequest request;
  v1::ListSlowCallsReply slow;
  for (const auto& [method, count] : {std::pair{"AppendStream", 2}, std::pair{"Decode", 1}}) {
    request.set_method(method);
    ASSERT_THAT(admin_.Call(&AdminStub::ListSlowCalls, request, &slow), IsRpcOk());
    ASSERT_EQ(slow.calls_size(), count) << method;  // while the stream of Decode is open
    EXPECT_EQ(slow.calls(0).session_id(), "a");
    EXPECT_EQ(slow.calls(0).layer(), 1u);
    std::vector<std::string> stages;
    for (const auto& stage : slow.calls(0).stages()) stages.push_back(stage.stage());
    EXPECT_THAT(stages, AllOf(::testing::Contains("wait"), ::testing::Contains("append")));
  }
  stream->WritesDone();
  EXPECT_THAT(stream->Finish(), IsRpcOk());
}

TEST_F(AdminServiceTest, EveryCallIsAuditedWithWhoWhatAndResult) {
  OpenWithTokens("a\n\"b", 0);
  ASSERT_THAT(CloseIds({"a\n\"b"}), IsRpcOk());
  EXPECT_THAT(admin_.LastAudit(),
              AllOf(HasSubstr("method=\"CloseSessions\" code=\"OK\" tenant=\"default\" peer=\"ipv4:127.0.0.1:"),
                    HasSubstr(R"(request="{\"session_ids\":[\"a\\n\\\"b\"]}")"), HasSubstr("1 sessions closed"),
                    HasSubstr("trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"")));
  EXPECT_THAT(CloseIds({}), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, ""));
  EXPECT_THAT(admin_.LastAudit(), AllOf(HasSubstr("code=\"INVALID_ARGUMENT\""), HasSubstr("message=\"session_ids")));
  EXPECT_THAT(server_.metrics().Text(),
              AllOf(HasSubstr("ctkvr_admin_calls_total{code=\"OK\",method=\"CloseSessions\"} 1\n"),
                    HasSubstr("ctkvr_admin_calls_total{code=\"INVALID_ARGUMENT\",method=\"CloseSessions\"} 1\n")));
}

// Lanes that run only when the test says so.
class StuckAdminTest : public DrivenSessionTest {
 protected:
  StuckAdminTest() : admin_(server_) {}
  AdminCaller admin_;
};

TEST_F(StuckAdminTest, TheStateIsToldWhileALaneDoesNotAnswer) {
  OpenDriven("a");
  auto waiting = std::async(std::launch::async, [this] { return Get("a"); });
  server_.AwaitQueued(1);
  clock().Advance(std::chrono::seconds(7));
  v1::DumpStateReply state;
  ASSERT_THAT(admin_.Call(&AdminStub::DumpState, v1::DumpStateRequest(), &state), IsRpcOk());
  ASSERT_EQ(state.lanes_size(), 1);
  EXPECT_EQ(state.lanes(0).queued_items(), 1u);
  EXPECT_EQ(state.lanes(0).oldest_wait_us(), 7'000'000u);
  EXPECT_EQ(state.lanes(0).working_for_us(), 0u);
  EXPECT_EQ(state.lanes(0).sessions(), 1u);
  EXPECT_EQ(state.queue_items_max(), 64u);
  while (waiting.wait_for(std::chrono::seconds(0)) != std::future_status::ready) RunLanes();
  EXPECT_THAT(waiting.get(), IsRpcOk());
  ASSERT_THAT(admin_.Call(&AdminStub::DumpState, v1::DumpStateRequest(), &state), IsRpcOk());
  EXPECT_EQ(state.lanes(0).queued_items(), 0u);
  EXPECT_EQ(state.lanes(0).oldest_wait_us(), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
