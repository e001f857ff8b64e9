// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/top_k.h"

namespace ctkvr::cpu {
namespace {

float DotRows(const CpuKernels& kernels, const float* a, const float* b, uint32_t padded_dim) {
  float dot;
  kernels.scan->dots(
      {.keys = a, .queries = b, .tokens = 1, .heads = 1, .padded_dim = padded_dim, .dots = &dot, .stride = 1});
  return dot;
}

}  // namespace

// The norms are taken of the rows as stored: rounding to binary16 moves them a little from 1.
void SelectLists(const CpuKernels& kernels, const SelectListsItem& item) {
  const uint32_t head_dim = item.head_dim, padded = PaddedFloats(head_dim), heads = item.query.heads;
  CTKVR_CHECK(heads <= kGroupHeadsMax && head_dim <= kDimMax);
  alignas(64) float queries[kGroupHeadsMax * PaddedFloats(kDimMax)] = {};
  float query_norms[kGroupHeadsMax];
  for (uint32_t r = 0; r < heads; ++r) {
    float* query = queries + size_t{r} * padded;
    std::copy_n(item.query.plain + size_t{r} * head_dim, head_dim, query);
    query_norms[r] = std::sqrt(DotRows(kernels, query, query, padded));
  }
  std::vector<float> cosines(item.centroid_count), workspace(item.centroid_count);
  for (uint32_t c = 0; c < item.centroid_count; ++c) {
    for (uint32_t r = 0; r < heads; ++r) {
      alignas(64) float row[PaddedFloats(kDimMax)];
      kernels.scan->decode_float(reinterpret_cast<const std::byte*>(item.centroids[c] + size_t{r} * head_dim),
                                 DType::kF16, head_dim, row);
      const float norms = query_norms[r] * std::sqrt(DotRows(kernels, row, row, padded));
      if (norms > 0) cosines[c] += DotRows(kernels, row, queries + size_t{r} * padded, padded) / norms;
    }
  }
  std::vector<uint32_t> indices(item.centroid_count);
  const size_t taken = TakeTopK(kernels, cosines, item.probes, indices.data(), workspace.data());
  std::copy_n(indices.begin(), taken, item.selected);
}

}  // namespace ctkvr::cpu
