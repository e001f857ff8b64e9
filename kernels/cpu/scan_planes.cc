// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"

namespace ctkvr::cpu {
namespace {

struct Tables {
  alignas(64) uint8_t entries[kGroupHeadsMax * (kDimMax / 4) * 16];  // [R][D/4][16]
  int32_t offset[kGroupHeadsMax];
};

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

// sum_i query[i] * c0[i] = S + (2^P - 1) * least, with S the sum over the tables; E = 2 * that + (1 - 2^P) * scan_sum.
void MakeTables(const ScanPlanesItem& item, Tables& tables) {
  const uint32_t head_dim = item.view.layout.head_dim;
  const int32_t levels = (1 << item.view.layout.first_planes) - 1;
  for (uint32_t r = 0; r < item.query.heads; ++r) {
    int32_t least = 0;
    for (uint32_t i = 0; i < head_dim; i += 4) {
      MakeTable(item.query.scan + size_t{r} * head_dim + i, &least, tables.entries + (size_t{r} * head_dim + i) * 4);
    }
    tables.offset[r] = levels * (2 * least - item.query.scan_sum[r]);
  }
}

// Pages lie apart, and of each only the front is read: the hardware starts anew at every page, so it is told early.
constexpr uint32_t kPrefetchPages = 2;

void PrefetchPage(const ScanPlanesItem& item, uint32_t page) {
  if (page * kPageTokens >= item.end) return;
  const PageLayout& layout = item.view.layout;
  const std::byte* planes = item.view.pages[page] + layout.first_planes_offset;
  const size_t bytes = size_t{kPageTokens} * layout.first_planes * layout.plane_bytes;
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(planes + at);
  const std::byte* scales = item.view.pages[page] + layout.sketch_scales_offset;
  __builtin_prefetch(scales);
  __builtin_prefetch(scales + 64);
}

}  // namespace

void ScanPlanes(const CpuKernels& kernels, const ScanPlanesItem& item) {
  if (item.begin >= item.end) return;
  const PageLayout& layout = item.view.layout;
  CTKVR_CHECK(item.query.heads <= kGroupHeadsMax && layout.head_dim <= kDimMax);
  Tables tables;
  MakeTables(item, tables);
  const size_t token_bytes = size_t{layout.first_planes} * layout.plane_bytes;
  for (uint32_t begin = item.begin; begin < item.end;) {
    const uint32_t end = std::min(item.end, (begin / kPageTokens + 1) * kPageTokens);
    const std::byte* page = item.view.pages[begin / kPageTokens];
    const uint32_t slot = begin % kPageTokens;
    PrefetchPage(item, begin / kPageTokens + kPrefetchPages);
    kernels.scan->scan_planes({.planes = page + layout.first_planes_offset + slot * token_bytes,
                               .sketch_scales = page + layout.sketch_scales_offset + slot * sizeof(uint16_t),
                               .tokens = end - begin,
                               .first_planes = layout.first_planes,
                               .head_dim = layout.head_dim,
                               .heads = item.query.heads,
                               .tables = tables.entries,
                               .offset = tables.offset,
                               .scan_scale = item.query.scan_scale,
                               .mean_dot = item.query.mean_dot,
                               .estimates = item.estimates + (begin - item.begin),
                               .stride = item.stride});
    begin = end;
  }
}

}  // namespace ctkvr::cpu
