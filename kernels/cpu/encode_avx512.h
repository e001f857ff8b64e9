// SPDX-License-Identifier: Apache-2.0
//
// What encode_keys_avx512.h and encode_values_avx512.h share: rows coded many at once, where the dimension is 64, 128
// or 256. What is one number a row (scales, sums) is found for 16 rows or groups in the lanes of one register, so that
// no row waits for another's chain of scalar steps. The bytes are those of the row by row loops:
//
// - x / s is formed as q = x * y, y = round(1 / s), and q + (x - q * s) * y with fused steps, which is the correctly
//   rounded quotient (Markstein 1990, https://doi.org/10.1147/rd.341.0111) unless it is subnormal. For values every
//   subnormal quotient rounds to code 0. A key with a subnormal x is left to the row by row loop.
// - A fused multiplication by +1 or -1 rounds once, as the addition it stands for.
//
// In an unnamed namespace, as all of rows_avx512.cc. Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {
namespace {

// Arrays of registers stay registers only where the loops over them are inlined.
#define CTKVR_INLINE inline __attribute__((always_inline))

constexpr uint32_t kBatch = 16;  // rows or groups a register
constexpr uint32_t kPrefetchRows = 16;

struct FoldSum {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};
struct FoldMin {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_min_ps(a, b); }
};
struct FoldMax {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
};

// Where the register of row n stands for FoldBatch.
constexpr uint32_t FoldSlot(uint32_t n) { return n / 4 + 4 * (n % 4); }

// Lane n of the result: the lanes of from[FoldSlot(n)] folded in halves, lane j with j + 8, then + 4, + 2, + 1.
template <typename Fold>
__m512 FoldBatch(const __m512* from) {
  const Fold fold;
  __m512 quarters[4];  // lane l of number q: row q + 4 * l ... as FoldSlot orders them
  for (uint32_t q = 0; q < 4; ++q) {
    const __m512* four = from + 4 * q;
    const __m512 ab = fold(_mm512_shuffle_f32x4(four[0], four[1], 0x44), _mm512_shuffle_f32x4(four[0], four[1], 0xee));
    const __m512 cd = fold(_mm512_shuffle_f32x4(four[2], four[3], 0x44), _mm512_shuffle_f32x4(four[2], four[3], 0xee));
    quarters[q] = fold(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  __m512 pairs[2];
  for (uint32_t p = 0; p < 2; ++p) {
    const __m512 a = quarters[2 * p], b = quarters[2 * p + 1];
    pairs[p] = fold(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return fold(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

template <DType kDType>
__m512 LoadNumbers(const std::byte* from, uint32_t i) {
  if constexpr (kDType == DType::kF32) {
    return _mm512_loadu_ps(from + 4 * size_t{i});
  } else {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * size_t{i}));
    if constexpr (kDType == DType::kF16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

template <DType kDType>
void PrefetchRow(const std::byte* row, uint32_t dim) {
  for (uint32_t at = 0; at < dim * DTypeBytes(kDType); at += 64) __builtin_prefetch(row + at);
}

// x / scale rounded once; reciprocal = 1 / scale rounded once.
__m512 Quotient(__m512 x, __m512 scale, __m512 reciprocal) {
  const __m512 near = _mm512_mul_ps(x, reciprocal);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, scale, x), reciprocal, near);
}

// 64 numbers of four registers, saturated to bytes; of dimensions 16k + 4L to 16k + 4L + 3 in dword 4L + k.
__m512i PackSigned(const __m512i* n) {
  return _mm512_packs_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3]));
}
__m512i PackUnsigned(const __m512i* n) {
  return _mm512_packus_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3]));
}
__m512i InOrder(__m512i packed) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, packed);
}

}  // namespace
}  // namespace ctkvr::cpu
