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

// The order of formats.h: 16 interleaved partial sums, folded in halves. `term` maps an index to a number. The inner
// loops have a fixed length so that the compiler keeps the partial sums in registers.
template <typename Term>
float SumInOrder(uint32_t count, Term term) {
  float lanes[kSumLanes] = {};
  uint32_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (uint32_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (uint32_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (uint32_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// REQUIRES: count a multiple of 8.
float MaxMagnitude(const float* x, uint32_t count) {
  float lanes[8] = {};
  for (uint32_t i = 0; i < count; i += 8) {
    for (uint32_t lane = 0; lane < 8; ++lane) {
      const float magnitude = std::fabs(x[i + lane]);
      lanes[lane] = magnitude > lanes[lane] ? magnitude : lanes[lane];
    }
  }
  return *std::max_element(lanes, lanes + 8);
}

struct Quantised {
  int8_t* codes = nullptr;  // [count]
  float* scale = nullptr;
  int32_t* sum = nullptr;
};

// x [count] of the largest magnitude given -> codes within +-max, their sum and the scale; zeros where the scale
// underflows.
void Quantise(const float* x, uint32_t count, float magnitude, int32_t max, const Quantised& to) {
  const auto limit = static_cast<float>(max);
  const float step = magnitude / limit;
  *to.scale = step;
  *to.sum = 0;
  if (!(step > 0)) {
    std::memset(to.codes, 0, count);
    return;
  }
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
  constexpr float kShift = 12582912.0f;
  int32_t total = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const float ratio = x[i] / step;
    const float above = ratio > -limit ? ratio : -limit;
    const float rounded = ((above < limit ? above : limit) + kShift) - kShift;
    const auto code = static_cast<int32_t>(rounded);
    to.codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  *to.sum = total;
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
    const float magnitude = MaxMagnitude(rotated, head_dim);
    Quantise(rotated, head_dim, magnitude, kScanQueryMax,
             {.codes = out.scan + size_t{r} * head_dim, .scale = out.scan_scale + r, .sum = out.scan_sum + r});
    Quantise(rotated, head_dim, magnitude, kRefineQueryMax,
             {.codes = out.refine + size_t{r} * head_dim, .scale = out.refine_scale + r, .sum = out.refine_sum + r});
  }
}

}  // namespace ctkvr::cpu
