// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"

namespace ctkvr::cpu {
namespace {

// Sets bits [from, to).
void SetRange(uint64_t* bits, uint64_t from, uint64_t to) {
  for (uint64_t at = from; at < to;) {
    const uint64_t stop = std::min(to, (at / 64 + 1) * 64);
    const uint64_t ones = stop - at == 64 ? ~uint64_t{0} : (uint64_t{1} << (stop - at)) - 1;
    bits[at / 64] |= ones << (at % 64);
    at = stop;
  }
}

}  // namespace

// A bit for every position: the union is then free of duplicates and in order, whatever the lists hold.
void MergeCandidates(const CpuKernels&, const MergeCandidatesItem& item) {
  *item.count = 0;
  if (item.begin >= item.end) return;
  auto* bits = static_cast<uint64_t*>(item.workspace);
  const uint64_t width = item.end - item.begin, words = (width + 63) / 64;
  std::memset(bits, 0, words * sizeof(uint64_t));
  const uint32_t below = std::clamp(item.force_below, item.begin, item.end);
  const uint32_t from = std::clamp(item.force_from, item.begin, item.end);
  SetRange(bits, 0, below - item.begin);
  SetRange(bits, from - item.begin, width);
  for (uint32_t p = 0; p < item.probes; ++p) {
    const uint32_t list = item.selected[p];
    VisitPackedList(item.packing, item.lists[list], item.list_counts[list], [&](uint32_t token) {
      if (token < item.begin || token >= item.end) return;
      const uint64_t at = token - item.begin;
      bits[at / 64] |= uint64_t{1} << (at % 64);
    });
  }
  uint32_t count = 0;
  for (uint64_t word = 0; word < words; ++word) {
    for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
      item.tokens[count++] = item.begin + static_cast<uint32_t>(word * 64 + std::countr_zero(left));
    }
  }
  *item.count = count;
}

}  // namespace ctkvr::cpu
