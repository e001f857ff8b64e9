// SPDX-License-Identifier: Apache-2.0
//
// Proves a drain of the real program under load, started by a signal and by an administrator alike: of clients that
// retrieve and decode without a pause no call that the server took is lost, and the process exits with 0 before its
// time is over.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <sstream>
#include <thread>

#include "ctkvr/v1/admin.grpc.pb.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/process.h"
#include "tests/server/rpc/details.h"
#include "tests/server/rpc/messages.h"
#include "tests/testing/test_server.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;
using Stub = v1::Cache::Stub;

constexpr int kThreads = 4;  // of each kind
constexpr uint32_t kTokens = 200;

class DrainTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "--listen_address=127.0.0.1:0", "--metrics_address=", "--admin_address=127.0.0.1:0", "--arena_bytes=64MiB",
        "--scratch_bytes=32MiB",        "--lanes=2",          "--log_format=json",           "--drain_seconds=4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    process_ = std::make_unique<Process>(CTKVRD_PATH, arguments);
    const std::string line = process_->AwaitLine("\"event\":\"serving\"");
    ASSERT_NE(line, "") << process_->text();
    serving_ = nlohmann::json::parse(line);
  }
  std::unique_ptr<Stub> NewStub(int number) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt("ctkvr.test_channel", number);  // a connection of its own
    return v1::Cache::NewStub(
        grpc::CreateCustomChannel(serving_.at("listen_address"), grpc::InsecureChannelCredentials(), arguments));
  }
  static void Open(Stub& stub, const std::string& id) {
    grpc::ClientContext context;
    v1::OpenSessionReply opened;
    ASSERT_THAT(stub.OpenSession(&context, MakeOpen(id), &opened), IsRpcOk());
    grpc::ClientContext append_context;
    v1::AppendReply appended;
    ASSERT_THAT(stub.Append(&append_context, MakeAppend(id, 0, 0, kTokens), &appended), IsRpcOk());
  }

  // The end of a client's load: told so, or not let in any more. gRPC says CANCELLED of calls that arrive while it
  // closes the door; that none of them was taken, the server's lines say.
  void NoteEnd(const grpc::Status& status, bool may_arrive_late) {
    const bool late = may_arrive_late && status.error_code() == grpc::StatusCode::CANCELLED;
    EXPECT_TRUE(late || status.error_code() == grpc::StatusCode::UNAVAILABLE)
        << status.error_code() << ": " << status.error_message();
    ++ended_;
  }

  // Calls until it is refused.
  void Retrieve(int number) {
    const auto stub = NewStub(number);
    const std::string id = "unary-" + std::to_string(number);
    Open(*stub, id);
    for (;;) {
      grpc::ClientContext context;
      v1::RetrieveReply reply;
      const grpc::Status status = stub->Retrieve(&context, MakeRetrieve(id, 0, kTokens - 1), &reply);
      if (!status.ok()) return NoteEnd(status, /*may_arrive_late=*/true);
      ++retrieved_;
    }
  }
  // Sends message after message, several in flight, until the stream ends: what was answered was answered in order.
  void Decode(int number) {
    const auto stub = NewStub(number);
    const std::string id = "decode-" + std::to_string(number);
    Open(*stub, id);
    grpc::ClientContext context;
    const auto stream = stub->Decode(&context);
    std::thread writer([&] {
      for (uint32_t step = 0;; ++step) {
        v1::DecodeRequest request = MakeDecode(id, 0, std::min(kTokens + step, kTokenLimit - 1), step);
        if (kTokens + step >= kTokenLimit) request.mutable_items(0)->clear_chunk();
        if (!stream->Write(request)) return;
      }
    });
    v1::DecodeReply reply;
    uint64_t next = 0;
    while (stream->Read(&reply)) {
      EXPECT_EQ(reply.sequence(), next++);
      EXPECT_EQ(reply.items(0).append_status().code(), 0) << reply.items(0).append_status().message();
      EXPECT_EQ(reply.items(0).status().code(), 0) << reply.items(0).status().message();
      ++decoded_;
    }
    writer.join();
    NoteEnd(stream->Finish(), /*may_arrive_late=*/false);
  }

  // Load until `drain` has made the process end.
  void DrainUnderLoad(const std::function<void()>& drain) {
    std::vector<std::thread> clients;
    for (int i = 0; i < kThreads; ++i) clients.emplace_back([this, i] { Retrieve(i); });
    for (int i = 0; i < kThreads; ++i) clients.emplace_back([this, i] { Decode(kThreads + i); });
    while (retrieved_ < 100 || decoded_ < 100) std::this_thread::yield();
    drain();
    EXPECT_EQ(process_->Wait(), 0);
    for (std::thread& client : clients) client.join();
    EXPECT_EQ(ended_, 2 * kThreads);
    EXPECT_THAT(process_->text(), HasSubstr("\"event\":\"stopped\",\"all_work_finished\":true"));
    CompareWithTheServersLines();
  }
  // What the server took, it answered, and the clients got it: by its lines, call by call and message by message.
  void CompareWithTheServersLines() {
    int retrieved = 0;
    int decoded = 0;
    std::istringstream lines(process_->text());
    for (std::string line; std::getline(lines, line);) {
      const auto parsed = nlohmann::json::parse(line);
      if (parsed.at("event") != "access") continue;
      const std::string method = parsed.at("method");
      const std::string code = parsed.at("code");
      if (code != "OK") {
        EXPECT_EQ(code, "UNAVAILABLE") << line;
        EXPECT_THAT(parsed.at("message").get<std::string>(), HasSubstr("draining")) << line;
      }
      if (method == "Retrieve" && code == "OK") ++retrieved;
      if (method == "Decode") decoded += parsed.value("items", 0);
    }
    EXPECT_EQ(retrieved, retrieved_);
    EXPECT_EQ(decoded, decoded_);
  }

  std::unique_ptr<Process> process_;
  nlohmann::json serving_;
  std::atomic<int> retrieved_{0};  // calls
  std::atomic<int> decoded_{0};    // messages
  std::atomic<int> ended_{0};
};

TEST_F(DrainTest, OnASignalNoAcceptedCallIsLost) {
  Start();
  DrainUnderLoad([this] { process_->Signal(SIGTERM); });
}

// And the signal that a supervisor sends meanwhile changes nothing.
TEST_F(DrainTest, OnAnAdministratorsRequestNoAcceptedCallIsLost) {
  Start();
  const auto admin =
      v1::Admin::NewStub(grpc::CreateChannel(serving_.at("admin_address"), grpc::InsecureChannelCredentials()));
  DrainUnderLoad([&] {
    grpc::ClientContext context;
    v1::StartDrainReply reply;
    ASSERT_THAT(admin->StartDrain(&context, {}, &reply), IsRpcOk());
    EXPECT_EQ(reply.drain_seconds(), 4u);
    EXPECT_GE(reply.sessions(), 1u);
    process_->Signal(SIGTERM);
  });
  EXPECT_THAT(process_->text(), HasSubstr("\"requested\":true"));
}

TEST_F(DrainTest, AdminTellsOfADrainUntilItIsOver) {
  Start({"--drain_seconds=3600"});
  const auto stub = NewStub(0);
  Open(*stub, "a");
  grpc::ClientContext work_context;
  v1::AppendStreamReply appended;
  const auto work = stub->AppendStream(&work_context, &appended);
  ASSERT_TRUE(work->Write(MakeAppend("a", 1, 0, 10)));
  v1::GetSessionRequest get;
  get.mutable_session()->set_session_id("a");
  v1::GetSessionReply got;
  while (got.session().appended_tokens() < kTokens + 10) {  // until the stream has surely been accepted
    grpc::ClientContext context;
    ASSERT_THAT(stub->GetSession(&context, get, &got), IsRpcOk());
  }
  const auto admin =
      v1::Admin::NewStub(grpc::CreateChannel(serving_.at("admin_address"), grpc::InsecureChannelCredentials()));
  grpc::ClientContext drain_context;
  v1::StartDrainReply drain;
  ASSERT_THAT(admin->StartDrain(&drain_context, {}, &drain), IsRpcOk());
  ASSERT_NE(process_->AwaitLine("\"event\":\"draining\""), "");
  v1::DumpStateReply state;
  while (!state.draining()) {  // the line comes a moment earlier
    grpc::ClientContext context;
    ASSERT_THAT(admin->DumpState(&context, {}, &state), IsRpcOk());
  }
  EXPECT_EQ(state.sessions().open(), 1u);
  ASSERT_TRUE(work->Write(MakeAppend("a", 1, 10, 10)));
  work->WritesDone();
  EXPECT_THAT(work->Finish(), IsRpcOk());
  EXPECT_EQ(appended.lengths(1), 20u);
  EXPECT_EQ(process_->Wait(), 0);
}

}  // namespace
}  // namespace ctkvr::testing
