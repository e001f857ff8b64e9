// SPDX-License-Identifier: Apache-2.0
//
// What RankPolicy moves in SelectTokens, on every backend against the oracle: terms, quotas and redundancy, alone,
// together, and with the thresholds that they must not touch.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

using Positions = std::vector<uint32_t>;

// One selection over every other position from 3 on, its inputs owned.
struct Case {
  Case(uint32_t head_count, uint32_t token_count, uint64_t salt) : heads(head_count) {
    for (uint32_t i = 0; i < token_count; ++i) tokens.push_back(3 + 2 * i);
    scores = RandomFloats(size_t{heads} * token_count, salt);
    for (float& score : scores) score *= 8;
    options.softmax.scale = 0.3;
    options.force_below = 7;
    options.force_from = tokens.back();
    std::mt19937_64 random = MakeRandom(salt);
    for (uint32_t t = 0; t <= tokens.back(); ++t) {
      weights.push_back(static_cast<float>(random() % 5));
      classes.push_back(static_cast<uint8_t>(random() % 4 * 85));  // 0, 85, 170, 255
    }
  }

  // By the definition in ops.h.
  void TakeTerms() {
    for (const uint32_t t : tokens) {
      double term = 0;
      const double rise = (policy.recency_max - double{policy.recency_min}) / (policy.length - 1.0);
      if (policy.recency_min != policy.recency_max) term += std::log(policy.recency_min + rise * t);
      if (policy.weights != nullptr) term += std::log(1 + double{policy.weight_boost} * weights[t]);
      options.terms.push_back(term);
    }
  }
  void TakeQuotas(const std::vector<std::pair<uint8_t, uint32_t>>& wanted) {
    quotas.assign(kTokenClasses, 0);
    for (const auto& [c, quota] : wanted) quotas[c] = quota;
    policy.classes = classes.data();
    policy.class_quotas = quotas.data();
    for (const uint32_t t : tokens) options.classes.push_back(classes[t]);
    options.class_quotas = quotas;
  }
  void TakeSigns(const StoredHead& head, const HeadView& view, uint32_t bits) {
    policy.redundant_view = &view;
    policy.redundant_bits = options.redundant_bits = bits;
    for (const uint32_t t : tokens) {
      std::vector<bool>& signs = options.signs.emplace_back();
      for (const uint32_t code : head.CodesAt(t, 1)) signs.push_back(code != 0);
    }
  }
  oracle::Matrix rows() const {
    oracle::Matrix rows;
    for (uint32_t r = 0; r < heads; ++r) {
      rows.emplace_back(scores.begin() + r * tokens.size(), scores.begin() + (r + 1) * tokens.size());
    }
    return rows;
  }
  Positions Expected() const { return oracle::Select(rows(), tokens, options); }

  uint32_t heads = 1;
  std::vector<float> scores;  // [heads][tokens]
  Positions tokens;
  std::vector<float> weights;    // by position
  std::vector<uint8_t> classes;  // by position
  std::vector<uint32_t> quotas;  // [kTokenClasses]
  oracle::SelectOptions options;
  RankPolicy policy;
};

class RankPolicyConformance : public OpConformance {
 protected:
  Positions Run(const Case& input) {
    const auto count = static_cast<uint32_t>(input.tokens.size());
    Positions chosen(count);
    uint32_t taken = 0;
    std::vector<float> chosen_scores(input.heads * size_t{count});
    GuardedArray<std::byte> workspace(SelectTokensWorkspaceBytes(count));
    const SelectTokensItem item = {.heads = input.heads,
                                   .scores = input.scores.data(),
                                   .stride = count,
                                   .tokens = input.tokens.data(),
                                   .count = &count,
                                   .count_max = count,
                                   .k = input.options.k,
                                   .force_below = input.options.force_below,
                                   .force_from = input.options.force_from,
                                   .softmax = {.scale = static_cast<float>(input.options.softmax.scale)},
                                   .min_score = static_cast<float>(input.options.min_score),
                                   .min_share = static_cast<float>(input.options.min_share),
                                   .top_p = static_cast<float>(input.options.top_p),
                                   .policy = input.policy,
                                   .chosen = chosen.data(),
                                   .chosen_count = &taken,
                                   .chosen_scores = chosen_scores.data(),
                                   .chosen_stride = count,
                                   .workspace = workspace.data()};
    EXPECT_TRUE(backend().SelectTokens(stream(), {&item, 1}).ok());
    EXPECT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
    chosen.resize(taken);
    for (uint32_t n = 0; n < taken; ++n) {
      const size_t place = (chosen[n] - 3) / 2;
      for (uint32_t r = 0; r < input.heads; ++r) {
        EXPECT_EQ(chosen_scores[r * count + n], input.scores[r * count + place]) << "scores stay as they are";
      }
    }
    return chosen;
  }
};

TEST_P(RankPolicyConformance, TermsMoveTheRanking) {
  for (const uint32_t heads : {1u, 3u, 16u}) {
    for (const bool recent : {false, true}) {
      for (const bool weighted : {false, true}) {
        Case input(heads, 300, heads);
        input.options.k = 90;
        if (recent) input.policy.recency_min = 0.5f, input.policy.recency_max = 1.5f, input.policy.length = 700;
        if (weighted) input.policy.weights = input.weights.data(), input.policy.weight_boost = 0.3f;
        input.TakeTerms();
        const Positions positions = Run(input);
        oracle::Row ranks =
            oracle::GroupRanks(oracle::LogShares(input.rows(), input.options.softmax), GroupReduction::kSumSoftmax);
        oracle::Row others;
        Positions chosen;
        for (size_t i = 0; i < input.tokens.size(); ++i) {
          const uint32_t token = input.tokens[i];
          if (token < input.options.force_below || token >= input.options.force_from) continue;
          if (std::binary_search(positions.begin(), positions.end(), token)) {
            chosen.push_back(static_cast<uint32_t>(others.size()));
          }
          others.push_back(ranks[i] + input.options.terms[i]);
        }
        EXPECT_TRUE(IsTopK(chosen, others, 90, 1e-5)) << heads << recent << weighted;
      }
    }
  }
}

// Of tokens of one score the newest must win, whatever its sign. A factor on the score would choose the oldest of
// those below zero.
TEST_P(RankPolicyConformance, RecencyFavoursTheNewestOfNegativeScoresToo) {
  for (const float score : {-20.0f, -1.0f, 0.0f, 20.0f}) {
    for (const uint32_t heads : {1u, 2u}) {
      Case input(heads, 100, 1);
      std::fill(input.scores.begin(), input.scores.end(), score);
      input.options.k = 1;
      input.policy.recency_min = 0.5f, input.policy.recency_max = 1.5f, input.policy.length = 300;
      const uint32_t newest = input.options.force_from - 2, oldest = 7;
      const Positions expected = {3, 5, newest, input.options.force_from};
      EXPECT_EQ(Run(input), expected);
      const auto factor = [&](uint32_t t) { return score * (0.5 + t / 299.0); };
      if (score < 0) {
        EXPECT_GT(factor(oldest), factor(newest));
      }
    }
  }
}

TEST_P(RankPolicyConformance, QuotasComeFirst) {
  using Quotas = std::vector<std::pair<uint8_t, uint32_t>>;
  for (const uint32_t k : {0u, 1u, 20u, 60u, 500u}) {
    for (const Quotas& quotas : {Quotas{}, Quotas{{0, 5}}, Quotas{{85, 1}, {255, 30}}, Quotas{{0, 40}, {170, 40}},
                                 Quotas{{7, 50}}, Quotas{{0, 9999}}}) {
      Case input(1, 300, k);
      for (float& score : input.scores) score = std::round(score);  // many ties
      input.options.k = k;
      input.TakeQuotas(quotas);
      EXPECT_EQ(Run(input), input.Expected());
    }
  }
}

TEST_P(RankPolicyConformance, RedundantTokensAreLeftOut) {
  for (const uint32_t head_dim : {24u, 64u, 128u, 144u}) {
    const StoredHead head({.head_dim = head_dim, .tokens = 500}, head_dim);
    const StoredHead few({.head_dim = head_dim, .tokens = 500, .pattern = KeyPattern::kTies}, head_dim);
    for (const uint32_t first_planes : {1u, 2u}) {
      const StoredHead wide({.head_dim = head_dim, .first_planes = first_planes, .tokens = 500}, head_dim);
      const HeadView wide_view = wide.view();
      Case input(1, 200, 9);
      input.options.k = 150;
      input.TakeSigns(wide, wide_view, head_dim / 3);
      EXPECT_EQ(Run(input), input.Expected());
    }
    const HeadView view = head.view(), few_view = few.view();
    size_t before = SIZE_MAX;
    for (const uint32_t bits : {0u, head_dim / 3, head_dim / 2, head_dim}) {
      Case input(1, 200, 9);
      input.options.k = 150;
      input.TakeSigns(head, view, bits);
      const Positions chosen = Run(input);
      EXPECT_EQ(chosen, input.Expected());
      EXPECT_LE(chosen.size(), before);
      before = chosen.size();
    }
    EXPECT_EQ(before, 3u + 1) << "everything is within head_dim bits of the best";
    Case input(1, 200, 9);
    input.options.k = 150;
    input.TakeSigns(few, few_view, 0);
    EXPECT_EQ(Run(input), input.Expected());
    EXPECT_LE(Run(input).size(), 3u + 5) << "five distinct keys";
  }
}

TEST_P(RankPolicyConformance, ThresholdsComeAfterAndSeePlainScoresAndShares) {
  const StoredHead head({.tokens = 500}, 3);
  const HeadView view = head.view();
  Case input(1, 200, 11);
  input.options.k = 120;
  input.options.min_score = -4;
  input.options.min_share = 1e-5;
  input.options.top_p = 0.98;
  input.TakeQuotas({{0, 20}, {255, 20}});
  input.TakeSigns(head, view, 20);
  const Positions chosen = Run(input);
  EXPECT_EQ(chosen, input.Expected());
  input.options.min_score = -1e30;
  input.options.min_share = 0;
  input.options.top_p = 1;
  EXPECT_GT(Run(input).size(), chosen.size()) << "the thresholds have something to do";
}

// Equal shares, so that the token that reaches top_p is known: the fifth of eight reaches 0.5 and more.
TEST_P(RankPolicyConformance, TopPStopsAtItsBorder) {
  const std::pair<double, size_t> cases[] = {{0.1249, 1}, {0.1251, 2}, {0.4999, 4}, {0.5001, 5},
                                             {0.8749, 7}, {0.8751, 8}, {0.9999, 8}};
  for (const auto& [top_p, kept] : cases) {
    Case input(2, 8, 5);
    std::fill(input.scores.begin(), input.scores.end(), 1.25f);
    input.options.k = 8;
    input.options.force_below = 0;
    input.options.force_from = 0xffffffffu;
    input.options.top_p = top_p;
    const Positions chosen = Run(input);
    EXPECT_EQ(chosen, Positions(input.tokens.begin(), input.tokens.begin() + kept)) << top_p;
    input.options.force_from = input.tokens[6];  // a quarter of the attention is there already
    EXPECT_EQ(Run(input).size(), std::max<size_t>(kept, 2)) << top_p;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RankPolicyConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
