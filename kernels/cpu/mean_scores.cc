// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/mean_scores.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"

namespace ctkvr::cpu {

void WidenLevels(const std::byte* levels, uint32_t count, uint32_t padded, float* to) {
  const auto* from = reinterpret_cast<const int8_t*>(levels);
  for (uint32_t i = 0; i < count; ++i) to[i] = from[i];
  std::fill(to + count, to + padded, 0.0f);
}

float LogitOf(float score, const SoftmaxParams& softmax) {
  const float logit = softmax.scale * score;
  return softmax.softcap > 0 ? softmax.softcap * std::tanh(logit / softmax.softcap) : logit;
}

MeanScores::MeanScores(const CpuKernels& kernels, const ClusterLayout& layout, const PreparedQuery& query)
    : kernels_(kernels), layout_(layout), query_(query), padded_(PaddedFloats(layout.head_dim)) {
  CTKVR_CHECK(query.heads <= kGroupHeadsMax && layout.head_dim <= kDimMax);
  const float* from = layout.coded ? query.rotated : query.plain;
  for (uint32_t r = 0; r < query.heads; ++r) {
    float* row = queries_ + size_t{r} * padded_;
    std::memcpy(row, from + size_t{r} * layout.head_dim, layout.head_dim * sizeof(float));
    std::fill(row + layout.head_dim, row + padded_, 0.0f);
  }
}

// <query r, what the block's means are relative to>.
void MeanScores::FindOrigins(const std::byte* block, float* origins) {
  if (layout_.coded) {
    std::copy(query_.mean_dot, query_.mean_dot + query_.heads, origins);
    return;
  }
  std::memcpy(rows_, block + layout_.centre_offset, layout_.head_dim * sizeof(float));
  std::fill(rows_ + layout_.head_dim, rows_ + padded_, 0.0f);
  Dots(1, origins, 1);
}

void MeanScores::Dots(uint32_t rows, float* dots, size_t stride) {
  kernels_.scan->dots({.keys = rows_,
                       .queries = queries_,
                       .tokens = rows,
                       .heads = query_.heads,
                       .padded_dim = padded_,
                       .dots = dots,
                       .stride = stride});
}

void MeanScores::Score(const Run& run) {
  float origins[kGroupHeadsMax];
  FindOrigins(run.block, origins);
  const std::byte* means = run.block + layout_.key_means_offset;
  for (uint32_t begin = 0; begin < run.count; begin += kScoreBlockTokens) {
    const uint32_t rows = std::min(kScoreBlockTokens, run.count - begin);
    float scales[kScoreBlockTokens];
    for (uint32_t n = 0; n < rows; ++n) {
      const size_t cluster = run.clusters[begin + n];
      WidenLevels(means + cluster * layout_.head_dim, layout_.head_dim, padded_, rows_ + size_t{n} * padded_);
      scales[n] = LoadElement(run.block + layout_.key_scales_offset, DType::kBF16, cluster);
    }
    Dots(rows, run.scores + begin, run.stride);
    for (uint32_t r = 0; r < query_.heads; ++r) {
      float* scores = run.scores + r * run.stride + begin;
      for (uint32_t n = 0; n < rows; ++n) scores[n] = scales[n] * scores[n] + origins[r];
    }
  }
}

}  // namespace ctkvr::cpu
