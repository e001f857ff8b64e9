// SPDX-License-Identifier: Apache-2.0
//
// The element types that workers exchange, and conversion of one value. Thread-safe: pure functions.
// Conversions to 16 bits round to nearest, ties to even; values too large become infinite, which callers must test.

#pragma once

#include <fp16.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ctkvr {

enum class DType : uint8_t { kF32, kF16, kBF16 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
  }
  return "?";
}

inline uint16_t F16FromF32(float value) { return fp16_ieee_from_fp32_value(value); }
inline float F32FromF16(uint16_t bits) { return fp16_ieee_to_fp32_value(bits); }

inline uint16_t BF16FromF32(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float F32FromBF16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Element `index` of an array of `dtype`; the array may be misaligned.
inline float LoadElement(const std::byte* data, DType dtype, size_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + 2 * index, 2);
  return dtype == DType::kF16 ? F32FromF16(bits) : F32FromBF16(bits);
}

inline void StoreElement(std::byte* data, DType dtype, size_t index, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(data + 4 * index, &value, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kF16 ? F16FromF32(value) : BF16FromF32(value);
  std::memcpy(data + 2 * index, &bits, 2);
}

}  // namespace ctkvr
