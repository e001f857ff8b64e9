// SPDX-License-Identifier: Apache-2.0

#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {
namespace {

// Float64: neither squares nor their sum may overflow or vanish. Returns the norm.
float NormaliseHead(const float* query, uint32_t head_dim, uint16_t* centroid) {
  double sum = 0;
  for (uint32_t i = 0; i < head_dim; ++i) sum += double{query[i]} * query[i];
  const double norm = std::sqrt(sum);
  for (uint32_t i = 0; i < head_dim; ++i) {
    centroid[i] = norm == 0 ? uint16_t{0} : F16FromF32(static_cast<float>(query[i] / norm));
  }
  return static_cast<float>(norm);
}

}  // namespace

void WriteCentroids(const CpuKernels& kernels, const WriteCentroidsItem& item) {
  const size_t head_bytes = item.head_dim * DTypeBytes(item.dtype);
  float query[kDimMax];
  for (uint32_t i = 0; i < item.count; ++i) {
    const uint32_t slot = item.slots[i];
    for (uint32_t r = 0; r < item.heads; ++r) {
      LoadRow(*kernels.rows, item.queries + i * item.stride + r * head_bytes, item.dtype, query, item.head_dim);
      item.norms[size_t{slot} * item.heads + r] =
          NormaliseHead(query, item.head_dim, item.centroids[slot] + size_t{r} * item.head_dim);
    }
  }
}

}  // namespace ctkvr::cpu
