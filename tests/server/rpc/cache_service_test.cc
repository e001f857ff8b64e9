// SPDX-License-Identifier: Apache-2.0
//
// Proves, call by call and over a real connection, every code that proto/ctkvr/v1/cache.proto promises, with the
// details that a client acts on, and that answers carry what was appended.

#include "server/rpc/cache_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <thread>

#include "server/core/limits.h"
#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CacheServiceTest : public SessionTest {};

// ---- The server and its sessions ---------------------------------------------------------------------------------

TEST_F(CacheServiceTest, ServerInfoTellsVersionLimitsAndWhatIsServed) {
  v1::GetServerInfoReply info;
  ASSERT_THAT(Call(&Stub::GetServerInfo, v1::GetServerInfoRequest(), &info), IsRpcOk());
  EXPECT_EQ(info.version(), "test");
  EXPECT_EQ(info.header().boot_id(), server_.engine().boot_id());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_NE(info.device(), "");
  EXPECT_EQ(info.lanes(), 2u);
  EXPECT_FALSE(info.draining());
  EXPECT_EQ(info.arena_bytes(), server_.engine().memory().arena_bytes);
  EXPECT_EQ(info.arena_free_bytes(), server_.engine().memory().arena_free_bytes);
  EXPECT_EQ(info.limits().message_bytes_max(), limits::kMessageBytesMax);
  EXPECT_EQ(info.limits().k_tokens_max(), limits::kTokensMax);
  EXPECT_EQ(info.limits().magnitude_max(), limits::kMagnitudeMax);
  EXPECT_THAT(info.sources(),
              ElementsAre(v1::SOURCE_DENSE, v1::SOURCE_EXACT, v1::SOURCE_SKETCH, v1::SOURCE_QUERY_CENTROIDS,
                          v1::SOURCE_KEY_CENTROIDS, v1::SOURCE_KEY_CENTROIDS_SKETCH, v1::SOURCE_AUTO));
  EXPECT_THAT(info.formats(), ElementsAre(v1::FORMAT_F32, v1::FORMAT_F16, v1::FORMAT_BF16, v1::FORMAT_K8V8,
                                          v1::FORMAT_K8V4, v1::FORMAT_K6V4));
}

TEST_F(CacheServiceTest, EveryLimitIsTold) {
  v1::GetServerInfoReply info;
  ASSERT_THAT(Call(&Stub::GetServerInfo, v1::GetServerInfoRequest(), &info), IsRpcOk());
  const auto* descriptor = v1::ServerLimits::descriptor();
  const auto* reflection = info.limits().GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    EXPECT_TRUE(reflection->HasField(info.limits(), descriptor->field(i))) << descriptor->field(i)->name();
  }
}

TEST_F(CacheServiceTest, AnOpenedSessionIsToldWithEveryDefault) {
  ASSERT_THAT(Open(MakeOpen("a")), IsRpcOk());
  EXPECT_EQ(opened_.header().boot_id(), server_.engine().boot_id());
  EXPECT_NE(opened_.header().session_epoch(), 0u);
  EXPECT_EQ(opened_.session().epoch(), opened_.header().session_epoch());
  EXPECT_EQ(opened_.session().session_id(), "a");
  EXPECT_EQ(opened_.session().options().geometry().layers(), kLayers);
  EXPECT_EQ(opened_.session().options().selection().source(), v1::SOURCE_EXACT);
  EXPECT_EQ(opened_.session().options().selection().sink_tokens(), 4u);
  EXPECT_EQ(opened_.session().layers_size(), static_cast<int>(kLayers));
  EXPECT_EQ(opened_.session().lease_remaining_seconds(), 600u);
  EXPECT_GT(opened_.session().memory().reserved_bytes(), 0u);
}

TEST_F(CacheServiceTest, ASessionWithoutAnIdGetsOne) {
  ASSERT_THAT(Open(MakeOpen("")), IsRpcOk());
  EXPECT_NE(opened_.session().session_id(), "");
  EXPECT_THAT(Get(opened_.session().session_id()), IsRpcOk());
}

TEST_F(CacheServiceTest, AnIdInUseIsRefused) {
  ASSERT_THAT(Open(MakeOpen("a")), IsRpcOk());
  EXPECT_THAT(Open(MakeOpen("a")), IsRpc(grpc::StatusCode::ALREADY_EXISTS, "\"a\""));
}

TEST_F(CacheServiceTest, ASessionThatDoesNotFitIsRefusedWithARetry) {
  v1::OpenSessionRequest request = MakeOpen("a");
  request.mutable_options()->set_token_limit(limits::kTokenLimitMax);
  const grpc::Status status = Open(request);
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "bytes"));
  EXPECT_EQ(ReasonOf(status), "ARENA_FULL");
  EXPECT_EQ(RetrySecondsOf(status), 1);
  EXPECT_THAT(Get("a"), IsRpc(grpc::StatusCode::NOT_FOUND, ""));
}

TEST_F(CacheServiceTest, WrongOptionsAreRefusedByTheCodecAndByTheEngine) {
  v1::OpenSessionRequest request = MakeOpen("a");
  request.mutable_options()->set_format(static_cast<v1::Format>(99));
  EXPECT_THAT(Open(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "options.format is 99"));
  request = MakeOpen("a");
  request.mutable_options()->mutable_selection()->set_k_tokens(0);
  EXPECT_THAT(Open(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "k_tokens is 0"));
  request.mutable_options()->mutable_selection()->set_k_tokens(limits::kTokensMax + 1);
  EXPECT_THAT(Open(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "8192"));
  request = MakeOpen("a");
  request.mutable_options()->mutable_geometry()->set_q_heads(5);
  EXPECT_THAT(Open(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "q_heads"));
  EXPECT_THAT(Open(MakeOpen(std::string(129, 'x'))), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "129"));
  EXPECT_EQ(server_.engine().stats().sessions_opened.load(), 0u);
}

TEST_F(CacheServiceTest, AnOptionThatIsNotServedIsUnimplemented) {
  v1::OpenSessionRequest request = MakeOpen("a");
  request.mutable_options()->set_value_tier(v1::VALUE_TIER_HOST);
  EXPECT_THAT(Open(request), IsRpc(grpc::StatusCode::UNIMPLEMENTED, "VALUE_TIER_HOST"));
}

TEST_F(CacheServiceTest, ClosingFreesEverythingAndASecondCloseFindsNothing) {
  const uint64_t free_before = server_.engine().memory().arena_free_bytes;
  OpenWithTokens("a", 100);
  ASSERT_THAT(Close("a"), IsRpcOk());
  EXPECT_EQ(closed_.header().session_epoch(), opened_.session().epoch());
  EXPECT_EQ(closed_.freed_bytes(), opened_.session().memory().reserved_bytes());
  EXPECT_EQ(server_.engine().memory().arena_free_bytes, free_before);
  const grpc::Status again = Close("a");
  EXPECT_THAT(again, IsRpc(grpc::StatusCode::NOT_FOUND, "closed"));
  EXPECT_EQ(ReasonOf(again), "SESSION_CLOSED");
}

TEST_F(CacheServiceTest, TruncateForgetsFromItsLengthOn) {
  OpenWithTokens("a", 20);
  auto request = WithSession<v1::TruncateSessionRequest>("a");
  request.set_length(0);
  v1::TruncateSessionReply reply;
  ASSERT_THAT(Call(&Stub::TruncateSession, request, &reply), IsRpcOk());
  EXPECT_THAT(reply.removed_tokens(), ElementsAre(20, 0));
  EXPECT_EQ(reply.header().session_epoch(), opened_.session().epoch());
  request.set_length(5);
  const grpc::Status status = Call(&Stub::TruncateSession, request, &reply);
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::FAILED_PRECONDITION, "5"));
  EXPECT_EQ(ReasonOf(status), "SHORTER_LAYER");
}

TEST_F(CacheServiceTest, GetTellsLengthsMemoryAndCodecs) {
  OpenWithTokens("a", 1000, v1::FORMAT_K8V4);
  ASSERT_THAT(Get("a"), IsRpcOk());
  const v1::SessionInfo& info = got_.session();
  EXPECT_EQ(info.appended_tokens(), 1000u);
  EXPECT_EQ(info.layers(0).length(), 1000u);
  EXPECT_EQ(info.layers(1).length(), 0u);
  EXPECT_EQ(info.layers(1).layer(), 1u);
  EXPECT_EQ(info.layers(0).codec().format(), v1::FORMAT_K8V4);
  EXPECT_EQ(info.layers(0).codec().code_generation(), 1u);
  EXPECT_THAT(info.layers(0).codec().key_mean().dims(), ElementsAre(kKvHeads, kHeadDim));
  EXPECT_EQ(info.layers(0).codec().key_mean().data().size(), kKvHeads * kHeadDim * sizeof(float));
  EXPECT_EQ(info.layers(1).codec().code_generation(), 0u);
  EXPECT_EQ(info.layers(0).selection().source(), v1::SOURCE_KEY_CENTROIDS_SKETCH);
  EXPECT_FLOAT_EQ(info.layers(0).softmax().softmax_scale(), 1 / std::sqrt(static_cast<float>(kHeadDim)));
  const v1::SessionMemory& memory = info.memory();
  EXPECT_EQ(memory.held_bytes(),
            memory.page_bytes() + memory.raw_bytes() + memory.index_bytes() + memory.state_bytes());
  EXPECT_DOUBLE_EQ(memory.bytes_per_token_head(), static_cast<double>(memory.page_bytes()) / (1000 * kKvHeads));
  EXPECT_DOUBLE_EQ(memory.share_of_f32(),
                   static_cast<double>(memory.held_bytes()) / (1000.0 * kKvHeads * (kHeadDim + kValueDim) * 4));
}

TEST_F(CacheServiceTest, SessionsAreListedInPages) {
  for (const char* id : {"c", "a", "b"}) ASSERT_THAT(Open(MakeOpen(id)), IsRpcOk());
  v1::ListSessionsRequest request;
  request.set_page_size(2);
  v1::ListSessionsReply first;
  ASSERT_THAT(Call(&Stub::ListSessions, request, &first), IsRpcOk());
  ASSERT_EQ(first.sessions_size(), 2);
  EXPECT_EQ(first.sessions(0).session_id(), "a");
  EXPECT_EQ(first.sessions(1).session_id(), "b");
  EXPECT_EQ(first.sessions(0).token_limit(), kTokenLimit);
  EXPECT_NE(first.sessions(0).epoch(), 0u);
  request.set_page_token(first.next_page_token());
  v1::ListSessionsReply second;
  ASSERT_THAT(Call(&Stub::ListSessions, request, &second), IsRpcOk());
  ASSERT_EQ(second.sessions_size(), 1);
  EXPECT_EQ(second.sessions(0).session_id(), "c");
  EXPECT_EQ(second.next_page_token(), "");
}

TEST_F(CacheServiceTest, TheLargestPageIsServedAndALargerOneRefused) {
  v1::ListSessionsRequest request;
  request.set_page_size(1000);
  v1::ListSessionsReply reply;
  EXPECT_THAT(Call(&Stub::ListSessions, request, &reply), IsRpcOk());
  request.set_page_size(1001);
  EXPECT_THAT(Call(&Stub::ListSessions, request, &reply), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "1000"));
}

TEST_F(CacheServiceTest, KeepAliveTellsTheLease) {
  ASSERT_THAT(Open(MakeOpen("a")), IsRpcOk());
  v1::KeepAliveReply reply;
  ASSERT_THAT(Call(&Stub::KeepAlive, WithSession<v1::KeepAliveRequest>("a"), &reply), IsRpcOk());
  EXPECT_EQ(reply.lease_remaining_seconds(), 600u);
  EXPECT_EQ(reply.header().session_epoch(), opened_.session().epoch());
}

TEST_F(CacheServiceTest, MaintainTellsIndexedLengthsAndRefusesALayerThatIsNotThere) {
  OpenWithTokens("a", 100);
  auto request = WithSession<v1::MaintainSessionRequest>("a");
  v1::MaintainSessionReply reply;
  ASSERT_THAT(Call(&Stub::MaintainSession, request, &reply), IsRpcOk());
  EXPECT_EQ(reply.indexed_length_size(), static_cast<int>(kLayers));
  request.add_layers(kLayers);
  const grpc::Status status = Call(&Stub::MaintainSession, request, &reply);
  EXPECT_THAT(status.error_code(),
              ::testing::AnyOf(grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::OUT_OF_RANGE));
}

TEST_F(CacheServiceTest, CallsThatAreNotServedSaySo) {
  v1::ForkSessionReply forked;
  EXPECT_THAT(Call(&Stub::ForkSession, v1::ForkSessionRequest(), &forked),
              IsRpc(grpc::StatusCode::UNIMPLEMENTED, "ForkSession is not served"));
  v1::SnapshotSessionReply snapshot;
  EXPECT_THAT(Call(&Stub::SnapshotSession, v1::SnapshotSessionRequest(), &snapshot),
              IsRpc(grpc::StatusCode::UNIMPLEMENTED, "SnapshotSession is not served"));
  v1::RestoreSessionReply restored;
  EXPECT_THAT(Call(&Stub::RestoreSession, v1::RestoreSessionRequest(), &restored),
              IsRpc(grpc::StatusCode::UNIMPLEMENTED, "RestoreSession is not served"));
}

// ---- Every call that names a session -----------------------------------------------------------------------------

// Each such call as a function of the session it names.
using NamedCall = std::function<grpc::Status(v1::Cache::Stub&, const v1::SessionRef&)>;
std::vector<std::pair<const char*, NamedCall>> NamedCalls() {
  const auto simple = [](auto method, auto request, auto reply) {
    return [=](v1::Cache::Stub& stub, const v1::SessionRef& ref) mutable {
      grpc::ClientContext context;
      *request.mutable_session() = ref;
      return (stub.*method)(&context, request, &reply);
    };
  };
  using Stub = v1::Cache::Stub;
  return {
      {"CloseSession", simple(&Stub::CloseSession, v1::CloseSessionRequest(), v1::CloseSessionReply())},
      {"TruncateSession", simple(&Stub::TruncateSession, v1::TruncateSessionRequest(), v1::TruncateSessionReply())},
      {"GetSession", simple(&Stub::GetSession, v1::GetSessionRequest(), v1::GetSessionReply())},
      {"KeepAlive", simple(&Stub::KeepAlive, v1::KeepAliveRequest(), v1::KeepAliveReply())},
      {"MaintainSession", simple(&Stub::MaintainSession, v1::MaintainSessionRequest(), v1::MaintainSessionReply())},
      {"Append", simple(&Stub::Append, MakeAppend("", 0, 0, 1), v1::AppendReply())},
      {"Retrieve",
       [](v1::Cache::Stub& stub, const v1::SessionRef& ref) {
         v1::RetrieveRequest request = MakeRetrieve("", 0, 0);
         *request.mutable_items(0)->mutable_session() = ref;
         v1::RetrieveReply reply;
         grpc::ClientContext context;
         return stub.Retrieve(&context, request, &reply);
       }},
      {"AppendStream",
       [](v1::Cache::Stub& stub, const v1::SessionRef& ref) {
         v1::AppendRequest request = MakeAppend("", 0, 0, 1);
         *request.mutable_session() = ref;
         v1::AppendStreamReply reply;
         grpc::ClientContext context;
         const auto stream = stub.AppendStream(&context, &reply);
         stream->Write(request);
         stream->WritesDone();
         return stream->Finish();
       }},
  };
}

TEST_F(CacheServiceTest, AnUnknownSessionIsNotFoundByEveryCall) {
  v1::SessionRef ref;
  ref.set_session_id("nobody");
  for (const auto& [name, call] : NamedCalls()) {
    SCOPED_TRACE(name);
    const grpc::Status status = call(*stub_, ref);
    EXPECT_THAT(status, IsRpc(grpc::StatusCode::NOT_FOUND, "\"nobody\""));
    EXPECT_EQ(ReasonOf(status), "SESSION_UNKNOWN");
  }
}

TEST_F(CacheServiceTest, AMissingIdIsInvalidInEveryCall) {
  for (const auto& [name, call] : NamedCalls()) {
    SCOPED_TRACE(name);
    EXPECT_THAT(call(*stub_, v1::SessionRef()), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "session_id is missing"));
  }
}

TEST_F(CacheServiceTest, AnotherEpochIsRefusedByEveryCall) {
  ASSERT_THAT(Open(MakeOpen("a")), IsRpcOk());
  v1::SessionRef ref;
  ref.set_session_id("a");
  ref.set_epoch(opened_.session().epoch() + 1);
  for (const auto& [name, call] : NamedCalls()) {
    SCOPED_TRACE(name);
    const grpc::Status status = call(*stub_, ref);
    EXPECT_THAT(status, IsRpc(grpc::StatusCode::FAILED_PRECONDITION, "epoch"));
    EXPECT_EQ(ReasonOf(status), "EPOCH_MISMATCH");
  }
}

TEST_F(CacheServiceTest, AForeignFingerprintIsRefusedByEveryCall) {
  v1::OpenSessionRequest request = MakeOpen("a");
  request.mutable_options()->set_fingerprint("model-1");
  ASSERT_THAT(Open(request), IsRpcOk());
  v1::SessionRef ref;
  ref.set_session_id("a");
  ref.set_fingerprint("model-2");
  for (const auto& [name, call] : NamedCalls()) {
    SCOPED_TRACE(name);
    const grpc::Status status = call(*stub_, ref);
    EXPECT_THAT(status, IsRpc(grpc::StatusCode::FAILED_PRECONDITION, "fingerprint"));
    EXPECT_EQ(ReasonOf(status), "FINGERPRINT_MISMATCH");
  }
}

// ---- Load, time and loss -----------------------------------------------------------------------------------------

TEST_F(CacheServiceTest, AMessageAtTheSizeLimitIsReadAndALargerOneRefused) {
  v1::AppendRequest request;
  request.mutable_session()->set_session_id("a");
  std::string* data = request.mutable_chunk()->mutable_keys()->mutable_data();
  data->assign(limits::kMessageBytesMax, 'x');
  const size_t framing = request.ByteSizeLong() - data->size();
  data->resize(limits::kMessageBytesMax - framing);
  ASSERT_EQ(request.ByteSizeLong(), limits::kMessageBytesMax);
  EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::INVALID_ARGUMENT, "values is missing"));
  data->push_back('x');
  EXPECT_THAT(Append(request), IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "67108864"));
}

TEST_F(CacheServiceTest, EveryCallLeavesAnAccessLineAndACount) {
  OpenWithTokens("quoted \"id\"\n", 1);
  ASSERT_THAT(Get("nobody"), IsRpc(grpc::StatusCode::NOT_FOUND, ""));
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"NOT_FOUND\",method=\"GetSession\"}", 1);
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"OK\",method=\"Append\"}", 1);
  const std::string log = server_.log_text();
  EXPECT_THAT(log, HasSubstr(R"(method="OpenSession" code="OK" session="quoted \"id\"\n" us=)"));
  EXPECT_THAT(log, HasSubstr(R"(method="Append" code="OK" session="quoted \"id\"\n" layer=0 us=)"));
  EXPECT_THAT(log, HasSubstr("peer=\"ipv4:127.0.0.1:"));
}

class DrivenServiceTest : public DrivenSessionTest {
 protected:
  DrivenServiceTest() : DrivenSessionTest(/*lanes=*/1, /*queue_items_max=*/2, /*sessions_max=*/1) {}
};

TEST_F(DrivenServiceTest, AFullQueueRefusesWithAShortRetry) {
  OpenDriven("a");
  std::vector<std::future<grpc::Status>> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.push_back(std::async(std::launch::async, [this] {
      v1::KeepAliveReply reply;
      return Call(&Stub::KeepAlive, WithSession<v1::KeepAliveRequest>("a"), &reply);
    }));
    server_.AwaitQueued(i + 1);
  }
  const grpc::Status refused = Get("a");
  EXPECT_THAT(refused, IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "the limit is 2"));
  EXPECT_EQ(ReasonOf(refused), "QUEUE_FULL");
  EXPECT_DOUBLE_EQ(RetrySecondsOf(refused), 0.05);
  RunLanes();
  for (auto& call : waiting) EXPECT_THAT(call.get(), IsRpcOk());
}

TEST_F(DrivenServiceTest, TheSessionLimitRefusesWithARetry) {
  OpenDriven("a");
  const grpc::Status refused = Open(MakeOpen("b"));
  EXPECT_THAT(refused, IsRpc(grpc::StatusCode::RESOURCE_EXHAUSTED, "the limit is 1"));
  EXPECT_EQ(ReasonOf(refused), "SESSION_LIMIT");
  EXPECT_EQ(RetrySecondsOf(refused), 1);
}

TEST_F(DrivenServiceTest, ADeadlineThatPassedBeforeWorkChangesNothing) {
  OpenDriven("a");
  auto call = std::async(std::launch::async, [this] { return Append(MakeAppend("a", 0, 0, 3)); });
  server_.AwaitQueued(1);
  clock().Advance(std::chrono::minutes(3));  // beyond the call's deadline, as the engine sees time
  RunLanes();
  EXPECT_THAT(call.get(), IsRpc(grpc::StatusCode::DEADLINE_EXCEEDED, "deadline"));
  EXPECT_EQ(server_.engine().stats().expired_in_queue.load(), 1u);
  ASSERT_THAT(Drive([this] { return Get("a"); }), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
}

TEST_F(DrivenServiceTest, AClientThatLeftBeforeWorkChangesNothing) {
  OpenDriven("a");
  grpc::ClientContext context;
  auto call = std::async(std::launch::async, [this, &context] {
    v1::AppendReply reply;
    return stub_->Append(&context, MakeAppend("a", 0, 0, 3), &reply);
  });
  server_.AwaitQueued(1);
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  server_.AwaitMetric("ctkvr_rpc_cancelled_total{method=\"Append\"}", 1);
  RunLanes();
  EXPECT_EQ(server_.engine().stats().expired_in_queue.load(), 1u);
  ASSERT_THAT(Drive([this] { return Get("a"); }), IsRpcOk());
  EXPECT_EQ(got_.session().layers(0).length(), 0u);
  server_.AwaitMetric("ctkvr_rpc_calls_total{code=\"CANCELLED\",method=\"Append\"}", 1);
}

TEST_F(DrivenServiceTest, AnExpiredLeaseIsNotFoundAndSaysSo) {
  OpenDriven("a");
  clock().Advance(std::chrono::seconds(601));
  const grpc::Status status = Drive([this] { return Get("a"); });
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::NOT_FOUND, "lease"));
  EXPECT_EQ(ReasonOf(status), "LEASE_EXPIRED");
}

TEST_F(DrivenServiceTest, AFailedSessionSaysSoUntilItIsClosed) {
  OpenDriven("a");
  backend().Fail({.first = 0, .count = 1000000, .code = absl::StatusCode::kInternal});
  EXPECT_EQ(Drive([this] { return Append(MakeAppend("a", 0, 0, 3)); }).error_code(), grpc::StatusCode::INTERNAL);
  backend().StopFailing();
  const grpc::Status status = Drive([this] { return Append(MakeAppend("a", 0, 0, 3)); });
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::FAILED_PRECONDITION, ""));
  EXPECT_EQ(ReasonOf(status), "SESSION_FAILED");
  EXPECT_THAT(Drive([this] { return Close("a"); }), IsRpcOk());
  EXPECT_THAT(server_.log_text(), HasSubstr(" error access method=\"Append\" code=\"INTERNAL\""));
}

}  // namespace
}  // namespace ctkvr::testing
