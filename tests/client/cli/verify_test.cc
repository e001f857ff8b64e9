// SPDX-License-Identifier: Apache-2.0
//
// Proves that the check of source `exact` accepts a right answer and catches every kind of wrong one: a check that
// cannot fail proves nothing.
#include "client/cli/verify.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "ctkvr/client/tensor.h"
#include "gmock/gmock.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kTokens = 40, kDim = 16, kHeads = 2, kK = 5, kSinks = 2, kWindow = 3;

// One KV head with two query heads; the answer is worked out here by sorting.
class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() {
    auto random = testing::MakeRandom(1);
    std::normal_distribution<float> normal;
    trace_ = {.name = "t",
              .q_heads = kHeads,
              .kv_heads = 1,
              .head_dim = kDim,
              .value_dim = kDim,
              .tokens = kTokens,
              .prompt_tokens = 1,
              .query_first_position = 0,
              .scale = 0.25f};
    trace_.queries.resize(kTokens * kHeads * kDim);
    for (uint16_t& x : trace_.queries) x = client::FloatToHalf(normal(random));
    keys_.emplace_back(kTokens * kDim);
    for (float& x : keys_[0]) x = normal(random);
    settings_ = {.k_tokens = kK, .sink_tokens = kSinks, .softmax_scale = 0.25f};
    for (const uint32_t position : {20u, 39u}) steps_.push_back(Answer(position));
  }

  double Score(uint32_t position, uint32_t head, uint32_t token) const {
    double sum = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      sum += static_cast<double>(client::HalfToFloat(trace_.queries[(position * kHeads + head) * kDim + i])) *
             keys_[0][token * kDim + i];
    }
    return sum;
  }

  StepRecord Answer(uint32_t position) const {
    const uint32_t tokens = position + 1;
    std::vector<double> group(tokens);
    for (uint32_t head = 0; head < kHeads; ++head) {
      double sum = 0;
      for (uint32_t t = 0; t < tokens; ++t) sum += std::exp(0.25 * Score(position, head, t));
      for (uint32_t t = 0; t < tokens; ++t) group[t] += std::exp(0.25 * Score(position, head, t)) / sum;
    }
    std::vector<uint32_t> order(tokens - kSinks - kWindow);
    std::iota(order.begin(), order.end(), kSinks);
    std::sort(order.begin(), order.end(), [&group](uint32_t a, uint32_t b) { return group[a] > group[b]; });
    order.resize(kK);
    for (const uint32_t t : {0u, 1u, tokens - 3, tokens - 2, tokens - 1}) order.push_back(t);
    std::sort(order.begin(), order.end());
    StepRecord record{.position = position,
                      .always_tokens = kSinks + kWindow,
                      .counts = {static_cast<uint32_t>(order.size())},
                      .ids = order,
                      .scores = {}};
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (const uint32_t t : order) record.scores.push_back(static_cast<float>(Score(position, head, t)));
    }
    return record;
  }

  // A token between the always-included ones that was not chosen.
  uint32_t LeftOut() const {
    for (uint32_t t = kSinks;; ++t) {
      if (!std::binary_search(steps_[0].ids.begin(), steps_[0].ids.end(), t)) return t;
    }
  }
  VerifyReport Verify() const { return VerifySteps(trace_, settings_, keys_, steps_); }

  Trace trace_;
  VerifySettings settings_;
  std::vector<std::vector<float>> keys_;
  std::vector<StepRecord> steps_;
};

TEST_F(VerifyTest, ARightAnswerPasses) {
  SCOPED_TRACE(testing::TestSeed());
  const VerifyReport report = Verify();
  EXPECT_TRUE(report.good()) << report.first;
  EXPECT_EQ(report.sets, 2u);
  EXPECT_EQ(report.tied_tokens, 0u);
  EXPECT_THAT(report.first, IsEmpty());
}

TEST_F(VerifyTest, ASwappedTokenIsCaught) {
  SCOPED_TRACE(testing::TestSeed());
  steps_[0].scores.clear();
  auto& ids = steps_[0].ids;
  ids[2] = LeftOut();  // in place of a chosen one
  std::sort(ids.begin(), ids.end());
  const VerifyReport report = Verify();
  EXPECT_EQ(report.wrong_sets, 1u);
  EXPECT_THAT(report.first, HasSubstr("t, position 20, set 0: token"));
}

TEST_F(VerifyTest, ATieMayGoEitherWay) {
  SCOPED_TRACE(testing::TestSeed());
  steps_.resize(1);
  // All keys equal: every choice of the right size is a right one.
  for (uint32_t t = 1; t < kTokens; ++t) std::copy_n(keys_[0].begin(), kDim, keys_[0].begin() + t * kDim);
  steps_[0].scores.clear();
  steps_[0].ids = {0, 1, 3, 5, 7, 9, 11, 18, 19, 20};
  const VerifyReport report = Verify();
  EXPECT_TRUE(report.good()) << report.first;
  EXPECT_EQ(report.tied_tokens, 6u);  // 7, 9 and 11 in place of 2, 4 and 6
}

TEST_F(VerifyTest, MalformedSetsAreCaught) {
  const auto wrong = [this](const char* text) {
    const VerifyReport report = Verify();
    EXPECT_EQ(report.wrong_sets, 1u);
    EXPECT_THAT(report.first, HasSubstr(text));
    steps_[0] = Answer(20);
  };
  steps_[0].scores.clear();
  steps_[0].ids.back() = 21;
  wrong("token 21 is not visible");
  steps_[0].scores.clear();
  steps_[0].ids[1] = 0;
  wrong("ids do not ascend");
  steps_[0].scores.clear();
  steps_[0].ids[1] = LeftOut();
  std::sort(steps_[0].ids.begin(), steps_[0].ids.end());
  wrong("token 1 must always be included");
  steps_[0].scores.clear();
  steps_[0].ids.erase(steps_[0].ids.begin() + kSinks);
  --steps_[0].counts[0];
  wrong("9 tokens were chosen; 10 are expected");
}

TEST_F(VerifyTest, AWrongScoreIsCaught) {
  steps_[1].scores[3] += 1e-3f;
  const VerifyReport report = Verify();
  EXPECT_EQ(report.wrong_sets, 0u);
  EXPECT_EQ(report.wrong_scores, 1u);
  EXPECT_GT(report.score_error_max, 1);
  EXPECT_THAT(report.first, HasSubstr("score of token"));
  EXPECT_FALSE(report.good());
}

TEST_F(VerifyTest, WrongKeysAreCaught) {
  keys_[0][5 * kDim] += 8;
  EXPECT_FALSE(Verify().good());
}

}  // namespace
}  // namespace ctkvr::cli
