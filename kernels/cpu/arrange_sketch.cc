// SPDX-License-Identifier: Apache-2.0

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/sketch_slots.h"

namespace ctkvr::cpu {

void ArrangeSketch(const CpuKernels&, const ArrangeSketchItem& item) {
  const PageLayout& layout = item.view.layout;
  CTKVR_CHECK(!item.view.raw() && layout.first_planes > 0 && item.sketch != item.view.sketches[item.index]);
  SketchSlots old_slots(item.view, true);
  const SketchOrder order = item.layout.Order(nullptr, item.begin);
  const BlockOrder block(order, item.index, item.block);
  const size_t bytes = layout.sketch_token_bytes();
  std::byte* scales = item.sketch + layout.sketch_scales_offset;
  for (uint32_t slot = 0; slot < kSketchTokens; ++slot) {
    const uint32_t token = item.index * kSketchTokens + block.OffsetAt(slot);
    const uint32_t old_slot = old_slots.SlotOf(token);
    std::memcpy(item.sketch + slot * bytes, FirstPlanesPlace(item.view, token, old_slot), bytes);
    std::memcpy(scales + slot * sizeof(uint16_t), SketchScalePlace(item.view, token, old_slot), sizeof(uint16_t));
  }
}

}  // namespace ctkvr::cpu
