// SPDX-License-Identifier: Apache-2.0
//
// What an answer carries in each mode and row format; scratch, deadlines and batches.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "server/core/retriever.h"
#include "tests/server/core/retriever_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Memory, RetrieverTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

// ---- Modes and rows ------------------------------------------------------------------------------------------------

TEST_P(RetrieverTest, ModesCarryWhatTheyName) {
  for (Source source : {Source::kExact, Source::kDense}) {
    Fill(SmallConfig(SmallLayer(Format::kK8V4, source)));
    OwnedQuery query = tokens_->Ask(kLength);
    query.query.answer.mode = AnswerMode::kIds;
    const auto ids = harness_.Retrieve("s", query);
    query.query.answer.mode = AnswerMode::kScores;
    const auto scores = harness_.Retrieve("s", query);
    query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kF32};
    const auto rows = harness_.Retrieve("s", query);
    ASSERT_THAT(ids, IsOk());
    ASSERT_THAT(scores, IsOk());
    ASSERT_THAT(rows, IsOk());
    EXPECT_EQ(ids->scores + ids->keys + scores->keys + scores->values, "");
    EXPECT_EQ(ids->ids, scores->ids);
    EXPECT_EQ(ids->ids, rows->ids);
    EXPECT_EQ(scores->scores, rows->scores);
    EXPECT_EQ(rows->keys.size(), rows->ids.size() * 32);
    EXPECT_EQ(rows->values.size(), rows->ids.size() * 16);
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(RetrieverTest, RowsAreTheDecodedStoredRows) {
  for (Format format : kAllFormats) {
    for (uint32_t length : {100u, kLength}) {  // raw, and coded
      SCOPED_TRACE(FormatName(format));
      Fill(SmallConfig(SmallLayer(format, Source::kExact)), length);
      for (RowFormat row_format : {RowFormat::kF32, RowFormat::kF16, RowFormat::kBF16}) {
        OwnedQuery query = tokens_->Ask(length);
        query.query.answer = {.mode = AnswerMode::kRows, .row_format = row_format};
        const auto answer = harness_.Retrieve("s", query);
        ASSERT_THAT(answer, IsOk());
        EXPECT_FALSE(answer->codec.has_value());
        EXPECT_EQ(answer->code_generation, KeysAreCoded(format) && length == kLength ? 1u : 0u);
        const DType dtype = row_format == RowFormat::kF32   ? DType::kF32
                            : row_format == RowFormat::kF16 ? DType::kF16
                                                            : DType::kBF16;
        const double relative = dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 1e-3 : 8e-3;
        const auto sets = SplitAnswer(*answer, 2);
        for (size_t h = 0; h < 2; ++h) {
          for (size_t i = 0; i < sets[h].ids.size(); ++i) {
            const oracle::Row& key = stored_.keys[h][sets[h].ids[i]];
            const oracle::Row& value = stored_.values[h][sets[h].ids[i]];
            const auto* keys = reinterpret_cast<const std::byte*>(answer->keys.data());
            const auto* values = reinterpret_cast<const std::byte*>(answer->values.data());
            for (size_t d = 0; d < 32; ++d) {
              ASSERT_NEAR(LoadElement(keys, dtype, (sets[h].first_row + i) * 32 + d), key[d],
                          relative * (std::fabs(key[d]) + 1e-1));
            }
            for (size_t d = 0; d < 16; ++d) {
              ASSERT_NEAR(LoadElement(values, dtype, (sets[h].first_row + i) * 16 + d), value[d],
                          relative * (std::fabs(value[d]) + 1e-1));
            }
          }
        }
      }
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(RetrieverTest, TheCodecComesWithStorageRowsUnlessItIsKnown) {
  Fill(SmallConfig(SmallLayer()));
  OwnedQuery query = tokens_->Ask(kLength);
  query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kStorage};
  auto answer = harness_.Retrieve("s", query);
  ASSERT_TRUE(answer->codec.has_value());
  EXPECT_EQ(answer->codec->code_generation, 1u);
  EXPECT_EQ(answer->codec->rotation_seed, 12345u);
  EXPECT_EQ(answer->keys.size(), answer->ids.size() / 4 * answer->codec->key_row_bytes);
  EXPECT_EQ(answer->values.size(), answer->ids.size() / 4 * answer->codec->value_row_bytes);
  query.query.answer.known_code_generation = 1;
  EXPECT_FALSE(harness_.Retrieve("s", query)->codec.has_value());
  query.query.answer.known_code_generation = 2;
  EXPECT_TRUE(harness_.Retrieve("s", query)->codec.has_value());
}

TEST_P(RetrieverTest, RowsThatOverflowTheirFormatAreRefusedByName) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kF32, Source::kDense));
  config.dtype = DType::kF32;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OwnedChunk chunk = tokens.Append(0, 20);
  StoreElement(chunk.values.data(), DType::kF32, 100, 1e6f);
  ASSERT_THAT(harness_.Append("s", chunk), IsOk());
  OwnedQuery query = tokens.Ask(20);
  query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kF16};
  const auto answer = harness_.Retrieve("s", query);
  EXPECT_THAT(answer, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("row_format is f16; 1 elements")));
  EXPECT_EQ(GetErrorDetail(answer.status()).reason, kReasonRowOverflow);
  query.query.answer.row_format = RowFormat::kBF16;
  EXPECT_THAT(harness_.Retrieve("s", query), IsOk());
}

// ---- Scratch, deadlines, batches -----------------------------------------------------------------------------------

TEST(RetrieverScratchTest, SetsThatDoNotFitTogetherFollowInRounds) {
  for (const bool shares : {true, false}) {
    SCOPED_TRACE(shares);
    HarnessOptions options{.shares_host_memory = shares};
    options.engine.scratch_bytes = size_t{56} << 10;
    Harness small(options);
    Harness large({.shares_host_memory = shares});
    const SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, Source::kSketch));
    const Tokens tokens(config.layers[0], config.dtype, 1);
    std::vector<absl::StatusOr<Answer>> answers;
    uint64_t calls = 0;
    for (Harness* harness : {&small, &large}) {
      ASSERT_THAT(harness->Open("s", config), IsOk());
      ASSERT_THAT(harness->Append("s", tokens.Append(0, kLength)), IsOk());
      OwnedQuery query = tokens.Ask(kLength, 8);
      query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kF16};
      const uint64_t before = harness->backend().calls();
      answers.push_back(harness->Retrieve("s", query));
      if (harness == &small) calls = harness->backend().calls() - before;
      if (harness == &large) {
        EXPECT_LT(harness->backend().calls() - before, calls) << "one round must do";
      }
    }
    ASSERT_THAT(answers[0], IsOk());
    ASSERT_THAT(answers[1], IsOk());
    EXPECT_EQ(answers[0]->counts, answers[1]->counts);
    EXPECT_EQ(answers[0]->ids, answers[1]->ids);
    EXPECT_EQ(answers[0]->scores, answers[1]->scores);
    EXPECT_EQ(answers[0]->keys, answers[1]->keys);
    EXPECT_EQ(answers[0]->values, answers[1]->values);
    EXPECT_EQ(answers[0]->bytes_read, answers[1]->bytes_read);
  }
}

TEST(RetrieverScratchTest, ASetThatDoesNotFitAloneSaysHowManyBytesItNeeds) {
  HarnessOptions options;
  options.engine.scratch_bytes = size_t{16} << 10;
  Harness harness(options);
  const SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 1000)), IsOk());
  EXPECT_THAT(harness.Retrieve("s", tokens.Ask(1000)),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("bytes of scratch; the lane has 16384")));
  // What fits is served still.
  EXPECT_THAT(harness.Retrieve("s", tokens.Ask(300)), IsOk());
}

TEST(RetrieverLimitTest, AnAnswerAboveTheReplyLimitIsRefusedBeforeWork) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, Source::kDense), 16384);
  config.layers[0].q_heads = config.layers[0].kv_heads = 2;
  config.layers[0].head_dim = config.layers[0].value_dim = 64;
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  for (uint32_t t = 0; t < 8192; t += 1024) ASSERT_THAT(harness.Append("s", tokens.Append(t, 1024)), IsOk());
  OwnedQuery query = tokens.Ask(8192, 64);
  query.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kF32};
  const uint64_t before = harness.backend().calls();
  EXPECT_THAT(harness.Retrieve("s", query),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("the limit is 268435456")));
  EXPECT_EQ(harness.backend().calls(), before);
}

TEST(RetrieverDeadlineTest, ADeadlineOrCancellationIsNoticedBeforeGathering) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 100)), IsOk());
  // Cancelled once it has been asked for the second time: the first is before work starts.
  int asked = 0;
  CallContext context;
  context.cancelled = [&asked] { return ++asked > 1; };
  EXPECT_THAT(harness.Retrieve("s", tokens.Ask(100), context),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("gathering")));
  EXPECT_EQ(harness.engine().stats().expired_in_flight, 1u);
  EXPECT_EQ(harness.engine().stats().expired_in_queue, 0u);
}

TEST(RetrieverBatchTest, RetrievalsOfManySessionsShareOperations) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  const Tokens tokens(config.layers[0], config.dtype, 1);
  std::vector<OwnedQuery> queries;
  std::vector<StepRequest> requests;
  std::vector<Answer> alone;
  for (uint32_t i = 0; i < 6; ++i) {
    const std::string id = std::to_string(i);
    ASSERT_THAT(harness.Open(id, config), IsOk());
    ASSERT_THAT(harness.Append(id, tokens.Append(0, 100 + i, 0, i)), IsOk());
    queries.push_back(tokens.Ask(200 + i));
    requests.push_back({.session = Ref(id), .chunk = std::nullopt, .query = queries.back().query});
    alone.push_back(*harness.Retrieve(id, queries.back()));
  }
  // PrepareQueries, ScoreTokens, SelectTokens, two waits; ids and scores (two heads) of 12 sets.
  const uint64_t before = harness.backend().calls();
  const auto results = harness.Step(std::move(requests));
  EXPECT_EQ(harness.backend().calls() - before, 5u + 12 * 3);
  for (uint32_t i = 0; i < 6; ++i) {
    ASSERT_THAT(results[i].answer, IsOk());
    EXPECT_EQ(results[i].answer->ids, alone[i].ids);
    EXPECT_EQ(results[i].answer->scores, alone[i].scores);
  }
}

}  // namespace
}  // namespace ctkvr::testing
