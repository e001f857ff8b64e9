// SPDX-License-Identifier: Apache-2.0
//
// Proves that each of the two signals is waited for and not lost when it comes early, that a request and a lost device
// end the wait, and that a signal after Release ends a process, but for those it tolerates.

#include "server/stop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace ctkvr {
namespace {

bool Healthy() { return true; }

TEST(StopSignalsTest, EachSignalIsReturned) {
  StopSignals stop;
  for (int number : {SIGTERM, SIGINT}) {
    kill(getpid(), number);  // before anybody waits
    EXPECT_EQ(stop.Await(Healthy), number);
  }
}

TEST(StopSignalsTest, ARequestEndsTheWaitBeforeItAndDuringIt) {
  StopSignals stop;
  stop.Request();
  EXPECT_EQ(stop.Await(Healthy), StopSignals::kRequested);
  std::thread asker([&stop] { stop.Request(); });
  EXPECT_EQ(stop.Await(Healthy), StopSignals::kRequested);
  asker.join();
}

TEST(StopSignalsTest, ARequestIsHeardBeforeTheSignalThatFollowsIt) {
  StopSignals stop;
  stop.Request();
  kill(getpid(), SIGTERM);
  EXPECT_EQ(stop.Await(Healthy), StopSignals::kRequested);
  EXPECT_EQ(stop.Await(Healthy), SIGTERM);
}

TEST(StopSignalsTest, ATolerantReleaseEndsWithoutASignal) {
  StopSignals stop;
  stop.Release(1);
}

TEST(StopSignalsTest, ALostDeviceEndsTheWait) {
  StopSignals stop;
  int asked = 0;
  EXPECT_EQ(stop.Await([&asked] { return ++asked < 2; }), 0);
  EXPECT_EQ(asked, 2);
}

TEST(StopSignalsTest, AClosedPipeDoesNotEndTheProcess) {
  StopSignals stop;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  EXPECT_EQ(write(ends[1], "x", 1), -1);
  close(ends[1]);
}

TEST(StopSignalsDeathTest, AfterReleaseASignalEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StopSignals stop;
        kill(getpid(), SIGTERM);
        stop.Await(Healthy);
        stop.Release();
        kill(getpid(), SIGTERM);
        std::_Exit(0);
      },
      ::testing::KilledBySignal(SIGTERM), "");
}

TEST(StopSignalsDeathTest, AToleratedSignalDoesNothingAndTheNextEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StopSignals stop;
        stop.Release(1);
        // Taken from the process before the next is sent: two of a kind that wait are one.
        kill(getpid(), SIGTERM);
        sigset_t waiting;
        do {
          sigpending(&waiting);
        } while (sigismember(&waiting, SIGTERM) == 1);
        kill(getpid(), SIGTERM);
        for (;;) pause();
      },
      ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace ctkvr
