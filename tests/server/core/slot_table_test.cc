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

// The next answer to the worker that has all before it.
void Begin(SlotTable& table) { table.Begin({.sets = table.sets()}, table.version()); }

TEST(SlotTableTest, ATokenStaysInItsSlotUntilItIsTheLeastRecentlyChosen) {
  SlotTable table(1, 4, 100);
  Begin(table);
  const Placed first = Place(table, 0, {10, 20, 30, 40});
  EXPECT_THAT(first.missing, ElementsAre(0, 1, 2, 3));
  Begin(table);
  const Placed second = Place(table, 0, {20, 30, 50});
  EXPECT_THAT(second.missing, ElementsAre(2));
  EXPECT_EQ(second.slots[0], first.slots[1]);
  EXPECT_EQ(second.slots[1], first.slots[2]);
  EXPECT_EQ(second.slots[2], first.slots[0]) << "10 and 40 are equally old; the lower was placed first";
  Begin(table);
  EXPECT_THAT(Place(table, 0, {40}).missing, IsEmpty());
}

TEST(SlotTableTest, PositionsOfOneAnswerDoNotTakeEachOthersSlots) {
  SlotTable table(1, 4, 100);
  Begin(table);
  ASSERT_TRUE(Place(table, 0, {1, 2}).ok);
  const Placed second = Place(table, 0, {2, 3, 4});
  ASSERT_TRUE(second.ok);
  EXPECT_THAT(second.missing, ElementsAre(1, 2));
  const uint64_t version = table.version();
  EXPECT_FALSE(Place(table, 0, {5}).ok) << "the four slots hold rows of this very answer";
  EXPECT_NE(table.version(), version) << "the answer is not sent";
  Begin(table);
  EXPECT_EQ(Place(table, 0, {1, 2, 3, 4}).missing.size(), 4u);
}

TEST(SlotTableTest, AWorkerThatLacksRowsStartsFromAnEmptyCache) {
  const auto is_emptied = [](RowKind kind, int64_t version_off) {
    SlotTable table(2, 8, 100);
    table.Begin({.sets = 1}, 0);
    EXPECT_TRUE(Place(table, 0, {7}).ok);
    table.Begin(kind, table.version() + version_off);
    return Place(table, 0, {7}).missing.size() == 1;
  };
  EXPECT_FALSE(is_emptied({.sets = 1}, 0));
  EXPECT_TRUE(is_emptied({.sets = 1}, -1)) << "it lacks the last answer";
  EXPECT_TRUE(is_emptied({.sets = 1}, 1));
  EXPECT_TRUE(is_emptied({.sets = 2}, 0));
  EXPECT_TRUE(is_emptied({.sets = 1, .row_format = RowFormat::kStorage}, 0));
  EXPECT_TRUE(is_emptied({.sets = 1, .code_generation = 1}, 0));
}

TEST(SlotTableTest, AResetIsAVersionThatNobodyHolds) {
  SlotTable table(1, 8, 100);
  Begin(table);
  ASSERT_TRUE(Place(table, 0, {7}).ok);
  const uint64_t sent = table.version();
  table.Reset();
  table.Begin({.sets = 1}, sent);
  EXPECT_THAT(Place(table, 0, {7}).missing, ElementsAre(0));
}

TEST(SlotTableTest, NoVersionIsThatOfAnEmptyCache) {
  SlotTable table(1, 8, ~uint64_t{0} - 1);
  for (int i = 0; i < 4; ++i) {
    Begin(table);
    EXPECT_NE(table.version(), 0u);
  }
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
    SlotTable table(2, slots, seed);
    std::vector<Model> models(2, Model(slots));
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
      Begin(table);
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
  SlotTable table(1, limits::kCacheSlotsMax, 100);
  std::vector<uint32_t> tokens(limits::kCacheSlotsMax);
  for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i * 64;
  Begin(table);
  const Placed placed = Place(table, 0, tokens);
  ASSERT_TRUE(placed.ok);
  EXPECT_EQ(std::set<uint16_t>(placed.slots.begin(), placed.slots.end()).size(), tokens.size());
  Begin(table);
  EXPECT_THAT(Place(table, 0, tokens).missing, IsEmpty());
}

}  // namespace
}  // namespace ctkvr::testing
