// SPDX-License-Identifier: Apache-2.0
//
// Proves that with access control no call of any service is reachable without authorisation, health aside: services and
// methods are taken from the server's own reflection, so that a new one is held to it by itself. Refused calls are
// counted by what was wrong, tell the caller nothing about that, and leave no token in the log.

#include "server/rpc/gate.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>
#include <set>
#include <sstream>

#include "ctkvr/v1/admin.grpc.pb.h"
#include "tests/server/rpc/callers.h"
#include "tests/server/rpc/raw_call.h"
#include "tests/server/rpc/session_test.h"
#include "tests/testing/certificates.h"

namespace ctkvr::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

TestServerOptions WithAccess() {
  TestServerOptions options;
  options.access = MakeRules;
  return options;
}

// Names of a reflection's reply, in whatever fields they stand.
std::set<std::string> NamesIn(const std::string& bytes) {
  static const std::regex name(R"([A-Za-z0-9_.]+\.[A-Za-z0-9_]+)");
  return {std::sregex_token_iterator(bytes.begin(), bytes.end(), name), std::sregex_token_iterator()};
}

class GateTest : public SessionTest {
 protected:
  GateTest() : GateTest(WithAccess()) {}
  explicit GateTest(const TestServerOptions& options) : SessionTest(options), channel_(server_.NewChannel()) {}

  // Every method of every service that the server has, "/service/Method".
  std::vector<std::string> Methods() {
    // ServerReflectionRequest {list_services: "*"}
    const RawReply reply = RawCall(channel_, kReflection, "\x3a\x01*", kAdminToken);
    EXPECT_THAT(reply.status, IsRpcOk());
    std::vector<std::string> methods = {kReflection, "/no.such.Service/Method", "/ctkvr.v1.Cache/NoSuchMethod"};
    size_t services = 0;
    for (const std::string& name : NamesIn(reply.bytes)) {
      const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
      if (service == nullptr || name.starts_with("grpc.")) continue;
      ++services;
      for (int i = 0; i < service->method_count(); ++i) {
        methods.push_back("/" + service->full_name() + "/" + service->method(i)->name());
      }
    }
    EXPECT_GE(services, 1u);
    return methods;
  }
  double Metric(const std::string& series) {
    const std::string page = server_.metrics().Text();
    const size_t at = page.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::strtod(page.c_str() + at + series.size() + 2, nullptr);
  }
  double Refused(const std::string& reason) { return Metric("ctkvr_access_refusals_total{reason=\"" + reason + "\"}"); }

  const std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(GateTest, NoCallOfAnyServiceIsReachableWithoutAuthorisation) {
  const std::vector<std::string> methods = Methods();
  EXPECT_THAT(methods, Contains("/ctkvr.v1.Cache/Decode"));
  EXPECT_GE(methods.size(), 18u);
  for (const std::string& method : methods) {
    for (const char* token : {"", kUnknownToken, kExpiredToken}) {
      const RawReply reply = RawCall(channel_, method, "", token);
      EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method << " " << token;
      EXPECT_EQ(reply.status.error_message(), rpc::Access::kRefusal) << method << " " << token;
      EXPECT_EQ(reply.status.error_details(), "") << method;
      EXPECT_EQ(reply.bytes, "") << method;
    }
    const RawReply reply = RawCall(channel_, method, "", kAdminToken);
    EXPECT_NE(reply.status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
  }
  EXPECT_EQ(Refused("no_token"), methods.size());
  EXPECT_EQ(Refused("unknown_token"), methods.size());
  EXPECT_EQ(Refused("expired_token"), methods.size());
  server_.AwaitMetric("ctkvr_rpc_in_flight{method=\"Decode\"}", 0);
  for (const char* token : {kUnknownToken, kExpiredToken, kAdminToken}) {
    EXPECT_THAT(server_.log_text(), Not(HasSubstr(token)));
    EXPECT_THAT(server_.metrics().Text(), Not(HasSubstr(token)));
  }
}

TEST_F(GateTest, WhatAdministersWantsItsRole) {
  const auto admin = rpc::AdminServer::Start({.address = "127.0.0.1:0", .version = "test"}, server_.edge(),
                                             {.version = "test", .start_drain = [] {}});
  ASSERT_TRUE(admin.ok()) << admin.status();
  const auto channel = grpc::CreateChannel((*admin)->address(), grpc::InsecureChannelCredentials());
  const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("ctkvr.v1.Admin");
  ASSERT_NE(service, nullptr);
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string method = "/ctkvr.v1.Admin/" + service->method(i)->name();
    for (const char* token : {"", kUnknownToken, kExpiredToken}) {
      EXPECT_EQ(RawCall(channel, method, "", token).status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
    }
    EXPECT_EQ(RawCall(channel, method, "", kRedToken).status.error_code(), grpc::StatusCode::PERMISSION_DENIED)
        << method;
  }
  EXPECT_EQ(Refused("not_admin"), service->method_count());
  EXPECT_THAT(RawCall(channel, "/ctkvr.v1.Admin/DumpState", "", kAdminToken).status, IsRpcOk());
}

TEST_F(GateTest, WhoAdministersSeesTheSessionsOfEveryTenant) {
  for (const char* token : {kRedToken, kBlueToken}) {
    ASSERT_THAT(stub_->OpenSession(ContextOf(token).get(), MakeOpen("s"), &opened_), IsRpcOk());
  }
  ASSERT_THAT(stub_->OpenSession(ContextOf(kBlueToken).get(), MakeOpen("t"), &opened_), IsRpcOk());
  const auto server = rpc::AdminServer::Start({.address = "127.0.0.1:0", .version = "test"}, server_.edge(),
                                              {.version = "test", .start_drain = [] {}});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto admin = v1::Admin::NewStub(grpc::CreateChannel((*server)->address(), grpc::InsecureChannelCredentials()));
  std::vector<std::string> listed;
  v1::ListTenantSessionsRequest request;
  request.set_page_size(1);
  do {
    v1::ListTenantSessionsReply page;
    ASSERT_THAT(admin->ListTenantSessions(ContextOf(kAdminToken).get(), request, &page), IsRpcOk());
    for (const auto& entry : page.sessions()) listed.push_back(entry.tenant() + "/" + entry.session().session_id());
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(listed, ::testing::ElementsAre("blue/s", "blue/t", "red/s"));
  v1::CloseSessionsRequest close;
  v1::CloseSessionsReply closed;
  close.add_session_ids("s");
  close.set_tenant("red");
  ASSERT_THAT(admin->CloseSessions(ContextOf(kAdminToken).get(), close, &closed), IsRpcOk());
  EXPECT_EQ(closed.closed(), 1u);
  close.clear_tenant();  // of whatever tenant
  ASSERT_THAT(admin->CloseSessions(ContextOf(kAdminToken).get(), close, &closed), IsRpcOk());
  EXPECT_EQ(closed.closed(), 1u);
  EXPECT_EQ(closed.failures_size(), 0);
  ASSERT_THAT(admin->CloseSessions(ContextOf(kAdminToken).get(), close, &closed), IsRpcOk());
  EXPECT_EQ(closed.failures_size(), 1);
  EXPECT_EQ(Metric("ctkvr_tenant_sessions{tenant=\"blue\"}"), 1);
}

TEST_F(GateTest, HealthIsForEverybody) {
  EXPECT_EQ(HealthOf(channel_, ""), 1);
  EXPECT_EQ(HealthOf(channel_, "ctkvr.v1.Cache"), 1);
  for (const char* method : {"/grpc.health.v1.Healthy/Check", "/x/grpc.health.v1.Health/Check"}) {
    EXPECT_EQ(RawCall(channel_, method, "").status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
  }
}

TEST_F(GateTest, HeadersThatAreNoTokenAreRefused) {
  const auto call = [&](const std::vector<std::string>& headers) {
    grpc::ClientContext context;
    for (const std::string& header : headers) context.AddMetadata("authorization", header);
    v1::GetServerInfoReply reply;
    return stub_->GetServerInfo(&context, {}, &reply).error_code();
  };
  const std::string red = std::string("Bearer ") + kRedToken;
  EXPECT_EQ(call({red}), grpc::StatusCode::OK);
  EXPECT_EQ(call({std::string("bearer  ") + kRedToken}), grpc::StatusCode::OK) << "schemes have no case";
  for (const std::vector<std::string>& headers :
       std::vector<std::vector<std::string>>{{"Bearer"},
                                             {"Bearer "},
                                             {kRedToken},
                                             {std::string("Basic ") + kRedToken},
                                             {red + "x"},
                                             {red, red},
                                             {red, std::string("Bearer ") + kBlueToken},
                                             {"Bearer " + std::string(limits::kTokenBytesMax + 1, 'a')}}) {
    EXPECT_EQ(call(headers), grpc::StatusCode::UNAUTHENTICATED) << headers[0];
  }
}

TEST_F(GateTest, ATenantSeesItsOwnSessionsAlone) {
  const auto open = [&](const std::string& token, const std::string& id) {
    return stub_->OpenSession(ContextOf(token).get(), MakeOpen(id), &opened_);
  };
  ASSERT_THAT(open(kRedToken, "s"), IsRpcOk());
  const uint64_t red_epoch = opened_.session().epoch();
  v1::GetSessionRequest request;
  request.mutable_session()->set_session_id("s");
  request.mutable_session()->set_epoch(red_epoch);  // overheard
  const grpc::Status anothers = stub_->GetSession(ContextOf(kBlueToken).get(), request, &got_);
  request.mutable_session()->set_session_id("t");
  const grpc::Status nobodys = stub_->GetSession(ContextOf(kBlueToken).get(), request, &got_);
  EXPECT_EQ(anothers.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(std::regex_replace(anothers.error_message(), std::regex("\"s\""), "\"t\""), nobodys.error_message());
  EXPECT_EQ(anothers.error_details().size(), nobodys.error_details().size());
  ASSERT_THAT(open(kBlueToken, "s"), IsRpcOk());
  EXPECT_NE(opened_.session().epoch(), red_epoch);
  ASSERT_THAT(open(kBlueToken, "u"), IsRpcOk());
  v1::ListSessionsReply list;
  ASSERT_THAT(stub_->ListSessions(ContextOf(kRedToken).get(), {}, &list), IsRpcOk());
  ASSERT_EQ(list.sessions_size(), 1);
  EXPECT_EQ(list.sessions(0).session_id(), "s");
  EXPECT_EQ(Metric("ctkvr_tenant_sessions{tenant=\"red\"}"), 1);
  EXPECT_EQ(Metric("ctkvr_tenant_sessions{tenant=\"blue\"}"), 2);
}

// ---- Client certificates -------------------------------------------------------------------------------------------

class GateCertificatesTest : public ::testing::Test {
 protected:
  GateCertificatesTest() {
    pem_.MakeAuthority("ours");
    pem_.Sign("ours", "server");
    pem_.Sign("ours", "worker");
  }
  grpc::Status Call(const TestServer& server, const std::string& token = "") {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = pem_.Text("ours.pem");
    options.pem_private_key = pem_.Text("worker.key");
    options.pem_cert_chain = pem_.Text("worker.pem");
    const auto stub = v1::Cache::NewStub(grpc::CreateChannel(server.address(), grpc::SslCredentials(options)));
    v1::GetServerInfoReply reply;
    return stub->GetServerInfo(ContextOf(token).get(), {}, &reply);
  }
  TestServerOptions Options(const std::string& certificate) {
    TestServerOptions options;
    options.tls = {
        .certificate = pem_.Path("server.pem"), .key = pem_.Path("server.key"), .client_ca = pem_.Path("ours.pem")};
    options.access = [certificate] {
      rpc::AccessRules rules = MakeRules();
      rules.tenants[0].certificates = {certificate};
      return rules;
    };
    return options;
  }

  const Certificates pem_;
};

TEST_F(GateCertificatesTest, ANameOfTheCertificateIsATenants) {
  const TestServer server(Options("worker"));
  EXPECT_THAT(Call(server), IsRpcOk());
  EXPECT_THAT(Call(server, kBlueToken), IsRpcOk());
  EXPECT_EQ(Call(server, kUnknownToken).error_code(), grpc::StatusCode::UNAUTHENTICATED) << "a token decides";
}

TEST_F(GateCertificatesTest, AnAddressOfTheCertificateIsATenants) {
  const TestServer server(Options("127.0.0.1"));
  EXPECT_THAT(Call(server), IsRpcOk());
}

TEST_F(GateCertificatesTest, ACertificateOfNoTenantIsRefused) {
  TestServer server(Options("somebody"));
  EXPECT_EQ(Call(server).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(server.metrics().Text(), HasSubstr("ctkvr_access_refusals_total{reason=\"unknown_certificate\"} 1\n"));
}

// ---- What does not grow --------------------------------------------------------------------------------------------

size_t SeriesOf(const std::string& page) {
  size_t series = 0;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) series += line.starts_with("#") || line.empty() ? 0 : 1;
  return series;
}

// Through the engine that the server serves from, as calls would take minutes; half of them have ids of a client's.
TEST(GateSeriesTest, AHundredThousandSessionsLeaveTheNumberOfSeries) {
  TestServerOptions options = WithAccess();
  options.engine.queue_items_max = 1u << 20;
  TestServer server(options);
  SessionConfig config;
  config.token_limit = 64;
  config.layers = {LayerConfig{.q_heads = 1, .kv_heads = 1, .head_dim = 16, .value_dim = 16, .format = Format::kF16}};
  config.layers[0].selection.source = Source::kExact;
  config.layers[0].softmax.scale = 0.25f;
  ASSERT_TRUE(ValidateSessionConfig(config).ok()) << ValidateSessionConfig(config);
  const TenantId tenants[] = {*server.access().FindTenant("red"), *server.access().FindTenant("blue")};
  const size_t before = SeriesOf(server.metrics().Text());
  std::atomic<int> failed{0};
  std::atomic<int> done{0};
  constexpr int kSessions = 100000;
  for (int i = 0; i < kSessions; ++i) {
    const CallContext context{.tenant = tenants[i % 2]};
    server.engine().Open(i % 4 < 2 ? "" : "session " + std::to_string(i), config, context, [&, context](auto opened) {
      if (!opened.ok()) ++failed;
      if (!opened.ok()) ++done;
      if (!opened.ok()) return;
      server.engine().Close({.id = opened->id}, context, [&](const auto& closed) {
        if (!closed.ok()) ++failed;
        ++done;
      });
    });
    while (i - done.load() > 1000) std::this_thread::yield();
  }
  while (done.load() < kSessions) std::this_thread::yield();
  EXPECT_EQ(failed.load(), 0);
  EXPECT_EQ(server.engine().stats().sessions_opened.load(), static_cast<uint64_t>(kSessions));
  EXPECT_EQ(SeriesOf(server.metrics().Text()), before);
  EXPECT_EQ(server.engine().tenant_usage().at(tenants[0]).sessions, 0u);
  EXPECT_EQ(server.engine().memory().arena_reserved_bytes, 0u);
}

}  // namespace
}  // namespace ctkvr::testing
