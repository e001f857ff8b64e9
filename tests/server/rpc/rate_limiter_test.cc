// SPDX-License-Identifier: Apache-2.0
//
// Proves the limiter against a bucket of tokens kept in whole nanoseconds of credit, and that threads together never
// get more than the bucket gives.

#include "server/rpc/rate_limiter.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/testing/random_kv.h"

namespace ctkvr::rpc {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;

TimePoint At(int64_t ns) { return TimePoint(nanoseconds(ns)); }

TEST(RateLimiterTest, WithoutARateEverythingGoes) {
  RateLimiter limiter;
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(limiter.Take(At(0)).count(), 0);
}

TEST(RateLimiterTest, ABurstGoesAndThenOneAtATime) {
  RateLimiter limiter;
  limiter.Set(10, 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limiter.Take(At(0)).count(), 0) << i;
  EXPECT_EQ(limiter.Take(At(0)), nanoseconds(100'000'000));
  EXPECT_EQ(limiter.Take(At(99'999'999)), nanoseconds(1)) << "refused calls cost nothing";
  EXPECT_EQ(limiter.Take(At(100'000'000)).count(), 0);
  EXPECT_EQ(limiter.Take(At(100'000'000)), nanoseconds(100'000'000));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limiter.Take(At(10'000'000'000)).count(), 0) << "full, not fuller";
  EXPECT_GT(limiter.Take(At(10'000'000'000)).count(), 0);
}

TEST(RateLimiterTest, RandomCallsGoAsFromABucketOfTokens) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(31);
  for (int round = 0; round < 50; ++round) {
    const int64_t interval = 1 + static_cast<int64_t>(random() % 1000);
    const int64_t burst = 1 + static_cast<int64_t>(random() % 20);
    RateLimiter limiter;
    limiter.Set(1e9 / static_cast<double>(interval), static_cast<uint64_t>(burst));
    int64_t now = static_cast<int64_t>(random() % 1000);
    int64_t credit = burst * interval;  // nanoseconds; a call costs `interval`
    for (int call = 0; call < 2000; ++call) {
      const auto passed = static_cast<int64_t>(random() % static_cast<uint64_t>(2 * interval));
      now += passed;
      credit = std::min(burst * interval, credit + passed);
      const nanoseconds wait = limiter.Take(At(now));
      ASSERT_EQ(wait.count(), std::max<int64_t>(0, interval - credit)) << "call " << call << " of round " << round;
      if (wait.count() == 0) credit -= interval;
    }
  }
}

TEST(RateLimiterTest, ThreadsTogetherGetWhatTheBucketHolds) {
  RateLimiter limiter;
  limiter.Set(1, 1000);
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) taken += limiter.Take(At(0)).count() == 0 ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(taken.load(), 1000);
}

}  // namespace
}  // namespace ctkvr::rpc
