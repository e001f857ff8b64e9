// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/sketch_scan.h"

namespace ctkvr::cpu {
namespace {

// Tokens of offsets [from, to) of a block in cluster order: slot by slot, as they lie, then each to its place.
void ScanClustered(const SketchScan& scan, const ScanPlanesItem& item, uint32_t index, uint32_t from, uint32_t to) {
  const BlockOrder order(item.view.order, index);
  const uint32_t begin = from < order.last() ? std::min(from, order.first()) : from;
  const uint32_t end = to > order.first() ? std::max(to, order.last()) : to;
  float found[kGroupHeadsMax * kSketchTokens];
  scan.Run(item.view.sketches[index], begin, end, found, kSketchTokens);
  float* estimates = item.estimates + (index * kSketchTokens + from - item.begin);
  for (uint32_t slot = begin; slot < end; ++slot) {
    const uint32_t offset = slot >= order.first() && slot < order.last() ? order.OffsetAt(slot) : slot;
    if (offset < from || offset >= to) continue;
    for (uint32_t r = 0; r < item.query.heads; ++r) {
      estimates[r * item.stride + (offset - from)] = found[r * kSketchTokens + slot - begin];
    }
  }
}

}  // namespace

void ScanPlanes(const CpuKernels& kernels, const ScanPlanesItem& item) {
  if (item.begin >= item.end) return;
  const SketchScan scan(kernels, item.view.layout, item.query);
  for (uint32_t begin = item.begin; begin < item.end;) {
    const uint32_t index = begin / kSketchTokens, first = index * kSketchTokens;
    const uint32_t end = std::min(item.end, first + kSketchTokens);
    if (BlockOrder(item.view.order, index).clustered()) {
      ScanClustered(scan, item, index, begin - first, end - first);
    } else {
      scan.Run(item.view.sketches[index], begin - first, end - first, item.estimates + (begin - item.begin),
               item.stride);
    }
    begin = end;
  }
}

}  // namespace ctkvr::cpu
