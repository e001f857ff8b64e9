// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {

void FitMean(const CpuKernels& kernels, const FitMeanItem& item) {
  const uint32_t head_dim = item.view.layout.head_dim;
  const size_t row_bytes = head_dim * DTypeBytes(item.view.raw_dtype);
  double sums[kDimMax] = {};
  float key[kDimMax];
  for (uint32_t token = item.begin; token < item.end; ++token) {
    const std::byte* page = item.view.raw_pages[token / kPageTokens];
    LoadRow(*kernels.rows, page + token % kPageTokens * row_bytes, item.view.raw_dtype, key, head_dim);
    for (uint32_t i = 0; i < head_dim; ++i) sums[i] += key[i];
  }
  for (uint32_t i = 0; i < head_dim; ++i) item.mean[i] = static_cast<float>(sums[i] / (item.end - item.begin));
}

}  // namespace ctkvr::cpu
