// SPDX-License-Identifier: Apache-2.0
//
// How tokens lie in a sketch block (formats.h). A token's offset is its position less that of the block's first token.
// In position order its slot is its offset. A block whose tokens are clustered (cluster_ops.h) is in cluster order: the
// tokens before the first cluster, then cluster by cluster, each in ascending position, then the tokens after the last
// cluster; those of no cluster lie at their offsets. A block keeps that order, which is one of all 1,024 offsets, when
// tokens go or come again: until its clusters are built anew, or all that were in them are gone.
//
// Thread-safe: values that view memory.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace ctkvr {

// Clusters a block has at most where their numbers fit beside the offsets: 6 and 10 bits of 16.
inline constexpr uint32_t kPackedClustersMax = 64;
inline constexpr uint32_t kOffsetBits = 10;
static_assert(kSketchTokens == 1u << kOffsetBits);

// The orders of a head's sketch blocks. Offsets are within a block of clusters.
struct SketchOrder {
  // [ceil(length / 1024)]; null where a sketch block is in position order. Null: all are.
  std::byte* const* blocks = nullptr;
  uint32_t begin = 0;           // position of the first token that may be in a cluster
  uint32_t clusters = 0;        // C
  uint32_t ends_offset = 0;     // [C] uint16: the slot past each cluster
  uint32_t places_offset = 0;   // [1024] uint16: at a slot, in the low 10 bits, the offset of its token
  uint32_t members_offset = 0;  // [1024] uint8: at an offset, its cluster; 0: in the high 6 bits of places, C <= 64
};

// The order of one block.
class BlockOrder {
 public:
  BlockOrder() = default;  // of positions
  BlockOrder(const SketchOrder& order, uint32_t index)
      : BlockOrder(order, index, order.blocks == nullptr ? nullptr : order.blocks[index]) {}
  BlockOrder(const SketchOrder& order, uint32_t index, const std::byte* block) {
    if (block == nullptr) return;
    ends_ = reinterpret_cast<const uint16_t*>(block + order.ends_offset);
    places_ = reinterpret_cast<const uint16_t*>(block + order.places_offset);
    members_ = order.members_offset == 0 ? nullptr : reinterpret_cast<const uint8_t*>(block + order.members_offset);
    first_ = order.begin - std::min(order.begin, index * kSketchTokens);
    last_ = ends_[order.clusters - 1];
  }

  bool clustered() const { return ends_ != nullptr; }
  // Slots [first, last) are those of clusters. REQUIRES of this and all below but SlotOf: clustered().
  uint32_t first() const { return first_; }
  uint32_t last() const { return last_; }
  uint32_t ClusterBegin(uint32_t cluster) const { return cluster == 0 ? first_ : ends_[cluster - 1]; }
  uint32_t ClusterEnd(uint32_t cluster) const { return ends_[cluster]; }
  uint32_t OffsetAt(uint32_t slot) const { return places_[slot] & (kSketchTokens - 1); }
  // REQUIRES: first() <= offset < last().
  uint32_t ClusterOf(uint32_t offset) const {
    return members_ != nullptr ? members_[offset] : places_[offset] >> kOffsetBits;
  }

  uint32_t SlotOf(uint32_t offset) const {
    if (!clustered() || offset < first_ || offset >= last_) return offset;
    const uint32_t cluster = ClusterOf(offset), begin = ClusterBegin(cluster), end = ClusterEnd(cluster);
    uint32_t below = 0;  // in a cluster, offsets ascend
    for (uint32_t slot = begin; slot < end; ++slot) below += OffsetAt(slot) < offset;
    return begin + below;
  }

 private:
  const uint16_t* ends_ = nullptr;
  const uint16_t* places_ = nullptr;
  const uint8_t* members_ = nullptr;
  uint32_t first_ = 0;
  uint32_t last_ = 0;
};

}  // namespace ctkvr
