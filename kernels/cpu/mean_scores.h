// SPDX-License-Identifier: Apache-2.0
//
// Scores of cluster means: what SelectClusters and EstimateRest share. Not thread-safe: holds the rows at work.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cluster_ops.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/score_block.h"

namespace ctkvr::cpu {

// One query against the means of one layer and KV head.
class MeanScores {
 public:
  // All must outlive it.
  MeanScores(const CpuKernels& kernels, const ClusterLayout& layout, const PreparedQuery& query);

  // <query r, mean key> of some clusters of a block, [heads, stride]. REQUIRES: their counts are not 0.
  struct Run {
    const std::byte* block = nullptr;
    const uint32_t* clusters = nullptr;  // [count], numbers within the block
    uint32_t count = 0;
    float* scores = nullptr;
    size_t stride = 0;
  };
  void Score(const Run& run);

 private:
  void FindOrigins(const std::byte* block, float* origins);
  void Dots(uint32_t rows, float* dots, size_t stride);

  const CpuKernels& kernels_;
  const ClusterLayout& layout_;
  const PreparedQuery& query_;
  const uint32_t padded_;
  alignas(64) float queries_[kGroupHeadsMax * PaddedFloats(kDimMax)];
  alignas(64) float rows_[kScoreBlockTokens * PaddedFloats(kDimMax)];
};

// A row of int8 levels as floats, with zeros up to `padded`.
void WidenLevels(const std::byte* levels, uint32_t count, uint32_t padded, float* to);

float LogitOf(float score, const SoftmaxParams& softmax);

}  // namespace ctkvr::cpu
