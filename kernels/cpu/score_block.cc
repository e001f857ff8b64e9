// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/score_block.h"

#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/stored_row.h"

namespace ctkvr::cpu {
void ScoreBlock(const CpuKernels& kernels, const HeadView& view, const ScoreQueries& queries,
                const ScoreBlockRun& run) {
  const uint32_t head_dim = view.layout.head_dim, padded = PaddedFloats(head_dim);
  const bool coded = ReadsCodes(view);
  alignas(64) float keys[kScoreBlockTokens * PaddedFloats(kDimMax)];
  float scales[kScoreBlockTokens];
  for (uint32_t n = 0; n < run.count; ++n) {
    const uint32_t token = run.tokens != nullptr ? run.tokens[n] : run.begin + n;
    if (coded) {
      kernels.scan->decode_coded(CodedKeyAt(view, token), keys + size_t{n} * padded);
      scales[n] = CodeScaleAt(view, token);
    } else {
      const FloatKey key = FloatKeyAt(view, token);
      kernels.scan->decode_float(key.data, key.dtype, head_dim, keys + size_t{n} * padded);
    }
  }
  kernels.scan->dots({.keys = keys,
                      .queries = queries.rows,
                      .tokens = run.count,
                      .heads = queries.heads,
                      .padded_dim = padded,
                      .dots = run.scores,
                      .stride = run.stride});
  if (!coded) return;
  for (uint32_t r = 0; r < queries.heads; ++r) {
    float* scores = run.scores + r * run.stride;
    const float half_sum = 0.5f * queries.rotated_sum[r];  // a code stands for the middle of its interval
    for (uint32_t n = 0; n < run.count; ++n) scores[n] = scales[n] * (scores[n] + half_sum) + queries.mean_dot[r];
  }
}

}  // namespace ctkvr::cpu
