// SPDX-License-Identifier: Apache-2.0
//
// What rows_avx2.cc and rows_avx512.cc share, in 256-bit vectors; for them alone. All in an unnamed namespace: each
// translation unit has its own copy, compiled with its own instructions. Thread-safe: pure functions.

#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/base/half_steps.h"
#include "kernels/formats.h"

namespace ctkvr::cpu {
namespace {

// The largest magnitude as bits, compared as integers: NaN counts as larger than everything.
[[maybe_unused]] inline uint32_t MaxMagnitudeBits(const float* x, uint32_t count) {
  __m256i max = _mm256_setzero_si256();
  for (uint32_t i = 0; i < count; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    max = _mm256_max_epu32(max, _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MAX)));
  }
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

// The 16 partial sums of formats.h, numbers 0 to 7 and 8 to 15, folded in halves.
[[maybe_unused]] inline float FoldLanes(__m256 low, __m256 high) {
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

constexpr uint32_t kGroupHeaderBytes = 4;

struct ValueGroup {
  uint16_t zero;
  uint16_t scale;
};

// Fits one group; returns -1 or the first element that cannot be held.
[[maybe_unused]] inline int32_t FitValueGroup(const float* value, uint32_t count, uint32_t levels, ValueGroup* group) {
  __m256 min8 = _mm256_loadu_ps(value);
  __m256 max8 = min8;
  for (uint32_t i = 8; i < count; i += 8) {
    const __m256 element = _mm256_loadu_ps(value + i);
    min8 = _mm256_min_ps(min8, element);
    max8 = _mm256_max_ps(max8, element);
  }
  __m128 min4 = _mm_min_ps(_mm256_castps256_ps128(min8), _mm256_extractf128_ps(min8, 1));
  __m128 max4 = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps(max8, 1));
  min4 = _mm_min_ps(min4, _mm_movehl_ps(min4, min4));
  max4 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
  const float min = _mm_cvtss_f32(_mm_min_ss(min4, _mm_shuffle_ps(min4, min4, 1)));
  const float max = _mm_cvtss_f32(_mm_max_ss(max4, _mm_shuffle_ps(max4, max4, 1)));
  const bool finite = MaxMagnitudeBits(value, count) < 0x7f800000u;
  const uint16_t zero_bits = finite ? LargestHalfAtMost(min < -kHalfMax ? -kHalfMax : min) : uint16_t{0};
  const float zero = HalfToFloat(zero_bits);
  const double limit = zero + double{kHalfMax} * levels;
  if (!finite || min < -kHalfMax || max > limit) {
    for (uint32_t i = 0; i < count; ++i) {
      if (!(value[i] >= -kHalfMax && value[i] <= limit)) return static_cast<int32_t>(i);
    }
  }
  group->zero = zero_bits;
  group->scale = SmallestValueScale(zero, max, levels);
  return -1;
}

// Pairs of 4-bit codes to bytes, `count` codes, a multiple of 8.
[[maybe_unused]] inline void PackNibbles(const uint8_t* codes, uint32_t count, std::byte* packed) {
  const __m128i weights = _mm_set1_epi16(0x1001);
  for (uint32_t i = 0; i < count; i += 8) {
    const __m128i pairs = _mm_maddubs_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)), weights);
    const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
    std::memcpy(packed + i / 2, &bytes, 4);
  }
}

// EncodeValueRow of formats.h. kCodeGroup(value, count, levels, group, codes) codes one group.
template <void (*kCodeGroup)(const float*, uint32_t, uint32_t, ValueGroup, uint8_t*)>
int32_t EncodeValue(const float* value, uint32_t value_dim, uint32_t bits, std::byte* row) {
  const uint32_t levels = (1u << bits) - 1;
  const uint32_t groups = (value_dim + kValueGroup - 1) / kValueGroup;
  ValueGroup fitted[kDimMax / kValueGroup];
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t begin = group * kValueGroup;
    const uint32_t count = value_dim - begin < kValueGroup ? value_dim - begin : kValueGroup;
    const int32_t bad = FitValueGroup(value + begin, count, levels, &fitted[group]);
    if (bad >= 0) return static_cast<int32_t>(begin) + bad;
  }
  std::byte* packed = row + groups * kGroupHeaderBytes;
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t begin = group * kValueGroup;
    const uint32_t count = value_dim - begin < kValueGroup ? value_dim - begin : kValueGroup;
    std::memcpy(row + group * kGroupHeaderBytes, &fitted[group].scale, 2);
    std::memcpy(row + group * kGroupHeaderBytes + 2, &fitted[group].zero, 2);
    uint8_t codes[kValueGroup];
    kCodeGroup(value + begin, count, levels, fitted[group], codes);
    if (bits == 8) {
      std::memcpy(packed + begin, codes, count);
    } else {
      PackNibbles(codes, count, packed + begin / 2);
    }
  }
  return -1;
}

}  // namespace
}  // namespace ctkvr::cpu
