// SPDX-License-Identifier: Apache-2.0
//
// The ring of queries and the sets built from it, without an engine: which queries stay, what a failed write forgets,
// what truncation takes.

#include "server/core/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "kernels/base/dtype.h"
#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;

class IndexTest : public ::testing::TestWithParam<bool> {
 protected:
  IndexTest()
      : backend_({.shares_host_memory = GetParam()}),
        arena_(*Arena::Create(backend_, size_t{16} << 20)),
        stream_(*backend_.NewStream()),
        scratch_(*Scratch::Create(backend_, 1 << 16)) {
    Make(Placement::kLast);
  }
  void Make(Placement placement, uint32_t capacity = 4, uint32_t adjust_tokens = 0) {
    index_.reset();
    const IndexShape shape{.kv_heads = 2,
                           .group_heads = 2,
                           .head_dim = 16,
                           .centroids = 4,
                           .capacity = capacity,
                           .placement = placement,
                           .adjust_tokens = adjust_tokens,
                           .packing = MakePackedLists(8, 200)};
    MemoryPlan plan;
    const IndexRequests requests = PlanIndex(shape, true, plan);
    reservations_ = *arena_->Reserve(plan.requests());
    index_.emplace(shape, QueryIndex::Memory{.centroids = &reservations_[requests.centroids],
                                             .lists = &reservations_[requests.lists],
                                             .norms = &reservations_[requests.norms]});
  }
  LaneDevice device() { return {.backend = backend_, .stream = *stream_, .scratch = scratch_}; }

  // Writes queries whose numbers are their positions, as the device would.
  void Write(uint32_t first_position, uint32_t count, bool appended = false) {
    const QueryIndex::RingWrite write = index_->BeginRingWrite(first_position, count);
    for (uint32_t i = 0; i < write.slots.size(); ++i) {
      for (uint32_t h = 0; h < 2; ++h) {
        const auto position = static_cast<uint16_t>(write.first_position + i * write.step);
        std::fill_n(index_->ring_centroids(h)[write.slots[i]], 32, position);
        std::fill_n(index_->ring_norms(h) + write.slots[i] * 2, 2, static_cast<float>(position));
      }
    }
    index_->CommitRing(write, appended);
  }
  // A set with lists 10, 20, ... for every centroid, published.
  void Publish(uint32_t end) {
    auto set = index_->StartSet(device(), 4, end);
    ASSERT_THAT(set, IsOk());
    for (IndexSet::Head& head : (*set)->heads) {
      for (uint32_t c = 0; c < head.lists.size(); ++c) {
        std::vector<uint32_t> tokens;
        for (uint32_t i = 0; i < 8; ++i) tokens.push_back(10 * (i + 1) + c);
        PackList(index_->packing(), tokens.data(), 8, head.lists[c]);
        head.list_counts[c] = 8;
      }
    }
    index_->Publish(*std::move(set));
  }

  FakeBackend backend_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Stream> stream_;
  Scratch scratch_;
  std::vector<Reservation> reservations_;
  std::optional<QueryIndex> index_;
};
INSTANTIATE_TEST_SUITE_P(Memory, IndexTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(IndexTest, ASetIsMadeOfTheNewestQueriesInOrder) {
  for (uint32_t count : {3u, 60u, 100u}) {  // fewer than C, less than the ring, more than the ring
    SCOPED_TRACE(count);
    index_->Truncate(0, {});
    Write(0, count);
    Write(count, 1);
    const auto set = index_->StartSet(device(), 4, 200);
    ASSERT_THAT(set, IsOk());
    for (const IndexSet::Head& head : (*set)->heads) {
      ASSERT_EQ(head.positions, (std::vector<uint32_t>{count - 3, count - 2, count - 1, count}));
      for (uint32_t c = 0; c < 4; ++c) {
        EXPECT_EQ(head.centroids[c][0], count - 3 + c);
        EXPECT_EQ(head.centroids[c][31], count - 3 + c);
      }
      EXPECT_THAT(head.mean_norms, ElementsAre(count - 1.5f, count - 1.5f));
    }
  }
}

TEST_P(IndexTest, AFailedWriteForgetsNoQueryThatTheNextSetNeeds) {
  Write(0, 68);
  EXPECT_EQ(index_->ring_count(), 68u);
  (void)index_->BeginRingWrite(68, limits::kQueryPositionsMax);  // and never committed
  EXPECT_EQ(index_->ring_count(), 4u);
  EXPECT_EQ((*index_->StartSet(device(), 4, 100))->heads[1].positions, (std::vector<uint32_t>{64, 65, 66, 67}));
}

TEST_P(IndexTest, MoreQueriesThanTheRingHoldsAreSkippedFromTheFront) {
  const QueryIndex::RingWrite write = index_->BeginRingWrite(0, 100);
  EXPECT_EQ(write.first, 32u);
  EXPECT_EQ(write.first_position, 32u);
  EXPECT_EQ(write.slots.size(), 68u);
  std::vector<uint32_t> sorted = write.slots;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end()) << "no slot twice";
}

TEST_P(IndexTest, PositionsThatAreKnownDoNotEnterAgain) {
  Write(10, 4);
  EXPECT_TRUE(index_->BeginRingWrite(0, 5).slots.empty());
  EXPECT_TRUE(index_->BeginRingWrite(13, 1).slots.empty());
  EXPECT_TRUE(index_->BeginRingWrite(14, 0).slots.empty());
  const QueryIndex::RingWrite write = index_->BeginRingWrite(12, 4);
  EXPECT_EQ(write.first, 2u);
  EXPECT_EQ(write.first_position, 14u);
  EXPECT_EQ(write.slots.size(), 2u);
  EXPECT_EQ(index_->ring_count(), 4u);
}

TEST_P(IndexTest, StridedQueriesAreSpreadOverTheTextHoweverTheyCame) {
  for (uint32_t chunk : {1u, 7u, 100u}) {
    SCOPED_TRACE(chunk);
    Make(Placement::kStrided);
    for (uint32_t t = 0; t < 100; t += chunk) {
      (void)index_->BeginRingWrite(t, 1);  // a write that failed
      Write(t, std::min(chunk, 100 - t));
    }
    // Of 0, 16, ..., 96.
    EXPECT_EQ(index_->ring_count(), 7u);
    const std::vector<uint32_t> expected = {16, 48, 80, 96};
    const auto set = index_->StartSet(device(), 4, 100);
    ASSERT_THAT(set, IsOk());
    for (const IndexSet::Head& head : (*set)->heads) {
      EXPECT_EQ(head.positions, expected);
      for (uint32_t c = 0; c < 4; ++c) EXPECT_EQ(head.centroids[c][31], expected[c]);
      EXPECT_THAT(head.mean_norms, ElementsAre(60, 60));
    }
    index_->Truncate(50, {});
    EXPECT_EQ(index_->ring_count(), 4u);
    Write(50, 50);
    EXPECT_EQ((*index_->StartSet(device(), 4, 100))->heads[1].positions, expected);
    index_->Truncate(0, {});
    Write(0, 8);
    EXPECT_EQ(index_->ring_count(), 8u) << "an empty ring begins anew";
    EXPECT_EQ((*index_->StartSet(device(), 4, 8))->heads[1].positions, (std::vector<uint32_t>{1, 3, 5, 7}));
  }
}

TEST_P(IndexTest, TruncationDropsQueriesListEntriesAndCentroids) {
  Write(40, 4);
  Publish(100);
  const auto counts = index_->PlanTruncate(device(), 42);
  ASSERT_THAT(counts, IsOk());
  index_->Truncate(42, *counts);
  EXPECT_EQ(index_->ring_count(), 2u);
  EXPECT_EQ(index_->indexed_length(), 42u);
  ASSERT_EQ(index_->centroid_count(), 2u);
  // 10, 20, 30, 40 and 11, 21, 31, 41.
  for (const IndexSet::Head& head : index_->live()->heads) EXPECT_THAT(head.list_counts, ElementsAre(4, 4));
  // The same position again, with another text: the list must not know it.
  const auto again = index_->PlanTruncate(device(), 41);
  index_->Truncate(41, *again);
  for (const IndexSet::Head& head : index_->live()->heads) EXPECT_THAT(head.list_counts, ElementsAre(4));
}

TEST_P(IndexTest, TruncationPastTheIndexChangesNothing) {
  Write(40, 4);
  Publish(100);
  const auto counts = index_->PlanTruncate(device(), 100);
  ASSERT_THAT(counts, IsOk());
  index_->Truncate(100, *counts);
  EXPECT_EQ(index_->indexed_length(), 100u);
  EXPECT_EQ(index_->centroid_count(), 4u);
}

TEST_P(IndexTest, CentroidsOfQueriesTakenBackGoEvenWhenTheListsStay) {
  Write(108, 4);
  Publish(100);
  index_->Truncate(110, *index_->PlanTruncate(device(), 110));
  EXPECT_EQ(index_->indexed_length(), 100u);
  EXPECT_EQ(index_->centroid_count(), 2u);
  for (const IndexSet::Head& head : index_->live()->heads) EXPECT_THAT(head.list_counts, ElementsAre(8, 8));
}

TEST_P(IndexTest, WithoutCentroidsThereIsNoIndex) {
  Write(40, 4);
  Publish(100);
  index_->Truncate(40, *index_->PlanTruncate(device(), 40));
  EXPECT_EQ(index_->live(), nullptr);
  EXPECT_EQ(index_->indexed_length(), 0u);
  EXPECT_EQ(index_->ring_count(), 0u);
}

// ---- Clustering ----------------------------------------------------------------------------------------------------

class IndexClusteringTest : public IndexTest {
 protected:
  IndexClusteringTest() { Make(Placement::kClustered); }

  // Query p points along axis Axis(p) of head 0, and against it in head 1, a little off by a third axis.
  static uint32_t Axis(uint32_t position) { return position == 14 ? 1 : (position + 2) / 4 % 4; }
  void WriteDirections(uint32_t first_position, uint32_t count) {
    const QueryIndex::RingWrite write = index_->BeginRingWrite(first_position, count);
    for (uint32_t i = 0; i < write.slots.size(); ++i) {
      const uint32_t position = write.first_position + i * write.step;
      for (uint32_t h = 0; h < 2; ++h) {
        uint16_t* row = index_->ring_centroids(h)[write.slots[i]];
        std::fill_n(row, 32, uint16_t{0});
        row[Axis(position)] = F16FromF32(0.8f);
        row[4 + position % 4] = F16FromF32(0.6f);
        row[16 + Axis(position)] = F16FromF32(-1.0f);
        std::fill_n(index_->ring_norms(h) + write.slots[i] * 2, 2, 2.0f);
      }
    }
    index_->CommitRing(write, true);
  }
  std::unique_ptr<IndexSet> Clustered() {
    auto set = index_->StartSet(device(), 4, 100);
    EXPECT_THAT(set, IsOk());
    for (int step = 0; (*set)->clustering.has_value(); ++step) {
      EXPECT_LT(step, 100);
      EXPECT_THAT(index_->ClusterStep(device(), **set), IsOk());
    }
    return *std::move(set);
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, IndexClusteringTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(IndexClusteringTest, CentroidsMoveToTheMiddleOfTheirLike) {
  WriteDirections(0, 16);
  const auto set = Clustered();
  for (const IndexSet::Head& head : set->heads) {
    // 6 to 9, 10 to 13, 2 to 5 with 14, 0 and 1 with 15.
    const uint32_t axes[] = {2, 3, 1, 0};
    EXPECT_THAT(head.positions, ElementsAre(9, 13, 14, 15));
    for (uint32_t c = 0; c < 4; ++c) {
      double norm = 0;
      for (uint32_t i = 0; i < 16; ++i) norm += std::pow(F32FromF16(head.centroids[c][i]), 2);
      EXPECT_NEAR(norm, 1, 2e-3);
      EXPECT_GT(F32FromF16(head.centroids[c][axes[c]]), 0.85) << "nearer to the axis than any of its queries";
      EXPECT_FLOAT_EQ(F32FromF16(head.centroids[c][16 + axes[c]]), -1);
    }
    EXPECT_THAT(head.mean_norms, ElementsAre(2, 2));
  }
}

TEST_P(IndexClusteringTest, WhereEveryQueryIsACentroidNoneMoves) {
  WriteDirections(0, 4);
  const auto set = index_->StartSet(device(), 4, 100);
  ASSERT_THAT(set, IsOk());
  EXPECT_FALSE((*set)->clustering.has_value());
}

TEST_P(IndexClusteringTest, QueriesThatLeaveTheRingEndAClustering) {
  WriteDirections(0, 16);
  const auto set = index_->StartSet(device(), 4, 100);
  ASSERT_THAT(set, IsOk());
  ASSERT_THAT(index_->ClusterStep(device(), **set), IsOk());
  (void)index_->BeginRingWrite(16, 1);  // 17 queries are too many: every other one goes
  EXPECT_THAT(index_->ClusterStep(device(), **set), StatusIs(absl::StatusCode::kAborted));
}

TEST_P(IndexClusteringTest, TruncationTakesACentroidWithAnyOfItsQueries) {
  WriteDirections(0, 16);
  index_->Publish(Clustered());
  index_->Truncate(14, *index_->PlanTruncate(device(), 14));
  for (const IndexSet::Head& head : index_->live()->heads) EXPECT_THAT(head.positions, ElementsAre(9, 13));
}

// ---- Adjustment ----------------------------------------------------------------------------------------------------

class IndexAdjustmentTest : public IndexTest {
 protected:
  IndexAdjustmentTest() {
    Make(Placement::kLast, /*capacity=*/5, /*adjust_tokens=*/3);
    Write(0, 4);
    Publish(100);
  }
  void Use(uint32_t kv_head, std::vector<uint32_t> lists, uint32_t position) {
    index_->CountUses(kv_head, lists, position);
  }
  // With lists 7, 17, 27, ... of those that join.
  void Adjust() {
    auto set = index_->StartAdjustment(device());
    ASSERT_THAT(set, IsOk());
    EXPECT_EQ((*set)->begin, 4u);
    EXPECT_EQ((*set)->indexed_length, 100u);
    for (IndexSet::Head& head : (*set)->heads) {
      for (uint32_t c = 0; c < head.lists.size(); ++c) {
        EXPECT_EQ(head.centroids[c][31], head.positions[c]);
        std::vector<uint32_t> tokens;
        for (uint32_t i = 0; i < 8; ++i) tokens.push_back(10 * i + 7);
        PackList(index_->packing(), tokens.data(), 8, head.lists[c]);
        head.list_counts[c] = 8;
      }
    }
    index_->Join(*std::move(set));
  }
  const IndexSet::Head& head(uint32_t kv_head) const { return index_->live()->heads[kv_head]; }
};
INSTANTIATE_TEST_SUITE_P(Memory, IndexAdjustmentTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(IndexAdjustmentTest, AHotListBringsItsNewestUser) {
  Write(100, 5);
  for (uint32_t p : {100u, 103u, 102u}) {
    EXPECT_FALSE(index_->adjustment_due());
    Use(0, {1, p == 100 ? 0u : 2u}, p);  // list 1 thrice, list 2 twice: the mean is 1.5
    Use(1, {p % 4}, p);
  }
  EXPECT_TRUE(index_->adjustment_due());
  Use(0, {1}, 101);  // 4 of 7: more than twice 1.75
  const std::vector<uint16_t*> before = head(0).centroids;
  Adjust();
  EXPECT_FALSE(index_->adjustment_due());
  EXPECT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3, 103));
  EXPECT_THAT(head(0).list_counts, ElementsAre(8, 8, 8, 8, 8));
  EXPECT_THAT(head(0).uses, ElementsAre(0.5, 2, 1, 0, 0.875));
  EXPECT_TRUE(std::equal(before.begin(), before.end(), head(0).centroids.begin())) << "the others stay as they are";
  EXPECT_EQ(head(0).centroids[4][31], 103);
  EXPECT_THAT(head(1).positions, ElementsAre(0, 1, 2, 3)) << "no list of it is hot";
  EXPECT_EQ(index_->centroid_count(), 4u) << "that every head has";
}

TEST_P(IndexAdjustmentTest, WhereThereIsNoRoomTheLeastUsedLeave) {
  for (uint32_t turn = 0; turn < 40; ++turn) {
    const uint32_t position = 100 + turn;
    Write(position, 1);
    // The last list is hot, the second cold, the others in between.
    const auto last = static_cast<uint32_t>(head(0).uses.size() - 1);
    for (int i = 0; i < 200; ++i) Use(0, {last}, position);
    for (int i = 0; i < 30; ++i) Use(0, {0}, position);
    for (uint32_t c = 2; c < last; ++c) {
      for (int i = 0; i < 10; ++i) Use(0, {c}, position);
    }
    std::vector<uint32_t> expected = head(0).positions;
    if (expected.size() == 5) expected.erase(expected.begin() + 1);
    expected.push_back(position);
    Adjust();
    ASSERT_EQ(head(0).positions, expected);
  }
  // As many elements are free as at the start, no two centroids share one.
  std::set<uint16_t*> centroids(head(0).centroids.begin(), head(0).centroids.end());
  EXPECT_EQ(centroids.size(), 5u);
  EXPECT_EQ(head(0).free.size(), limits::kAdjustedCentroidsMax);
}

TEST_P(IndexAdjustmentTest, NothingLeavesThatIsUsedAndNothingJoinsWithoutRoom) {
  Write(100, 3);
  for (int i = 0; i < 20; ++i) Use(0, {3}, 100);
  Adjust();
  ASSERT_EQ(head(0).positions.size(), 5u);
  for (int i = 0; i < 20; ++i) Use(0, {0, 1, 2, 3, 3, 3, 4}, 102);
  Adjust();
  EXPECT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3, 100));
}

TEST_P(IndexAdjustmentTest, OnlyQueriesThatTheRingKnowsAndLaterOnesJoin) {
  Write(100, 2);
  for (int i = 0; i < 9; ++i) Use(0, {0}, 150);  // no query of the ring
  for (int i = 0; i < 9; ++i) Use(1, {0}, 3);    // the newest centroid already
  Adjust();
  EXPECT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(head(1).positions, ElementsAre(0, 1, 2, 3));
  for (int i = 0; i < 9; ++i) Use(0, {0}, 101);
  index_->Truncate(101, *index_->PlanTruncate(device(), 101));
  Write(101, 1);  // another text
  Adjust();
  EXPECT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3)) << "the user was taken back";
}

TEST_P(IndexAdjustmentTest, TruncationTakesThoseThatJoined) {
  Write(60, 3);
  for (int i = 0; i < 9; ++i) Use(0, {0}, 61);
  Adjust();
  ASSERT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3, 61));
  index_->Truncate(60, *index_->PlanTruncate(device(), 60));
  EXPECT_THAT(head(0).positions, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(head(0).free.size(), limits::kAdjustedCentroidsMax + 1);
  // 10, 20, ..., 50 and 11, ..., 51.
  EXPECT_THAT(head(0).list_counts, ElementsAre(5, 5, 5, 5));
  EXPECT_THAT(head(0).uses, ElementsAre(4.5, 0, 0, 0));
}

TEST_P(IndexAdjustmentTest, ABuildBeginsFromTheAdjustedCentroids) {
  Write(100, 2);
  for (int i = 0; i < 9; ++i) Use(0, {2}, 101);
  const auto set = index_->StartSet(device(), 4, 120);
  ASSERT_THAT(set, IsOk());
  EXPECT_THAT((*set)->heads[0].positions, ElementsAre(0, 1, 2, 3, 101));
  EXPECT_THAT((*set)->heads[1].positions, ElementsAre(0, 1, 2, 3));
  for (uint32_t c = 0; c < 5; ++c) EXPECT_EQ((*set)->heads[0].centroids[c][0], (*set)->heads[0].positions[c]);
  EXPECT_THAT((*set)->heads[0].uses, ElementsAre(0, 0, 4.5, 0, 1.125));
  EXPECT_THAT((*set)->heads[0].mean_norms, ElementsAre(51.5, 51.5)) << "of the newest queries: 2, 3, 100 and 101";
  EXPECT_EQ(index_->held_bytes() + (*set)->held_bytes(), arena_->held_bytes());
  EXPECT_LE(arena_->held_bytes(), arena_->reserved_bytes());
}

TEST_P(IndexAdjustmentTest, ABuildAfterANewPromptBeginsFromItsQueries) {
  for (int i = 0; i < 9; ++i) Use(0, {2}, 3);
  Write(100, 3, true);
  EXPECT_THAT((*index_->StartSet(device(), 4, 120))->heads[0].positions, ElementsAre(0, 1, 2, 3));
  Write(103, 1, true);
  EXPECT_THAT((*index_->StartSet(device(), 4, 120))->heads[0].positions, ElementsAre(100, 101, 102, 103));
  Publish(120);
  Write(104, 9, false);
  EXPECT_THAT((*index_->StartSet(device(), 4, 120))->heads[0].positions, ElementsAre(100, 101, 102, 103));
}

TEST_P(IndexAdjustmentTest, ABuildAfterTooFewCentroidsBeginsFromTheRing) {
  index_->Truncate(2, *index_->PlanTruncate(device(), 2));
  ASSERT_EQ(index_->live(), nullptr) << "nothing is left to list";
  Publish(100);
  ASSERT_EQ(index_->centroid_count(), 2u);
  Write(50, 6);
  EXPECT_THAT((*index_->StartSet(device(), 4, 120))->heads[0].positions, ElementsAre(52, 53, 54, 55));
}

TEST_P(IndexTest, HeldBytesAreThoseOfTheArena) {
  EXPECT_EQ(index_->held_bytes(), 0u);
  Write(0, 10);
  EXPECT_EQ(index_->held_bytes(), arena_->held_bytes());
  Publish(100);
  EXPECT_EQ(index_->held_bytes(), arena_->held_bytes());
  // A second set beside the live one is what the plan's spare is for.
  auto next = index_->StartSet(device(), 4, 120);
  ASSERT_THAT(next, IsOk());
  EXPECT_EQ(index_->held_bytes() + (*next)->held_bytes(), arena_->held_bytes());
  EXPECT_LE(arena_->held_bytes(), arena_->reserved_bytes());
  index_->Publish(*std::move(next));
  EXPECT_EQ(index_->held_bytes(), arena_->held_bytes());
}

}  // namespace
}  // namespace ctkvr::testing
