// SPDX-License-Identifier: Apache-2.0
//
// Where the parts of a coded key stand in its page and its sketch block. Thread-safe: pure functions.

#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

// REQUIRES of all: coded, not raw; token in a page of the view.

// The token's record; it begins with the code scale, one binary16.
inline std::byte* RecordAt(const HeadView& view, uint32_t token) {
  return view.pages[token / kPageTokens] + view.layout.records_offset +
         size_t{token % kPageTokens} * view.layout.record_bytes;
}

// The token's planes of the first pass, and its sketch scale, given its slot.
inline std::byte* FirstPlanesPlace(const HeadView& view, uint32_t token, uint32_t slot) {
  return view.sketches[token / kSketchTokens] + size_t{slot} * view.layout.sketch_token_bytes();
}
inline std::byte* SketchScalePlace(const HeadView& view, uint32_t token, uint32_t slot) {
  return view.sketches[token / kSketchTokens] + view.layout.sketch_scales_offset + slot * sizeof(uint16_t);
}

inline CodedKey CodedKeyAt(const HeadView& view, uint32_t token, uint32_t slot) {
  const PageLayout& layout = view.layout;
  return {.first = FirstPlanesPlace(view, token, slot),
          .rest = RecordAt(view, token) + PageLayout::kCodeScaleBytes,
          .first_planes = layout.first_planes,
          .planes = layout.planes,
          .head_dim = layout.head_dim};
}

inline float CodeScaleAt(const HeadView& view, uint32_t token) {
  return LoadElement(RecordAt(view, token), DType::kF16, 0);
}

// Starts loading the planes of a token that is read soon: lists jump about, so the hardware does not foresee them.
inline void PrefetchCodedKey(const HeadView& view, uint32_t token, uint32_t slot, uint32_t planes) {
  __builtin_prefetch(FirstPlanesPlace(view, token, slot));
  PrefetchBytes(RecordAt(view, token), view.layout.record_bytes_of(planes));
}

}  // namespace ctkvr::cpu
