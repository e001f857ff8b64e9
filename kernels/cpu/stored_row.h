// SPDX-License-Identifier: Apache-2.0
//
// Where float keys and values stand in their page, and values decoded. Thread-safe: pure functions.

#pragma once

#include "kernels/cpu/float_rows.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

// A key that is stored as floats.
struct FloatKey {
  const std::byte* data = nullptr;  // [head_dim]
  DType dtype = DType::kF32;
};

// REQUIRES: raw, or not coded.
inline FloatKey FloatKeyAt(const HeadView& view, uint32_t token) {
  const DType dtype = view.raw() ? view.raw_dtype : FloatType(view.layout.format);
  const std::byte* keys =
      view.raw() ? view.raw_pages[token / kPageTokens] : view.pages[token / kPageTokens] + view.layout.keys_offset;
  return {.data = keys + token % kPageTokens * (view.layout.head_dim * DTypeBytes(dtype)), .dtype = dtype};
}

inline const std::byte* ValueAt(const HeadView& view, uint32_t token) {
  return view.pages[token / kPageTokens] + view.layout.values_offset +
         size_t{token % kPageTokens} * view.layout.value_row_bytes;
}

// value [value_dim].
inline void DecodeValue(const RowKernels& rows, const HeadView& view, uint32_t token, float* value) {
  const PageLayout& layout = view.layout;
  if (KeysAreCoded(layout.format)) {
    rows.decode_value(ValueAt(view, token), layout.value_dim, ValueBits(layout.format), value);
  } else {
    LoadRow(rows, ValueAt(view, token), FloatType(layout.format), value, layout.value_dim);
  }
}

}  // namespace ctkvr::cpu
