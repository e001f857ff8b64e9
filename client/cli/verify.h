// SPDX-License-Identifier: Apache-2.0
//
// Proof that source `exact` is exact: every set of ids equals brute force in binary64 over the stored keys, decoded by
// this client from the bytes the server holds. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/trace.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::cli {

// One retrieval as it was answered.
struct StepRecord {
  uint32_t position = 0;
  uint32_t always_tokens = 0;
  std::vector<uint32_t> counts;  // [sets]
  std::vector<uint32_t> ids;     // [sum of counts]
  std::vector<float> scores;     // as in Answer.scores, or empty
};

struct VerifySettings {
  uint32_t k_tokens = 0;
  uint32_t sink_tokens = 0;
  float softmax_scale = 0;
  v1::GroupReduction reduction = v1::GROUP_REDUCTION_SUM_SOFTMAX;
};

struct VerifyReport {
  uint64_t sets = 0;
  uint64_t wrong_sets = 0;     // differ outside the tie band, or are malformed
  uint64_t tied_tokens = 0;    // chosen otherwise than by brute force, within the tie band
  uint64_t wrong_scores = 0;   // further from binary64 than float32 explains
  double score_error_max = 0;  // as a share of what is allowed
  std::string first;           // what was wrong first; empty when nothing was

  bool good() const { return wrong_sets == 0 && wrong_scores == 0; }
  void Merge(const VerifyReport& other);
};

// keys [kv_heads][tokens, head_dim]: the stored keys, decoded. Records of sets of consistent sizes (see AnswerView).
//
// The tie band. A float32 inner product of D terms differs from the exact one by about sqrt(D) 2^-24 |q| |k|, whatever
// its order; four times that is allowed on a score, and twice what that makes of a logit between two ranks.
VerifyReport VerifySteps(const Trace& trace, const VerifySettings& settings,
                         const std::vector<std::vector<float>>& keys, const std::vector<StepRecord>& steps);

}  // namespace ctkvr::cli
