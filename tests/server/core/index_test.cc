// SPDX-License-Identifier: Apache-2.0
//
// The ring of queries and the sets built from it, without an engine: which queries stay, what a failed write forgets,
// what truncation takes.

#include "server/core/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

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
    IndexShape shape{.kv_heads = 2, .group_heads = 2, .head_dim = 16, .centroids = 4, .list_tokens = 8};
    MemoryPlan plan;
    const IndexRequests requests = PlanIndex(shape, true, plan);
    reservations_ = *arena_->Reserve(plan.requests());
    index_.emplace(shape, QueryIndex::Memory{.centroids = &reservations_[requests.centroids],
                                             .lists = &reservations_[requests.lists],
                                             .norms = &reservations_[requests.norms]});
  }
  LaneDevice device() { return {.backend = backend_, .stream = *stream_, .scratch = scratch_}; }

  // Writes queries whose numbers are their positions, as the device would.
  void Write(uint32_t first_position, uint32_t count) {
    const QueryIndex::RingWrite write = index_->BeginRingWrite(count);
    for (uint32_t i = 0; i < write.slots.size(); ++i) {
      for (uint32_t h = 0; h < 2; ++h) {
        const auto position = static_cast<uint16_t>(first_position + write.skipped + i);
        std::fill_n(index_->ring_centroids(h)[write.slots[i]], 32, position);
        std::fill_n(index_->ring_norms(h) + write.slots[i] * 2, 2, static_cast<float>(position));
      }
    }
    index_->CommitRing(write, first_position + write.skipped);
  }
  // A set with lists 10, 20, ... for every centroid, published.
  void Publish(uint32_t end) {
    auto set = index_->StartSet(device(), 4, end);
    ASSERT_THAT(set, IsOk());
    for (IndexSet::Head& head : (*set)->heads) {
      for (uint32_t c = 0; c < head.lists.size(); ++c) {
        for (uint32_t i = 0; i < 8; ++i) head.lists[c][i] = 10 * (i + 1) + c;
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
    ASSERT_EQ((*set)->positions, (std::vector<uint32_t>{count - 3, count - 2, count - 1, count}));
    for (const IndexSet::Head& head : (*set)->heads) {
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
  (void)index_->BeginRingWrite(limits::kQueryPositionsMax);  // and never committed
  EXPECT_EQ(index_->ring_count(), 4u);
  EXPECT_EQ((*index_->StartSet(device(), 4, 100))->positions, (std::vector<uint32_t>{64, 65, 66, 67}));
}

TEST_P(IndexTest, MoreQueriesThanTheRingHoldsAreSkippedFromTheFront) {
  const QueryIndex::RingWrite write = index_->BeginRingWrite(100);
  EXPECT_EQ(write.skipped, 32u);
  EXPECT_EQ(write.slots.size(), 68u);
  std::vector<uint32_t> sorted = write.slots;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end()) << "no slot twice";
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
