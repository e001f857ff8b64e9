// SPDX-License-Identifier: Apache-2.0
//
// The first pass over slots of sketch blocks, in the order in which they lie: what the operations over planes share.
// Thread-safe once made.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

class SketchScan {
 public:
  // The query's tables. The arrays of `query` must outlive them.
  // REQUIRES: query.heads <= kGroupHeadsMax, layout.head_dim <= kDimMax, coded keys.
  SketchScan(const CpuKernels& kernels, const PageLayout& layout, const PreparedQuery& query);

  // Estimates, as ScanPlanesItem says, of slots [from, to) of one sketch block: slot s of head r goes to
  // estimates[r * stride + s - from].
  void Run(const std::byte* sketch, uint32_t from, uint32_t to, float* estimates, size_t stride) const;

 private:
  const CpuKernels& kernels_;
  const PageLayout& layout_;
  const PreparedQuery& query_;
  int32_t offset_[kGroupHeadsMax];
  alignas(64) uint8_t entries_[kGroupHeadsMax * (kDimMax / 4) * 16];  // [R][D/4][16]
};

}  // namespace ctkvr::cpu
