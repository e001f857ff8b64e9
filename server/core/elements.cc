// SPDX-License-Identifier: Apache-2.0

#include "server/core/elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Magnitudes of floats order like their bits without the sign, infinities and NaN above all numbers. So the largest
// bits of a block tell both its magnitude and whether it holds anything bad, in a loop of integers: signed ones, whose
// maximum every vector unit has.
template <typename Bits>
Bits LargestBits(const std::byte* elements, size_t count) {
  constexpr Bits kMask = std::numeric_limits<Bits>::max();
  Bits largest = 0;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, elements + i * sizeof(Bits), sizeof(Bits));
    largest = std::max<Bits>(largest, static_cast<Bits>(bits & kMask));
  }
  return largest;
}

float ValueOf(uint32_t bits, DType dtype) {
  if (dtype == DType::kF32) return std::bit_cast<float>(bits);
  const auto half = static_cast<uint16_t>(bits);
  return dtype == DType::kF16 ? F32FromF16(half) : F32FromBF16(half);
}

bool IsGood(float magnitude) { return static_cast<double>(magnitude) <= limits::kMagnitudeMax; }

uint32_t LargestBitsOf(const std::byte* elements, size_t count, DType dtype) {
  const int32_t largest =
      dtype == DType::kF32 ? LargestBits<int32_t>(elements, count) : LargestBits<int16_t>(elements, count);
  return static_cast<uint32_t>(largest);
}

}  // namespace

absl::StatusOr<float> CheckElements(const char* tensor, std::span<const std::byte> elements, DType dtype) {
  const size_t count = elements.size() / DTypeBytes(dtype);
  const uint32_t largest = LargestBitsOf(elements.data(), count, dtype);
  const float magnitude = ValueOf(largest, dtype);
  if (IsGood(magnitude)) return magnitude;
  for (size_t i = 0; i < count; ++i) {
    const float value = LoadElement(elements.data(), dtype, i);
    if (IsGood(std::fabs(value))) continue;
    if (!std::isfinite(value)) {
      return absl::InvalidArgumentError(absl::StrCat(tensor, "[", i, "] is ",
                                                     std::isnan(value) ? "NaN"
                                                     : value > 0       ? "inf"
                                                                       : "-inf"));
    }
    return absl::InvalidArgumentError(
        absl::StrCat(tensor, "[", i, "] is ", value, "; the magnitude limit is ", limits::kMagnitudeMax));
  }
  return magnitude;
}

absl::Status CheckKeyNorms(const KeyNorms& norms) {
  const double limit = limits::kCodedKeyNormMax;
  // Real keys are far below: then no key has to be looked at.
  if (norms.magnitude_max * std::sqrt(static_cast<double>(norms.head_dim)) <= limit) return absl::OkStatus();
  const size_t count = norms.keys.size() / DTypeBytes(norms.dtype) / norms.head_dim;
  for (size_t key = 0; key < count; ++key) {
    double sum = 0;
    for (uint32_t i = 0; i < norms.head_dim; ++i) {
      const double value = LoadElement(norms.keys.data(), norms.dtype, key * norms.head_dim + i);
      sum += value * value;
    }
    if (sum <= limit * limit) continue;
    return absl::InvalidArgumentError(absl::StrCat("keys[", key * norms.head_dim, "] begins a key of 2-norm ",
                                                   std::sqrt(sum), "; the limit of coded formats is ", limit));
  }
  return absl::OkStatus();
}

}  // namespace ctkvr
