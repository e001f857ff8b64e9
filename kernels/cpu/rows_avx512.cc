// SPDX-License-Identifier: Apache-2.0
//
// RowKernels with AVX-512. The same operations in the same order as the portable loops, so the same bits: no fused
// multiply-add, sums in the 16 lanes of one register folded in halves. Sixteen numbers a step, the last eight by mask.
//
// Everything called here is inlined or has internal linkage: an inline function of a shared header compiled with wider
// instructions must not become the copy that the linker keeps for all.

#include <cstring>

#include "kernels/base/half_steps.h"
#include "kernels/cpu/avx512.h"
#include "kernels/cpu/encode_keys_avx512.h"
#include "kernels/cpu/encode_values_avx512.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/rows_avx.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kWidth = 16;
constexpr uint32_t kInfinityBits = 0x7f800000u;

__mmask16 FirstLanes(size_t count) { return static_cast<__mmask16>(count >= kWidth ? 0xffffu : (1u << count) - 1); }

// --- Rotation ---

// low + high where the mask is clear, low - high where it is set; `swapped` is x with the pairs exchanged.
__m512 Butterfly(__m512 x, __m512 swapped, __mmask16 high) {
  return _mm512_mask_sub_ps(_mm512_add_ps(swapped, x), high, swapped, x);
}

// Strides 1, 2, 4 and 8 within a register.
__m512 TransformRegister(__m512 x) {
  x = Butterfly(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
  x = Butterfly(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
  x = Butterfly(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
  return Butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
}

// A block of 16 to 256 numbers, in registers from first to last.
template <bool kForward, uint32_t kRegisters>
void TransformLarge(float* x, const float* signs, float scale) {
  __m512 v[kRegisters];
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = _mm512_loadu_ps(x + kWidth * i);
    if constexpr (kForward) v[i] = _mm512_mul_ps(v[i], _mm512_loadu_ps(signs + kWidth * i));
    v[i] = TransformRegister(v[i]);
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
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(scale));
    if constexpr (!kForward) v[i] = _mm512_mul_ps(v[i], _mm512_loadu_ps(signs + kWidth * i));
    _mm512_storeu_ps(x + kWidth * i, v[i]);
  }
}

// A block of 8: the lower half of a register, without stride 8.
template <bool kForward>
void TransformEight(float* x, const float* signs, float scale) {
  __m512 v = _mm512_maskz_loadu_ps(0xff, x);
  const __m512 sign = _mm512_maskz_loadu_ps(0xff, signs);
  if constexpr (kForward) v = _mm512_mul_ps(v, sign);
  v = Butterfly(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
  v = Butterfly(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
  v = Butterfly(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
  v = _mm512_mul_ps(v, _mm512_set1_ps(scale));
  if constexpr (!kForward) v = _mm512_mul_ps(v, sign);
  _mm512_mask_storeu_ps(x, 0xff, v);
}

// The scales are 1 / sqrt(size), rounded once.
template <bool kForward>
void TransformBlock(float* x, uint32_t size, const float* signs) {
  switch (size) {
    case 8:
      return TransformEight<kForward>(x, signs, 0x1.6a09e6p-2f);
    case 16:
      return TransformLarge<kForward, 1>(x, signs, 0x1p-2f);
    case 32:
      return TransformLarge<kForward, 2>(x, signs, 0x1.6a09e6p-3f);
    case 64:
      return TransformLarge<kForward, 4>(x, signs, 0x1p-3f);
    case 128:
      return TransformLarge<kForward, 8>(x, signs, 0x1.6a09e6p-4f);
    default:
      return TransformLarge<kForward, 16>(x, signs, 0x1p-4f);
  }
}

template <bool kForward>
void TransformRound(float* x, uint32_t head_dim, const float* signs, uint32_t round) {
  for (uint32_t rest = head_dim, begin = 0; rest != 0;) {
    const uint32_t size = round == 0 ? 0x80000000u >> __builtin_clz(rest) : rest & -rest;
    TransformBlock<kForward>(x + begin, size, signs + begin);
    begin += size;
    rest -= size;
  }
}

void Rotate(float* x, uint32_t head_dim, const float* signs) {
  TransformRound<true>(x, head_dim, signs, 0);
  if ((head_dim & (head_dim - 1)) != 0) TransformRound<true>(x, head_dim, signs + head_dim, 1);
}

void Unrotate(float* x, uint32_t head_dim, const float* signs) {
  if ((head_dim & (head_dim - 1)) != 0) TransformRound<false>(x, head_dim, signs + head_dim, 1);
  TransformRound<false>(x, head_dim, signs, 0);
}

// --- Sixteen-bit floats ---

void F32FromHalf(const std::byte* from, float* to, size_t count) {
  for (size_t i = 0; i < count; i += kWidth) {
    const __mmask16 lanes = FirstLanes(count - i);
    _mm512_mask_storeu_ps(to + i, lanes, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from + 2 * i)));
  }
}

void F32FromBrain(const std::byte* from, float* to, size_t count) {
  for (size_t i = 0; i < count; i += kWidth) {
    const __mmask16 lanes = FirstLanes(count - i);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + 2 * i)), 16);
    _mm512_mask_storeu_ps(to + i, lanes, _mm512_castsi512_ps(bits));
  }
}

struct HalfCoder {
  static constexpr int32_t kMagnitudeMax = 0x477fefff;  // from 65520 on the result is infinite
  static __m256i Convert(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

struct BrainCoder {
  static constexpr int32_t kMagnitudeMax = 0x7f7f7fff;
  static __m256i Convert(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
};

__m512i MagnitudeBits(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX)); }

template <typename Coder>
int64_t FromF32(const float* from, std::byte* to, size_t count) {
  for (size_t i = 0; i < count; i += kWidth) {
    const __mmask16 lanes = FirstLanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, from + i);
    const __mmask16 bad = _mm512_cmpgt_epi32_mask(MagnitudeBits(x), _mm512_set1_epi32(Coder::kMagnitudeMax));
    if (bad != 0) return static_cast<int64_t>(i) + __builtin_ctz(bad);
    _mm256_mask_storeu_epi16(to + 2 * i, lanes, Coder::Convert(x));
  }
  return -1;
}

// --- Keys ---

float Fold(__m512 lanes) {
  float sums[kWidth];
  _mm512_storeu_ps(sums, lanes);
  return FoldLanes(_mm256_loadu_ps(sums), _mm256_loadu_ps(sums + 8));
}

// codes [D, and zeros up to a multiple of 64].
void PackPlanes(const uint8_t* codes, uint32_t head_dim, uint32_t planes, std::byte* packed) {
  const uint32_t plane_bytes = head_dim / 8;
  for (uint32_t i = 0; i < head_dim; i += 64) {
    __m512i bytes = _mm512_loadu_si512(codes + i);
    // The lower bit planes move up into bit 7; codes of 6 bits leave the two bits that cross into the next byte clear.
    bytes = _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(static_cast<int>(8 - planes)));
    const uint32_t room = head_dim - i >= 64 ? 8 : (head_dim - i) / 8;
    for (uint32_t plane = 0; plane < planes; ++plane) {
      const uint64_t bits = _mm512_movepi8_mask(bytes);
      std::memcpy(packed + plane * plane_bytes + i / 8, &bits, room);
      bytes = _mm512_add_epi8(bytes, bytes);
    }
  }
}

bool EncodeKey(const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, std::byte* packed,
               uint16_t* code_scale, uint16_t* sketch_scale) {
  const uint32_t max_bits = MaxMagnitudeBits(x, head_dim);
  if (max_bits >= kInfinityBits) return false;
  float max;
  std::memcpy(&max, &max_bits, sizeof(max));
  const int32_t half_levels = 1 << (planes - 1);
  const uint16_t scale_bits = SmallestHalfScale(max, static_cast<float>(half_levels));
  if (scale_bits >= kHalfInfinity) return false;
  // Dividing zeros by one gives the codes that are wanted where the scale is zero.
  const __m512 scale = _mm512_set1_ps(max_bits == 0 ? 1.0f : HalfToFloat(scale_bits));
  const __m512i middle = _mm512_set1_epi32(half_levels);
  const __m512i top = _mm512_set1_epi32(2 * half_levels - 1);
  const __m512i level_offset = _mm512_set1_epi32(1 - (1 << first_planes));
  const __m128i level_shift = _mm_cvtsi32_si128(static_cast<int>(planes - first_planes));
  alignas(64) uint8_t codes[kDimMax] = {};
  __m512 squares = _mm512_setzero_ps();
  __m512 products = _mm512_setzero_ps();
  for (uint32_t i = 0; i < head_dim; i += kWidth) {
    const __mmask16 lanes = FirstLanes(head_dim - i);
    const __m512 element = _mm512_maskz_loadu_ps(lanes, x + i);
    const __m512 floor = _mm512_roundscale_ps(_mm512_div_ps(element, scale), _MM_FROUND_TO_NEG_INF);
    __m512i code = _mm512_add_epi32(_mm512_cvttps_epi32(floor), middle);
    code = _mm512_min_epi32(_mm512_max_epi32(code, _mm512_setzero_si512()), top);
    const __m512i level = _mm512_add_epi32(_mm512_slli_epi32(_mm512_srl_epi32(code, level_shift), 1), level_offset);
    squares = _mm512_add_ps(squares, _mm512_mul_ps(element, element));
    products = _mm512_add_ps(products, _mm512_mul_ps(element, _mm512_cvtepi32_ps(level)));
    _mm_mask_storeu_epi8(codes + i, lanes, _mm512_cvtepi32_epi8(code));
  }
  const float ratio = Fold(squares) / Fold(products);
  const uint16_t sketch_bits = max_bits == 0 ? uint16_t{0} : FloatToHalf(ratio);
  if (sketch_bits >= kHalfInfinity) return false;
  PackPlanes(codes, head_dim, planes, packed);
  *code_scale = scale_bits;
  *sketch_scale = sketch_bits;
  return true;
}

// --- Values ---

void CodeValueGroup(const float* value, uint32_t count, uint32_t levels, ValueGroup group, uint8_t* codes) {
  const __m512 zero = _mm512_set1_ps(HalfToFloat(group.zero));
  const __m512 scale = _mm512_set1_ps(HalfToFloat(group.scale));
  const __m512i top = _mm512_set1_epi32(group.scale == 0 ? 0 : static_cast<int32_t>(levels));
  for (uint32_t i = 0; i < count; i += kWidth) {
    const __mmask16 lanes = FirstLanes(count - i);
    const __m512 ratio = _mm512_div_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, value + i), zero), scale);
    const __m512i code = _mm512_and_si512(_mm512_min_epi32(_mm512_cvtps_epi32(ratio), top), top);
    _mm_mask_storeu_epi8(codes + i, lanes, _mm512_cvtepi32_epi8(code));
  }
}

// Sixteen codes from dimension i on, of which `count`, 16 or 8, are there, as numbers.
__m512 LoadCodes(const std::byte* packed, uint32_t i, uint32_t count, uint32_t bits) {
  if (bits == 8) {
    const auto* codes = reinterpret_cast<const __m128i*>(packed + i);
    const __m128i bytes = count == kWidth ? _mm_loadu_si128(codes) : _mm_loadl_epi64(codes);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  }
  int64_t eight = 0;
  std::memcpy(&eight, packed + i / 2, count == kWidth ? 8 : 4);
  const __m128i pairs = _mm_cvtsi64_si128(eight);
  const __m128i low_half = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(pairs, low_half);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_half);
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)));
}

void DecodeValue(const std::byte* row, uint32_t value_dim, uint32_t bits, float* value) {
  const std::byte* packed = row + (value_dim + kValueGroup - 1) / kValueGroup * kGroupHeaderBytes;
  for (uint32_t begin = 0; begin < value_dim; begin += kValueGroup) {
    uint16_t header[2];
    std::memcpy(header, row + begin / kValueGroup * kGroupHeaderBytes, sizeof(header));
    const __m512 scale = _mm512_set1_ps(HalfToFloat(header[0]));
    const __m512 zero = _mm512_set1_ps(HalfToFloat(header[1]));
    const uint32_t end = value_dim - begin < kValueGroup ? value_dim : begin + kValueGroup;
    for (uint32_t i = begin; i < end; i += kWidth) {
      const uint32_t count = end - i < kWidth ? end - i : kWidth;
      const __m512 decoded = _mm512_add_ps(zero, _mm512_mul_ps(scale, LoadCodes(packed, i, count, bits)));
      _mm512_mask_storeu_ps(value + i, FirstLanes(count), decoded);
    }
  }
}

constexpr RowKernels kTable{
    .rotate = Rotate,
    .unrotate = Unrotate,
    .f32_from_f16 = F32FromHalf,
    .f32_from_bf16 = F32FromBrain,
    .f16_from_f32 = FromF32<HalfCoder>,
    .bf16_from_f32 = FromF32<BrainCoder>,
    .encode_key = EncodeKey,
    .encode_value = EncodeValue<CodeValueGroup>,
    .decode_value = DecodeValue,
    .encode_keys = EncodeKeys,
    .encode_values = EncodeValues,
};

}  // namespace

const RowKernels& Avx512RowKernels() { return kTable; }

}  // namespace ctkvr::cpu
