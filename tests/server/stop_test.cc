// SPDX-License-Identifier: Apache-2.0
//
// Proves that each of the two signals is waited for and not lost when it comes early, that a lost device ends the wait,
// and that a signal after Release ends a process.

#include "server/stop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

namespace ctkvr {
namespace {

bool Healthy() { return true; }

TEST(StopSignalsTest, EachSignalIsReturned) {
  const StopSignals stop;
  for (int number : {SIGTERM, SIGINT}) {
    kill(getpid(), number);  // before anybody waits
    EXPECT_EQ(stop.Await(Healthy), number);
  }
}

TEST(StopSignalsTest, ALostDeviceEndsTheWait) {
  const StopSignals stop;
  int asked = 0;
  EXPECT_EQ(stop.Await([&asked] { return ++asked < 2; }), 0);
  EXPECT_EQ(asked, 2);
}

TEST(StopSignalsTest, AClosedPipeDoesNotEndTheProcess) {
  const StopSignals stop;
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
        const StopSignals stop;
        kill(getpid(), SIGTERM);
        stop.Await(Healthy);
        stop.Release();
        kill(getpid(), SIGTERM);
        std::_Exit(0);
      },
      ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace ctkvr
