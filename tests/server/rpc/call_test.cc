// SPDX-License-Identifier: Apache-2.0
//
// Proves what a call leaves behind when it ends (series, access line, counter), how its deadline reaches the engine's
// time, and that waiting for calls to end waits exactly for that.

#include "server/rpc/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "spdlog/sinks/ostream_sink.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/test_server.h"

namespace ctkvr::rpc {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CallTest : public ::testing::Test {
 protected:
  std::ostringstream lines_;
  obs::Log log_{{.sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(lines_)}};
  testing::FakeClock clock_;
  testing::TestServer server_;  // for an engine and metrics
  Edge edge_{.engine = server_.engine(),
             .clock = clock_,
             .metrics = server_.metrics(),
             .log = log_,
             .access = server_.access(),
             .slow_calls = server_.slow_calls()};
  grpc::CallbackServerContext context_;
  CallCounter counter_;
};

TEST_F(CallTest, AnEndedCallLeavesItsLineAndItsSeries) {
  {
    Call call(obs::Method::kAppend, context_, edge_, counter_);
    call.NoteSession("a");
    call.NoteLayer(3);
    call.NoteItems(2);
    call.NoteReceived(10);
    call.NoteSent(20);
    EXPECT_EQ(call.End(absl::NotFoundError("gone")).error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(server_.metrics().Text(), HasSubstr("ctkvr_rpc_in_flight{method=\"Append\"} 1\n"));
    EXPECT_THAT(lines_.str(), IsEmpty());
  }
  EXPECT_THAT(lines_.str(), HasSubstr(R"(method="Append" code="NOT_FOUND" session="a" layer=3 items=2 us=)"));
  EXPECT_THAT(lines_.str(), HasSubstr(R"(bytes_in=10 bytes_out=20)"));
  EXPECT_THAT(lines_.str(), HasSubstr(R"(message="gone")"));
  const std::string page = server_.metrics().Text();
  EXPECT_THAT(page, HasSubstr("ctkvr_rpc_in_flight{method=\"Append\"} 0\n"));
  EXPECT_THAT(page, HasSubstr("ctkvr_rpc_calls_total{code=\"NOT_FOUND\",method=\"Append\"} 1\n"));
  EXPECT_THAT(page, HasSubstr("ctkvr_rpc_received_bytes_total{method=\"Append\"} 10\n"));
  EXPECT_THAT(page, HasSubstr("ctkvr_rpc_sent_bytes_total{method=\"Append\"} 20\n"));
}

TEST_F(CallTest, FaultsOfTheServerAreErrors) {
  for (const absl::Status& status : {absl::InternalError("x"), absl::UnknownError("x")}) {
    lines_.str("");
    { Call(obs::Method::kAppend, context_, edge_, counter_).End(status); }
    EXPECT_THAT(lines_.str(), HasSubstr(" error access ")) << status;
  }
  lines_.str("");
  { Call(obs::Method::kAppend, context_, edge_, counter_).End(absl::DataLossError("of the client's")); }
  EXPECT_THAT(lines_.str(), HasSubstr(" info access "));
}

TEST_F(CallTest, ACallWithoutADeadlineHasNoneForTheEngine) {
  Call call(obs::Method::kAppend, context_, edge_, counter_);
  EXPECT_EQ(call.Context().deadline, TimePoint::max());
  call.End(absl::OkStatus());
}

TEST_F(CallTest, CancellationShowsInTheContextAndIsCountedOnce) {
  Call call(obs::Method::kAppend, context_, edge_, counter_);
  const CallContext context = call.Context();
  EXPECT_FALSE(context.cancelled());
  call.OnCancel();
  call.OnCancel();
  EXPECT_TRUE(context.cancelled());
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("ctkvr_rpc_cancelled_total{method=\"Append\"} 1\n"));
  call.End(absl::OkStatus());
}

TEST(CallCounterTest, WithoutCallsThereIsNothingToWaitFor) {
  CallCounter counter;
  EXPECT_TRUE(counter.WaitIdle(milliseconds(0)));
}

TEST(CallCounterTest, WaitsUntilTheLastCallLeaves) {
  CallCounter counter;
  counter.Enter();
  counter.Enter();
  EXPECT_FALSE(counter.WaitIdle(milliseconds(0)));
  counter.Leave();
  EXPECT_FALSE(counter.WaitIdle(milliseconds(0)));
  std::thread last([&counter] { counter.Leave(); });
  EXPECT_TRUE(counter.WaitIdle(std::chrono::minutes(1)));
  last.join();
}

}  // namespace
}  // namespace ctkvr::rpc
