// SPDX-License-Identifier: Apache-2.0
//
// Plain C++ for all instruction sets, so that the numbers that coarse passes start from are the same bits.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kSumLanes = 16;

// The order of formats.h: 16 interleaved partial sums, folded in halves.
template <typename Term>
float SumInOrder(uint32_t count, Term term) {
  float lanes[kSumLanes] = {};
  for (uint32_t i = 0; i < count; ++i) lanes[i % kSumLanes] += term(i);
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (uint32_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// x [count] -> codes within +-max, their sum, and the scale; zeros when the scale underflows.
void Quantise(const float* x, uint32_t count, int32_t max, int8_t* codes, float* scale, int32_t* sum) {
  float magnitude = 0;
  for (uint32_t i = 0; i < count; ++i) magnitude = std::max(magnitude, std::fabs(x[i]));
  const auto limit = static_cast<float>(max);
  const float step = magnitude / limit;
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
  constexpr float kShift = 12582912.0f;
  int32_t total = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const float ratio = step > 0 ? x[i] / step : 0.0f;
    const float rounded = (std::clamp(ratio, -limit, limit) + kShift) - kShift;
    const auto code = static_cast<int32_t>(rounded);
    codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  *scale = step;
  *sum = total;
}

}  // namespace

void PrepareQuery(const CpuKernels& kernels, const PrepareQueriesItem& item) {
  const uint32_t head_dim = item.head_dim;
  const PreparedQuery& out = item.out;
  LoadRow(*kernels.rows, item.query, item.dtype, out.plain, size_t{out.heads} * head_dim);
  if (item.signs == nullptr) return;
  for (uint32_t r = 0; r < out.heads; ++r) {
    const float* plain = out.plain + size_t{r} * head_dim;
    float* rotated = out.rotated + size_t{r} * head_dim;
    std::memcpy(rotated, plain, head_dim * sizeof(float));
    kernels.rows->rotate(rotated, head_dim, item.signs);
    out.rotated_sum[r] = SumInOrder(head_dim, [=](uint32_t i) { return rotated[i]; });
    out.mean_dot[r] = SumInOrder(head_dim, [=, mean = item.mean](uint32_t i) { return plain[i] * mean[i]; });
    Quantise(rotated, head_dim, kScanQueryMax, out.scan + size_t{r} * head_dim, out.scan_scale + r, out.scan_sum + r);
    Quantise(rotated, head_dim, kRefineQueryMax, out.refine + size_t{r} * head_dim, out.refine_scale + r,
             out.refine_sum + r);
  }
}

}  // namespace ctkvr::cpu
