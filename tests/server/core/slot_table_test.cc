// SPDX-License-Identifier: Apache-2.0
//
// Slot tables against a plain model: counts that decay at every answer, and a worker that obeys.

#include "server/core/slot_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

constexpr uint32_t kNoWindow = 0xffffffff;

Placed Place(SlotTable& table, uint32_t set, const std::vector<uint32_t>& tokens, uint32_t window_begin = kNoWindow) {
  Placed placed{.slots = std::vector<uint16_t>(tokens.size()), .missing = {}};
  placed.ok = table.Place(set, tokens, window_begin, placed.slots.data(), placed.missing);
  return placed;
}

// The next answer to the worker that has all before it.
void Begin(SlotTable& table) { table.Begin({.sets = table.sets()}, table.version()); }

TEST(SlotTableTest, ATokenStaysInItsSlotUntilItIsTheLeastOftenChosen) {
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

TEST(SlotTableTest, ATokenChosenOftenOutlivesOneChosenLastUntilItsCountHasDecayed) {
  const auto often_leaves_after = [](uint32_t pause, uint32_t window_begin = kNoWindow) {
    SlotTable table(1, 2, 100);
    for (int i = 0; i < 4; ++i) {
      Begin(table);
      Place(table, 0, {7}, window_begin);
    }
    for (uint32_t i = 0; i < pause; ++i) Begin(table);
    Place(table, 0, {8});
    Begin(table);
    Place(table, 0, {9});
    Begin(table);
    return !Place(table, 0, {7}).missing.empty();
  };
  // The count is a little under 4 at its last choice; 2 half-lives of 48 answers bring it below 1.
  EXPECT_FALSE(often_leaves_after(1));
  EXPECT_FALSE(often_leaves_after(85));
  EXPECT_TRUE(often_leaves_after(97));
  EXPECT_TRUE(often_leaves_after(1, 7)) << "the window chose it";
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
  // 16 bytes a slot and 2 in the heap; 2 a bucket, a power of two of at least twice the slots; 2 a slot for all sets.
  EXPECT_EQ(SlotTableBytes(1, 1), 18u + 2 * 2 + 2);
  EXPECT_EQ(SlotTableBytes(3, 2048), 3u * (2048 * 18 + 4096 * 2) + 2048 * 2);
  EXPECT_EQ(SlotTableBytes(1, limits::kCacheSlotsMax), size_t{limits::kCacheSlotsMax} * 20 + 131072 * 2);
}

// The model: how often each token held was chosen since it came, and what a worker holds in each slot.
class Model {
 public:
  explicit Model(uint32_t slots) : slots_(slots) {}

  void Check(const std::vector<uint32_t>& tokens, uint32_t window_begin, const Placed& placed) {
    for (auto& [token, count] : counts_) count *= std::exp2(-1.0 / 48);
    std::set<uint32_t> expected;
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      if (counts_.count(tokens[i]) == 0) expected.insert(i);
    }
    ASSERT_EQ(std::set<uint32_t>(placed.missing.begin(), placed.missing.end()), expected);
    std::map<uint32_t, double> counts = counts_;
    for (uint32_t token : tokens) counts.erase(token);
    double most_gone = 0;
    for (uint32_t i : placed.missing) {
      const auto held = worker_.find(placed.slots[i]);
      if (held != worker_.end() && counts_.count(held->second) > 0) {
        const uint32_t gone = held->second;
        ASSERT_EQ(std::count(tokens.begin(), tokens.end(), gone), 0) << "a chosen token left";
        most_gone = std::max(most_gone, counts.at(gone));
        counts_.erase(gone);
      }
      worker_[placed.slots[i]] = tokens[i];
    }
    for (uint32_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(worker_[placed.slots[i]], tokens[i]);
    for (const auto& [token, count] : counts) {
      if (counts_.count(token) == 0) continue;
      ASSERT_GE(count, most_gone * 0.999) << token << " stays, and one of a greater count left";
    }
    for (uint32_t token : tokens) {
      double& count = counts_[token];
      count = token < window_begin ? count + 1 : std::max(count, 1.0);
    }
    ASSERT_LE(counts_.size(), slots_);
    ASSERT_TRUE(most_gone == 0 || counts_.size() == slots_) << "a token left while a slot was free";
  }
  void Truncate(uint32_t length) {
    counts_.erase(counts_.lower_bound(length), counts_.end());
    std::erase_if(worker_, [&](const auto& held) { return held.second >= length; });
  }
  void Clear() {
    counts_.clear();
    worker_.clear();
  }

 private:
  const uint32_t slots_;
  std::map<uint32_t, double> counts_;
  std::map<uint16_t, uint32_t> worker_;
};

class SlotTableModelTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(SlotTableModelTest, AgreesWithCountsThatDecay) {
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
        const uint32_t window_begin = below(2) == 0 ? kNoWindow : tokens[below(static_cast<uint32_t>(tokens.size()))];
        const Placed placed = Place(table, set, tokens, window_begin);
        ASSERT_TRUE(placed.ok);
        models[set].Check(tokens, window_begin, placed);
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
