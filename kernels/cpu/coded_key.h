// SPDX-License-Identifier: Apache-2.0
//
// Where the parts of a coded key stand in its page. Thread-safe: pure functions.

#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

// REQUIRES: coded, not raw; token in a page of the view.
inline CodedKey CodedKeyAt(const HeadView& view, uint32_t token) {
  const PageLayout& layout = view.layout;
  const std::byte* page = view.pages[token / kPageTokens];
  const size_t slot = token % kPageTokens;
  const uint32_t rest_planes = layout.planes - layout.first_planes;
  return {.first = page + layout.first_planes_offset + slot * layout.first_planes * layout.plane_bytes,
          .rest = page + layout.rest_planes_offset + slot * rest_planes * layout.plane_bytes,
          .first_planes = layout.first_planes,
          .planes = layout.planes,
          .head_dim = layout.head_dim};
}

// The code scale's place: one binary16.
inline const std::byte* CodeScalePlace(const HeadView& view, uint32_t token) {
  return view.pages[token / kPageTokens] + view.layout.code_scales_offset + token % kPageTokens * sizeof(uint16_t);
}

inline float CodeScaleAt(const HeadView& view, uint32_t token) {
  return LoadElement(CodeScalePlace(view, token), DType::kF16, 0);
}

// Starts loading the planes of a token that is read soon: lists jump about, so the hardware does not foresee them.
inline void PrefetchCodedKey(const HeadView& view, uint32_t token, uint32_t planes) {
  const CodedKey key = CodedKeyAt(view, token);
  __builtin_prefetch(CodeScalePlace(view, token));
  __builtin_prefetch(key.first);
  if (planes <= key.first_planes) return;
  const size_t rest_bytes = size_t{planes - key.first_planes} * view.layout.plane_bytes;
  for (size_t at = 0; at < rest_bytes; at += 64) __builtin_prefetch(key.rest + at);
  __builtin_prefetch(key.rest + rest_bytes - 1);
}

}  // namespace ctkvr::cpu
