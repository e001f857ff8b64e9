// SPDX-License-Identifier: Apache-2.0
//
// Exact scores of a few tokens against many queries: what ScoreTokens and BuildLists share.
// Thread-safe: functions over caller-owned memory.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/sketch_slots.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

// Tokens decoded together: 16 rows of 256 float32 are half of a 32 KiB first-level cache.
inline constexpr uint32_t kScoreBlockTokens = 16;

struct ScoreQueries {
  const float* rows = nullptr;  // [heads, PaddedFloats(D)]: rotated where the view's keys are coded now, else plain
  const float* rotated_sum = nullptr;  // [heads]; coded keys only
  const float* mean_dot = nullptr;     // [heads]; coded keys only
  uint32_t heads = 0;                  // any number
};

inline bool ReadsCodes(const HeadView& view) { return KeysAreCoded(view.layout.format) && !view.raw(); }

// score(r, t) of `count` <= kScoreBlockTokens tokens: tokens[0 .. count), or begin, begin + 1, ... when tokens is null.
// scores [heads, stride].
struct ScoreBlockRun {
  const uint32_t* tokens = nullptr;
  uint32_t begin = 0;
  uint32_t count = 0;
  float* scores = nullptr;
  size_t stride = 0;
  SketchSlots* slots = nullptr;  // of the view
};
void ScoreBlock(const CpuKernels& kernels, const HeadView& view, const ScoreQueries& queries, const ScoreBlockRun& run);

}  // namespace ctkvr::cpu
