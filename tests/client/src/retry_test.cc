// SPDX-License-Identifier: Apache-2.0
//
// Proves which errors are tried again, how long is waited, and that nothing else is tried twice. No test sleeps: the
// waits are recorded.
#include "client/src/retry.h"

#include <vector>

#include "client/src/status.h"
#include "ctkvr/client/error.h"
#include "tests/client/fake_server.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using std::chrono::milliseconds;
using testing::IsOk;
using testing::RichError;
using testing::StatusIs;

absl::Status Unavailable(const std::string& reason = "") {
  return MakeStatus(absl::StatusCode::kUnavailable, "gone", reason);
}
absl::Status QueueFull(int64_t retry_ms) {
  return FromGrpc(RichError(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", {}, retry_ms));
}
Deadline Far() { return std::chrono::system_clock::now() + std::chrono::hours(1); }

class Retry : public ::testing::Test {
 protected:
  Retry() {
    options_.sleep = [this](milliseconds wait) { waits_.push_back(wait); };
  }
  // Attempts end like `statuses`, the last one over and over.
  Outcome Run(std::vector<absl::Status> statuses, Repeat repeat, Deadline deadline = Far()) {
    size_t next = 0;
    return RunWithRetries(options_, deadline, repeat,
                          [&](Deadline) { return statuses[std::min(next++, statuses.size() - 1)]; });
  }

  RetryOptions options_;
  std::vector<milliseconds> waits_;
};

TEST_F(Retry, SuccessIsNotRepeated) {
  const Outcome outcome = Run({absl::OkStatus()}, Repeat::kSafe);
  EXPECT_THAT(outcome.status, IsOk());
  EXPECT_EQ(outcome.attempts, 1u);
  EXPECT_TRUE(waits_.empty());
}

TEST_F(Retry, UnavailableIsTriedAgainWithGrowingWaits) {
  const Outcome outcome = Run({Unavailable(), Unavailable(), Unavailable(), absl::OkStatus()}, Repeat::kSafe);
  EXPECT_THAT(outcome.status, IsOk());
  EXPECT_EQ(outcome.attempts, 4u);
  ASSERT_EQ(waits_.size(), 3u);
  const int64_t expected[] = {50, 100, 200};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GE(waits_[i].count(), expected[i] * 8 / 10) << i;
    EXPECT_LE(waits_[i].count(), expected[i] * 12 / 10) << i;
  }
}

TEST_F(Retry, AttemptsRunOutAndTheErrorSaysSo) {
  const Outcome outcome = Run({Unavailable("WHY")}, Repeat::kSafe);
  EXPECT_EQ(outcome.attempts, 4u);
  EXPECT_THAT(outcome.status, StatusIs(absl::StatusCode::kUnavailable, "after 4 attempts: gone"));
  EXPECT_EQ(DetailOf(outcome.status).reason, "WHY");
}

TEST_F(Retry, WaitsStayBelowTheirMaximum) {
  options_.attempts_max = 12;
  Run({Unavailable()}, Repeat::kSafe);
  ASSERT_EQ(waits_.size(), 11u);
  for (const milliseconds wait : waits_) EXPECT_LE(wait, options_.backoff_max * 12 / 10);
  EXPECT_GE(waits_.back(), options_.backoff_max * 8 / 10);
}

TEST_F(Retry, UnsafeCallsAreNotRepeatedAfterUnavailable) {
  const Outcome outcome = Run({Unavailable(), absl::OkStatus()}, Repeat::kUnsafe);
  EXPECT_EQ(outcome.attempts, 1u);
  EXPECT_THAT(outcome.status, StatusIs(absl::StatusCode::kUnavailable, "gone"));
}

TEST_F(Retry, ADrainingServerIsNotAskedAgain) {
  EXPECT_EQ(Run({Unavailable("DRAINING"), absl::OkStatus()}, Repeat::kSafe).attempts, 1u);
}

TEST_F(Retry, RetryInfoIsHonouredEvenForUnsafeCalls) {
  const Outcome outcome = Run({QueueFull(700), absl::OkStatus()}, Repeat::kUnsafe);
  EXPECT_THAT(outcome.status, IsOk());
  ASSERT_EQ(waits_.size(), 1u);
  EXPECT_GE(waits_[0], milliseconds(700));
}

TEST_F(Retry, ExhaustionWithoutRetryInfoIsFinal) {
  EXPECT_EQ(Run({QueueFull(-1), absl::OkStatus()}, Repeat::kSafe).attempts, 1u);
}

TEST_F(Retry, AWaitBeyondTheDeadlineIsNotBegun) {
  const Deadline soon = std::chrono::system_clock::now() + std::chrono::seconds(30);
  const Outcome outcome = Run({QueueFull(3600000), absl::OkStatus()}, Repeat::kSafe, soon);
  EXPECT_EQ(outcome.attempts, 1u);
  EXPECT_TRUE(waits_.empty());
}

TEST_F(Retry, OtherErrorsAreFinal) {
  for (const auto code : {absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound, absl::StatusCode::kInternal,
                          absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kAborted}) {
    EXPECT_EQ(Run({absl::Status(code, "x"), absl::OkStatus()}, Repeat::kSafe).attempts, 1u);
  }
}

TEST_F(Retry, OneAttemptSwitchesRetriesOff) {
  options_.attempts_max = 1;
  EXPECT_EQ(Run({Unavailable(), absl::OkStatus()}, Repeat::kSafe).attempts, 1u);
}

}  // namespace
}  // namespace ctkvr::client
