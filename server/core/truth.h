// SPDX-License-Identifier: Apache-2.0
//
// What an exact repeat of one retrieval found, and its sums: of a layer, of a session, of the server.
//
//   needle   a query head one of whose tokens, of those that were not always included, holds over limits::kNeedleShare
//            of its attention over all that the query saw; found when the heaviest of them was chosen
//   recall   share of the exact best k (ranked as the selection ranks, always-included tokens aside) that were chosen
//   mass     attention on chosen tokens, and on those that the worker attends itself
//   error    |answered - exact| / |exact| of the attention's output over the server's part, 2-norms
//
// Not thread-safe, but for CountTruth, whose sums are atomic.

#pragma once

#include <cstdint>
#include <vector>

#include "server/core/stats.h"
#include "server/core/types.h"

namespace ctkvr {

// One query head of one repeat.
struct HeadTruth {
  bool needle = false;
  bool found = false;
  double mass = 0;
  double output_error = 0;
};

struct TruthSample {
  Source source = Source::kExact;  // that served
  std::vector<HeadTruth> heads;    // [q_heads]
  uint64_t best_tokens = 0;
  uint64_t best_chosen = 0;
};

class TruthCounts {
 public:
  void Add(const TruthSample& sample);
  TruthInfo Info() const;

 private:
  TruthInfo sums_;
  std::vector<uint64_t> needles_;  // [q_heads]; empty until the first sample
  std::vector<uint64_t> found_;
};

// Adds what a sample counts to the server's sums of its source.
void CountTruth(const TruthSample& sample, Stats& stats);

// Sums of several layers; the worst head is that of the worst layer.
TruthInfo SumTruth(const std::vector<TruthInfo>& layers);

}  // namespace ctkvr
