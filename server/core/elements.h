// SPDX-License-Identifier: Apache-2.0
//
// The one check of what tensors hold: every element finite and within limits::kMagnitudeMax. Thread-safe: pure.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"

namespace ctkvr {

// The largest magnitude in `elements` (whole ones of `dtype`; a rest of bytes is not looked at).
// INVALID_ARGUMENT naming `tensor` and the index of the first element that is NaN, infinite or too large.
absl::StatusOr<float> CheckElements(const char* tensor, std::span<const std::byte> elements, DType dtype);

// Keys of coded formats also have a limit on their 2-norm, limits::kCodedKeyNormMax, so that no code scale overflows
// whatever the mean: a key accepted raw can always be coded later. keys [count, head_dim].
// INVALID_ARGUMENT naming the index of the first element of the first key that is too long.
struct KeyNorms {
  std::span<const std::byte> keys;
  DType dtype = DType::kF32;
  uint32_t head_dim = 0;
  float magnitude_max = 0;  // as CheckElements returned it
};
absl::Status CheckKeyNorms(const KeyNorms& norms);

}  // namespace ctkvr
