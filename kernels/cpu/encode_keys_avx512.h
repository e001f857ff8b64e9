// SPDX-License-Identifier: Apache-2.0
//
// For rows_avx512.cc alone: RowKernels::encode_keys, by the methods of encode_avx512.h. Thread-safe: pure functions.

#pragma once

#include <cstring>

#include "kernels/base/half_steps.h"
#include "kernels/cpu/encode_avx512.h"

namespace ctkvr::cpu {
namespace {

// x to x and its neighbour `swapped`: low + high, low - high; `signs` is -1 in the upper lane of a pair.
__m512 Pairs(__m512 x, __m512 swapped, __mmask16 high) {
  const __m512 signs = _mm512_mask_blend_ps(high, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
  return _mm512_fmadd_ps(x, signs, swapped);
}

template <uint32_t kRegisters>
CTKVR_INLINE void TransformKey(__m512* v) {
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = Pairs(v[i], _mm512_permute_ps(v[i], 0xb1), 0xaaaa);
    v[i] = Pairs(v[i], _mm512_permute_ps(v[i], 0x4e), 0xcccc);
    v[i] = Pairs(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0xb1), 0xf0f0);
    v[i] = Pairs(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0x4e), 0xff00);
  }
  for (uint32_t stride = 1; stride < kRegisters; stride *= 2) {
    for (uint32_t begin = 0; begin < kRegisters; begin += 2 * stride) {
      for (uint32_t i = begin; i < begin + stride; ++i) {
        const __m512 low = v[i];
        v[i] = _mm512_add_ps(low, v[i + stride]);
        v[i + stride] = _mm512_sub_ps(low, v[i + stride]);
      }
    }
  }
}

template <uint32_t kRegisters>
constexpr float kTransformScale = kRegisters == 4   ? 0x1p-3f
                                  : kRegisters == 8 ? 0x1.6a09e6p-4f
                                                    : 0x1p-4f;

template <uint32_t kRegisters>
struct KeyBatch {
  alignas(64) float x[kBatch][16 * kRegisters];
  alignas(64) float squares[kBatch][16];
  alignas(64) float products[kBatch][16];
  alignas(64) float scale[kBatch];
  alignas(64) float reciprocal[kBatch];
  alignas(32) uint16_t code_scales[kBatch];
};

// Rotated keys of a batch, and the largest magnitude of each as bits. False when an element is subnormal.
template <DType kDType, uint32_t kRegisters>
bool RotateBatch(const KeyRun& run, uint32_t first, uint32_t count, const float* signed_mean,
                 KeyBatch<kRegisters>& batch, __m512i* max_bits) {
  __m512 max[kBatch];
  for (__m512& rows : max) rows = _mm512_setzero_ps();
  __mmask16 subnormal = 0;
  for (uint32_t n = 0; n < count; ++n) {
    const std::byte* key = run.keys + (first + n) * run.stride;
    if (first + n + kPrefetchRows < run.tokens) PrefetchRow<kDType>(key + kPrefetchRows * run.stride, run.head_dim);
    __m512 v[kRegisters];
    for (uint32_t i = 0; i < kRegisters; ++i) {
      v[i] = _mm512_fmsub_ps(LoadNumbers<kDType>(key, 16 * i), _mm512_loadu_ps(run.signs + 16 * i),
                             _mm512_loadu_ps(signed_mean + 16 * i));
    }
    TransformKey<kRegisters>(v);
    __m512 largest = _mm512_setzero_ps();
    for (uint32_t i = 0; i < kRegisters; ++i) {
      v[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(kTransformScale<kRegisters>));
      _mm512_store_ps(batch.x[n] + 16 * i, v[i]);
      subnormal |= _mm512_fpclass_ps_mask(v[i], 0xb9);  // subnormal, infinite or not a number
      largest = _mm512_max_ps(largest, _mm512_abs_ps(v[i]));
    }
    max[FoldSlot(n)] = largest;
  }
  *max_bits = _mm512_castps_si512(FoldBatch<FoldMax>(max));
  return subnormal == 0;
}

// Code scales of a batch, and what divides by them. False when one exceeds binary16.
template <uint32_t kRegisters>
bool FitKeyScales(const KeyRun& run, __m512i max_bits, KeyBatch<kRegisters>& batch) {
  const __m512 half_levels = _mm512_set1_ps(static_cast<float>(1 << (run.planes - 1)));
  const __m512 bound = _mm512_castsi512_ps(max_bits);
  const __m256i near =
      _mm512_cvtps_ph(_mm512_div_ps(bound, half_levels), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 held = _mm512_mul_ps(_mm512_cvtph_ps(near), half_levels);
  const __mmask16 below = _mm512_cmp_ps_mask(held, bound, _CMP_LT_OQ);
  __m512i half = _mm512_cvtepu16_epi32(near);
  half = _mm512_mask_add_epi32(half, below, half, _mm512_set1_epi32(1));
  if (_mm512_cmpge_epu32_mask(half, _mm512_set1_epi32(kHalfInfinity)) != 0) return false;
  const __m256i bits = _mm512_cvtepi32_epi16(half);
  _mm256_store_si256(reinterpret_cast<__m256i*>(batch.code_scales), bits);
  // Dividing zeros by one gives the codes that are wanted where the scale is zero.
  const __mmask16 zero = _mm512_cmpeq_epi32_mask(half, _mm512_setzero_si512());
  const __m512 scale = _mm512_mask_blend_ps(zero, _mm512_cvtph_ps(bits), _mm512_set1_ps(1.0f));
  _mm512_store_ps(batch.scale, scale);
  _mm512_store_ps(batch.reciprocal, _mm512_div_ps(_mm512_set1_ps(1.0f), scale));
  return true;
}

// Planes of one key and its two sums. kFirstPlanes as in formats.h.
template <uint32_t kRegisters, uint32_t kFirstPlanes>
CTKVR_INLINE void CodeKey(const KeyRun& run, uint32_t token, uint32_t n, KeyBatch<kRegisters>& batch) {
  const __m512 scale = _mm512_set1_ps(batch.scale[n]), reciprocal = _mm512_set1_ps(batch.reciprocal[n]);
  const int32_t half_levels = 1 << (run.planes - 1);
  const __m512i half = _mm512_set1_epi32(half_levels / 2), whole = _mm512_set1_epi32(half_levels);
  __m512 squares = _mm512_setzero_ps(), products = _mm512_setzero_ps();
  __m512i floor[kRegisters];
  for (uint32_t i = 0; i < kRegisters; ++i) {
    const __m512 x = _mm512_load_ps(batch.x[n] + 16 * i);
    floor[i] = _mm512_cvt_roundps_epi32(Quotient(x, scale, reciprocal), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    squares = _mm512_add_ps(squares, _mm512_mul_ps(x, x));
    // x times its level, which has its sign: 1, or 3 in the outer halves of two planes.
    __m512 product = _mm512_abs_ps(x);
    if constexpr (kFirstPlanes == 2) {
      const __mmask16 outer = _mm512_cmpge_epu32_mask(_mm512_add_epi32(floor[i], half), whole);
      product = _mm512_mask_mul_ps(product, outer, product, _mm512_set1_ps(3.0f));
    }
    products = _mm512_add_ps(products, product);
  }
  _mm512_store_ps(batch.squares[n], squares);
  _mm512_store_ps(batch.products[n], products);
  const uint32_t plane_bytes = 2 * kRegisters;
  std::byte* first = run.first + size_t{token} * kFirstPlanes * plane_bytes;
  std::byte* record = run.records + token * run.record_bytes;
  std::memcpy(record, &batch.code_scales[n], sizeof(uint16_t));
  std::byte* rest = record + PageLayout::kCodeScaleBytes;
  for (uint32_t i = 0; i < kRegisters; i += 4) {
    __m512i codes = InOrder(PackSigned(floor + i));
    codes = _mm512_min_epi8(codes, _mm512_set1_epi8(static_cast<char>(half_levels - 1)));
    codes = _mm512_add_epi8(codes, _mm512_set1_epi8(static_cast<char>(half_levels)));
    char bit = static_cast<char>(half_levels);
    for (uint32_t plane = 0; plane < run.planes; ++plane) {
      const uint64_t bits = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(bit));
      bit = static_cast<char>(static_cast<uint8_t>(bit) >> 1);
      std::byte* to = plane < kFirstPlanes ? first + plane * plane_bytes : rest + (plane - kFirstPlanes) * plane_bytes;
      std::memcpy(to + 2 * i, &bits, sizeof(bits));
    }
  }
}

// Sketch scales of a batch, stored. False when one exceeds binary16.
template <uint32_t kRegisters>
bool FitSketchScales(const KeyRun& run, uint32_t first, uint32_t count, __m512i max_bits,
                     const KeyBatch<kRegisters>& batch) {
  __m512 squares[kBatch], products[kBatch];
  for (uint32_t n = 0; n < kBatch; ++n) {
    squares[FoldSlot(n)] = n < count ? _mm512_load_ps(batch.squares[n]) : _mm512_setzero_ps();
    products[FoldSlot(n)] = n < count ? _mm512_load_ps(batch.products[n]) : _mm512_setzero_ps();
  }
  const __m512 ratio = _mm512_div_ps(FoldBatch<FoldSum>(squares), FoldBatch<FoldSum>(products));
  const __m256i near = _mm512_cvtps_ph(ratio, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 some = _mm512_test_epi32_mask(max_bits, max_bits);
  const __m512i half = _mm512_maskz_mov_epi32(some, _mm512_cvtepu16_epi32(near));
  if (_mm512_cmpge_epu32_mask(half, _mm512_set1_epi32(kHalfInfinity)) != 0) return false;
  const auto rows = static_cast<__mmask16>((1u << count) - 1);
  _mm256_mask_storeu_epi16(run.sketch_scales + 2 * first, rows, _mm512_cvtepi32_epi16(half));
  return true;
}

template <DType kDType, uint32_t kRegisters>
uint32_t EncodeKeyRun(const KeyRun& run) {
  alignas(64) float signed_mean[16 * kRegisters];
  for (uint32_t i = 0; i < 16 * kRegisters; ++i) signed_mean[i] = run.mean[i] * run.signs[i];
  KeyBatch<kRegisters> batch;
  for (uint32_t first = 0; first < run.tokens; first += kBatch) {
    const uint32_t count = run.tokens - first < kBatch ? run.tokens - first : kBatch;
    __m512i max_bits;
    if (!RotateBatch<kDType, kRegisters>(run, first, count, signed_mean, batch, &max_bits)) return first;
    if (!FitKeyScales<kRegisters>(run, max_bits, batch)) return first;
    for (uint32_t n = 0; n < count; ++n) {
      if (run.first_planes == 1) {
        CodeKey<kRegisters, 1>(run, first + n, n, batch);
      } else {
        CodeKey<kRegisters, 2>(run, first + n, n, batch);
      }
    }
    if (!FitSketchScales<kRegisters>(run, first, count, max_bits, batch)) return first;
  }
  return run.tokens;
}

template <DType kDType>
uint32_t EncodeKeysOf(const KeyRun& run) {
  switch (run.head_dim) {
    case 64:
      return EncodeKeyRun<kDType, 4>(run);
    case 128:
      return EncodeKeyRun<kDType, 8>(run);
    case 256:
      return EncodeKeyRun<kDType, 16>(run);
    default:
      return 0;
  }
}

uint32_t EncodeKeys(const KeyRun& run) {
  switch (run.dtype) {
    case DType::kF32:
      return EncodeKeysOf<DType::kF32>(run);
    case DType::kF16:
      return EncodeKeysOf<DType::kF16>(run);
    default:
      return EncodeKeysOf<DType::kBF16>(run);
  }
}

}  // namespace
}  // namespace ctkvr::cpu
