// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {
namespace {

// Queries that meet a decoded centroid together.
constexpr uint32_t kQueriesTogether = 16;

}  // namespace

// A group's rows are one vector: the sum of the heads' products is the product of the whole.
void AssignQueries(const CpuKernels& kernels, const AssignQueriesItem& item) {
  const uint32_t dim = item.heads * item.head_dim, padded = PaddedFloats(dim);
  CTKVR_CHECK(item.heads <= kGroupHeadsMax && item.head_dim <= kDimMax && item.centroid_count > 0);
  const auto decode = [&](const uint16_t* row, float* decoded) {
    kernels.scan->decode_float(reinterpret_cast<const std::byte*>(row), DType::kF16, dim, decoded);
  };
  std::vector<float> queries(size_t{kQueriesTogether} * padded), centroid(padded);
  for (uint32_t first = item.first; first < item.last; first += kQueriesTogether) {
    const uint32_t count = std::min(kQueriesTogether, item.last - first);
    for (uint32_t i = 0; i < count; ++i) decode(item.queries[first + i], queries.data() + size_t{i} * padded);
    float best[kQueriesTogether] = {}, dots[kQueriesTogether];
    for (uint32_t c = 0; c < item.centroid_count; ++c) {
      decode(item.centroids[c], centroid.data());
      kernels.scan->dots({.keys = centroid.data(),
                          .queries = queries.data(),
                          .tokens = 1,
                          .heads = count,
                          .padded_dim = padded,
                          .dots = dots,
                          .stride = 1});
      for (uint32_t i = 0; i < count; ++i) {
        if (c > 0 && dots[i] <= best[i]) continue;
        best[i] = dots[i];
        item.nearest[first + i] = c;
      }
    }
  }
}

}  // namespace ctkvr::cpu
