// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/score_block.h"

#include <cstring>

#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/stored_row.h"

namespace ctkvr::cpu {
namespace {

uint32_t TokenAt(const ScoreBlockRun& run, uint32_t n) { return run.tokens != nullptr ? run.tokens[n] : run.begin + n; }

// Many heads share one decoding better.
constexpr uint32_t kCodeHeadsMax = kGroupHeadsMax;

bool DotCodes(const CpuKernels& kernels, const ScoreQueries& queries, const CodedKey* keys, uint32_t padded,
              const ScoreBlockRun& run) {
  if (queries.heads > kCodeHeadsMax) return false;
  return kernels.scan->code_dots({.keys = keys,
                                  .queries = queries.rows,
                                  .tokens = run.count,
                                  .heads = queries.heads,
                                  .padded_dim = padded,
                                  .dots = run.scores,
                                  .stride = run.stride});
}

}  // namespace

void ScoreBlock(const CpuKernels& kernels, const HeadView& view, const ScoreQueries& queries,
                const ScoreBlockRun& run) {
  const uint32_t head_dim = view.layout.head_dim, padded = PaddedFloats(head_dim);
  const bool coded = ReadsCodes(view);
  CodedKey coded_keys[kScoreBlockTokens];  // filled where coded
  uint16_t half_scales[kScoreBlockTokens];
  for (uint32_t n = 0; coded && n < run.count; ++n) {
    coded_keys[n] = CodedKeyAt(view, TokenAt(run, n), run.slots->SlotOf(TokenAt(run, n)));
    std::memcpy(&half_scales[n], RecordAt(view, TokenAt(run, n)), sizeof(half_scales[n]));
  }
  if (!coded || !DotCodes(kernels, queries, coded_keys, padded, run)) {
    alignas(64) float keys[kScoreBlockTokens * PaddedFloats(kDimMax)];
    for (uint32_t n = 0; n < run.count; ++n) {
      if (coded) {
        kernels.scan->decode_coded(coded_keys[n], keys + size_t{n} * padded);
      } else {
        const FloatKey key = FloatKeyAt(view, TokenAt(run, n));
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
  }
  if (!coded) return;
  float scales[kScoreBlockTokens];
  kernels.rows->f32_from_f16(reinterpret_cast<const std::byte*>(half_scales), scales, run.count);
  for (uint32_t r = 0; r < queries.heads; ++r) {
    float* scores = run.scores + r * run.stride;
    const float half_sum = 0.5f * queries.rotated_sum[r];  // a code stands for the middle of its interval
    for (uint32_t n = 0; n < run.count; ++n) scores[n] = scales[n] * (scores[n] + half_sum) + queries.mean_dot[r];
  }
}

}  // namespace ctkvr::cpu
