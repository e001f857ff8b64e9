// SPDX-License-Identifier: Apache-2.0
//
// The arena: promises are all or nothing, blocks never overlap, slabs come back. Random histories are checked against
// a plain account of what is promised and alive.

#include "kernels/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "kernels/backend_registry.h"
#include "tests/testing/random_kv.h"

namespace ctkvr {
namespace {

using ::testing::HasSubstr;

constexpr size_t kSlab = Arena::kSlabBytes;

class ArenaTest : public ::testing::Test {
 protected:
  std::unique_ptr<Arena> MakeArena(size_t slabs) { return *Arena::Create(*backend_, slabs * kSlab); }
  static Reservation ReserveOne(Arena& arena, size_t block_bytes, uint64_t count) {
    const Arena::Request request{.block_bytes = block_bytes, .count = count};
    auto reserved = arena.Reserve({&request, 1});
    EXPECT_TRUE(reserved.ok()) << reserved.status();
    return std::move(reserved->at(0));
  }

  std::unique_ptr<Backend> backend_ = *CreateBackend("cpu:portable");
};

TEST_F(ArenaTest, BytesAreRoundedDownToWholeSlabs) {
  const auto arena = *Arena::Create(*backend_, 3 * kSlab + kSlab - 1);
  EXPECT_EQ(arena->capacity_bytes(), 3 * kSlab);
  EXPECT_EQ(arena->free_bytes(), 3 * kSlab);
  EXPECT_EQ(arena->reserved_bytes(), 0u);
  EXPECT_EQ(arena->held_bytes(), 0u);
}

TEST_F(ArenaTest, LessThanOneSlabIsRefused) {
  const auto arena = Arena::Create(*backend_, kSlab - 1);
  ASSERT_EQ(arena.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(arena.status().message()), HasSubstr("2097151"));
}

TEST_F(ArenaTest, WhatTheBackendCannotAllocateIsExhausted) {
  EXPECT_EQ(Arena::Create(*backend_, size_t{1} << 52).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ArenaTest, BlocksAreAlignedApartAndInsideTheArena) {
  const auto arena = MakeArena(2);
  Reservation reservation = ReserveOne(*arena, 1000, 4000);
  EXPECT_EQ(reservation.block_bytes(), 1024u);
  EXPECT_EQ(reservation.bytes(), 4000u * 1024);
  std::vector<Block> blocks;
  std::set<std::byte*> starts;
  for (int i = 0; i < 4000; ++i) {
    blocks.push_back(reservation.Take());
    ASSERT_EQ(reinterpret_cast<uintptr_t>(blocks.back().data()) % Arena::kBlockAlignment, 0u);
    ASSERT_EQ(blocks.back().bytes(), 1024u);
    starts.insert(blocks.back().data());
    std::memset(blocks.back().data(), i, 1024);
  }
  ASSERT_EQ(starts.size(), 4000u);
  for (auto it = std::next(starts.begin()); it != starts.end(); ++it) ASSERT_GE(*it - *std::prev(it), 1024);
  EXPECT_LE(*starts.rbegin() + 1024 - *starts.begin(), static_cast<ptrdiff_t>(2 * kSlab));
  EXPECT_EQ(arena->held_bytes(), 4000u * 1024);
}

TEST_F(ArenaTest, AReservationIsAllOrNothingAndSaysWhatIsNeededAndFree) {
  const auto arena = MakeArena(4);
  const Arena::Request requests[] = {{.block_bytes = kSlab, .count = 2},
                                     {.block_bytes = 64, .count = 3 * (kSlab / 64)}};
  const auto refused = arena->Reserve(requests);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("10485760 bytes needed"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("8388608 bytes free"));
  EXPECT_EQ(arena->free_bytes(), 4 * kSlab);
  EXPECT_EQ(arena->reserved_bytes(), 0u);
  const Arena::Request fitting[] = {{.block_bytes = kSlab, .count = 2}, {.block_bytes = 64, .count = 2 * (kSlab / 64)}};
  EXPECT_TRUE(arena->Reserve(fitting).ok());
}

TEST_F(ArenaTest, RequestsOfOneSizeAreCountedTogether) {
  const auto arena = MakeArena(1);
  const Arena::Request half{.block_bytes = 128, .count = kSlab / 128 / 2};
  const Arena::Request twice[] = {half, half};
  EXPECT_TRUE(arena->Reserve(twice).ok());
  const Arena::Request thrice[] = {half, half, half};
  EXPECT_EQ(arena->Reserve(thrice).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ArenaTest, CountsFarBeyondAnyMemoryAreRefusedNotWrapped) {
  const auto arena = MakeArena(1);
  for (uint64_t count : {~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 44}) {
    const Arena::Request twice[] = {{.block_bytes = 1 << 20, .count = count}, {.block_bytes = 1 << 20, .count = count}};
    EXPECT_EQ(arena->Reserve(twice).status().code(), absl::StatusCode::kResourceExhausted) << count;
  }
}

TEST_F(ArenaTest, BlockSizesOutsideTheLimitsAreRefused) {
  const auto arena = MakeArena(1);
  for (size_t bytes : {size_t{0}, kSlab + 1}) {
    const Arena::Request request{.block_bytes = bytes, .count = 1};
    EXPECT_EQ(arena->Reserve({&request, 1}).status().code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
  EXPECT_EQ(ReserveOne(*arena, kSlab, 1).bytes(), kSlab);
}

TEST_F(ArenaTest, AnEmptyReservationCostsNothing) {
  const auto arena = MakeArena(1);
  const Reservation none = ReserveOne(*arena, 64, 0);
  EXPECT_EQ(arena->free_bytes(), kSlab);
  EXPECT_TRUE(arena->Reserve({})->empty());
}

TEST_F(ArenaTest, SlabsOfOneSizeComeBackForAnother) {
  const auto arena = MakeArena(2);
  {
    Reservation small = ReserveOne(*arena, 64, 2 * (kSlab / 64));
    EXPECT_EQ(arena->free_bytes(), 0u);
    std::vector<Block> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(small.Take());
  }
  EXPECT_EQ(arena->free_bytes(), 2 * kSlab);
  Reservation large = ReserveOne(*arena, kSlab / 2, 4);
  EXPECT_EQ(arena->free_bytes(), 0u);
}

TEST_F(ArenaTest, ASlabStaysWhileOneBlockOfItLives) {
  const auto arena = MakeArena(2);
  Reservation first = ReserveOne(*arena, kSlab / 4, 4);
  std::vector<Block> of_first;
  for (int i = 0; i < 4; ++i) of_first.push_back(first.Take());
  Reservation second = ReserveOne(*arena, kSlab / 4, 4);
  Block survivor = second.Take();  // in the second slab
  of_first.clear();
  first = Reservation();
  // Four blocks are promised: one slab would do, but the survivor lies in the one and nothing in the other.
  EXPECT_EQ(arena->reserved_bytes(), kSlab);
  EXPECT_EQ(arena->held_bytes(), kSlab / 4);
  EXPECT_EQ(arena->free_bytes(), kSlab);
  std::vector<Block> of_second;
  for (int i = 0; i < 3; ++i) of_second.push_back(second.Take());
  for (const Block& block : of_second) EXPECT_NE(block.data(), survivor.data());
}

TEST_F(ArenaTest, TwoSizesWithScatteredSurvivorsGiveTheirSlabsBackAtTheEnd) {
  const auto arena = MakeArena(6);
  Reservation a = ReserveOne(*arena, 4096, 3 * 512);
  Reservation b = ReserveOne(*arena, 8192, 3 * 256);
  std::vector<Block> blocks_a, blocks_b;
  for (int i = 0; i < 3 * 512; ++i) blocks_a.push_back(a.Take());
  for (int i = 0; i < 3 * 256; ++i) blocks_b.push_back(b.Take());
  EXPECT_EQ(arena->free_bytes(), 0u);
  for (size_t i = 0; i < blocks_a.size(); ++i) {
    if (i % 512 != 7) blocks_a[i] = Block();
  }
  blocks_b.clear();
  EXPECT_EQ(arena->free_bytes(), 0u);  // still promised
  b = Reservation();
  EXPECT_EQ(arena->free_bytes(), 3 * kSlab);
  blocks_a.clear();
  a = Reservation();
  EXPECT_EQ(arena->free_bytes(), 6 * kSlab);
  EXPECT_EQ(arena->held_bytes(), 0u);
}

TEST_F(ArenaTest, MovingPassesOwnershipOn) {
  const auto arena = MakeArena(1);
  Reservation reservation = ReserveOne(*arena, 64, 2);
  Block block = reservation.Take();
  std::byte* const data = block.data();
  Block moved = std::move(block);
  EXPECT_EQ(moved.data(), data);
  EXPECT_FALSE(block);  // NOLINT: what a moved-from block is, is the claim
  EXPECT_EQ(arena->held_bytes(), 64u);
  Block other = reservation.Take();
  other = std::move(moved);  // its own block goes back at once
  EXPECT_EQ(arena->held_bytes(), 64u);
  EXPECT_EQ(other.data(), data);
  other = std::move(*&other);
  EXPECT_EQ(other.data(), data);
  Reservation target = std::move(reservation);
  EXPECT_EQ(arena->reserved_bytes(), 128u);
  other = Block();
  EXPECT_EQ(arena->held_bytes(), 0u);
  target = Reservation();
  EXPECT_EQ(arena->reserved_bytes(), 0u);
}

TEST_F(ArenaTest, RandomHistoriesKeepTheAccountAndNeverHandOutABlockTwice) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(21);
  struct Held {
    Reservation reservation;
    std::vector<Block> blocks;
  };
  const size_t sizes[] = {64, 4096, 65536, 300000, kSlab};
  const auto arena = MakeArena(12);
  std::vector<Held> all;
  std::map<const std::byte*, size_t> alive;
  size_t reserved = 0;
  size_t held = 0;
  for (int step = 0; step < 20000; ++step) {
    const uint64_t action = random() % 10;
    if (action == 0) {
      const Arena::Request request{.block_bytes = sizes[random() % 5], .count = random() % 60};
      auto granted = arena->Reserve({&request, 1});
      if (!granted.ok()) continue;
      reserved += granted->at(0).bytes();
      all.push_back({.reservation = std::move(granted->at(0)), .blocks = {}});
    } else if (action == 1 && !all.empty()) {
      const size_t victim = random() % all.size();
      std::swap(all[victim], all.back());
      for (const Block& block : all.back().blocks) alive.erase(block.data());
      held -= all.back().blocks.size() * all.back().reservation.block_bytes();
      reserved -= all.back().reservation.bytes();
      all.back().blocks.clear();
      all.pop_back();
    } else if (!all.empty()) {
      Held& one = all[random() % all.size()];
      if (action < 7 && one.blocks.size() < one.reservation.count()) {
        one.blocks.push_back(one.reservation.Take());
        const Block& block = one.blocks.back();
        const auto next = alive.lower_bound(block.data());
        ASSERT_TRUE(next == alive.end() || block.data() + block.bytes() <= next->first);
        ASSERT_TRUE(next == alive.begin() || std::prev(next)->first + std::prev(next)->second <= block.data());
        alive[block.data()] = block.bytes();
        held += block.bytes();
      } else if (!one.blocks.empty()) {
        std::swap(one.blocks[random() % one.blocks.size()], one.blocks.back());
        alive.erase(one.blocks.back().data());
        held -= one.blocks.back().bytes();
        one.blocks.pop_back();
      }
    }
    ASSERT_EQ(arena->reserved_bytes(), reserved);
    ASSERT_EQ(arena->held_bytes(), held);
    ASSERT_LE(reserved + arena->free_bytes(), arena->capacity_bytes());
  }
  all.clear();
  EXPECT_EQ(arena->free_bytes(), arena->capacity_bytes());
}

// ---- Owners --------------------------------------------------------------------------------------------------------

// Owners that fill their blocks with their own number.
constexpr OwnerId kOwners = 3;

// Raw memory is read, all of it: no byte is another owner's.
void ExpectNothingOfOthers(const Block& block, OwnerId owner) {
  for (OwnerId other = 1; other <= kOwners; ++other) {
    if (other == owner) continue;
    ASSERT_EQ(std::memchr(block.data(), static_cast<int>(other), block.bytes()), nullptr) << other << " wrote there";
  }
}

class ArenaOwnersTest : public ArenaTest {
 protected:
  Reservation ReserveFor(Arena& arena, OwnerId owner, size_t block_bytes, uint64_t count) {
    const Arena::Request request{.block_bytes = block_bytes, .count = count};
    return std::move(arena.Reserve({&request, 1}, {.owner = owner, .stream = stream_.get()})->at(0));
  }
  // Takes every block, fills it, gives it back.
  void Use(Reservation reservation, OwnerId owner) {
    std::vector<Block> blocks;
    for (uint64_t i = 0; i < reservation.count(); ++i) {
      blocks.push_back(reservation.Take());
      ExpectNothingOfOthers(blocks.back(), owner);
      std::memset(blocks.back().data(), static_cast<int>(owner), blocks.back().bytes());
    }
  }

  std::unique_ptr<Stream> stream_ = *backend_->NewStream();
};

TEST_F(ArenaOwnersTest, WhatOneOwnerWroteIsZeroToTheNext) {
  const auto arena = MakeArena(2);
  Use(ReserveFor(*arena, 1, 4096, 2 * kSlab / 4096), 1);
  EXPECT_EQ(arena->cleared_bytes(), 0u) << "memory that nobody had";
  Use(ReserveFor(*arena, 1, 8192, 2 * kSlab / 8192), 1);
  EXPECT_EQ(arena->cleared_bytes(), 0u) << "its own";
  Use(ReserveFor(*arena, 2, 65536, 2 * kSlab / 65536), 2);
  EXPECT_EQ(arena->cleared_bytes(), 2 * kSlab) << "cut anew";
  Use(ReserveFor(*arena, 2, kSlab, 2), 2);
  EXPECT_EQ(arena->cleared_bytes(), 2 * kSlab);
}

TEST_F(ArenaOwnersTest, ASlabThatSeveralWroteToIsNobodysOwn) {
  const auto arena = MakeArena(1);
  Use(ReserveFor(*arena, 1, kSlab / 2, 2), 1);
  Use(ReserveFor(*arena, 2, kSlab / 2, 1), 2);
  for (OwnerId owner : {1, 2}) Use(ReserveFor(*arena, owner, kSlab, 1), owner);
}

TEST_F(ArenaOwnersTest, TheEndOfASlabThatNoBlockFillsKeepsItsWriter) {
  const auto arena = MakeArena(1);
  Use(ReserveFor(*arena, 1, kSlab, 1), 1);
  Use(ReserveFor(*arena, 2, 300032, kSlab / 300032), 2);  // leaves 297,152 bytes of the slab alone
  Use(ReserveFor(*arena, 2, kSlab, 1), 2);
}

TEST_F(ArenaOwnersTest, RandomHistoriesNeverShowWhatAnotherOwnerWrote) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(22);
  struct Held {
    OwnerId owner;
    Reservation reservation;
    std::vector<Block> blocks;
  };
  const size_t sizes[] = {4096, 65536, 300032, kSlab / 2, kSlab};
  const auto arena = MakeArena(6);
  std::vector<Held> all;
  for (int step = 0; step < 3000; ++step) {
    const uint64_t action = random() % 10;
    if (action < 2) {
      const OwnerId owner = 1 + random() % kOwners;
      const Arena::Request request{.block_bytes = sizes[random() % 5], .count = 1 + random() % 20};
      auto granted = arena->Reserve({&request, 1}, {.owner = owner, .stream = stream_.get()});
      if (granted.ok()) all.push_back({.owner = owner, .reservation = std::move(granted->at(0)), .blocks = {}});
    } else if (action < 4 && !all.empty()) {
      std::swap(all[random() % all.size()], all.back());
      all.back().blocks.clear();
      all.pop_back();
    } else if (!all.empty()) {
      Held& one = all[random() % all.size()];
      if (action < 8 && one.blocks.size() < one.reservation.count()) {
        one.blocks.push_back(one.reservation.Take());
        ExpectNothingOfOthers(one.blocks.back(), one.owner);
        if (HasFatalFailure()) return;
        std::memset(one.blocks.back().data(), static_cast<int>(one.owner), one.blocks.back().bytes());
      } else if (!one.blocks.empty()) {
        std::swap(one.blocks[random() % one.blocks.size()], one.blocks.back());
        one.blocks.pop_back();
      }
    }
  }
  EXPECT_GT(arena->cleared_bytes(), 0u);
  all.clear();
}

TEST_F(ArenaTest, ThreadsReserveTakeAndReturnAtOnce) {
  const auto arena = MakeArena(16);
  std::atomic<int> refused = 0;
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t round = 0; round < 200; ++round) {
        const Arena::Request request{.block_bytes = size_t{4096} << (thread + round) % 3, .count = 700};
        auto granted = arena->Reserve({&request, 1});
        if (!granted.ok()) {
          ++refused;
          continue;
        }
        std::vector<Block> blocks;
        for (uint32_t i = 0; i < 100; ++i) {
          blocks.push_back(granted->at(0).Take());
          std::memset(blocks.back().data(), static_cast<int>(thread), 64);
        }
        for (const Block& block : blocks) {
          for (size_t i = 0; i < 64; ++i) ASSERT_EQ(block.data()[i], std::byte(thread));
        }
        std::thread([moved = std::move(blocks)]() mutable { moved.clear(); }).join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->free_bytes(), arena->capacity_bytes());
  EXPECT_LT(refused, 800);
}

using ArenaDeathTest = ArenaTest;

TEST_F(ArenaDeathTest, AReservationThatOutlivesTheArenaEnds) {
  EXPECT_DEATH(
      {
        auto arena = MakeArena(1);
        Reservation reservation = ReserveOne(*arena, 64, 1);
        arena.reset();
      },
      "outlives");
}

TEST_F(ArenaDeathTest, TakingMoreThanPromisedEnds) {
  const auto arena = MakeArena(1);
  Reservation reservation = ReserveOne(*arena, 64, 1);
  const Block block = reservation.Take();
  EXPECT_DEATH(reservation.Take(), "more blocks taken than reserved");
}

TEST_F(ArenaDeathTest, ABlockThatOutlivesItsReservationEnds) {
  const auto arena = MakeArena(1);
  EXPECT_DEATH(
      {
        Reservation reservation = ReserveOne(*arena, 64, 1);
        Block block = reservation.Take();
        reservation = Reservation();
      },
      "a Block outlives");
}

}  // namespace
}  // namespace ctkvr
