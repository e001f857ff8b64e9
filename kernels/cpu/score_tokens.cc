// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/score_block.h"

namespace ctkvr::cpu {
namespace {

void PrefetchBlock(const ScoreTokensItem& item, uint32_t from, uint32_t count) {
  if (item.tokens == nullptr || !ReadsCodes(item.view)) return;
  for (uint32_t n = from; n < std::min(from + kScoreBlockTokens, count); ++n) {
    PrefetchCodedKey(item.view, item.tokens[n], item.view.layout.planes);
  }
}

}  // namespace

void ScoreTokens(const CpuKernels& kernels, const ScoreTokensItem& item) {
  const uint32_t head_dim = item.view.layout.head_dim, padded = PaddedFloats(head_dim);
  CTKVR_CHECK(item.query.heads <= kGroupHeadsMax && head_dim <= kDimMax);
  const float* query = ReadsCodes(item.view) ? item.query.rotated : item.query.plain;
  alignas(64) float rows[kGroupHeadsMax * PaddedFloats(kDimMax)];
  for (uint32_t r = 0; r < item.query.heads; ++r) {
    std::memcpy(rows + size_t{r} * padded, query + size_t{r} * head_dim, head_dim * sizeof(float));
    std::fill(rows + size_t{r} * padded + head_dim, rows + size_t{r + 1} * padded, 0.0f);
  }
  const ScoreQueries queries = {
      .rows = rows, .rotated_sum = item.query.rotated_sum, .mean_dot = item.query.mean_dot, .heads = item.query.heads};
  const uint32_t count = *item.count;
  PrefetchBlock(item, 0, count);
  for (uint32_t n = 0; n < count; n += kScoreBlockTokens) {
    PrefetchBlock(item, n + kScoreBlockTokens, count);
    ScoreBlock(kernels, item.view, queries,
               {.tokens = item.tokens != nullptr ? item.tokens + n : nullptr,
                .begin = item.begin + n,
                .count = std::min(kScoreBlockTokens, count - n),
                .scores = item.scores + n,
                .stride = item.stride});
  }
}

}  // namespace ctkvr::cpu
