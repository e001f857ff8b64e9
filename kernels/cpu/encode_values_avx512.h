// SPDX-License-Identifier: Apache-2.0
//
// For rows_avx512.cc alone: RowKernels::encode_values, by the methods of encode_avx512.h. Thread-safe: pure functions.

#pragma once

#include <cstring>

#include "kernels/base/half_steps.h"
#include "kernels/cpu/encode_avx512.h"

namespace ctkvr::cpu {
namespace {

// A register of 16 groups: those of 2 to 8 tokens, one token after another.
struct ValueScales {
  __m512i header;  // scale in the lower half, zero in the upper
  __m512 zero;
  __m512 scale;       // 1 where it is 0
  __m512 reciprocal;  // 0 where the scale is 0
};

// zero + half * levels >= max in binary64, where it is exact.
__mmask16 Reaches(__m512 zero, __m512i half, __m512 max, uint32_t levels) {
  const __m512 step = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half));
  __mmask16 reaches = 0;
  for (int side = 0; side < 2; ++side) {
    const auto part = [side](__m512 x) {
      return _mm512_cvtps_pd(side == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1));
    };
    const __m512d top = _mm512_fmadd_pd(part(step), _mm512_set1_pd(levels), part(zero));
    reaches |= static_cast<__mmask16>(_mm512_cmp_pd_mask(top, part(max), _CMP_GE_OQ) << (8 * side));
  }
  return reaches;
}

// REQUIRES: -65504 < min <= max < 65504 in every lane.
ValueScales FitValueScales(__m512 min, __m512 max, uint32_t levels) {
  const __m512i one = _mm512_set1_epi32(1);
  const __m256i near_zero = _mm512_cvtps_ph(min, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512i zero = _mm512_cvtepu16_epi32(near_zero);
  // One step down where rounding went up: away from zero below it, else towards it, and from +0 to the first below.
  const __mmask16 above = _mm512_cmp_ps_mask(_mm512_cvtph_ps(near_zero), min, _CMP_GT_OQ);
  const __mmask16 negative = _mm512_test_epi32_mask(zero, _mm512_set1_epi32(0x8000));
  const __mmask16 nothing = ~_mm512_test_epi32_mask(zero, _mm512_set1_epi32(0x7fff));
  const __m512i towards = _mm512_mask_sub_epi32(zero, above, zero, one);
  zero = _mm512_mask_add_epi32(towards, above & negative, zero, one);
  zero = _mm512_mask_mov_epi32(zero, above & nothing, _mm512_set1_epi32(0x8001));
  zero = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(zero, _mm512_set1_epi32(0x7fff)), zero);
  ValueScales scales;
  scales.zero = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(zero));
  // Within 2^-22 of the least scale: it or, where that falls short, the next is the one wanted.
  const __m512 width =
      _mm512_mul_ps(_mm512_sub_ps(max, scales.zero), _mm512_set1_ps(1.0f / static_cast<float>(levels)));
  __m512i half = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(width, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const __mmask16 short_of = ~Reaches(scales.zero, half, max, levels);
  half = _mm512_mask_add_epi32(half, short_of, half, one);
  scales.header = _mm512_or_si512(half, _mm512_slli_epi32(zero, 16));
  const __mmask16 flat = _mm512_cmpeq_epi32_mask(half, _mm512_setzero_si512());
  scales.scale = _mm512_mask_blend_ps(flat, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), _mm512_set1_ps(1.0f));
  scales.reciprocal =
      _mm512_mask_blend_ps(flat, _mm512_div_ps(_mm512_set1_ps(1.0f), scales.scale), _mm512_setzero_ps());
  return scales;
}

// Codes of one row, [16 * kRegisters].
template <uint32_t kRegisters>
CTKVR_INLINE void StoreValueCodes(const __m512i* codes, uint32_t bits, std::byte* to) {
  if (bits == 8) {
    for (uint32_t i = 0; i < kRegisters; i += 4) _mm512_storeu_si512(to + 16 * i, InOrder(PackUnsigned(codes + i)));
    return;
  }
  // Two codes a byte, two bytes of each of 16 registers in a lane, put in order as words.
  const __m512i weights = _mm512_set1_epi16(0x1001);
  alignas(64) uint16_t place[32];
  for (uint16_t word = 0; word < 32; ++word) place[word] = word % 16 / 4 + word % 4 * 8 + word / 16 * 4;
  const __m512i order = _mm512_load_si512(place);
  for (uint32_t i = 0; i < kRegisters; i += 8) {
    const __m512i low = _mm512_maddubs_epi16(PackUnsigned(codes + i), weights);
    const __m512i high =
        kRegisters == 4 ? low : _mm512_maddubs_epi16(PackUnsigned(codes + i + (kRegisters > 4) * 4), weights);
    const __m512i nibbles = _mm512_permutexvar_epi16(order, _mm512_packus_epi16(low, high));
    if constexpr (kRegisters == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(nibbles));
    } else {
      _mm512_storeu_si512(to + 8 * i, nibbles);
    }
  }
}

template <DType kDType, uint32_t kRegisters>
uint32_t EncodeValueRun(const ValueRun& run) {
  constexpr uint32_t kGroups = kRegisters / 2, kTokens = kBatch / kGroups;
  const uint32_t levels = (1u << run.bits) - 1;
  alignas(64) float rows[kTokens][16 * kRegisters];
  alignas(64) float zeros[kBatch], scales[kBatch], reciprocals[kBatch];
  alignas(64) uint32_t headers[kBatch];
  for (uint32_t first = 0; first < run.tokens; first += kTokens) {
    const uint32_t count = run.tokens - first < kTokens ? run.tokens - first : kTokens;
    __m512 min[kBatch], max[kBatch];
    for (uint32_t g = 0; g < kBatch; ++g) min[g] = max[g] = _mm512_setzero_ps();
    __mmask16 special = 0;
    for (uint32_t n = 0; n < count; ++n) {
      const std::byte* value = run.values + (first + n) * run.stride;
      if (first + n + kPrefetchRows < run.tokens)
        PrefetchRow<kDType>(value + kPrefetchRows * run.stride, run.value_dim);
      for (uint32_t g = 0; g < kGroups; ++g) {
        const __m512 low = LoadNumbers<kDType>(value, 32 * g), high = LoadNumbers<kDType>(value, 32 * g + 16);
        _mm512_store_ps(rows[n] + 32 * g, low);
        _mm512_store_ps(rows[n] + 32 * g + 16, high);
        special |= _mm512_fpclass_ps_mask(low, 0x99) | _mm512_fpclass_ps_mask(high, 0x99);  // infinite, not a number
        min[FoldSlot(n * kGroups + g)] = _mm512_min_ps(low, high);
        max[FoldSlot(n * kGroups + g)] = _mm512_max_ps(low, high);
      }
    }
    const __m512 least = FoldBatch<FoldMin>(min), most = FoldBatch<FoldMax>(max);
    const __m512 half_max = _mm512_set1_ps(kHalfMax);
    special |= _mm512_cmp_ps_mask(_mm512_max_ps(_mm512_abs_ps(least), _mm512_abs_ps(most)), half_max, _CMP_NLT_UQ);
    if (special != 0) return first;
    const ValueScales fitted = FitValueScales(least, most, levels);
    _mm512_store_ps(zeros, fitted.zero);
    _mm512_store_ps(scales, fitted.scale);
    _mm512_store_ps(reciprocals, fitted.reciprocal);
    _mm512_store_si512(headers, fitted.header);
    for (uint32_t n = 0; n < count; ++n) {
      __m512i codes[kRegisters];
      for (uint32_t i = 0; i < kRegisters; ++i) {
        const uint32_t group = n * kGroups + i / 2;
        const __m512 above = _mm512_sub_ps(_mm512_load_ps(rows[n] + 16 * i), _mm512_set1_ps(zeros[group]));
        codes[i] =
            _mm512_cvtps_epi32(Quotient(above, _mm512_set1_ps(scales[group]), _mm512_set1_ps(reciprocals[group])));
      }
      std::byte* row = run.rows + (first + n) * size_t{run.row_bytes};
      std::memcpy(row, headers + n * kGroups, 4 * kGroups);
      StoreValueCodes<kRegisters>(codes, run.bits, row + 4 * kGroups);
    }
  }
  return run.tokens;
}

template <DType kDType>
uint32_t EncodeValuesOf(const ValueRun& run) {
  switch (run.value_dim) {
    case 64:
      return EncodeValueRun<kDType, 4>(run);
    case 128:
      return EncodeValueRun<kDType, 8>(run);
    case 256:
      return EncodeValueRun<kDType, 16>(run);
    default:
      return 0;
  }
}

uint32_t EncodeValues(const ValueRun& run) {
  switch (run.dtype) {
    case DType::kF32:
      return EncodeValuesOf<DType::kF32>(run);
    case DType::kF16:
      return EncodeValuesOf<DType::kF16>(run);
    default:
      return EncodeValuesOf<DType::kBF16>(run);
  }
}

}  // namespace
}  // namespace ctkvr::cpu
