// SPDX-License-Identifier: Apache-2.0
//
// The ranking that every selection shares: higher is better, equal values prefer the lower index. Exact for any
// distribution of values. Thread-safe: functions over caller-owned memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

// The best k of some values are those above `threshold` and the first `ties` of those equal to it.
struct TopKCut {
  float threshold = 0;
  size_t ties = 0;
};
// REQUIRES: 1 <= k <= values.size(); values finite. `workspace` [values.size()].
TopKCut FindTopKCut(const CpuKernels& kernels, std::span<const float> values, size_t k, float* workspace);

// Indices of the best min(k, values.size()) values, ascending; returns how many. `indices` has room for
// values.size() entries, `workspace` [values.size()].
size_t TakeTopK(const CpuKernels& kernels, std::span<const float> values, size_t k, uint32_t* indices,
                float* workspace);

// Scores of `count` tokens under R query heads. scores [heads, stride].
struct GroupScores {
  const float* scores = nullptr;
  size_t stride = 0;
  uint32_t heads = 0;
  size_t count = 0;
};

// A head's log shares before their shift: x of `scores` is at most 0, but for rounding. REQUIRES: scores not empty.
LogShare FitOrigin(const CpuKernels& kernels, std::span<const float> scores, const SoftmaxParams& softmax);

// The logit whose x is 0.
double MaxLogit(const LogShare& log_share);

// log_share [heads], with which each head's log share of the softmax over all `count` tokens (and its sink) is formed.
// REQUIRES: count >= 1.
void FitLogShares(const CpuKernels& kernels, const GroupScores& group, const SoftmaxParams& softmax,
                  LogShare* log_share);

// log p of one score; the inverse question to FitLogShares.
double LogShareOf(float score, const LogShare& log_share);

// The group's ranking values of tokens [begin, end): the scores themselves where there is one head (the same order,
// without rounding), else `buffer` [end - begin] filled. log_share may be null where there is one head.
const float* GroupRanks(const CpuKernels& kernels, const GroupScores& group, const LogShare* log_share,
                        GroupReduction reduction, size_t begin, size_t end, float* buffer);

}  // namespace ctkvr::cpu
