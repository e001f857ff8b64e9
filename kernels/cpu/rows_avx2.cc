// SPDX-License-Identifier: Apache-2.0
//
// RowKernels with AVX2 and F16C. The same operations in the same order as the portable loops, so the same bits:
// no fused multiply-add, sums in 16 lanes (two registers) folded in halves.
//
// Everything called here is inlined or has internal linkage: an inline function of a shared header compiled with wider
// instructions must not become the copy that the linker keeps for all.

#include <immintrin.h>

#include <cstring>

#include "kernels/base/half_steps.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/rows_avx.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kWidth = 8;
constexpr uint32_t kInfinityBits = 0x7f800000u;

// --- Rotation ---

// Strides 1, 2 and 4 within a register: low + high and low - high side by side.
__m256 TransformRegister(__m256 x) {
  const __m256 high1 = _mm256_castsi256_ps(_mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN));
  const __m256 high2 = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN));
  const __m256 high4 = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN));
  x = _mm256_add_ps(_mm256_permute_ps(x, 0xb1), _mm256_xor_ps(x, high1));
  x = _mm256_add_ps(_mm256_permute_ps(x, 0x4e), _mm256_xor_ps(x, high2));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, high4));
}

// What happens to each number last: the scale, and on the way back the signs.
template <bool kForward>
void StoreFinished(float* x, __m256 value, __m256 scale, const float* signs) {
  value = _mm256_mul_ps(value, scale);
  if constexpr (!kForward) value = _mm256_mul_ps(value, _mm256_loadu_ps(signs));
  _mm256_storeu_ps(x, value);
}

// A block or a part of one of up to 64 numbers, all its strides in registers.
template <bool kForward, uint32_t kRegisters>
void TransformPart(float* x, const float* signs, bool whole, __m256 scale) {
  __m256 v[kRegisters];
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = _mm256_loadu_ps(x + kWidth * i);
    if constexpr (kForward) v[i] = _mm256_mul_ps(v[i], _mm256_loadu_ps(signs + kWidth * i));
    v[i] = TransformRegister(v[i]);
  }
  for (uint32_t stride = 1; stride < kRegisters; stride *= 2) {
    for (uint32_t begin = 0; begin < kRegisters; begin += 2 * stride) {
      for (uint32_t i = begin; i < begin + stride; ++i) {
        const __m256 low = v[i];
        v[i] = _mm256_add_ps(low, v[i + stride]);
        v[i + stride] = _mm256_sub_ps(low, v[i + stride]);
      }
    }
  }
  for (uint32_t i = 0; i < kRegisters; ++i) {
    if (whole) {
      StoreFinished<kForward>(x + kWidth * i, v[i], scale, signs + kWidth * i);
    } else {
      _mm256_storeu_ps(x + kWidth * i, v[i]);
    }
  }
}

// Stride 64 of a block of 128, or strides 64 and 128 of a block of 256.
template <bool kForward>
void TransformOuter(float* x, uint32_t size, const float* signs, __m256 scale) {
  for (uint32_t i = 0; i < 64; i += kWidth) {
    const __m256 a = _mm256_loadu_ps(x + i);
    const __m256 b = _mm256_loadu_ps(x + i + 64);
    const __m256 sum = _mm256_add_ps(a, b);
    const __m256 difference = _mm256_sub_ps(a, b);
    if (size == 128) {
      StoreFinished<kForward>(x + i, sum, scale, signs + i);
      StoreFinished<kForward>(x + i + 64, difference, scale, signs + i + 64);
      continue;
    }
    const __m256 c = _mm256_loadu_ps(x + i + 128);
    const __m256 d = _mm256_loadu_ps(x + i + 192);
    const __m256 high_sum = _mm256_add_ps(c, d);
    const __m256 high_difference = _mm256_sub_ps(c, d);
    StoreFinished<kForward>(x + i, _mm256_add_ps(sum, high_sum), scale, signs + i);
    StoreFinished<kForward>(x + i + 64, _mm256_add_ps(difference, high_difference), scale, signs + i + 64);
    StoreFinished<kForward>(x + i + 128, _mm256_sub_ps(sum, high_sum), scale, signs + i + 128);
    StoreFinished<kForward>(x + i + 192, _mm256_sub_ps(difference, high_difference), scale, signs + i + 192);
  }
}

// 1 / sqrt(size), rounded once.
float BlockScale(uint32_t size) {
  switch (size) {
    case 8:
      return 0x1.6a09e6p-2f;
    case 16:
      return 0x1p-2f;
    case 32:
      return 0x1.6a09e6p-3f;
    case 64:
      return 0x1p-3f;
    case 128:
      return 0x1.6a09e6p-4f;
    default:
      return 0x1p-4f;
  }
}

template <bool kForward>
void TransformBlock(float* x, uint32_t size, const float* signs) {
  const __m256 scale = _mm256_set1_ps(BlockScale(size));
  switch (size) {
    case 8:
      return TransformPart<kForward, 1>(x, signs, true, scale);
    case 16:
      return TransformPart<kForward, 2>(x, signs, true, scale);
    case 32:
      return TransformPart<kForward, 4>(x, signs, true, scale);
    case 64:
      return TransformPart<kForward, 8>(x, signs, true, scale);
    default:
      break;
  }
  for (uint32_t i = 0; i < size; i += 64) TransformPart<kForward, 8>(x + i, signs + i, false, scale);
  TransformOuter<kForward>(x, size, signs, scale);
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
  size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  if (i == count) return;
  alignas(16) uint16_t halves[kWidth] = {};
  alignas(32) float floats[kWidth];
  std::memcpy(halves, from + 2 * i, 2 * (count - i));
  _mm256_store_ps(floats, _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves))));
  std::memcpy(to + i, floats, sizeof(float) * (count - i));
}

void F32FromBrain(const std::byte* from, float* to, size_t count) {
  size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    _mm256_storeu_ps(to + i, _mm256_castsi256_ps(bits));
  }
  for (; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    const uint32_t bits = uint32_t{half} << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

struct HalfCoder {
  static constexpr int32_t kMagnitudeMax = 0x477fefff;  // from 65520 on the result is infinite
  static __m128i Convert(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

struct BrainCoder {
  static constexpr int32_t kMagnitudeMax = 0x7f7f7fff;
  static __m128i Convert(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_packus_epi32(high, high);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
};

// Lanes that are not finite in the target type, as a bit mask.
template <typename Coder>
uint32_t BadLanes(__m256 x) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(INT32_MAX));
  const __m256i bad = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(Coder::kMagnitudeMax));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(bad)));
}

template <typename Coder>
int64_t FromF32(const float* from, std::byte* to, size_t count) {
  size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m256 x = _mm256_loadu_ps(from + i);
    if (const uint32_t bad = BadLanes<Coder>(x)) return static_cast<int64_t>(i) + __builtin_ctz(bad);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), Coder::Convert(x));
  }
  if (i == count) return -1;
  alignas(32) float floats[kWidth] = {};
  alignas(16) uint16_t halves[kWidth];
  std::memcpy(floats, from + i, sizeof(float) * (count - i));
  const __m256 x = _mm256_load_ps(floats);
  if (const uint32_t bad = BadLanes<Coder>(x)) return static_cast<int64_t>(i) + __builtin_ctz(bad);
  _mm_store_si128(reinterpret_cast<__m128i*>(halves), Coder::Convert(x));
  std::memcpy(to + 2 * i, halves, 2 * (count - i));
  return -1;
}

// --- Keys ---

// Eight numbers 0 to 255 as bytes.
void StoreBytes(uint8_t* to, __m256i codes) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

// codes [D, and zeros up to a multiple of 32].
void PackPlanes(const uint8_t* codes, uint32_t head_dim, uint32_t planes, std::byte* packed) {
  const uint32_t plane_bytes = head_dim / 8;
  for (uint32_t i = 0; i < head_dim; i += 32) {
    __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
    bytes = _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(static_cast<int>(8 - planes)));
    const uint32_t room = head_dim - i >= 32 ? 4 : (head_dim - i) / 8;
    for (uint32_t plane = 0; plane < planes; ++plane) {
      const int bits = _mm256_movemask_epi8(bytes);
      std::memcpy(packed + plane * plane_bytes + i / 8, &bits, room);
      bytes = _mm256_add_epi8(bytes, bytes);
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
  const __m256 scale = _mm256_set1_ps(max_bits == 0 ? 1.0f : HalfToFloat(scale_bits));
  const __m256i middle = _mm256_set1_epi32(half_levels);
  const __m256i top = _mm256_set1_epi32(2 * half_levels - 1);
  const __m256i level_offset = _mm256_set1_epi32(1 - (1 << first_planes));
  const __m128i level_shift = _mm_cvtsi32_si128(static_cast<int>(planes - first_planes));
  alignas(32) uint8_t codes[kDimMax] = {};
  __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  __m256 products[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (uint32_t i = 0; i < head_dim; i += kWidth) {
    const __m256 element = _mm256_loadu_ps(x + i);
    const __m256i floor = _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_div_ps(element, scale)));
    const __m256i code =
        _mm256_min_epi32(_mm256_max_epi32(_mm256_add_epi32(floor, middle), _mm256_setzero_si256()), top);
    const __m256i level = _mm256_add_epi32(_mm256_slli_epi32(_mm256_srl_epi32(code, level_shift), 1), level_offset);
    const uint32_t lanes = i / kWidth % 2;
    squares[lanes] = _mm256_add_ps(squares[lanes], _mm256_mul_ps(element, element));
    products[lanes] = _mm256_add_ps(products[lanes], _mm256_mul_ps(element, _mm256_cvtepi32_ps(level)));
    StoreBytes(codes + i, code);
  }
  const float ratio = FoldLanes(squares[0], squares[1]) / FoldLanes(products[0], products[1]);
  const uint16_t sketch_bits = max_bits == 0 ? uint16_t{0} : FloatToHalf(ratio);
  if (sketch_bits >= kHalfInfinity) return false;
  PackPlanes(codes, head_dim, planes, packed);
  *code_scale = scale_bits;
  *sketch_scale = sketch_bits;
  return true;
}

// --- Values ---

void CodeValueGroup(const float* value, uint32_t count, uint32_t levels, ValueGroup group, uint8_t* codes) {
  const __m256 zero = _mm256_set1_ps(HalfToFloat(group.zero));
  const __m256 scale = _mm256_set1_ps(HalfToFloat(group.scale));
  const __m256i top = _mm256_set1_epi32(group.scale == 0 ? 0 : static_cast<int32_t>(levels));
  for (uint32_t i = 0; i < count; i += kWidth) {
    const __m256 ratio = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(value + i), zero), scale);
    StoreBytes(codes + i, _mm256_and_si256(_mm256_min_epi32(_mm256_cvtps_epi32(ratio), top), top));
  }
}

// Eight codes from dimension i on as numbers.
__m256 LoadCodes(const std::byte* packed, uint32_t i, uint32_t bits) {
  if (bits == 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  int pairs;
  std::memcpy(&pairs, packed + i / 2, 4);
  const __m128i bytes = _mm_cvtsi32_si128(pairs);
  const __m128i low_half = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, low_half);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_half);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)));
}

void DecodeValue(const std::byte* row, uint32_t value_dim, uint32_t bits, float* value) {
  const std::byte* packed = row + (value_dim + kValueGroup - 1) / kValueGroup * kGroupHeaderBytes;
  for (uint32_t begin = 0; begin < value_dim; begin += kValueGroup) {
    uint16_t header[2];
    std::memcpy(header, row + begin / kValueGroup * kGroupHeaderBytes, sizeof(header));
    const __m256 scale = _mm256_set1_ps(HalfToFloat(header[0]));
    const __m256 zero = _mm256_set1_ps(HalfToFloat(header[1]));
    const uint32_t end = value_dim - begin < kValueGroup ? value_dim : begin + kValueGroup;
    for (uint32_t i = begin; i < end; i += kWidth) {
      _mm256_storeu_ps(value + i, _mm256_add_ps(zero, _mm256_mul_ps(scale, LoadCodes(packed, i, bits))));
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
    .encode_keys = [](const KeyRun&) { return uint32_t{0}; },
    .encode_values = [](const ValueRun&) { return uint32_t{0}; },
};

}  // namespace

const RowKernels& Avx2RowKernels() { return kTable; }

}  // namespace ctkvr::cpu
