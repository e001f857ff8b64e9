// SPDX-License-Identifier: Apache-2.0
//
// Slot tables against a plain model: a list in the order of use, and a worker that obeys.

#include "server/core/slot_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>

#include "server/core/limits.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Placed {
  bool ok = false;
  std::vector<uint16_t> slots;
  std::vector<uint32_t> missing;
};

Placed Place(SlotTable& table, uint32_t set, const std::vector<uint32_t>& tokens) {
  Placed placed{.slots = std::vector<uint16_t>(tokens.size())};
  placed.ok = table.Place(set, tokens, placed.slots.data(), placed.missing);
  return placed;
}

SlotTableKind KindOf(uint64_t stream) { return {.stream = stream, .sets = 1}; }

TEST(SlotTableTest, ATokenStaysInItsSlotUntilItIsTheLeastRecentlyChosen) {
  SlotTable table(1, 4);
  table.Begin(KindOf(1), 0, 1);
  const Placed first = Place(table, 0, {10, 20, 30, 40});
  EXPECT_THAT(first.missing, ElementsAre(0, 1, 2, 3));
  table.Begin(KindOf(1), 1, 2);
  const Placed second = Place(table, 0, {20, 30, 50});
  EXPECT_THAT(second.missing, ElementsAre(2));
  EXPECT_EQ(second.slots[0], first.slots[1]);
  EXPECT_EQ(second.slots[1], first.slots[2]);
  EXPECT_EQ(second.slots[2], first.slots[0]) << "10 and 40 are equally old; the lower was placed first";
  table.Begin(KindOf(1), 2, 3);
  EXPECT_THAT(Place(table, 0, {40}).missing, IsEmpty());
}

TEST(SlotTableTest, PositionsOfOneAnswerDoNotTakeEachOthersSlots) {
  SlotTable table(1, 4);
  table.Begin(KindOf(1), 0, 1);
  ASSERT_TRUE(Place(table, 0, {1, 2}).ok);
  const Placed second = Place(table, 0, {2, 3, 4});
  ASSERT_TRUE(second.ok);
  EXPECT_THAT(second.missing, ElementsAre(1, 2));
  EXPECT_FALSE(Place(table, 0, {5}).ok) << "the four slots hold rows of this very answer";
}

TEST(SlotTableTest, WhateverMakesTheTablesDifferStartsANewEpoch) {
  const auto epoch_after = [](SlotTableKind kind, uint64_t applied) {
    SlotTable table(2, 8);
    table.Begin({.stream = 1, .sets = 1}, 0, 5);
    EXPECT_TRUE(Place(table, 0, {7}).ok);
    const uint64_t epoch = table.epoch();
    table.Begin(kind, applied, 6);
    const bool emptied = table.epoch() != epoch;
    EXPECT_EQ(Place(table, 0, {7}).missing.size(), emptied ? 1u : 0u);
    return emptied;
  };
  EXPECT_FALSE(epoch_after({.stream = 1, .sets = 1}, 5));
  EXPECT_TRUE(epoch_after({.stream = 1, .sets = 1}, 4)) << "the worker lacks reply 5";
  EXPECT_TRUE(epoch_after({.stream = 2, .sets = 1}, 5));
  EXPECT_TRUE(epoch_after({.stream = 1, .sets = 2}, 5));
  EXPECT_TRUE(epoch_after({.stream = 1, .sets = 1, .row_format = RowFormat::kStorage}, 5));
  EXPECT_TRUE(epoch_after({.stream = 1, .sets = 1, .code_generation = 1}, 5));
}

TEST(SlotTableTest, BytesAreWhatTheVectorsHold) {
  // 12 bytes a slot, 2 a bucket, the buckets a power of two of at least twice the slots.
  EXPECT_EQ(SlotTableBytes(1, 1), 12u + 2 * 2);
  EXPECT_EQ(SlotTableBytes(3, 2048), 3u * (2048 * 12 + 4096 * 2));
  EXPECT_EQ(SlotTableBytes(1, limits::kCacheSlotsMax), size_t{limits::kCacheSlotsMax} * 12 + 131072 * 2);
}

// The model: tokens of one set, the most recently chosen first, and what a worker holds in each slot.
class Model {
 public:
  explicit Model(uint32_t slots) : slots_(slots) {}

  void Check(const std::vector<uint32_t>& tokens, const Placed& placed) {
    std::set<uint32_t> expected;
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      if (std::find(order_.begin(), order_.end(), tokens[i]) == order_.end()) expected.insert(i);
    }
    ASSERT_EQ(std::set<uint32_t>(placed.missing.begin(), placed.missing.end()), expected);
    for (uint32_t i : placed.missing) worker_[placed.slots[i]] = tokens[i];
    for (uint32_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(worker_[placed.slots[i]], tokens[i]);
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      if (expected.count(i) == 0) Touch(tokens[i]);
    }
    for (uint32_t i : expected) Touch(tokens[i]);
    while (order_.size() > slots_) order_.pop_back();
  }
  void Truncate(uint32_t length) {
    order_.remove_if([&](uint32_t token) { return token >= length; });
  }
  void Clear() {
    order_.clear();
    worker_.clear();
  }

 private:
  void Touch(uint32_t token) {
    order_.remove(token);
    order_.push_front(token);
  }
  const uint32_t slots_;
  std::list<uint32_t> order_;
  std::map<uint16_t, uint32_t> worker_;
};

class SlotTableModelTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(SlotTableModelTest, AgreesWithAListInTheOrderOfUse) {
  const uint32_t slots = GetParam();
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto below = [&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); };
    SlotTable table(2, slots);
    std::vector<Model> models(2, Model(slots));
    uint64_t sequence = 0;
    for (uint32_t step = 0; step < 20 + 2000 / slots; ++step) {
      const uint32_t action = below(40);
      if (action == 0) {
        const uint32_t length = below(3 * slots + 2);
        table.Truncate(length);
        for (Model& model : models) model.Truncate(length);
      } else if (action == 1) {
        table.Reset();
        for (Model& model : models) model.Clear();
      }
      table.Begin({.stream = 1, .sets = 2}, sequence, sequence + 1);
      if (sequence++ == 0) {
        for (Model& model : models) model.Clear();
      }
      for (uint32_t set = 0; set < 2; ++set) {
        std::set<uint32_t> chosen;
        for (uint32_t n = below(slots) + 1; n > 0; --n) chosen.insert(below(3 * slots + 2) * (set == 0 ? 1 : 4096));
        const std::vector<uint32_t> tokens(chosen.begin(), chosen.end());
        const Placed placed = Place(table, set, tokens);
        ASSERT_TRUE(placed.ok);
        models[set].Check(tokens, placed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Slots, SlotTableModelTest, ::testing::Values(1, 2, 3, 7, 64, 257));

TEST(SlotTableTest, TheLargestTableUsesEverySlot) {
  SlotTable table(1, limits::kCacheSlotsMax);
  std::vector<uint32_t> tokens(limits::kCacheSlotsMax);
  for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i * 64;
  table.Begin(KindOf(1), 0, 1);
  const Placed placed = Place(table, 0, tokens);
  ASSERT_TRUE(placed.ok);
  EXPECT_EQ(std::set<uint16_t>(placed.slots.begin(), placed.slots.end()).size(), tokens.size());
  table.Begin(KindOf(1), 1, 2);
  EXPECT_THAT(Place(table, 0, tokens).missing, IsEmpty());
}

}  // namespace
}  // namespace ctkvr::testing
