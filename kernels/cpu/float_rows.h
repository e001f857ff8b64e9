// SPDX-License-Identifier: Apache-2.0
//
// Rows of floats in and out of the types that workers exchange. Thread-safe: pure functions; pointers may be
// misaligned.

#pragma once

#include <cmath>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {

// from [count] of `dtype` -> to [count].
inline void LoadRow(const RowKernels& rows, const std::byte* from, DType dtype, float* to, size_t count) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case DType::kF16:
      rows.f32_from_f16(from, to, count);
      return;
    case DType::kBF16:
      rows.f32_from_bf16(from, to, count);
      return;
  }
}

// The reverse. Returns -1, or the first element that is not finite in `dtype`; what was written is unspecified then.
inline int64_t StoreRow(const RowKernels& rows, const float* from, DType dtype, std::byte* to, size_t count) {
  if (dtype == DType::kF16) return rows.f16_from_f32(from, to, count);
  if (dtype == DType::kBF16) return rows.bf16_from_f32(from, to, count);
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(from[i])) return static_cast<int64_t>(i);
  }
  std::memcpy(to, from, count * sizeof(float));
  return -1;
}

}  // namespace ctkvr::cpu
