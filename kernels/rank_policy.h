// SPDX-License-Identifier: Apache-2.0
//
// What may move the ranking of SelectTokens (ops.h) beside the scores: how recent a token is, the weight and class it
// was tagged with, and whether a better one says the same. Thread-safe: plain data.

#pragma once

#include <cstdint>

namespace ctkvr {

struct HeadView;

inline constexpr uint32_t kTokenClasses = 256;

// What moves the ranking of SelectTokens; off as it stands. It changes which tokens are among the best k and in which
// order they are walked, and nothing else: scores, shares and what is compared with thresholds stay as they are.
//   Terms are added to g(t), which one head then has too: logit(t) - lse. Not factors: a factor above 1 would push a
//   token of negative logit down.
//     recency: log(recency_min + (recency_max - recency_min) * t / (length - 1)); none where the two are equal
//     weight:  log(1 + weight_boost * weights[t])
//   Quotas: for each class c, ascending, the best class_quotas[c] tokens of the class come first, as far as k reaches
//   and as there are any; then the best of all the others.
//   Redundancy: of the k, walked best first, leave out a token whose sign plane (plane 0 of its key) differs from that
//   of one kept before in at most redundant_bits places. REQUIRES: coded keys, not raw.
struct RankPolicy {
  float recency_min = 1;  // both above 0
  float recency_max = 1;
  uint32_t length = 0;    // above every position listed, and above 1, where recency has a say
  const float* weights = nullptr;            // [positions], each at least 0; null: none
  float weight_boost = 0;                    // at least 0
  const uint8_t* classes = nullptr;          // [positions]
  const uint32_t* class_quotas = nullptr;    // [kTokenClasses]; null: none
  const HeadView* redundant_view = nullptr;  // in host memory; null: nothing is redundant
  uint32_t redundant_bits = 0;

  bool has_terms() const { return recency_min != recency_max || (weights != nullptr && weight_boost > 0); }
};

}  // namespace ctkvr
