// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/sketch_slots.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kRefineAheadTokens = 16;  // ahead

// Everything of the query that an estimate needs, heads side by side so that four go through at once.
struct QueryTerms {
  alignas(16) int32_t offset[kGroupHeadsMax] = {};
  alignas(16) float scale[kGroupHeadsMax] = {};
  alignas(16) float mean_dot[kGroupHeadsMax] = {};
  uint32_t heads = 0;
};

// E = 2 * sum + (1 - 2^p) * refine_sum, below 2^24: exact in float32.
QueryTerms MakeTerms(const PreparedQuery& query, uint32_t planes) {
  QueryTerms terms;
  terms.heads = query.heads;
  for (uint32_t r = 0; r < query.heads; ++r) {
    terms.offset[r] = -((1 << planes) - 1) * query.refine_sum[r];
    terms.scale[r] = query.refine_scale[r];
    terms.mean_dot[r] = query.mean_dot[r];
  }
  return terms;
}

// Estimates of one token; every step is rounded by itself, as ops.h asks.
void WriteEstimates(const QueryTerms& terms, const int32_t* sums, float key_scale, float* estimates, size_t stride) {
  for (uint32_t first = 0; first < terms.heads; first += 4) {
    float four[4];
    for (uint32_t n = 0; n < 4; ++n) {
      const uint32_t r = first + n;
      const float scaled = static_cast<float>(2 * sums[r] + terms.offset[r]) * terms.scale[r];
      const float product = scaled * key_scale;
      four[n] = product + terms.mean_dot[r];
    }
    for (uint32_t n = 0; n < 4 && first + n < terms.heads; ++n) estimates[(first + n) * stride] = four[n];
  }
}

}  // namespace

void RefinePlanes(const CpuKernels& kernels, const RefinePlanesItem& item) {
  const PageLayout& layout = item.view.layout;
  const PreparedQuery& query = item.query;
  CTKVR_CHECK(query.heads <= kGroupHeadsMax && layout.head_dim <= kDimMax);
  alignas(64) int8_t rows[kGroupHeadsMax * PaddedBytes(kDimMax)];
  const size_t padded = PaddedBytes(layout.head_dim);
  std::memset(rows, 0, query.heads * padded);
  for (uint32_t r = 0; r < query.heads; ++r) {
    std::memcpy(rows + r * padded, query.refine + size_t{r} * layout.head_dim, layout.head_dim);
  }
  const RefineQuery refine = {.rows = rows, .heads = query.heads, .planes = item.planes};
  const QueryTerms terms = MakeTerms(query, item.planes);
  // s * 2^(b-p-1) is exact.
  const float step = std::ldexp(1.0f, static_cast<int>(layout.planes - item.planes) - 1);
  const uint32_t count = *item.count;
  // Each slot is found once, when its planes are asked for.
  SketchSlots slots(item.view, false);
  uint32_t ahead[kRefineAheadTokens];
  for (uint32_t n = 0; n < std::min(kRefineAheadTokens, count); ++n) ahead[n] = slots.SlotOf(item.tokens[n]);
  for (uint32_t n = 0; n < count; ++n) {
    uint32_t& slot = ahead[n % kRefineAheadTokens];
    const CodedKey key = CodedKeyAt(item.view, item.tokens[n], slot);
    if (n + kRefineAheadTokens < count) {
      const uint32_t token = item.tokens[n + kRefineAheadTokens];
      slot = slots.SlotOf(token);
      PrefetchCodedKey(item.view, token, slot, item.planes);
    }
    int32_t sums[kGroupHeadsMax] = {};
    kernels.scan->refine_token(key, refine, sums);
    WriteEstimates(terms, sums, CodeScaleAt(item.view, item.tokens[n]) * step, item.estimates + n, item.stride);
  }
}

}  // namespace ctkvr::cpu
