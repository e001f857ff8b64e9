// SPDX-License-Identifier: Apache-2.0
//
// The worker's row cache: it obeys, and refuses what cannot be right.

#include "ctkvr/client/row_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::ctkvr::testing::IsOk;
using ::ctkvr::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename T>
std::string BytesOfList(const std::vector<T>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
}

std::string Text(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Two sets; keys of two bytes, values of one.
v1::Answer FirstAnswer() {
  v1::Answer answer;
  answer.add_counts(2);
  answer.add_counts(1);
  answer.add_new_counts(2);
  answer.add_new_counts(1);
  answer.set_slots(BytesOfList<uint16_t>({3, 0, 3}));
  answer.set_new_slots(BytesOfList<uint16_t>({3, 0, 3}));
  answer.set_ids(BytesOfList<uint32_t>({10, 20, 30}));
  answer.set_keys("aabbcc");
  answer.set_values("ABC");
  answer.set_cache_version(7);
  return answer;
}

v1::Answer SecondAnswer() {
  v1::Answer answer;
  answer.add_counts(2);
  answer.add_counts(0);
  answer.add_new_counts(1);
  answer.add_new_counts(0);
  answer.set_slots(BytesOfList<uint16_t>({0, 3}));
  answer.set_new_slots(BytesOfList<uint16_t>({3}));
  answer.set_ids(BytesOfList<uint32_t>({40}));
  answer.set_keys("dd");
  answer.set_values("D");
  answer.set_cache_version(8);
  return answer;
}

TEST(RowCacheTest, RowsGoWhereTheAnswerSays) {
  RowCache cache(2, 4);
  EXPECT_EQ(cache.version(), 0u);
  ASSERT_THAT(cache.Apply(FirstAnswer()), IsOk());
  EXPECT_EQ(cache.version(), 7u);
  EXPECT_EQ(cache.positions(), 1u);
  EXPECT_EQ(cache.new_rows(), 3u);
  EXPECT_THAT(cache.slots(0, 0), ElementsAre(3, 0));
  EXPECT_THAT(cache.slots(0, 1), ElementsAre(3));
  EXPECT_EQ(Text(cache.key(0, 3)) + Text(cache.value(0, 3)), "aaA");
  EXPECT_EQ(Text(cache.key(0, 0)) + Text(cache.value(0, 0)), "bbB");
  EXPECT_EQ(Text(cache.key(1, 3)) + Text(cache.value(1, 3)), "ccC");
  EXPECT_EQ(cache.token(1, 3), 30u);
}

TEST(RowCacheTest, RowsStayUntilTheirSlotIsTaken) {
  RowCache cache(2, 4);
  ASSERT_THAT(cache.Apply(FirstAnswer()), IsOk());
  ASSERT_THAT(cache.Apply(SecondAnswer()), IsOk());
  EXPECT_THAT(cache.slots(0, 0), ElementsAre(0, 3));
  EXPECT_EQ(Text(cache.key(0, 0)), "bb");
  EXPECT_EQ(Text(cache.key(0, 3)), "dd");
  EXPECT_EQ(cache.token(0, 3), 40u);
  EXPECT_EQ(Text(cache.key(1, 3)), "cc");
}

TEST(RowCacheTest, WhatCannotBeRightIsRefusedAndEmptiesTheCache) {
  const auto refusal = [](auto change) {
    RowCache cache(2, 4);
    EXPECT_THAT(cache.Apply(FirstAnswer()), IsOk());
    v1::Answer answer = SecondAnswer();
    change(answer);
    const absl::Status status = cache.Apply(answer);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(cache.version(), 0u);
    EXPECT_THAT(cache.Apply(SecondAnswer()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("never filled")));
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](v1::Answer& a) { a.add_counts(1); }), HasSubstr("answer.counts has 3 numbers"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.mutable_new_counts()->RemoveLast(); }), HasSubstr("new_counts 1"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_slots("x"); }), HasSubstr("answer.slots has 1 bytes; 4"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_new_slots(""); }), HasSubstr("answer.new_slots has 0 bytes; 2"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_ids(""); }), HasSubstr("answer.ids has 0 bytes; 4"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.clear_values(); }), HasSubstr("2 and 0 bytes"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_new_slots(BytesOfList<uint16_t>({4})); }),
              HasSubstr("a new slot is 4; the cache has 4 slots"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_slots(BytesOfList<uint16_t>({0, 9})); }), HasSubstr("never filled"));
  EXPECT_THAT(refusal([](v1::Answer& a) { a.set_slots(BytesOfList<uint16_t>({0, 1})); }), HasSubstr("never filled"));
}

TEST(RowCacheTest, RowsOfAnotherSizeReplaceAllOthers) {
  RowCache cache(2, 4);
  ASSERT_THAT(cache.Apply(FirstAnswer()), IsOk());
  v1::Answer answer = SecondAnswer();
  answer.set_slots(BytesOfList<uint16_t>({3, 3}));
  answer.set_keys("dddd");
  ASSERT_THAT(cache.Apply(answer), IsOk());
  EXPECT_EQ(Text(cache.key(0, 3)), "dddd");
  EXPECT_THAT(cache.Apply(FirstAnswer()), IsOk());
  EXPECT_THAT(cache.Apply(answer), IsOk());
  answer = SecondAnswer();
  EXPECT_THAT(cache.Apply(answer), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("never filled")));
}

TEST(RowCacheTest, AnEmptyAnswerToAnEmptyCacheIsTaken) {
  RowCache cache(2, 4);
  v1::Answer answer;
  answer.add_counts(0);
  answer.add_counts(0);
  answer.add_new_counts(0);
  answer.add_new_counts(0);
  answer.set_cache_version(5);
  ASSERT_THAT(cache.Apply(answer), IsOk());
  EXPECT_EQ(cache.version(), 5u);
  EXPECT_TRUE(cache.slots(0, 1).empty());
}

}  // namespace
}  // namespace ctkvr::client
