// SPDX-License-Identifier: Apache-2.0

#include "kernels/packed_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/testing/list_oracle.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::testing {
namespace {

using Positions = std::vector<uint32_t>;

Positions Visited(const PackedLists& lists, const std::vector<uint64_t>& list, uint32_t count) {
  Positions visited;
  VisitPackedList(lists, list.data(), count, [&](uint32_t token) { visited.push_back(token); });
  return visited;
}

// Packs into guarded words, compares with the oracle's bits, and reads every prefix that is asked for.
void Check(uint32_t list_tokens, uint32_t limit, const Positions& tokens) {
  SCOPED_TRACE(::testing::Message() << tokens.size() << " of at most " << list_tokens << " below " << limit);
  const PackedLists lists = MakePackedLists(list_tokens, limit);
  std::vector<uint64_t> list(lists.words + 1, 0xabababababababab);
  PackList(lists, tokens.data(), static_cast<uint32_t>(tokens.size()), list.data());
  ASSERT_EQ(list.back(), 0xabababababababab) << "written past the end";
  list.pop_back();
  ASSERT_EQ(list, oracle::PackList(tokens, lists.low_bits, lists.low_words, lists.words));
  const auto size = static_cast<uint32_t>(tokens.size());
  for (uint32_t count : {0u, size / 2, size - std::min(size, 1u), size}) {
    ASSERT_EQ(Visited(lists, list, count), Positions(tokens.begin(), tokens.begin() + count));
  }
}

TEST(PackedListTest, ListsComeBackWhateverTheyHold) {
  std::mt19937_64 random = MakeRandom(1);
  for (const uint32_t limit : {1u, 2u, 63u, 64u, 65u, 1000u, 100000u, 4u << 20, (1u << 31) - 1}) {
    for (const uint32_t list_tokens : {1u, 2u, 63u, 64u, 512u, 8192u}) {
      if (list_tokens > limit) continue;
      Positions first, last, some;
      for (uint32_t i = 0; i < list_tokens; ++i) {
        first.push_back(i);
        last.push_back(limit - list_tokens + i);
        some.push_back(static_cast<uint32_t>(random() % limit));
      }
      std::sort(some.begin(), some.end());
      some.erase(std::unique(some.begin(), some.end()), some.end());
      for (const Positions& tokens : {Positions{}, first, last, some}) {
        ASSERT_NO_FATAL_FAILURE(Check(list_tokens, limit, tokens));
      }
    }
  }
}

TEST(PackedListTest, BytesAreThoseOfTheFormula) {
  // 7 low bits each, and 512 + 99,999 / 128 bits: 56 + 21 words.
  EXPECT_EQ(MakePackedLists(512, 100000).list_bytes(), 77u * 8);
  // Nothing but the second row where every position may be listed.
  EXPECT_EQ(MakePackedLists(64, 64), (PackedLists{.list_tokens = 64, .low_bits = 0, .low_words = 0, .words = 2}));
  for (const uint32_t limit : {600u, 5000u, 131072u, 4u << 20}) {
    const double bits = 8.0 * static_cast<double>(MakePackedLists(512, limit).list_bytes()) / 512;
    EXPECT_LE(bits, 2 + std::log2(limit / 512.0) + 128.0 / 512) << limit;
  }
}

}  // namespace
}  // namespace ctkvr::testing
