// SPDX-License-Identifier: Apache-2.0
//
// For avx512.h alone: SIMDe's emulation of AVX-512 under the intrinsics' own names, and the few intrinsics in use that
// SIMDe 0.7.4 lacks, lane by lane. Slow, exact. Needs -Wno-psabi: 512-bit vectors are passed without the registers for
// them, which is harmless as no such function leaves its translation unit. Thread-safe: pure functions.

#pragma once

// Alignment attributes of vector types do not matter to the templates below.
#pragma GCC diagnostic ignored "-Wignored-attributes"

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <simde/x86/gfni.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// The lanes of a vector, for element-wise loops.
template <typename T, typename Vector>
struct Lanes {
  static constexpr size_t kCount = sizeof(Vector) / sizeof(T);
  T at[kCount];
  Lanes() : at{} {}
  explicit Lanes(Vector vector) { std::memcpy(at, &vector, sizeof(vector)); }
  operator Vector() const {
    Vector vector;
    std::memcpy(&vector, at, sizeof(vector));
    return vector;
  }
};

template <typename Vector, typename Vector256>
[[maybe_unused]] inline Vector JoinHalves(Vector256 low, Vector256 high) {
  Vector vector;
  std::memcpy(&vector, &low, sizeof(low));
  std::memcpy(reinterpret_cast<std::byte*>(&vector) + sizeof(low), &high, sizeof(high));
  return vector;
}
template <typename Vector256, typename Vector>
[[maybe_unused]] inline Vector256 HalfOf(Vector vector, int half) {
  Vector256 out;
  std::memcpy(&out, reinterpret_cast<const std::byte*>(&vector) + sizeof(out) * half, sizeof(out));
  return out;
}

[[maybe_unused]] inline __m512 EmulatedCvtphPs(__m256i halves) {
  return JoinHalves<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                            _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}
[[maybe_unused]] inline __m256i EmulatedCvtpsPh(__m512 x) {
  return JoinHalves<__m256i>(_mm256_cvtps_ph(HalfOf<__m256>(x, 0), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                             _mm256_cvtps_ph(HalfOf<__m256>(x, 1), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
[[maybe_unused]] inline __m512i EmulatedCvtpsEpi32(__m512 x) {
  return JoinHalves<__m512i>(_mm256_cvtps_epi32(HalfOf<__m256>(x, 0)), _mm256_cvtps_epi32(HalfOf<__m256>(x, 1)));
}
[[maybe_unused]] inline __m512i EmulatedCvttpsEpi32(__m512 x) {
  return JoinHalves<__m512i>(_mm256_cvttps_epi32(HalfOf<__m256>(x, 0)), _mm256_cvttps_epi32(HalfOf<__m256>(x, 1)));
}
[[maybe_unused]] inline __m512i EmulatedFloorEpi32(__m512 x) {
  return JoinHalves<__m512i>(_mm256_cvtps_epi32(_mm256_floor_ps(HalfOf<__m256>(x, 0))),
                             _mm256_cvtps_epi32(_mm256_floor_ps(HalfOf<__m256>(x, 1))));
}
[[maybe_unused]] inline __m512 EmulatedCvtepi32Ps(__m512i x) {
  return JoinHalves<__m512>(_mm256_cvtepi32_ps(HalfOf<__m256i>(x, 0)), _mm256_cvtepi32_ps(HalfOf<__m256i>(x, 1)));
}
[[maybe_unused]] inline __m512i EmulatedCvtepu8Epi32(__m128i bytes) {
  Lanes<uint8_t, __m128i> from(bytes);
  Lanes<uint32_t, __m512i> to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = from.at[i];
  return to;
}
[[maybe_unused]] inline __m512i EmulatedCvtepi8Epi32(__m128i bytes) {
  Lanes<int8_t, __m128i> from(bytes);
  Lanes<int32_t, __m512i> to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = from.at[i];
  return to;
}
[[maybe_unused]] inline __m512i EmulatedCvtepu16Epi32(__m256i words) {
  Lanes<uint16_t, __m256i> from(words);
  Lanes<uint32_t, __m512i> to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = from.at[i];
  return to;
}
[[maybe_unused]] inline __m128i EmulatedCvtepi32Epi8(__m512i x) {
  Lanes<uint32_t, __m512i> from(x);
  Lanes<uint8_t, __m128i> to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = static_cast<uint8_t>(from.at[i]);
  return to;
}
[[maybe_unused]] inline __m256i EmulatedCvtepi32Epi16(__m512i x) {
  Lanes<uint32_t, __m512i> from(x);
  Lanes<uint16_t, __m256i> to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = static_cast<uint16_t>(from.at[i]);
  return to;
}
template <typename T, typename Vector, typename Mask>
[[maybe_unused]] inline Vector EmulatedMaskLoad(Mask mask, const void* from) {
  Lanes<T, Vector> to;
  for (size_t i = 0; i < to.kCount; ++i) {
    if (mask >> i & 1) std::memcpy(&to.at[i], static_cast<const std::byte*>(from) + i * sizeof(T), sizeof(T));
  }
  return to;
}
template <typename T, typename Vector, typename Mask>
[[maybe_unused]] inline void EmulatedMaskStore(void* to, Mask mask, Vector x) {
  Lanes<T, Vector> from(x);
  for (size_t i = 0; i < from.kCount; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<std::byte*>(to) + i * sizeof(T), &from.at[i], sizeof(T));
  }
}
// Lanes that are infinite or not a number, and the subnormal ones where `classes` has that bit.
[[maybe_unused]] inline uint16_t EmulatedFpclassPs(__m512 x, int classes) {
  Lanes<uint32_t, __m512> from(x);
  uint16_t mask = 0;
  for (size_t i = 0; i < 16; ++i) {
    const uint32_t magnitude = from.at[i] & 0x7fffffffu;
    const bool subnormal = magnitude > 0 && magnitude < 0x00800000u;
    mask |= static_cast<uint16_t>((magnitude >= 0x7f800000u || ((classes & 0x20) != 0 && subnormal)) << i);
  }
  return mask;
}
[[maybe_unused]] inline __m512 EmulatedPermutePs(__m512 x, unsigned control) {
  Lanes<float, __m512> from(x), to;
  for (size_t i = 0; i < 16; ++i) to.at[i] = from.at[(i & ~size_t{3}) + (control >> (2 * (i & 3)) & 3)];
  return to;
}
[[maybe_unused]] inline __m512 EmulatedShuffleF32x4(__m512 a, __m512 b, unsigned control) {
  Lanes<float, __m512> first(a), second(b), to;
  for (size_t i = 0; i < 16; ++i) {
    const size_t quarter = control >> (2 * (i / 4)) & 3;
    to.at[i] = (i < 8 ? first : second).at[4 * quarter + i % 4];
  }
  return to;
}
// The order of the compiler's own: halves, quarters, then pairs.
[[maybe_unused]] inline float EmulatedReduceAddPs(__m512 x) {
  Lanes<float, __m512> sum(x);
  for (size_t width = 8; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) sum.at[i] += sum.at[i + width];
  }
  return sum.at[0];
}
[[maybe_unused]] inline int32_t EmulatedReduceAddEpi32(__m512i x) {
  Lanes<uint32_t, __m512i> from(x);
  uint32_t sum = 0;
  for (uint32_t lane : from.at) sum += lane;
  return static_cast<int32_t>(sum);
}
[[maybe_unused]] inline float EmulatedReduceMaxPs(__m512 x) {
  Lanes<float, __m512> from(x);
  float max = from.at[0];
  for (float lane : from.at) max = lane > max ? lane : max;
  return max;
}
[[maybe_unused]] inline uint32_t EmulatedReduceMaxEpu32(__m512i x) {
  Lanes<uint32_t, __m512i> from(x);
  uint32_t max = 0;
  for (uint32_t lane : from.at) max = lane > max ? lane : max;
  return max;
}

[[maybe_unused]] inline __m512d EmulatedCvtpsPd(__m256 x) {
  return JoinHalves<__m512d>(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}
[[maybe_unused]] inline double EmulatedReduceAddPd(__m512d x) {
  Lanes<double, __m512d> sum(x);
  for (size_t width = 4; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) sum.at[i] += sum.at[i + width];
  }
  return sum.at[0];
}

}  // namespace

// Without optimisation the compiler has macros of some of these names, hence the #undef.
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) EmulatedCvtphPs(x)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) EmulatedCvtpsPh(x)  // every use rounds to nearest
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) EmulatedCvtpsEpi32(x)
#undef _mm512_cvt_roundps_epi32
#define _mm512_cvt_roundps_epi32(x, rounding) EmulatedFloorEpi32(x)  // every use rounds down
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32(x) EmulatedCvttpsEpi32(x)
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) EmulatedCvtepi32Ps(x)
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(x) EmulatedCvtepu8Epi32(x)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(x) EmulatedCvtepi8Epi32(x)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) EmulatedCvtepu16Epi32(x)
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(x) EmulatedCvtepi32Epi8(x)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) EmulatedCvtepi32Epi16(x)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, from) EmulatedMaskLoad<float, __m512>(mask, from)
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32(mask, from) EmulatedMaskLoad<uint32_t, __m512i>(mask, from)
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8(mask, from) EmulatedMaskLoad<uint8_t, __m512i>(mask, from)
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, from) EmulatedMaskLoad<uint16_t, __m256i>(mask, from)
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(to, mask, x) EmulatedMaskStore<float, __m512>(to, mask, x)
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32(to, mask, x) EmulatedMaskStore<uint32_t, __m512i>(to, mask, x)
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8(to, mask, x) EmulatedMaskStore<uint8_t, __m512i>(to, mask, x)
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16(to, mask, x) EmulatedMaskStore<uint16_t, __m256i>(to, mask, x)
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8(to, mask, x) EmulatedMaskStore<uint8_t, __m128i>(to, mask, x)
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask(x, classes) EmulatedFpclassPs(x, classes)
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, control) EmulatedPermutePs(x, control)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, control) EmulatedShuffleF32x4(a, b, control)
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(x) EmulatedReduceAddPs(x)
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32(x) EmulatedReduceAddEpi32(x)
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps(x) EmulatedReduceMaxPs(x)
#undef _mm512_reduce_max_epu32
#define _mm512_reduce_max_epu32(x) EmulatedReduceMaxEpu32(x)
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32(x) (Lanes<float, __m512>(x).at[0])
#undef _mm512_cvtsi512_si32
#define _mm512_cvtsi512_si32(x) (Lanes<int32_t, __m512i>(x).at[0])
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, half) HalfOf<__m256>(x, half)
#undef _mm512_cvtps_pd
#define _mm512_cvtps_pd(x) EmulatedCvtpsPd(x)
#undef _mm512_reduce_add_pd
#define _mm512_reduce_add_pd(x) EmulatedReduceAddPd(x)
