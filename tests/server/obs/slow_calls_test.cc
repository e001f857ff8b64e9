// SPDX-License-Identifier: Apache-2.0
//
// Proves what counts as slow, that the newest calls of each method are kept and no method pushes out another's, and
// that threads that add at once leave whole records.

#include "server/obs/slow_calls.h"

#include <gtest/gtest.h>

#include <thread>

namespace ctkvr::obs {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::system_clock;

SlowCall MakeCall(Method method, int64_t number) {
  SlowCall call{.method = method, .ended = system_clock::time_point(std::chrono::seconds(number))};
  call.duration = milliseconds(number);
  call.items = static_cast<uint64_t>(number);
  call.SetSession("session-" + std::to_string(number));
  return call;
}

TEST(SlowCallsTest, TheThresholdItselfIsSlow) {
  const SlowCalls slow(milliseconds(50));
  EXPECT_FALSE(slow.IsSlow(milliseconds(50) - nanoseconds(1)));
  EXPECT_TRUE(slow.IsSlow(milliseconds(50)));
  EXPECT_FALSE(SlowCalls(milliseconds(0)).IsSlow(std::chrono::hours(10000)));
}

TEST(SlowCallsTest, TheNewestOfEachMethodAreKept) {
  SlowCalls slow(milliseconds(1));
  slow.Add(MakeCall(Method::kRetrieve, 5));
  constexpr int kMany = 3 * SlowCalls::kKeptPerMethod + 7;
  for (int i = 10; i < 10 + kMany; ++i) slow.Add(MakeCall(Method::kAppend, i));
  const auto appends = slow.Recent(Method::kAppend, 1000);
  ASSERT_EQ(appends.size(), SlowCalls::kKeptPerMethod);
  for (size_t i = 0; i < appends.size(); ++i) {
    EXPECT_EQ(appends[i].items, static_cast<uint64_t>(10 + kMany - 1) - i);  // the newest first, none left out
  }
  const auto retrieves = slow.Recent(Method::kRetrieve, 1000);
  ASSERT_EQ(retrieves.size(), 1u);
  EXPECT_EQ(retrieves[0].SessionId(), "session-5");
  EXPECT_EQ(slow.Recent(std::nullopt, 1000).size(), SlowCalls::kKeptPerMethod + 1);
  EXPECT_EQ(slow.Recent(std::nullopt, 1000).back().SessionId(), "session-5");
  EXPECT_EQ(slow.Recent(std::nullopt, 3).size(), 3u);
  EXPECT_TRUE(slow.Recent(Method::kDecode, 1000).empty());
  EXPECT_EQ(slow.count(), kMany + 1u);
}

TEST(SlowCallsTest, AnIdIsKeptWholeUpToTheLongestAndCutBehind) {
  SlowCall call;
  EXPECT_EQ(call.SessionId(), "");
  const std::string longest(limits::kSessionIdBytesMax, 'a');
  call.SetSession(longest);
  EXPECT_EQ(call.SessionId(), longest);
  call.SetSession(longest + "b");
  EXPECT_EQ(call.SessionId(), longest);
  call.SetSession("c");
  EXPECT_EQ(call.SessionId(), "c");
}

TEST(SlowCallsTest, RecordsOfManyThreadsAreWhole) {
  SlowCalls slow(milliseconds(1));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&slow, t] {
      for (int i = 0; i < 2000; ++i) slow.Add(MakeCall(Method::kRetrieve, 10000 * t + i));
    });
  }
  for (int i = 0; i < 200; ++i) {
    for (const SlowCall& call : slow.Recent(std::nullopt, 1000)) {
      ASSERT_EQ(call.SessionId(), "session-" + std::to_string(call.items));
      ASSERT_EQ(call.duration, milliseconds(call.items));
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(slow.count(), 8000u);
}

}  // namespace
}  // namespace ctkvr::obs
