// SPDX-License-Identifier: Apache-2.0
//
// The slots of tokens in their sketch blocks, asked for one after another. Not thread-safe.

#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace ctkvr::cpu {

class SketchSlots {
 public:
  // Where `run`, most tokens of a block are asked for, ascending: its order is turned around once.
  SketchSlots(const HeadView& view, bool run) : order_(view.order), run_(run) {}

  uint32_t SlotOf(uint32_t token) {
    const uint32_t index = token / kSketchTokens, offset = token % kSketchTokens;
    if (order_.blocks == nullptr) return offset;
    if (index != index_) Enter(index);
    if (!block_.clustered() || offset < block_.first() || offset >= block_.last()) return offset;
    return run_ ? slots_[offset] : block_.SlotOf(offset);
  }

 private:
  void Enter(uint32_t index) {
    index_ = index;
    block_ = BlockOrder(order_, index);
    if (!run_ || !block_.clustered()) return;
    for (uint32_t slot = block_.first(); slot < block_.last(); ++slot) {
      slots_[block_.OffsetAt(slot)] = static_cast<uint16_t>(slot);
    }
  }

  const SketchOrder& order_;
  const bool run_;
  uint32_t index_ = UINT32_MAX;
  BlockOrder block_;
  uint16_t slots_[kSketchTokens];  // of offsets in clusters
};

}  // namespace ctkvr::cpu
