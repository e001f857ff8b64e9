// SPDX-License-Identifier: Apache-2.0
//
// Proves what an operator sees of the real binary: how it says that it is ready, what it serves beside the calls, how
// it ends on signals with and without running work, its exit codes, what it refuses, and that a restarted server is
// never taken for the old one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "nlohmann/json.hpp"
#include "tests/e2e/process.h"
#include "tests/server/rpc/details.h"
#include "tests/server/rpc/messages.h"
#include "tests/server/rpc/raw_call.h"
#include "tests/testing/test_server.h"

namespace ctkvr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Arguments = std::vector<std::string>;

class CtkvrdTest : public ::testing::Test {
 protected:
  CtkvrdTest() : folder_(::testing::TempDir() + "ctkvrd_test." + std::to_string(getpid())) {
    std::filesystem::create_directory(folder_);
  }
  ~CtkvrdTest() override { std::filesystem::remove_all(folder_); }

  // Small, on free ports, with JSON lines.
  static Arguments Small(const Arguments& more = {}) {
    Arguments arguments = {"--listen_address=127.0.0.1:0",
                           "--metrics_address=127.0.0.1:0",
                           "--arena_bytes=64MiB",
                           "--scratch_bytes=32MiB",
                           "--lanes=1",
                           "--log_format=json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  // Starts the server and waits until it serves.
  void Start(const Arguments& arguments, const std::map<std::string, std::string>& environment = {}) {
    process_ = std::make_unique<Process>(CTKVRD_PATH, arguments, environment);
    const std::string line = process_->AwaitLine("\"event\":\"serving\"");
    ASSERT_NE(line, "") << process_->text();
    serving_ = nlohmann::json::parse(line);
    address_ = serving_.at("listen_address");
    Connect();
  }
  void Connect() {
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    stub_ = v1::Cache::NewStub(channel_);
  }
  // Runs it to its end.
  int Run(const Arguments& arguments, const std::map<std::string, std::string>& environment = {}) {
    process_ = std::make_unique<Process>(CTKVRD_PATH, arguments, environment);
    return process_->Wait();
  }

  grpc::Status Open(const std::string& id) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    return stub_->OpenSession(&context, MakeOpen(id), &opened_);
  }
  // An AppendStream that stays open, with one chunk that is surely appended.
  void StartWork() {
    ASSERT_THAT(Open("work"), IsRpcOk());
    work_ = stub_->AppendStream(&work_context_, &work_reply_);
    ASSERT_TRUE(work_->Write(MakeAppend("work", 0, 0, 10)));
    v1::GetSessionRequest request;
    request.mutable_session()->set_session_id("work");
    v1::GetSessionReply reply;
    while (reply.session().appended_tokens() == 0) {
      grpc::ClientContext context;
      ASSERT_THAT(stub_->GetSession(&context, request, &reply), IsRpcOk());
    }
  }

  const std::string folder_;
  std::unique_ptr<Process> process_;
  nlohmann::json serving_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Cache::Stub> stub_;
  v1::OpenSessionReply opened_;
  grpc::ClientContext work_context_;
  v1::AppendStreamReply work_reply_;
  std::unique_ptr<grpc::ClientWriter<v1::AppendRequest>> work_;
};

// ---- Serving -----------------------------------------------------------------------------------------------------

TEST_F(CtkvrdTest, TheReadyFileTellsTheAddressesThatServe) {
  const std::string path = folder_ + "/ready.json";
  Start(Small({"--ready_file=" + path}));
  const auto ready = nlohmann::json::parse(std::ifstream(path));
  EXPECT_EQ(ready.at("listen_address"), address_);
  EXPECT_EQ(ready.at("metrics_address"), serving_.at("metrics_address"));
  v1::GetServerInfoReply info;
  grpc::ClientContext context;
  ASSERT_THAT(stub_->GetServerInfo(&context, {}, &info), IsRpcOk());
  EXPECT_EQ(ready.at("boot_id"), std::to_string(info.header().boot_id()));
  EXPECT_EQ(info.arena_bytes(), uint64_t{64} << 20);
  EXPECT_EQ(info.lanes(), 1u);
  EXPECT_NE(info.version(), "");
}

TEST_F(CtkvrdTest, HealthAndReflectionAreOn) {
  Start(Small());
  EXPECT_EQ(HealthOf(channel_, ""), 1);
  EXPECT_EQ(HealthOf(channel_, "ctkvr.v1.Cache"), 1);
  const RawReply reply =
      RawCall(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*");
  EXPECT_THAT(reply.bytes, HasSubstr("ctkvr.v1.Cache"));
}

TEST_F(CtkvrdTest, TheMetricsPageCountsWhatClientsDo) {
  Start(Small());
  const std::string address = serving_.at("metrics_address");
  const std::string before = HttpGet(address, "/metrics");
  EXPECT_THAT(before, HasSubstr("ctkvr_sessions 0\n"));
  EXPECT_THAT(before, HasSubstr("ctkvr_build_info{version=\"0."));
  ASSERT_THAT(Open("secret-session-name"), IsRpcOk());
  const std::string after = HttpGet(address, "/metrics");
  EXPECT_THAT(after, HasSubstr("ctkvr_sessions 1\n"));
  EXPECT_THAT(after, HasSubstr("ctkvr_sessions_opened_total 1\n"));
  EXPECT_THAT(after, Not(HasSubstr("secret-session-name")));
}

TEST_F(CtkvrdTest, AUnixSocketServes) {
  Start(Small({"--listen_address=unix:" + folder_ + "/socket", "--metrics_address="}));
  EXPECT_THAT(Open("a"), IsRpcOk());
  EXPECT_EQ(serving_.at("metrics_address"), "");
}

TEST_F(CtkvrdTest, EveryLineIsJsonWhereJsonIsAskedFor) {
  Start(Small());
  ASSERT_THAT(Open("a \"quoted\"\nid"), IsRpcOk());
  process_->AwaitLine("\"event\":\"access\"");
  process_->Signal(SIGTERM);
  EXPECT_EQ(process_->Wait(), 0);
  std::istringstream lines(process_->text());
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  }
  EXPECT_GE(count, 4);  // serving, access, draining, stopped
}

TEST_F(CtkvrdTest, TheEnvironmentSetsWhatNoFlagSays) {
  Start({"--metrics_address=", "--lanes=1", "--arena_bytes=64MiB", "--log_format=json"},
        {{"CTKVR_LISTEN_ADDRESS", "127.0.0.1:0"}, {"CTKVR_LANES", "2"}, {"CTKVR_SCRATCH_BYTES", "32MiB"}});
  v1::GetServerInfoReply info;
  grpc::ClientContext context;
  ASSERT_THAT(stub_->GetServerInfo(&context, {}, &info), IsRpcOk());
  EXPECT_EQ(info.lanes(), 1u);  // the flag wins
}

// ---- Ending ------------------------------------------------------------------------------------------------------

TEST_F(CtkvrdTest, AnIdleServerEndsWellOnEachSignal) {
  for (int number : {SIGTERM, SIGINT}) {
    Start(Small());
    ASSERT_THAT(Open("a"), IsRpcOk());
    process_->Signal(number);
    EXPECT_EQ(process_->Wait(), 0);
    EXPECT_THAT(process_->text(), HasSubstr("\"event\":\"stopped\",\"all_work_finished\":true"));
  }
}

TEST_F(CtkvrdTest, ATerminatedServerFinishesItsWorkAndRefusesMore) {
  Start(Small());
  StartWork();
  process_->Signal(SIGTERM);
  ASSERT_NE(process_->AwaitLine("\"event\":\"draining\""), "");
  while (HealthOf(channel_, "") == 1) std::this_thread::yield();  // the line comes a moment earlier
  EXPECT_EQ(HealthOf(channel_, ""), 2);
  const grpc::Status refused = Open("late");
  EXPECT_THAT(refused, IsRpc(grpc::StatusCode::UNAVAILABLE, "draining"));
  EXPECT_EQ(ReasonOf(refused), "DRAINING");
  ASSERT_TRUE(work_->Write(MakeAppend("work", 0, 10, 10)));
  work_->WritesDone();
  EXPECT_THAT(work_->Finish(), IsRpcOk());
  EXPECT_EQ(work_reply_.lengths(0), 20u);
  EXPECT_EQ(process_->Wait(), 0);
}

TEST_F(CtkvrdTest, WorkThatOutlastsTheDrainIsCutOffAndTheExitCodeSaysSo) {
  Start(Small({"--drain_seconds=0"}));
  StartWork();
  process_->Signal(SIGTERM);
  EXPECT_EQ(process_->Wait(), 1);
  EXPECT_FALSE(work_->Finish().ok());
  EXPECT_THAT(process_->text(), HasSubstr("\"all_work_finished\":false"));
}

TEST_F(CtkvrdTest, ASecondSignalEndsItAtOnce) {
  Start(Small({"--drain_seconds=3600"}));
  StartWork();
  process_->Signal(SIGTERM);
  ASSERT_NE(process_->AwaitLine("\"event\":\"draining\""), "");
  process_->Signal(SIGTERM);
  EXPECT_EQ(process_->Wait(), -SIGTERM);
  EXPECT_FALSE(work_->Finish().ok());
}

TEST_F(CtkvrdTest, ARestartedServerHasAnotherBootIdAndNoOldSession) {
  Start(Small());
  ASSERT_THAT(Open("a"), IsRpcOk());
  const uint64_t boot_id = opened_.header().boot_id();
  const uint64_t epoch = opened_.session().epoch();
  process_->Signal(SIGKILL);
  EXPECT_EQ(process_->Wait(), -SIGKILL);
  Start(Small({"--listen_address=" + address_}));
  v1::GetSessionRequest request;
  request.mutable_session()->set_session_id("a");
  request.mutable_session()->set_epoch(epoch);
  v1::GetSessionReply reply;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = stub_->GetSession(&context, request, &reply);
  EXPECT_THAT(status, IsRpc(grpc::StatusCode::NOT_FOUND, "\"a\""));
  EXPECT_EQ(ReasonOf(status), "SESSION_UNKNOWN");
  ASSERT_THAT(Open("a"), IsRpcOk());
  EXPECT_NE(opened_.header().boot_id(), boot_id);
  EXPECT_NE(opened_.session().epoch(), epoch);
}

// ---- Refusing ----------------------------------------------------------------------------------------------------

TEST_F(CtkvrdTest, BadFlagsEndWithTwoAndATextThatNamesThem) {
  const std::pair<Arguments, std::string> cases[] = {
      {{"--lanes=many"}, "--lanes is \"many\""},
      {{"--lanes=1000"}, "--lanes is \"1000\"; it must be 0 or 1 to 256"},
      {{"--unknown=1"}, "--unknown=1"},
      {{"--log_level=loud"}, "--log_level is \"loud\""},
      {{"--arena_bytes=1GB"}, "KiB"},
      {{"--listen_address=0.0.0.0:0"}, "--allow_plaintext"},
      {{"--metrics_address=0.0.0.0:0"}, "metrics_address is 0.0.0.0:0"},
  };
  for (const auto& [arguments, text] : cases) {
    EXPECT_EQ(Run(arguments), 2) << arguments[0];
    EXPECT_THAT(process_->text(), AllOf(HasSubstr("ctkvrd: "), HasSubstr(text))) << arguments[0];
  }
}

TEST_F(CtkvrdTest, ABadVariableEndsWithTwo) {
  EXPECT_EQ(Run({}, {{"CTKVR_DRAIN_SECONDS", "soon"}}), 2);
  EXPECT_THAT(process_->text(), HasSubstr("CTKVR_DRAIN_SECONDS is \"soon\""));
}

TEST_F(CtkvrdTest, AnUnknownBackendEndsWithTwo) {
  EXPECT_EQ(Run(Small({"--backend=abacus"})), 2);
  EXPECT_THAT(process_->text(), AllOf(HasSubstr("cannot_start"), HasSubstr("abacus")));
}

TEST_F(CtkvrdTest, AConfigurationIsPrintedCheckedAndServed) {
  const std::string path = folder_ + "/ctkvrd.toml";
  EXPECT_EQ(Run(Small({"--print-config"})), 0);
  std::ofstream(path) << process_->text();
  EXPECT_EQ(Run({"--config", path, "--check-config"}), 0);
  EXPECT_EQ(process_->text(), "");
  EXPECT_EQ(Run({"--config", path, "--check-config", "--backend=abacus"}), 2);
  Start({"--config", path});
  EXPECT_EQ(serving_.at("lanes"), 1);
  EXPECT_EQ(serving_.at("arena_bytes"), 64 << 20);
  std::ofstream(path) << "lanse = 4\n";
  EXPECT_EQ(Run({"--config", path, "--check-config"}), 2);
  EXPECT_THAT(process_->text(), AllOf(HasSubstr("lanse of " + path + ":1"), HasSubstr("did you mean lanes?")));
}

TEST_F(CtkvrdTest, APortInUseEndsWithOneAndATextThatNamesIt) {
  Start(Small());
  const auto first = std::move(process_);
  EXPECT_EQ(Run(Small({"--listen_address=" + address_})), 1);
  EXPECT_THAT(process_->text(), AllOf(HasSubstr("cannot_start"), HasSubstr(address_), HasSubstr("in use")));
  const std::string metrics = serving_.at("metrics_address");
  EXPECT_EQ(Run(Small({"--metrics_address=" + metrics})), 1);
  EXPECT_THAT(process_->text(), AllOf(HasSubstr("cannot_start"), HasSubstr(metrics)));
}

TEST_F(CtkvrdTest, AReadyFileThatCannotBeWrittenEndsWithOne) {
  EXPECT_EQ(Run(Small({"--ready_file=" + folder_ + "/nowhere/ready"})), 1);
  EXPECT_THAT(process_->text(), HasSubstr("ready_file"));
}

TEST_F(CtkvrdTest, ADirectoryOfRecordsThatIsNotThereEndsWithTwo) {
  EXPECT_EQ(Run(Small({"--record=" + folder_ + "/no"})), 2);
  EXPECT_THAT(process_->text(), HasSubstr("it must be a directory to write to"));
}

TEST_F(CtkvrdTest, HelpAndVersionEndWell) {
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(process_->text(), AllOf(HasSubstr("--listen_address  (address; default \"127.0.0.1:7420\""),
                                      HasSubstr("CTKVR_DRAIN_SECONDS"), HasSubstr("Exit codes")));
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_THAT(process_->text(), HasSubstr("ctkvrd 0."));
}

}  // namespace
}  // namespace ctkvr::testing
