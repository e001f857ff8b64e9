// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/sketch_scan.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/cpu/prefetch.h"

namespace ctkvr::cpu {
namespace {

// Entry n of a table is the sum of the elements whose bit is set in n; all 16 at once, as bytes.
void MakeTable(const int8_t* query, int32_t* least, uint8_t* table) {
  static constexpr uint8_t kBit[4][16] = {{0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255},
                                          {0, 0, 255, 255, 0, 0, 255, 255, 0, 0, 255, 255, 0, 0, 255, 255},
                                          {0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 255, 255, 255, 255},
                                          {0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255}};
  int32_t minimum = 0;
  for (int i = 0; i < 4; ++i) minimum += std::min<int32_t>(query[i], 0);
  const auto q0 = static_cast<uint8_t>(query[0]), q1 = static_cast<uint8_t>(query[1]);
  const auto q2 = static_cast<uint8_t>(query[2]), q3 = static_cast<uint8_t>(query[3]);
  const auto start = static_cast<uint8_t>(-minimum);
  for (int n = 0; n < 16; ++n) {
    table[n] =
        static_cast<uint8_t>(start + (kBit[0][n] & q0) + (kBit[1][n] & q1) + (kBit[2][n] & q2) + (kBit[3][n] & q3));
  }
  *least += minimum;
}

// Slots that the inner loop takes at once.
constexpr uint32_t kStepSlots = 64;
// Blocks lie apart, and so do the pages of memory in a block, where the hardware begins anew: it is told early.
constexpr uint32_t kPrefetchSlots = 2 * kStepSlots;

}  // namespace

// sum_i query[i] * c0[i] = S + (2^P - 1) * least, with S the sum over the tables; E = 2 * that + (1 - 2^P) * scan_sum.
SketchScan::SketchScan(const CpuKernels& kernels, const PageLayout& layout, const PreparedQuery& query)
    : kernels_(kernels), layout_(layout), query_(query) {
  CTKVR_CHECK(query.heads <= kGroupHeadsMax && layout.head_dim <= kDimMax && layout.first_planes > 0);
  const int32_t levels = (1 << layout.first_planes) - 1;
  for (uint32_t r = 0; r < query.heads; ++r) {
    int32_t least = 0;
    for (uint32_t i = 0; i < layout.head_dim; i += 4) {
      const size_t at = size_t{r} * layout.head_dim + i;
      MakeTable(query.scan + at, &least, entries_ + at * 4);
    }
    offset_[r] = levels * (2 * least - query.scan_sum[r]);
  }
}

void SketchScan::Run(const std::byte* sketch, uint32_t from, uint32_t to, float* estimates, size_t stride) const {
  const size_t token_bytes = layout_.sketch_token_bytes();
  const std::byte* scales = sketch + layout_.sketch_scales_offset;
  for (uint32_t slot = from; slot < to;) {
    const uint32_t end = std::min(to, (slot / kStepSlots + 1) * kStepSlots);
    const uint32_t ahead = slot + kPrefetchSlots;
    if (ahead < to) {
      PrefetchBytes(sketch + ahead * token_bytes, std::min(kStepSlots, to - ahead) * token_bytes);
      PrefetchBytes(scales + ahead * sizeof(uint16_t), std::min(kStepSlots, to - ahead) * sizeof(uint16_t));
    }
    kernels_.scan->scan_planes({.planes = sketch + slot * token_bytes,
                                .sketch_scales = scales + slot * sizeof(uint16_t),
                                .tokens = end - slot,
                                .first_planes = layout_.first_planes,
                                .head_dim = layout_.head_dim,
                                .heads = query_.heads,
                                .tables = entries_,
                                .offset = offset_,
                                .scan_scale = query_.scan_scale,
                                .mean_dot = query_.mean_dot,
                                .estimates = estimates + (slot - from),
                                .stride = stride});
    slot = end;
  }
}

}  // namespace ctkvr::cpu
