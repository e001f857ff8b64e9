// SPDX-License-Identifier: Apache-2.0
//
// What a lane promises, driven by hand with a clock of the test's own: order, batches, a bounded queue, deadlines,
// cancellation, leases, and maintenance jobs.

#include "server/core/lane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class LaneTest : public ::testing::Test {
 protected:
  void Open(const std::string& id, seconds lease = seconds(600)) {
    SessionConfig config = config_;
    config.lease = lease;
    ASSERT_THAT(harness_.Open(id, config), IsOk());
  }
  StepRequest AppendRequest(const std::string& id, const OwnedChunk& chunk) {
    return {.session = Ref(id), .chunk = chunk.chunk, .query = std::nullopt};
  }
  // Queues a Get and notes its status under `name` once it is answered.
  void QueueGet(const std::string& id, const std::string& name, CallContext context = {}) {
    harness_.engine().Get(Ref(id), std::move(context), [this, name](const absl::StatusOr<SessionInfo>& info) {
      answered_.push_back(name + ":" + absl::StatusCodeToString(info.status().code()));
    });
  }

  Harness harness_;
  const SessionConfig config_ = SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids));
  const Tokens tokens_{config_.layers[0], config_.dtype, 1};
  std::vector<std::string> answered_;
};

TEST_F(LaneTest, NothingRunsBeforeTheLaneDoes) {
  Open("s");
  QueueGet("s", "get");
  EXPECT_TRUE(answered_.empty());
  EXPECT_EQ(harness_.engine().stats().queued_items, 1);
  EXPECT_TRUE(harness_.engine().RunLane(0));
  EXPECT_THAT(answered_, ElementsAre("get:OK"));
  EXPECT_EQ(harness_.engine().stats().queued_items, 0);
  EXPECT_FALSE(harness_.engine().RunLane(0));
}

TEST_F(LaneTest, CallsOfASessionTakeEffectInOrder) {
  Open("s");
  const OwnedChunk first = tokens_.Append(0, 10), second = tokens_.Append(10, 5), third = tokens_.Append(8, 5, 0, 3);
  std::vector<std::string> seen;
  const auto step = [&](const OwnedChunk& chunk) {
    harness_.engine().Step({AppendRequest("s", chunk)}, {}, [&](const std::vector<StepResult>& results) {
      seen.push_back(results[0].append.ok() ? std::to_string(results[0].append->length) : "error");
    });
  };
  step(first);
  step(second);
  harness_.engine().Truncate(Ref("s"), 8, {},
                             [&](const auto& result) { seen.push_back(result.ok() ? "cut" : "error"); });
  step(third);
  harness_.engine().RunLane(0);
  EXPECT_THAT(seen, ElementsAre("10", "15", "cut", "13"));
  EXPECT_EQ(harness_.engine().stats().batches, 2u) << "the open, and these four";
}

TEST_F(LaneTest, AnAppendDoesNotOvertakeAQueryOfItsLayer) {
  Open("s");
  const OwnedChunk first = tokens_.Append(0, 10), second = tokens_.Append(10, 5);
  const OwnedQuery query = tokens_.Ask(100);
  std::vector<uint32_t> lengths;
  const auto ask = [&] {
    harness_.engine().Step(
        {{.session = Ref("s"), .chunk = std::nullopt, .query = query.query}}, {},
        [&](const std::vector<StepResult>& results) { lengths.push_back(results[0].answer->length); });
  };
  const auto append = [&](const OwnedChunk& chunk) {
    harness_.engine().Step({AppendRequest("s", chunk)}, {}, [](const std::vector<StepResult>&) {});
  };
  ask();
  append(first);
  ask();
  append(second);
  ask();
  harness_.engine().RunLane(0);
  EXPECT_THAT(lengths, ElementsAre(0u, 10u, 15u));
}

TEST_F(LaneTest, AStepAppendsThenRetrieves) {
  Open("s");
  const OwnedChunk chunk = tokens_.Append(0, 10);
  const OwnedQuery query = tokens_.Ask(9);
  const auto results = harness_.Step({{.session = Ref("s"), .chunk = chunk.chunk, .query = query.query}});
  EXPECT_EQ(results[0].append->length, 10u);
  EXPECT_EQ(results[0].answer->counts[0], 10u);
}

TEST_F(LaneTest, ARetrievalIsNotTriedWhenItsAppendFailed) {
  Open("s");
  const OwnedChunk chunk = tokens_.Append(5, 10);
  const OwnedQuery query = tokens_.Ask(9);
  const auto results = harness_.Step({{.session = Ref("s"), .chunk = chunk.chunk, .query = query.query}});
  EXPECT_THAT(results[0].append, StatusIs(absl::StatusCode::kOutOfRange));
  EXPECT_EQ(results[0].answer.status(), results[0].append.status());
}

TEST_F(LaneTest, ABadQueryBesideAGoodAppendLeavesTheAppend) {
  Open("s");
  const OwnedChunk chunk = tokens_.Append(0, 10);
  OwnedQuery query = tokens_.Ask(9);
  StoreElement(query.bytes.data(), config_.dtype, 5, std::numeric_limits<float>::quiet_NaN());
  const auto results = harness_.Step({{.session = Ref("s"), .chunk = chunk.chunk, .query = query.query}});
  EXPECT_THAT(results[0].append, IsOk());
  EXPECT_THAT(results[0].answer, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("queries[5] is NaN")));
}

TEST_F(LaneTest, EachItemOfAStepHasItsOwnOutcome) {
  Open("a");
  Open("b");
  const OwnedChunk good = tokens_.Append(0, 10), gap = tokens_.Append(3, 1);
  const auto results = harness_.Step({AppendRequest("a", good), AppendRequest("none", good), AppendRequest("b", gap),
                                      AppendRequest("b", good), AppendRequest("a", gap)});
  EXPECT_THAT(results[0].append, IsOk());
  EXPECT_THAT(results[1].append, StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(results[2].append, StatusIs(absl::StatusCode::kOutOfRange));
  EXPECT_THAT(results[3].append, IsOk());
  EXPECT_TRUE(results[4].append->repeated);
}

TEST_F(LaneTest, AFullQueueRefusesAtOnceAndSaysSo) {
  Open("s");
  const uint32_t limit = harness_.engine().options().queue_items_max;
  for (uint32_t i = 0; i < limit + 2; ++i) QueueGet("s", std::to_string(i));
  EXPECT_THAT(answered_, ElementsAre("64:RESOURCE_EXHAUSTED", "65:RESOURCE_EXHAUSTED"));
  absl::Status refused;
  harness_.engine().KeepAlive(Ref("s"), {}, [&](const auto& result) { refused = result.status(); });
  EXPECT_EQ(GetErrorDetail(refused).reason, kReasonQueueFull);
  const OwnedChunk chunk = tokens_.Append(0, 1);
  harness_.engine().Step({AppendRequest("s", chunk)}, {},
                         [&](const std::vector<StepResult>& results) { refused = results[0].append.status(); });
  EXPECT_EQ(GetErrorDetail(refused).reason, kReasonQueueFull);
  EXPECT_EQ(harness_.engine().stats().queue_rejections, 4u);
  // An open that found no room leaves its id free.
  harness_.engine().Open("t", config_, {}, [&](const auto& result) { refused = result.status(); });
  EXPECT_EQ(GetErrorDetail(refused).reason, kReasonQueueFull);
  harness_.engine().RunLane(0);
  EXPECT_EQ(answered_.size(), limit + 2);
  Open("t");
}

TEST_F(LaneTest, ADeadlineThatPassedInTheQueueIsNoticedBeforeWork) {
  Open("s");
  CallContext context;
  context.deadline = harness_.clock().Now() + seconds(5);
  QueueGet("s", "get", context);
  const OwnedChunk chunk = tokens_.Append(0, 3);
  absl::Status append;
  harness_.engine().Step({AppendRequest("s", chunk)}, context,
                         [&](const std::vector<StepResult>& results) { append = results[0].append.status(); });
  absl::Status open;
  harness_.engine().Open("t", config_, context, [&](const auto& result) { open = result.status(); });
  harness_.clock().Advance(seconds(5));
  harness_.engine().RunLane(0);
  EXPECT_THAT(answered_, ElementsAre("get:DEADLINE_EXCEEDED"));
  EXPECT_THAT(append, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("before work")));
  EXPECT_THAT(open, StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(harness_.engine().stats().expired_in_queue, 3u);
  EXPECT_EQ(harness_.Get(Ref("s"))->layers[0].length, 0u);
  Open("t");
}

TEST_F(LaneTest, ACallerThatWentAwayIsNoticedBeforeWork) {
  Open("s");
  CallContext context;
  context.cancelled = [] { return true; };
  QueueGet("s", "get", context);
  harness_.engine().RunLane(0);
  EXPECT_THAT(answered_, ElementsAre("get:CANCELLED"));
}

// ---- Leases --------------------------------------------------------------------------------------------------------

TEST_F(LaneTest, ASessionEndsWhenNoCallHasNamedItForItsLease) {
  Open("s", seconds(10));
  harness_.clock().Advance(seconds(9));
  EXPECT_EQ(harness_.KeepAlive("s")->lease_remaining_seconds, 10u);
  harness_.clock().Advance(seconds(9));
  EXPECT_THAT(harness_.Append("s", tokens_.Append(0, 1)), IsOk());
  harness_.clock().Advance(seconds(9));
  EXPECT_EQ(harness_.Get(Ref("s"))->lease_remaining_seconds, 10u);
  harness_.clock().Advance(seconds(10));
  const auto gone = harness_.Get(Ref("s"));
  EXPECT_THAT(gone, StatusIs(absl::StatusCode::kNotFound, HasSubstr("lease ran out")));
  EXPECT_EQ(GetErrorDetail(gone.status()).reason, kReasonLeaseExpired);
  EXPECT_EQ(harness_.engine().memory().arena_reserved_bytes, 0u);
  EXPECT_EQ(harness_.engine().stats().sessions_ended[static_cast<size_t>(SessionEnd::kExpired)], 1u);
  EXPECT_EQ(harness_.engine().stats().tokens_held, 0);
  EXPECT_EQ(GetErrorDetail(harness_.Get(Ref("s")).status()).reason, kReasonLeaseExpired);
  Open("s");
}

TEST_F(LaneTest, AnIdleLaneEndsSessionsToo) {
  Open("s", seconds(10));
  harness_.clock().Advance(seconds(10));
  harness_.engine().RunLane(0);
  EXPECT_EQ(harness_.engine().stats().sessions, 0);
}

TEST_F(LaneTest, ACallThatWaitedInTheQueueKeepsItsSession) {
  Open("s", seconds(10));
  harness_.clock().Advance(seconds(9));
  QueueGet("s", "in time");
  harness_.clock().Advance(seconds(5));
  QueueGet("s", "late");
  harness_.engine().RunLane(0);
  // The first renewed the lease, so that the second finds the session again.
  EXPECT_THAT(answered_, ElementsAre("in time:OK", "late:OK"));
}

TEST_F(LaneTest, ACallWithTheWrongEpochDoesNotRenewTheLease) {
  Open("s", seconds(10));
  harness_.clock().Advance(seconds(9));
  EXPECT_THAT(harness_.Get(Ref("s", 1)), StatusIs(absl::StatusCode::kFailedPrecondition));
  harness_.clock().Advance(seconds(1));
  EXPECT_THAT(harness_.Get(Ref("s")), StatusIs(absl::StatusCode::kNotFound));
}

// ---- Maintenance jobs ----------------------------------------------------------------------------------------------

TEST_F(LaneTest, OtherSessionsAreServedWhileAnIndexIsBuilt) {
  Open("s");
  Open("t");
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 500, 24)), IsOk());
  bool done = false;
  harness_.engine().Maintain(Ref("s"), {}, {}, [&](const auto& result) { done = result.ok(); });
  int served = 0;
  for (; !done && served < 100; ++served) {
    QueueGet("t", "get");
    ASSERT_TRUE(harness_.engine().RunLane(0));
  }
  EXPECT_EQ(served, 5) << "the set, then two steps for each of two heads";
  EXPECT_EQ(answered_.size(), 5u);
}

TEST_F(LaneTest, AJobEndsWithItsSession) {
  Open("s");
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 500, 24)), IsOk());
  absl::Status maintained;
  harness_.engine().Maintain(Ref("s"), {}, {}, [&](const auto& result) { maintained = result.status(); });
  harness_.engine().Close(Ref("s"), {}, [](const auto&) {});
  harness_.engine().RunLane(0);
  EXPECT_THAT(maintained, StatusIs(absl::StatusCode::kNotFound));
  EXPECT_EQ(GetErrorDetail(maintained).reason, kReasonSessionClosed);
}

TEST_F(LaneTest, AJobEndsAtItsDeadline) {
  Open("s");
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 500, 24)), IsOk());
  absl::Status maintained;
  CallContext context;
  context.deadline = harness_.clock().Now() + seconds(1);
  harness_.engine().Maintain(Ref("s"), {}, context, [&](const auto& result) { maintained = result.status(); });
  harness_.engine().RunLane(0);
  harness_.clock().Advance(seconds(1));
  harness_.engine().RunLane(0);
  EXPECT_THAT(maintained, StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(LaneTest, AJobKeepsItsSessionAlive) {
  Open("s", seconds(10));
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 500, 24)), IsOk());
  bool done = false;
  harness_.engine().Maintain(Ref("s"), {}, {}, [&](const auto& result) { done = result.ok(); });
  for (int i = 0; i < 5; ++i) {
    harness_.engine().RunLane(0);
    harness_.clock().Advance(seconds(6));
  }
  EXPECT_TRUE(done);
}

TEST_F(LaneTest, ATruncationDuringAJobIsRespected) {
  Open("s");
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 500, 24)), IsOk());
  std::vector<uint32_t> indexed;
  harness_.engine().Maintain(Ref("s"), {}, {}, [&](const auto& result) { indexed = result->indexed_length; });
  harness_.engine().RunLane(0);
  ASSERT_THAT(harness_.Truncate("s", 490), IsOk());
  harness_.RunAll();
  EXPECT_THAT(indexed, ElementsAre(490u));
}

}  // namespace
}  // namespace ctkvr::testing
