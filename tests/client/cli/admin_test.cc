// SPDX-License-Identifier: Apache-2.0
//
// Proves that each subcommand of admin asks for what its flags say, over a real Admin service, and that what a reply
// says is in the text.
#include "client/cli/admin.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "ctkvr/client/client.h"
#include "tests/server/rpc/details.h"
#include "tests/server/rpc/messages.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsRpcOk;
using testing::StatusIs;

class AdminTest : public ::testing::Test {
 protected:
  AdminTest() : server_({.slow_call = std::chrono::nanoseconds(1)}) {
    admin_ = *rpc::AdminServer::Start(
        {.address = "127.0.0.1:0", .version = "", .tls = {}}, server_.edge(),
        {.version = "7.8.9", .drain = std::chrono::seconds(9), .start_drain = [this] { ++drains_; }});
  }
  // What `ctkvr-cli admin ARGUMENTS` would do.
  absl::StatusOr<AdminResult> Run(const std::string& arguments, bool json = false) {
    CLI::App app;
    AdminFlags flags;
    const CLI::App* command = AddAdmin(app, &flags);
    app.parse("admin --admin-address " + admin_->address() + " " + arguments);
    return RunAdmin(*command, *client::Admin::Connect({.address = flags.address}), flags, json);
  }
  std::string Text(const std::string& arguments) {
    const auto result = Run(arguments);
    return result.ok() ? result->text : result.status().ToString();
  }
  void Open(const std::string& id) {
    grpc::ClientContext context;
    v1::OpenSessionReply reply;
    ASSERT_THAT(server_.NewStub()->OpenSession(&context, testing::MakeOpen(id), &reply), IsRpcOk());
  }

  // A call's line comes after its reply.
  void AwaitLog(const std::string& text) {
    while (server_.log_text().find(text) == std::string::npos) std::this_thread::yield();
  }

  testing::TestServer server_;
  std::atomic<int> drains_{0};
  std::unique_ptr<rpc::AdminServer> admin_;
};

TEST_F(AdminTest, SessionsAreListedAndClosed) {
  EXPECT_EQ(Text("sessions"), "no sessions\n");
  for (const char* id : {"a", "b", "c"}) Open(id);
  EXPECT_THAT(Text("sessions --tenant default"), AllOf(HasSubstr("session   tenant"), HasSubstr("\nb        default")));
  EXPECT_THAT(Text("sessions --tenant nobody"), HasSubstr("tenant is \"nobody\""));
  const auto closed = Run("close a nobody");
  ASSERT_TRUE(closed.ok()) << closed.status();
  EXPECT_FALSE(closed->good);
  EXPECT_THAT(closed->text, AllOf(HasSubstr("1 closed, "), HasSubstr("not closed: nobody: session \"nobody\"")));
  EXPECT_THAT(Text("close"), HasSubstr("INVALID_ARGUMENT"));
  const auto all = Run("close --tenant default", /*json=*/true);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_TRUE(all->good);
  EXPECT_EQ(nlohmann::json::parse(all->text).at("closed"), "2");
  EXPECT_EQ(Text("sessions"), "no sessions\n");
}

TEST_F(AdminTest, ADrainIsStarted) {
  EXPECT_EQ(Text("drain"), "draining: running calls have 9 s to finish; 0 sessions end with the process\n");
  EXPECT_THAT(Text("drain"), HasSubstr("draining already"));
  EXPECT_EQ(drains_, 1);
}

TEST_F(AdminTest, TheLogLevelIsSet) {
  EXPECT_EQ(Text("log-level debug"), "log level is debug, was info\n");
  EXPECT_THAT(Run("log-level off", /*json=*/true)->text, HasSubstr("\"previous\": \"debug\""));
  EXPECT_THROW(Run("log-level loud"), CLI::ParseError);
}

TEST_F(AdminTest, TheStateHasEveryLane) {
  Open("a");
  const std::string text = Text("state");
  EXPECT_THAT(text, AllOf(HasSubstr("7.8.9"), HasSubstr("serving"), HasSubstr("1 of 100,000"), HasSubstr("64.0 MiB"),
                          HasSubstr("1 opened, 0 closed"), HasSubstr("lanes, with queues of 1,024")));
  std::istringstream lines(text.substr(text.find("lane  sessions")));
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(lines), {}, '\n'), 3);  // the head and two lanes
}

TEST_F(AdminTest, SlowCallsShowTheirStages) {
  EXPECT_EQ(Text("slow-calls"), "no slow calls\n");
  Open("a session");
  while (server_.slow_calls().count() < 1) std::this_thread::yield();
  EXPECT_THAT(Text("slow-calls --method OpenSession"),
              AllOf(HasSubstr("wait"), HasSubstr("gather"), HasSubstr("OpenSession  OK"), HasSubstr("a session")));
  EXPECT_EQ(Text("slow-calls --method Decode"), "no slow calls\n");
}

// Through the client library, as every call of the command line goes.
TEST_F(AdminTest, TheTraceOfACallIsPassedOnAndAMalformedOneIsNot) {
  std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  const client::ConnectOptions options{.address = server_.address(), .traceparent = [&trace] { return trace; }};
  const auto client = client::Client::Connect(options);
  ASSERT_THAT(client, testing::IsOk());
  const auto session = (*client)->OpenSession(testing::MakeOptions(), {.session_id = "a"});
  ASSERT_THAT(session, testing::IsOk());
  EXPECT_FALSE((*session->StartAppend())->Finish().ok());  // no chunk
  EXPECT_THAT((*client)->StartDecode()->Finish(), testing::IsOk());
  AwaitLog("method=\"Decode\"");
  for (const char* method : {"GetServerInfo", "OpenSession", "AppendStream", "Decode"}) {
    const std::string log = server_.log_text();
    const size_t at = log.find(std::string("method=\"") + method);
    ASSERT_NE(at, std::string::npos) << method;
    EXPECT_THAT(log.substr(at, log.find('\n', at) - at), HasSubstr("trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\""));
  }
  for (const char* bad : {"", "00-zz", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n"}) {
    trace = bad;
    EXPECT_THAT((*client)->GetSession("a"), testing::IsOk());
  }
  AwaitLog("method=\"GetSession\"");
  const std::string log = server_.log_text();
  EXPECT_THAT(log.substr(log.find("method=\"GetSession\"")), ::testing::Not(HasSubstr("trace_id")));
}

TEST_F(AdminTest, NobodyThereIsUnavailable) {
  const auto nobody = client::Admin::Connect({.address = "127.0.0.1:1", .timeout = std::chrono::seconds(60)});
  EXPECT_THAT(nobody->DumpState(), StatusIs(absl::StatusCode::kUnavailable));
}

TEST(AdminText, AStateOfAServerInTroubleSaysSo) {
  v1::DumpStateReply state;
  state.set_draining(true);
  state.set_device("a device");
  state.mutable_start()->set_seconds(1'700'000'000);
  state.mutable_now()->set_seconds(1'700'000'000 + 2 * 86400 + 3 * 3600 + 240);
  state.set_slow_call_ms(0);
  state.add_lanes()->set_working_for_us(61'500'000);
  EXPECT_THAT(StateText(state),
              AllOf(HasSubstr("draining"), HasSubstr("a device (lost)"), HasSubstr("2 d 3 h 4 min, since 2023-11-14"),
                    HasSubstr("not kept"), HasSubstr("61500.0")));
}

TEST(AdminText, ASlowCallShowsWhatItHasAndDashesElsewhere) {
  v1::ListSlowCallsReply slow;
  v1::SlowCall* call = slow.add_calls();
  call->set_method("Retrieve");
  call->set_code("OK");
  call->set_duration_us(123'400);
  auto* stage = call->add_stages();
  stage->set_stage("candidates");
  stage->set_us(99'900);
  call->set_layer(0);
  call->set_trace_id("4bf9");
  EXPECT_THAT(SlowCallsText(slow), AllOf(HasSubstr("123.4"), HasSubstr("99.9"), HasSubstr("4bf9"), HasSubstr("  -  ")));
}

}  // namespace
}  // namespace ctkvr::cli
