// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {

// One centroid after another, so that the sums of one are all the memory it takes.
void AverageQueries(const CpuKernels&, const AverageQueriesItem& item) {
  const uint32_t dim = item.heads * item.head_dim;
  std::vector<double> sums(dim);
  for (uint32_t c = item.first; c < item.last; ++c) {
    std::fill(sums.begin(), sums.end(), 0.0);
    bool any = false;
    for (uint32_t q = 0; q < item.query_count; ++q) {
      if (item.nearest[q] != c) continue;
      any = true;
      for (uint32_t i = 0; i < dim; ++i) sums[i] += F32FromF16(item.queries[q][i]);
    }
    if (!any) continue;
    for (uint32_t r = 0; r < item.heads; ++r) {
      const double* head = sums.data() + size_t{r} * item.head_dim;
      double squares = 0;
      for (uint32_t i = 0; i < item.head_dim; ++i) squares += head[i] * head[i];
      const double norm = std::sqrt(squares);
      for (uint32_t i = 0; i < item.head_dim; ++i) {
        uint16_t& element = item.centroids[c][size_t{r} * item.head_dim + i];
        element = norm == 0 ? uint16_t{0} : F16FromF32(static_cast<float>(head[i] / norm));
      }
    }
  }
}

}  // namespace ctkvr::cpu
