// SPDX-License-Identifier: Apache-2.0
//
// Proves what stands around the service: the bound address, health by name, reflection, a port in use, and the order of
// events in a drain.

#include "server/rpc/grpc_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <string>
#include <utility>

#include "server/core/limits.h"
#include "tests/server/rpc/raw_call.h"
#include "tests/server/rpc/session_test.h"

namespace ctkvr::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using ::testing::HasSubstr;

class GrpcServerTest : public SessionTest {
 protected:
  // An AppendStream that runs: one chunk is appended, the client has not finished.
  void StartWork() {
    OpenWithTokens("a", 0);
    work_ = stub_->AppendStream(&work_context_, &work_reply_);
    ASSERT_TRUE(work_->Write(MakeAppend("a", 0, 0, 10)));
    server_.AwaitMetric("ctkvr_rpc_message_seconds_count{method=\"AppendStream\"}", 1);
  }
  std::future<bool> DrainAside(milliseconds timeout) {
    auto drained = std::async(std::launch::async, [this, timeout] { return server_.server().Drain(timeout); });
    server_.AwaitMetric("ctkvr_draining", 1);
    return drained;
  }

  grpc::ClientContext work_context_;
  v1::AppendStreamReply work_reply_;
  std::unique_ptr<grpc::ClientWriter<v1::AppendRequest>> work_;
};

TEST_F(GrpcServerTest, TheAddressHasThePortThatWasTaken) {
  EXPECT_THAT(server_.address(), ::testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
}

TEST_F(GrpcServerTest, HealthIsServingForTheServerAndTheService) {
  const auto channel = server_.NewChannel();
  EXPECT_EQ(HealthOf(channel, ""), 1);
  EXPECT_EQ(HealthOf(channel, "ctkvr.v1.Cache"), 1);
  EXPECT_EQ(HealthOf(channel, "other"), -static_cast<int>(grpc::StatusCode::NOT_FOUND));
}

TEST_F(GrpcServerTest, ReflectionListsTheServices) {
  // ServerReflectionRequest {list_services: "*"}
  const RawReply reply =
      RawCall(server_.NewChannel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*");
  ASSERT_THAT(reply.status, IsRpcOk());
  EXPECT_THAT(reply.bytes, HasSubstr("ctkvr.v1.Cache"));
  EXPECT_THAT(reply.bytes, HasSubstr("grpc.health.v1.Health"));
}

TEST_F(GrpcServerTest, APortInUseIsAnErrorThatNamesTheAddress) {
  RealClock clock;
  obs::Log log({.level = obs::LogLevel::kOff});
  const auto second =
      rpc::GrpcServer::Start({.address = server_.address(), .version = ""}, {.engine = server_.engine(),
                                                                             .clock = clock,
                                                                             .metrics = server_.metrics(),
                                                                             .log = log,
                                                                             .access = server_.access(),
                                                                             .slow_calls = server_.slow_calls()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_.address()));
}

TEST_F(GrpcServerTest, AnIdleServerDrainsAtOnce) {
  ASSERT_THAT(Open(MakeOpen("a")), IsRpcOk());
  EXPECT_TRUE(server_.server().Drain(minutes(1)));
  const grpc::Status status = Get("a");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcServerTest, WhileWorkRunsADrainRefusesOpensAndIsNotServing) {
  StartWork();
  const auto channel = server_.NewChannel();
  ASSERT_EQ(HealthOf(channel, ""), 1);
  auto drained = DrainAside(minutes(1));
  EXPECT_EQ(HealthOf(channel, ""), 2);
  EXPECT_EQ(HealthOf(channel, "ctkvr.v1.Cache"), 2);
  const grpc::Status refused = Open(MakeOpen("b"));
  EXPECT_THAT(refused, IsRpc(grpc::StatusCode::UNAVAILABLE, "draining"));
  EXPECT_EQ(ReasonOf(refused), "DRAINING");
  EXPECT_EQ(RetrySecondsOf(refused), 0);
  v1::GetServerInfoReply info;
  ASSERT_THAT(Call(&Stub::GetServerInfo, v1::GetServerInfoRequest(), &info), IsRpcOk());
  EXPECT_TRUE(info.draining());
  // The work that runs goes on to its end, and only then the drain ends.
  ASSERT_TRUE(work_->Write(MakeAppend("a", 0, 10, 10)));
  EXPECT_EQ(drained.wait_for(milliseconds(0)), std::future_status::timeout);
  work_->WritesDone();
  EXPECT_THAT(work_->Finish(), IsRpcOk());
  EXPECT_EQ(work_reply_.lengths(0), 20u);
  EXPECT_TRUE(drained.get());
}

// Clients that go on calling, so that some call always runs, cannot make a drain cut calls off: it ends what it took.
TEST_F(GrpcServerTest, UnderLoadThatDoesNotEndADrainFinishesAllThatItTook) {
  struct Stream {
    grpc::ClientContext context;
    v1::AppendStreamReply reply;
    std::unique_ptr<grpc::ClientWriter<v1::AppendRequest>> writer;
  };
  const auto run = [&](int streams) {
    const std::string series = "ctkvr_rpc_in_flight{method=\"AppendStream\"} ";
    return server_.metrics().Text().find(series + std::to_string(streams) + "\n") != std::string::npos;
  };
  StartWork();
  auto drained = DrainAside(milliseconds(400));
  for (std::unique_ptr<Stream> running;;) {
    auto next = std::make_unique<Stream>();
    next->writer = stub_->AppendStream(&next->context, &next->reply);
    bool taken = true;
    do {
      taken = next->writer->Write(MakeAppend("a", 0, 0, 10));
    } while (taken && !run(2));
    grpc::ClientWriter<v1::AppendRequest>& first = running == nullptr ? *work_ : *running->writer;
    first.WritesDone();
    ASSERT_THAT(first.Finish(), IsRpcOk());
    if (!taken) break;
    running = std::move(next);
    while (!run(1)) std::this_thread::yield();
  }
  EXPECT_TRUE(drained.get());
}

TEST_F(GrpcServerTest, WorkThatOutlastsTheDrainIsCutOff) {
  StartWork();
  EXPECT_FALSE(server_.server().Drain(milliseconds(0)));
  EXPECT_FALSE(work_->Finish().ok());
}

// Messages of gRPC go where RouteGrpcLog says: a failing listen is one that surely writes.
TEST_F(GrpcServerTest, GrpcsOwnMessagesGoToTheLog) {
  ::testing::internal::CaptureStderr();
  obs::Log log({.level = obs::LogLevel::kError, .format = obs::LogFormat::kJson});
  rpc::RouteGrpcLog(&log);
  RealClock clock;
  const auto second =
      rpc::GrpcServer::Start({.address = server_.address(), .version = ""}, {.engine = server_.engine(),
                                                                             .clock = clock,
                                                                             .metrics = server_.metrics(),
                                                                             .log = log,
                                                                             .access = server_.access(),
                                                                             .slow_calls = server_.slow_calls()});
  rpc::RouteGrpcLog(nullptr);
  log.Flush();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("\"event\":\"grpc\""));
  EXPECT_TRUE(text.starts_with("{\"ts\":")) << text;
}

// ---- Limits of a connection ----------------------------------------------------------------------------------------

TEST_F(GrpcServerTest, AConnectionCarriesSoManyStreamsAndNoMore) {
  const auto ask = [&](std::chrono::milliseconds patience) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + patience);
    v1::GetServerInfoReply reply;
    return stub_->GetServerInfo(&context, {}, &reply);
  };
  ASSERT_THAT(ask(minutes(1)), IsRpcOk());  // the server has told the connection its limit
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeReply>>> streams;
  for (int i = 0; i < rpc::kConnectionStreamsMax; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub_->Decode(contexts.back().get()));
  }
  server_.AwaitMetric("ctkvr_rpc_in_flight{method=\"Decode\"}", rpc::kConnectionStreamsMax);
  EXPECT_EQ(ask(milliseconds(200)).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << "one waits at the client";
  v1::GetServerInfoReply reply;
  grpc::ClientContext other;
  EXPECT_THAT(server_.NewStub()->GetServerInfo(&other, {}, &reply), IsRpcOk()) << "another connection";
  streams[0]->WritesDone();
  EXPECT_THAT(streams[0]->Finish(), IsRpcOk());
  EXPECT_THAT(ask(minutes(1)), IsRpcOk());
  for (size_t i = 1; i < streams.size(); ++i) contexts[i]->TryCancel();
  for (size_t i = 1; i < streams.size(); ++i) (void)streams[i]->Finish();
}

TEST_F(GrpcServerTest, HeadersOverTheirLimitAreRefused) {
  const auto ask = [&](size_t bytes) {
    grpc::ClientContext context;
    context.AddMetadata("x-long", std::string(bytes, 'a'));
    v1::GetServerInfoReply reply;
    return stub_->GetServerInfo(&context, {}, &reply);
  };
  EXPECT_THAT(ask(rpc::kMetadataBytesMax / 2), IsRpcOk());
  EXPECT_EQ(ask(2 * rpc::kMetadataBytesMax).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(GrpcServerTest, AMessageOverItsLimitIsRefused) {
  v1::AppendRequest request = MakeAppend("a", 0, 0, 1);
  request.mutable_chunk()->mutable_keys()->set_data(std::string(limits::kMessageBytesMax, 'a'));
  EXPECT_EQ(Append(request).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

// Speaks HTTP/2 itself, as gRPC's own client never pings so often.
std::string AnswerToPings(const std::string& address, int pings) {
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(10))))};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  bytes.append("\0\0\0\x04\0\0\0\0\0", 9);  // SETTINGS
  for (int i = 0; i < pings; ++i) bytes.append("\0\0\x08\x06\0\0\0\0\0........", 17);
  EXPECT_EQ(send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  std::string answer;
  char part[4096];
  for (ssize_t n = 0; (n = recv(connection, part, sizeof(part), 0)) > 0;) answer.append(part, static_cast<size_t>(n));
  close(connection);
  return answer;
}

TEST_F(GrpcServerTest, PingsThatComeTooOftenEndTheConnection) {
  EXPECT_THAT(AnswerToPings(server_.address(), rpc::kPingStrikesMax + 10), HasSubstr("too_many_pings"));
}

}  // namespace
}  // namespace ctkvr::testing
