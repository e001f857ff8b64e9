// SPDX-License-Identifier: Apache-2.0
//
// Proves that every series of calls is on the page from the start, that their number never changes, and that each is
// moved by what it counts and by nothing else.

#include "server/obs/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <regex>
#include <set>
#include <thread>

#include "tests/server/obs/page.h"

namespace ctkvr::obs {
namespace {

using ::ctkvr::testing::ParsePage;
using ::ctkvr::testing::ValueOf;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

class MetricsTest : public ::testing::Test {
 protected:
  double Value(const std::string& series) const { return ValueOf(metrics_.Text(), series); }

  Stats stats_;
  Metrics metrics_{stats_, [] { return ServerSample{}; }, {.version = "1", .backend = "cpu", .device = "test"}};
};

TEST_F(MetricsTest, EveryMethodHasEveryCodeFromTheStart) {
  const std::string text = metrics_.Text();
  for (const char* method : kMethodNames) {
    for (const char* code : kCodeNames) {
      const std::string labels = std::string("{code=\"") + code + "\",method=\"" + method + "\"}";
      EXPECT_EQ(ValueOf(text, "ctkvr_rpc_calls_total" + labels), 0) << labels;
    }
    const std::string label = std::string("{method=\"") + method + "\"}";
    EXPECT_EQ(ValueOf(text, "ctkvr_rpc_in_flight" + label), 0) << label;
    EXPECT_EQ(ValueOf(text, "ctkvr_rpc_cancelled_total" + label), 0) << label;
    EXPECT_EQ(ValueOf(text, "ctkvr_rpc_received_bytes_total" + label), 0) << label;
    EXPECT_EQ(ValueOf(text, "ctkvr_rpc_sent_bytes_total" + label), 0) << label;
    EXPECT_EQ(ValueOf(text, "ctkvr_rpc_seconds_count" + label), 0) << label;
  }
  for (const char* method : {"Retrieve", "Decode"}) {
    for (const char* code : kCodeNames) {
      const std::string labels = std::string("{code=\"") + code + "\",method=\"" + method + "\"}";
      EXPECT_EQ(ValueOf(text, "ctkvr_rpc_items_total" + labels), 0) << labels;
    }
  }
}

TEST_F(MetricsTest, TheNumberOfSeriesNeverChanges) {
  const size_t before = ParsePage(metrics_.Text()).size();
  for (size_t m = 0; m < kMethodNames.size(); ++m) {
    for (int code = -3; code < 40; ++code) {
      metrics_.CallStarted(static_cast<Method>(m));
      metrics_.CallDone(static_cast<Method>(m), code, milliseconds(code * code));
    }
  }
  for (int code = -3; code < 40; ++code) metrics_.ItemDone(Method::kDecode, code);
  metrics_.MessageDone(Method::kDecode, milliseconds(1));
  stats_.sessions_opened += 100;
  stats_.stages[0].Observe(milliseconds(3));
  EXPECT_EQ(ParsePage(metrics_.Text()).size(), before);
}

TEST_F(MetricsTest, CallsOfAdminAreCountedApart) {
  for (const char* method : kAdminMethodNames) {
    for (const char* code : kCodeNames) {
      EXPECT_EQ(Value(std::string("ctkvr_admin_calls_total{code=\"") + code + "\",method=\"" + method + "\"}"), 0);
    }
  }
  const size_t before = ParsePage(metrics_.Text()).size();
  metrics_.AdminCallDone(AdminMethod::kStartDrain, 7);
  metrics_.AdminCallDone(AdminMethod::kStartDrain, 99);
  EXPECT_EQ(Value("ctkvr_admin_calls_total{code=\"PERMISSION_DENIED\",method=\"StartDrain\"}"), 1);
  EXPECT_EQ(Value("ctkvr_admin_calls_total{code=\"UNKNOWN\",method=\"StartDrain\"}"), 1);
  EXPECT_EQ(ParsePage(metrics_.Text()).size(), before);
}

TEST_F(MetricsTest, ACallIsInFlightUntilItIsDone) {
  metrics_.CallStarted(Method::kAppend);
  EXPECT_EQ(Value("ctkvr_rpc_in_flight{method=\"Append\"}"), 1);
  metrics_.CallDone(Method::kAppend, 0, milliseconds(1));
  EXPECT_EQ(Value("ctkvr_rpc_in_flight{method=\"Append\"}"), 0);
}

TEST_F(MetricsTest, ACallIsCountedByItsMethodAndCodeOnly) {
  metrics_.CallStarted(Method::kRetrieve);
  metrics_.CallDone(Method::kRetrieve, 8, milliseconds(1));
  double sum = 0;
  for (const auto& [series, value] : ParsePage(metrics_.Text())) {
    if (series.starts_with("ctkvr_rpc_calls_total")) sum += value;
  }
  EXPECT_EQ(sum, 1);
  EXPECT_EQ(Value("ctkvr_rpc_calls_total{code=\"RESOURCE_EXHAUSTED\",method=\"Retrieve\"}"), 1);
}

TEST_F(MetricsTest, ACodeOutsideTheTableCountsAsUnknown) {
  metrics_.CallStarted(Method::kRetrieve);
  metrics_.CallDone(Method::kRetrieve, 99, milliseconds(1));
  EXPECT_EQ(Value("ctkvr_rpc_calls_total{code=\"UNKNOWN\",method=\"Retrieve\"}"), 1);
  EXPECT_STREQ(CodeName(-1), "UNKNOWN");
  EXPECT_STREQ(CodeName(16), "UNAUTHENTICATED");
}

TEST_F(MetricsTest, LatencyFallsIntoItsBucket) {
  metrics_.CallStarted(Method::kKeepAlive);
  metrics_.CallDone(Method::kKeepAlive, 0, milliseconds(20));
  EXPECT_EQ(Value("ctkvr_rpc_seconds_bucket{method=\"KeepAlive\",le=\"0.01\"}"), 0);
  EXPECT_EQ(Value("ctkvr_rpc_seconds_bucket{method=\"KeepAlive\",le=\"0.025\"}"), 1);
  EXPECT_EQ(Value("ctkvr_rpc_seconds_bucket{method=\"KeepAlive\",le=\"+Inf\"}"), 1);
  EXPECT_DOUBLE_EQ(Value("ctkvr_rpc_seconds_sum{method=\"KeepAlive\"}"), 0.02);
}

TEST_F(MetricsTest, BytesItemsMessagesAndCancellationsAreCounted) {
  metrics_.Bytes(Method::kDecode, 10, 3000);
  metrics_.ItemDone(Method::kDecode, 5);
  metrics_.ItemDone(Method::kRetrieve, 0);
  metrics_.MessageDone(Method::kAppendStream, milliseconds(2));
  metrics_.CallCancelled(Method::kDecode);
  EXPECT_EQ(Value("ctkvr_rpc_received_bytes_total{method=\"Decode\"}"), 10);
  EXPECT_EQ(Value("ctkvr_rpc_sent_bytes_total{method=\"Decode\"}"), 3000);
  EXPECT_EQ(Value("ctkvr_rpc_items_total{code=\"NOT_FOUND\",method=\"Decode\"}"), 1);
  EXPECT_EQ(Value("ctkvr_rpc_items_total{code=\"OK\",method=\"Retrieve\"}"), 1);
  EXPECT_EQ(Value("ctkvr_rpc_message_seconds_count{method=\"AppendStream\"}"), 1);
  EXPECT_EQ(Value("ctkvr_rpc_message_seconds_count{method=\"Decode\"}"), 0);
  EXPECT_EQ(Value("ctkvr_rpc_cancelled_total{method=\"Decode\"}"), 1);
}

// https://prometheus.io/docs/practices/naming/
TEST_F(MetricsTest, NamesFollowTheConventions) {
  static const std::regex declared("# TYPE (\\S+) (\\S+)");
  const std::string text = metrics_.Text();
  size_t families = 0;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), declared); it != std::sregex_iterator(); ++it) {
    const std::string name = (*it)[1];
    const std::string type = (*it)[2];
    ++families;
    EXPECT_TRUE(name.starts_with("ctkvr_")) << name;
    EXPECT_EQ(name.ends_with("_total"), type == "counter") << name << " is a " << type;
    EXPECT_TRUE(type != "histogram" || name.ends_with("_seconds")) << name << " is a " << type;
    EXPECT_THAT(text, HasSubstr("# HELP " + name + " "));
  }
  EXPECT_GT(families, 30u);
}

TEST_F(MetricsTest, NoFamilyIsDeclaredTwice) {
  static const std::regex declared("# TYPE (\\S+) ");
  const std::string text = metrics_.Text();
  std::multiset<std::string> names;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), declared); it != std::sregex_iterator(); ++it) {
    names.insert((*it)[1]);
  }
  for (const std::string& name : names) EXPECT_EQ(names.count(name), 1u) << name;
}

TEST_F(MetricsTest, ThePageIsServedOnAFreePort) {
  const auto address = metrics_.Expose("127.0.0.1:0");
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_TRUE(std::regex_match(*address, std::regex("127\\.0\\.0\\.1:[1-9][0-9]*"))) << *address;
}

TEST_F(MetricsTest, AnEmptyAddressServesNoPage) {
  const auto address = metrics_.Expose("");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(*address, "");
}

TEST_F(MetricsTest, AnAddressInUseIsAnErrorThatNamesIt) {
  const auto address = metrics_.Expose("127.0.0.1:0");
  ASSERT_TRUE(address.ok());
  Metrics second(stats_, [] { return ServerSample{}; }, {});
  const auto refused = second.Expose(*address);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(*address));
}

TEST_F(MetricsTest, CountersAreExactUnderManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 2000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < kCalls; ++i) {
        metrics_.CallStarted(Method::kAppend);
        metrics_.CallDone(Method::kAppend, 0, milliseconds(1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Value("ctkvr_rpc_calls_total{code=\"OK\",method=\"Append\"}"), kThreads * kCalls);
  EXPECT_EQ(Value("ctkvr_rpc_in_flight{method=\"Append\"}"), 0);
}

}  // namespace
}  // namespace ctkvr::obs
