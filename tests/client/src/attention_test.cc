// SPDX-License-Identifier: Apache-2.0
//
// Proves that parts of an attention merge to the attention over all their tokens, to the float, also at extremes and
// where parts are empty, and that an answer's attention is read and damaged ones are refused.
#include "ctkvr/client/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::StatusIs;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- Merging -------------------------------------------------------------------------------------------------------

// Tokens of one row: logits, and values of three dimensions.
struct TokensOfRow {
  std::vector<double> logits;
  std::vector<std::array<double, 3>> values;
};

struct Exact {
  std::array<double, 3> output{};
  double log_sum_exp = -std::numeric_limits<double>::infinity();
};

// Attention over tokens in float64, a sink logit with no value beside them.
Exact Attend(const TokensOfRow& tokens, double sink = -std::numeric_limits<double>::infinity()) {
  double max = sink;
  for (const double logit : tokens.logits) max = std::max(max, logit);
  Exact exact;
  if (std::isinf(max)) return exact;
  double sum = std::exp(sink - max);
  for (const double logit : tokens.logits) sum += std::exp(logit - max);
  for (size_t t = 0; t < tokens.logits.size(); ++t) {
    for (size_t i = 0; i < 3; ++i) exact.output[i] += std::exp(tokens.logits[t] - max) / sum * tokens.values[t][i];
  }
  exact.log_sum_exp = max + std::log(sum);
  return exact;
}

Attention PartOf(const std::vector<TokensOfRow>& rows) {
  Attention part;
  for (const TokensOfRow& row : rows) {
    const Exact exact = Attend(row);
    for (const double element : exact.output) part.output.push_back(static_cast<float>(element));
    part.log_sum_exp.push_back(static_cast<float>(exact.log_sum_exp));
  }
  return part;
}

// Random tokens a row and part, some parts of some rows empty, logits about `offset`.
void ExpectMergesToTheWhole(double offset, double spread, bool with_sinks, uint64_t salt) {
  std::mt19937_64 random = testing::MakeRandom(salt);
  std::normal_distribution<double> normal;
  constexpr size_t kRows = 12, kParts = 4, kHeads = 6;
  std::vector<TokensOfRow> whole(kRows);
  std::vector<Attention> parts;
  for (size_t p = 0; p < kParts; ++p) {
    std::vector<TokensOfRow> rows(kRows);
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t t = random() % 6; t > 0; --t) {
        rows[row].logits.push_back(offset + spread * normal(random));
        rows[row].values.push_back({normal(random), normal(random), normal(random)});
      }
      whole[row].logits.insert(whole[row].logits.end(), rows[row].logits.begin(), rows[row].logits.end());
      whole[row].values.insert(whole[row].values.end(), rows[row].values.begin(), rows[row].values.end());
    }
    parts.push_back(PartOf(rows));
  }
  std::vector<float> sinks;
  for (size_t h = 0; h < kHeads && with_sinks; ++h) sinks.push_back(static_cast<float>(offset + normal(random)));
  std::vector<AttentionView> views;
  for (const Attention& part : parts) views.push_back(part.view());
  const auto merged = MergeAttention(views, sinks);
  ASSERT_THAT(merged, IsOk());
  // A log-sum-exp of a part is rounded to float32, and that moves its weight.
  const double bound = 4 * std::ldexp(std::abs(offset) + 8 * spread + 4, -24) + 1e-6;
  for (size_t row = 0; row < kRows; ++row) {
    SCOPED_TRACE(row);
    const Exact expected = with_sinks ? Attend(whole[row], sinks[row % kHeads]) : Attend(whole[row]);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(merged->output[row * 3 + i], expected.output[i], 4 * bound);
    if (std::isinf(expected.log_sum_exp)) {
      EXPECT_EQ(merged->log_sum_exp[row], -kInfinity);
    } else {
      EXPECT_NEAR(merged->log_sum_exp[row], expected.log_sum_exp, bound);
    }
  }
}

TEST(MergeAttention, PartsAreTheWhole) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(testing::TestSeed()));
  uint64_t salt = 0;
  for (const double offset : {0.0, 80.0, -80.0, 1000.0, -1000.0}) {
    for (const double spread : {0.1, 3.0, 60.0}) {
      for (const bool with_sinks : {false, true}) {
        SCOPED_TRACE(::testing::Message() << offset << ", " << spread << ", " << with_sinks);
        ExpectMergesToTheWhole(offset, spread, with_sinks, ++salt);
      }
    }
  }
}

TEST(MergeAttention, OnePartIsItself) {
  const std::vector<float> output = {1, -2, 3e38f, 4}, log_sum_exp = {5, -1e30f};
  const AttentionView part{.output = output, .log_sum_exp = log_sum_exp};
  const auto merged = MergeAttention({&part, 1});
  ASSERT_THAT(merged, IsOk());
  EXPECT_EQ(merged->output, output);
  EXPECT_EQ(merged->log_sum_exp, log_sum_exp);
}

TEST(MergeAttention, EmptyRowsCountNothingWhateverTheirOutputHolds) {
  const std::vector<float> rubbish = {NAN, kInfinity, 7, 7}, some = {1, 2, 0, 0};
  const std::vector<float> empty = {-kInfinity, -kInfinity}, half = {3, -kInfinity};
  const AttentionView parts[] = {{.output = rubbish, .log_sum_exp = empty}, {.output = some, .log_sum_exp = half}};
  const auto merged = MergeAttention(parts);
  ASSERT_THAT(merged, IsOk());
  EXPECT_THAT(merged->output, ElementsAre(1, 2, 0, 0));
  EXPECT_THAT(merged->log_sum_exp, ElementsAre(3, -kInfinity));
}

TEST(MergeAttention, SinksTakeTheirShareOnceAndAloneHaveNoValue) {
  const std::vector<float> output = {8, 8, 8, 8}, log_sum_exp = {2, -kInfinity, 2, 2};
  const AttentionView part{.output = output, .log_sum_exp = log_sum_exp};
  const float sinks[] = {2, -kInfinity};
  const AttentionView parts[] = {part, part};
  const auto one = MergeAttention({&part, 1}, sinks);
  ASSERT_THAT(one, IsOk());
  EXPECT_THAT(one->output, ElementsAre(4, 0, 4, 8));
  EXPECT_FLOAT_EQ(one->log_sum_exp[0], 2 + std::log(2.0f));
  EXPECT_EQ(one->log_sum_exp[1], -kInfinity);
  const auto two = MergeAttention(parts, sinks);
  ASSERT_THAT(two, IsOk());
  EXPECT_FLOAT_EQ(two->output[0], 16.0f / 3);
  // A sink where nothing was attended.
  const float all[] = {2, 5};
  const auto alone = MergeAttention({&part, 1}, all);
  ASSERT_THAT(alone, IsOk());
  EXPECT_EQ(alone->output[1], 0);
  EXPECT_EQ(alone->log_sum_exp[1], 5);
}

TEST(MergeAttention, ExtremeLogSumExpsNeitherOverflowNorVanish) {
  const std::vector<float> a = {1}, b = {3};
  for (const float at : {3e38f, -3e38f, 1e-38f}) {
    const std::vector<float> lse = {at};
    const AttentionView parts[] = {{.output = a, .log_sum_exp = lse}, {.output = b, .log_sum_exp = lse}};
    const auto merged = MergeAttention(parts);
    ASSERT_THAT(merged, IsOk());
    EXPECT_EQ(merged->output[0], 2) << at;
    EXPECT_FLOAT_EQ(merged->log_sum_exp[0], static_cast<float>(at + std::log(2.0))) << at;
  }
  const std::vector<float> high = {3e38f}, low = {-3e38f};
  const AttentionView parts[] = {{.output = a, .log_sum_exp = low}, {.output = b, .log_sum_exp = high}};
  EXPECT_THAT(MergeAttention(parts)->output, ElementsAre(3));
}

TEST(MergeAttention, NoRowsMergeToNone) {
  const AttentionView parts[2] = {};
  const auto merged = MergeAttention(parts);
  ASSERT_THAT(merged, IsOk());
  EXPECT_THAT(merged->output, IsEmpty());
  EXPECT_THAT(merged->log_sum_exp, IsEmpty());
}

TEST(MergeAttention, ShapesThatDifferAndWrongSumsAreNamed) {
  const std::vector<float> four(4), two(2), three(3);
  const auto expect = [](std::vector<AttentionView> parts, std::vector<float> sinks, const std::string& text) {
    EXPECT_THAT(MergeAttention(parts, sinks), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  expect({}, {}, "parts is empty");
  expect({{.output = four, .log_sum_exp = two}, {.output = four, .log_sum_exp = three}}, {}, "parts[1] has 4");
  expect({{.output = four, .log_sum_exp = two}, {.output = two, .log_sum_exp = two}}, {}, "parts[1] has 2");
  expect({{.output = four, .log_sum_exp = three}}, {}, "parts[0] has 4");
  expect({{.output = four, .log_sum_exp = {}}}, {}, "parts[0] has 4");
  expect({{.output = four, .log_sum_exp = two}}, three, "sink_logits has 3 elements; the 2 rows");
  const std::vector<float> nan = {0, NAN}, infinite = {kInfinity, 0};
  expect({{.output = four, .log_sum_exp = nan}}, {}, "parts[0].log_sum_exp[1] is nan");
  expect({{.output = four, .log_sum_exp = infinite}}, {}, "parts[0].log_sum_exp[0] is inf");
  expect({{.output = four, .log_sum_exp = two}}, nan, "sink_logits[1] is nan");
}

// ---- Answers -------------------------------------------------------------------------------------------------------

constexpr LayerShape kShape{.q_heads = 4, .kv_heads = 2, .head_dim = 16, .value_dim = 8};

// Two positions.
v1::Answer SampleAnswer(v1::DType dtype) {
  v1::Answer answer;
  for (int i = 0; i < 4; ++i) answer.add_counts(7);
  std::vector<float> log_sum_exp;
  std::string data;
  for (int i = 0; i < 64; ++i) {
    const auto value = static_cast<float>(i - 20);
    const uint16_t half = dtype == v1::DTYPE_F16 ? FloatToHalf(value) : FloatToBfloat(value);
    const bool wide = dtype == v1::DTYPE_F32;
    data.append(wide ? reinterpret_cast<const char*>(&value) : reinterpret_cast<const char*>(&half), wide ? 4 : 2);
    if (i % 8 == 0) log_sum_exp.push_back(value);
  }
  const uint32_t dims[] = {2, 4, 8};
  *answer.mutable_output() = MakeTensor(dtype, dims, std::as_bytes(std::span(data)));
  *answer.mutable_log_sum_exp() =
      MakeTensor(v1::DTYPE_F32, std::span(dims).first(2), std::as_bytes(std::span(log_sum_exp)));
  return answer;
}

TEST(AttentionOf, OutputsOfEveryTypeAreRead) {
  for (const v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    const auto attention = AttentionOf(SampleAnswer(dtype), kShape);
    ASSERT_THAT(attention, IsOk());
    ASSERT_EQ(attention->output.size(), 64u);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(attention->output[static_cast<size_t>(i)], i - 20);
    EXPECT_THAT(attention->log_sum_exp, ElementsAre(-20, -12, -4, 4, 12, 20, 28, 36));
    EXPECT_EQ(attention->view().output.data(), attention->output.data());
  }
}

TEST(AttentionOf, PerHeadAnswersCountEveryQueryHead) {
  v1::Answer answer = SampleAnswer(v1::DTYPE_F32);
  answer.mutable_used()->set_reduction(v1::GROUP_REDUCTION_PER_HEAD);
  for (int i = 0; i < 4; ++i) answer.add_counts(1);
  EXPECT_THAT(AttentionOf(answer, kShape), IsOk());
}

TEST(AttentionOf, OthersAndDamagedOnesAreRefused) {
  const auto expect = [](const v1::Answer& answer, const std::string& text) {
    EXPECT_THAT(AttentionOf(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  expect(v1::Answer(), "carries no attention");
  v1::Answer answer = SampleAnswer(v1::DTYPE_F16);
  answer.clear_log_sum_exp();
  expect(answer, "carries no attention");
  answer = SampleAnswer(v1::DTYPE_F16);
  answer.mutable_output()->mutable_data()->pop_back();
  expect(answer, "answer.output has dims [2, 4, 8] of dtype 2 in 127 bytes");
  answer = SampleAnswer(v1::DTYPE_F16);
  answer.mutable_output()->set_dims(2, 16);
  expect(answer, "[2, 4, 16]");
  answer = SampleAnswer(v1::DTYPE_F16);
  answer.mutable_output()->set_dtype(v1::DTYPE_UNSPECIFIED);
  expect(answer, "dtype 0");
  answer = SampleAnswer(v1::DTYPE_F16);
  answer.mutable_log_sum_exp()->add_dims(1);
  expect(answer, "answer.log_sum_exp");
  answer = SampleAnswer(v1::DTYPE_F16);
  answer.add_counts(1);
  answer.add_counts(1);
  expect(answer, "give [3, 4, 8]");
}

TEST(RemainderOf, IsReadAsTheAttentionIs) {
  v1::Answer answer = SampleAnswer(v1::DTYPE_F16);
  EXPECT_THAT(RemainderOf(answer, kShape),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("carries no remainder")));
  answer.mutable_remainder_output()->Swap(answer.mutable_output());
  answer.mutable_remainder_log_sum_exp()->Swap(answer.mutable_log_sum_exp());
  const auto remainder = RemainderOf(answer, kShape);
  ASSERT_THAT(remainder, IsOk());
  EXPECT_EQ(remainder->output[63], 43);
  EXPECT_THAT(remainder->log_sum_exp, ElementsAre(-20, -12, -4, 4, 12, 20, 28, 36));
  answer.mutable_remainder_log_sum_exp()->add_dims(1);
  EXPECT_THAT(RemainderOf(answer, kShape),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("answer.remainder_log_sum_exp has dims")));
}

}  // namespace
}  // namespace ctkvr::client
