// SPDX-License-Identifier: Apache-2.0
//
// The fixture of tests against a server in this process: calls in one line each. Not thread-safe, but its stub is.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "ctkvr/v1/cache.grpc.pb.h"
#include "tests/server/rpc/details.h"
#include "tests/server/rpc/messages.h"
#include "tests/testing/fake_backend.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/test_server.h"

namespace ctkvr::testing {

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() : SessionTest(TestServerOptions()) {}
  explicit SessionTest(const TestServerOptions& options) : server_(options), stub_(server_.NewStub()) {}

  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Cache::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  // Calls with a deadline far away, so that a hanging call fails its test.
  template <typename Request, typename Reply>
  grpc::Status Call(Method<Request, Reply> method, const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    return ((*stub_).*method)(&context, request, reply);
  }

  grpc::Status Open(const v1::OpenSessionRequest& request) { return Call(&Stub::OpenSession, request, &opened_); }
  grpc::Status Append(const v1::AppendRequest& request) { return Call(&Stub::Append, request, &appended_); }
  grpc::Status Retrieve(const v1::RetrieveRequest& request) { return Call(&Stub::Retrieve, request, &retrieved_); }
  grpc::Status Get(const std::string& id) {
    return Call(&Stub::GetSession, WithSession<v1::GetSessionRequest>(id), &got_);
  }
  grpc::Status Close(const std::string& id) {
    return Call(&Stub::CloseSession, WithSession<v1::CloseSessionRequest>(id), &closed_);
  }

  template <typename Request>
  static Request WithSession(const std::string& id) {
    Request request;
    request.mutable_session()->set_session_id(id);
    return request;
  }

  // A session with `tokens` tokens in layer 0.
  void OpenWithTokens(const std::string& id, uint32_t tokens, v1::Format format = v1::FORMAT_F32) {
    ASSERT_THAT(Open(MakeOpen(id, format)), IsRpcOk());
    if (tokens == 0) return;
    ASSERT_THAT(Append(MakeAppend(id, 0, 0, tokens)), IsRpcOk());
  }

  using Stub = v1::Cache::Stub;
  TestServer server_;
  std::unique_ptr<v1::Cache::Stub> stub_;
  v1::OpenSessionReply opened_;
  v1::AppendReply appended_;
  v1::RetrieveReply retrieved_;
  v1::GetSessionReply got_;
  v1::CloseSessionReply closed_;
};

// What a driven server runs on, made before it and gone after it.
struct DrivenDevices {
  FakeBackend backend_{FakeBackendOptions()};
  FakeClock clock_;
};

// A server whose lanes run when the test says so, on a clock and a backend that the test holds.
class DrivenSessionTest : private DrivenDevices, public SessionTest {
 protected:
  explicit DrivenSessionTest(uint32_t lanes = 1, uint32_t queue_items_max = 64, uint32_t sessions_max = 16)
      : SessionTest({.engine = {.lanes = lanes,
                                .arena_bytes = size_t{64} << 20,
                                .scratch_bytes = size_t{32} << 20,
                                .queue_items_max = queue_items_max,
                                .sessions_max = sessions_max,
                                .threads = false},
                     .own_backend = &backend_,
                     .clock = &clock_}) {}

  // Runs a call on a thread of its own, and all lanes until the call has ended.
  template <typename Function>
  grpc::Status Drive(Function function) {
    auto result = std::async(std::launch::async, function);
    while (result.wait_for(std::chrono::seconds(0)) != std::future_status::ready) RunLanes();
    return result.get();
  }
  void RunLanes() {
    for (uint32_t lane = 0; lane < server_.engine().options().lanes; ++lane) server_.engine().RunLane(lane);
    std::this_thread::yield();
  }
  void OpenDriven(const std::string& id) {
    ASSERT_THAT(Drive([&] { return Open(MakeOpen(id)); }), IsRpcOk());
  }

  FakeBackend& backend() { return backend_; }
  FakeClock& clock() { return clock_; }
};

}  // namespace ctkvr::testing
