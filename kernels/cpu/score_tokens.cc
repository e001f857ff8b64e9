// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/score_block.h"

namespace ctkvr::cpu {
namespace {

// Codes are read few at a time, so that what is asked for ahead spreads over the work instead of filling the line
// buffers at once. Floats lie in one run a page, which the hardware foresees.
constexpr uint32_t kCodedStepTokens = 8;
static_assert(kCodedStepTokens <= kScoreBlockTokens);
constexpr uint32_t kScoreAheadTokens = 32;  // ahead

// The step's tokens of a page where they follow each other: `bytes_per_token` each from `array` on.
void PrefetchRun(const std::byte* array, uint32_t slot, size_t bytes_per_token) {
  const size_t begin = slot * bytes_per_token / 64 * 64;
  const size_t end = std::min(slot + kCodedStepTokens, kPageTokens) * bytes_per_token;
  for (size_t at = begin; at < end; at += 64) __builtin_prefetch(array + at);
}

// REQUIRES: coded keys.
void PrefetchStep(const ScoreTokensItem& item, uint32_t from, uint32_t count, SketchSlots& slots) {
  const PageLayout& layout = item.view.layout;
  if (item.tokens != nullptr) {
    for (uint32_t n = from; n < std::min(from + kCodedStepTokens, count); ++n) {
      PrefetchCodedKey(item.view, item.tokens[n], slots.SlotOf(item.tokens[n]), layout.planes);
    }
  } else if (from < count) {
    const uint32_t slot = (item.begin + from) % kPageTokens, first = item.begin + from - slot;
    // Where tokens lie in cluster order, the whole sketch block is soon in cache.
    PrefetchRun(FirstPlanesPlace(item.view, first, first % kSketchTokens), slot, layout.sketch_token_bytes());
    PrefetchRun(RecordAt(item.view, first), slot, layout.record_bytes);
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
  const bool coded = ReadsCodes(item.view);
  const uint32_t step = coded ? kCodedStepTokens : kScoreBlockTokens;
  SketchSlots slots(item.view, item.tokens == nullptr), slots_ahead(item.view, false);
  for (uint32_t n = 0; coded && n < kScoreAheadTokens; n += step) PrefetchStep(item, n, count, slots_ahead);
  for (uint32_t n = 0; n < count; n += step) {
    if (coded) PrefetchStep(item, n + kScoreAheadTokens, count, slots_ahead);
    ScoreBlock(kernels, item.view, queries,
               {.tokens = item.tokens != nullptr ? item.tokens + n : nullptr,
                .begin = item.begin + n,
                .count = std::min(step, count - n),
                .scores = item.scores + n,
                .stride = item.stride,
                .slots = &slots});
  }
}

}  // namespace ctkvr::cpu
