// SPDX-License-Identifier: Apache-2.0
//
// New rows: a worker that obeys holds, at every answer, the very rows that an answer with all rows brings, whatever
// became of earlier answers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "server/core/error.h"
#include "server/core/limits.h"
#include "server/core/slot_table.h"
#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSlots = 96;

SessionConfig CachedConfig(Format format = Format::kK8V4) {
  SessionConfig config = SmallConfig(SmallLayer(format, Source::kExact));
  config.layers[0].selection = {
      .source = Source::kExact, .k_tokens = 8, .sink_tokens = 2, .window_tokens = 4, .dense_below_tokens = 0};
  config.token_limit = 1200;
  config.cache_slots = kSlots;
  return config;
}

// The worker's row cache of one layer: rows by set and slot.
class Worker {
 public:
  uint64_t version() const { return version_; }
  size_t new_rows() const { return new_rows_; }

  // Keys and values of all chosen tokens, as kRows would have brought them.
  std::pair<std::string, std::string> Apply(const Answer& answer, size_t sets) {
    const size_t rows = answer.new_slots.size() / 2;
    EXPECT_EQ(answer.ids.size(), rows * 4);
    EXPECT_EQ(std::accumulate(answer.new_counts.begin(), answer.new_counts.end(), size_t{0}), rows);
    const size_t key_bytes = rows == 0 ? 0 : answer.keys.size() / rows;
    const size_t value_bytes = rows == 0 ? 0 : answer.values.size() / rows;
    for (size_t group = 0, row = 0; group < answer.new_counts.size(); ++group) {
      for (size_t i = 0; i < answer.new_counts[group]; ++i, ++row) {
        rows_[{group % sets, SlotAt(answer.new_slots, row)}] = {answer.keys.substr(row * key_bytes, key_bytes),
                                                                answer.values.substr(row * value_bytes, value_bytes)};
      }
    }
    version_ = answer.cache_version;
    new_rows_ = rows;
    std::string keys, values;
    for (size_t group = 0, at = 0; group < answer.counts.size(); ++group) {
      for (size_t i = 0; i < answer.counts[group]; ++i, ++at) {
        const auto& [key, value] = rows_[{group % sets, SlotAt(answer.slots, at)}];
        keys += key;
        values += value;
      }
    }
    return {keys, values};
  }

 private:
  static uint16_t SlotAt(const std::string& slots, size_t index) {
    uint16_t slot = 0;
    std::memcpy(&slot, slots.data() + index * sizeof(slot), sizeof(slot));
    EXPECT_LT(slot, kSlots);
    return slot;
  }
  std::map<std::pair<size_t, uint16_t>, std::pair<std::string, std::string>> rows_;
  uint64_t version_ = 0;
  size_t new_rows_ = 0;
};

class NewRowsTest : public ::testing::TestWithParam<bool> {
 protected:
  NewRowsTest() : harness_({.shares_host_memory = GetParam()}) {}

  absl::StatusOr<Answer> Ask(const Tokens& tokens, uint32_t position, const Worker& worker,
                             RowFormat format = RowFormat::kF16, uint64_t variant = 0) {
    OwnedQuery query = tokens.Ask(position, 1, variant);
    query.query.answer = {.mode = AnswerMode::kNewRows, .row_format = format};
    query.query.cache_version = worker.version();
    return harness_.Retrieve("s", query);
  }
  uint64_t SlotTableBytesHeld() { return harness_.engine().memory().slot_table_bytes; }

  Harness harness_;
};

INSTANTIATE_TEST_SUITE_P(Memory, NewRowsTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(NewRowsTest, TheSameQueryBringsNoRowTwice) {
  const SessionConfig config = CachedConfig();
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 900)), IsOk());
  Worker worker;
  const auto first = Ask(tokens, 899, worker);
  ASSERT_THAT(first, IsOk());
  worker.Apply(*first, config.layers[0].kv_heads);
  EXPECT_EQ(first->scores, "");
  EXPECT_EQ(first->ids.size() / 4, std::accumulate(first->counts.begin(), first->counts.end(), 0u));
  const auto second = Ask(tokens, 899, worker);
  ASSERT_THAT(second, IsOk());
  EXPECT_EQ(second->ids + second->keys + second->values + second->new_slots, "");
  EXPECT_EQ(second->slots, first->slots);
  // A worker that lost the second answer is given all of it again.
  const auto again = Ask(tokens, 899, worker);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->ids, first->ids);
  EXPECT_EQ(again->keys, first->keys);
}

// Losses, restarts of the worker, truncation and other bytes at the same positions, several positions a call, other row
// formats, keys that become codes: at every answer the worker's rows are those of kRows, to the byte.
TEST_P(NewRowsTest, WhateverIsLostTheRowsAreThoseOfAnAnswerWithAllRows) {
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto below = [&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); };
    const SessionConfig config = CachedConfig(seed % 2 == 0 ? Format::kK6V4 : Format::kF16);
    const size_t sets = config.layers[0].kv_heads;
    ASSERT_THAT(harness_.Open("s", config), IsOk());
    const Tokens tokens(config.layers[0], config.dtype, seed);
    uint32_t length = 400 + below(100);
    uint64_t variant = 0;
    ASSERT_THAT(harness_.Append("s", tokens.Append(0, length)), IsOk());
    Worker worker;
    RowFormat format = RowFormat::kF16;
    size_t asked = 0, brought = 0;
    for (int step = 0; step < 100; ++step) {
      const uint32_t event = below(30);
      if (event == 0) worker = Worker();
      if (event == 1) format = format == RowFormat::kF16 ? RowFormat::kStorage : RowFormat::kF16;
      if (event == 2) {
        length -= below(60);
        ASSERT_THAT(harness_.Truncate("s", length), IsOk());
        ++variant;
      }
      const uint32_t added = 1 + below(3);
      ASSERT_THAT(harness_.Append("s", tokens.Append(length, added, 0, variant)), IsOk());
      length += added;
      // Neighbouring steps ask alike.
      OwnedQuery query = tokens.Ask(length - added, added, step / 8);
      query.query.answer = {.mode = AnswerMode::kNewRows, .row_format = format};
      query.query.cache_version = worker.version();
      const auto answer = harness_.Retrieve("s", query);
      query.query.answer.mode = AnswerMode::kRows;
      const auto expected = harness_.Retrieve("s", query);
      ASSERT_THAT(answer, IsOk());
      ASSERT_THAT(expected, IsOk());
      ASSERT_EQ(answer->counts, expected->counts);
      if (below(10) == 0) continue;  // lost on its way
      const auto [keys, values] = worker.Apply(*answer, sets);
      ASSERT_EQ(keys, expected->keys);
      ASSERT_EQ(values, expected->values);
      asked += expected->ids.size() / 4;
      brought += worker.new_rows();
    }
    EXPECT_LT(brought, asked) << "the cache saved nothing";
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(NewRowsTest, AnswersOfOneBatchBuildOnEachOther) {
  const SessionConfig config = CachedConfig();
  const size_t sets = config.layers[0].kv_heads;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 900)), IsOk());
  Worker worker;
  std::vector<OwnedQuery> queries;
  std::vector<StepRequest> requests;
  for (uint64_t i = 0; i < 3; ++i) queries.push_back(tokens.Ask(899, 1, i));
  for (OwnedQuery& query : queries) {
    query.query.answer = {.mode = AnswerMode::kNewRows, .row_format = RowFormat::kF16};
    requests.push_back({.session = Ref("s"), .query = query.query});
  }
  const std::vector<StepResult> results = harness_.Step(requests);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_THAT(results[i].answer, IsOk());
    queries[i].query.answer.mode = AnswerMode::kRows;
    const auto expected = harness_.Retrieve("s", queries[i]);
    ASSERT_THAT(expected, IsOk());
    EXPECT_EQ(worker.Apply(*results[i].answer, sets), std::pair(expected->keys, expected->values));
    // None held the version of the one before it, so each is complete.
    EXPECT_EQ(results[i].answer->ids, expected->ids);
  }
}

TEST_P(NewRowsTest, AnAnswerThatFailsLeavesNoRowThatTheWorkerLacks) {
  SessionConfig config = CachedConfig(Format::kF32);
  config.dtype = DType::kF32;
  config.layers[0].selection.source = Source::kDense;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OwnedChunk chunk = tokens.Append(0, 20);
  StoreElement(chunk.values.data(), DType::kF32, 100, 1e6f);
  ASSERT_THAT(harness_.Append("s", chunk), IsOk());
  Worker worker;
  EXPECT_EQ(GetErrorDetail(Ask(tokens, 19, worker).status()).reason, kReasonRowOverflow);
  const auto answer = Ask(tokens, 19, worker, RowFormat::kF32);
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->ids.size() / 4, 20u * config.layers[0].kv_heads);
}

TEST_P(NewRowsTest, RefusalsNameTheField) {
  SessionConfig config = CachedConfig();
  config.cache_slots = 0;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 200)), IsOk());
  EXPECT_THAT(Ask(tokens, 199, Worker()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("opened with cache_slots 0")));
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());

  config.cache_slots = 13;  // k 8, 2 sinks and a window of 4 need 14
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 200)), IsOk());
  const auto small = Ask(tokens, 199, Worker());
  EXPECT_THAT(small, StatusIs(absl::StatusCode::kFailedPrecondition,
                              HasSubstr("cache_slots is 13; a set of the answer may need 14 slots")));
  EXPECT_EQ(GetErrorDetail(small.status()).reason, kReasonCacheTooSmall);
  OwnedQuery per_head = tokens.Ask(199);
  per_head.query.answer.mode = AnswerMode::kNewRows;
  per_head.query.selection.reduction = Reduction::kPerHead;
  EXPECT_THAT(harness_.Retrieve("s", per_head),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("reduction is per_head")));

  config.cache_slots = limits::kCacheSlotsMax + 1;
  EXPECT_THAT(harness_.Open("t", config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cache_slots is 65536")));
}

TEST_P(NewRowsTest, PositionsThatNeedMoreSlotsThanThereAreFailAndTheNextAnswerIsComplete) {
  SessionConfig config = CachedConfig();
  config.cache_slots = 14;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 200)), IsOk());
  Worker worker;
  const auto one = Ask(tokens, 199, worker);
  ASSERT_THAT(one, IsOk());
  worker.Apply(*one, config.layers[0].kv_heads);
  OwnedQuery two = tokens.Ask(198, 2);
  two.query.answer.mode = AnswerMode::kNewRows;
  two.query.cache_version = worker.version();
  EXPECT_EQ(GetErrorDetail(harness_.Retrieve("s", two).status()).reason, kReasonCacheTooSmall);
  const auto next = Ask(tokens, 199, worker);
  ASSERT_THAT(next, IsOk());
  EXPECT_EQ(next->ids, one->ids);
}

TEST_P(NewRowsTest, TheTablesAreAdmittedAtOpenAndGivenBackAtClose) {
  SessionConfig config = CachedConfig();
  config.cache_slots = 2048;
  const auto info = harness_.Open("s", config);
  ASSERT_THAT(info, IsOk());
  const uint64_t expected = SlotTableBytes(config.layers[0].kv_heads, 2048) * config.layers.size();
  EXPECT_EQ(info->memory.slot_table_bytes, expected);
  EXPECT_EQ(SlotTableBytesHeld(), expected);
  EXPECT_THAT(harness_.Open("s", config), StatusIs(absl::StatusCode::kAlreadyExists));
  EXPECT_EQ(SlotTableBytesHeld(), expected);
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  EXPECT_EQ(SlotTableBytesHeld(), 0u);
  config.layers.resize(limits::kLayersMax, config.layers[0]);
  for (LayerConfig& layer : config.layers) layer.q_heads = layer.kv_heads = 8;
  config.cache_slots = limits::kCacheSlotsMax;
  const auto refused = harness_.Open("s", config);
  EXPECT_THAT(refused,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("slot tables and tags of the session take")));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonHostMemoryFull);
  EXPECT_EQ(SlotTableBytesHeld(), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
