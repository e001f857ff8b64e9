// SPDX-License-Identifier: Apache-2.0
//
// Binary16 scales that are exact bounds: the steps of the row coding (formats.h) that every implementation shares.
//
// Thread-safe: pure functions. All have internal linkage on purpose: they are also used in translation units compiled
// for newer instruction sets, and the linker must not replace one unit's copy by another's.

#pragma once

#include <fp16.h>

#include <cstdint>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ctkvr {

// One conversion, by instruction where the translation unit has it: the same result, several times faster.
#ifdef __F16C__
[[maybe_unused]] static float HalfToFloat(uint16_t half) { return _cvtsh_ss(half); }
[[maybe_unused]] static uint16_t FloatToHalf(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
[[maybe_unused]] static float HalfToFloat(uint16_t half) { return fp16_ieee_to_fp32_value(half); }
[[maybe_unused]] static uint16_t FloatToHalf(float value) { return fp16_ieee_from_fp32_value(value); }
#endif

inline constexpr uint16_t kHalfInfinity = 0x7c00;
inline constexpr float kHalfMax = 65504.0f;

// The smallest non-negative binary16 h with bound <= h * factor, or kHalfInfinity when there is none.
// REQUIRES: bound >= 0 and finite; factor a power of two.
[[maybe_unused]] static uint16_t SmallestHalfScale(float bound, float factor) {
  uint16_t half = FloatToHalf(bound / factor);
  if (half < kHalfInfinity && HalfToFloat(half) * factor < bound) ++half;
  return half;
}

// The largest binary16 h <= value; +0 for zero. REQUIRES: value >= -kHalfMax and finite.
[[maybe_unused]] static uint16_t LargestHalfAtMost(float value) {
  if (value >= kHalfMax) return kHalfInfinity - 1;
  uint16_t half = FloatToHalf(value);
  if (HalfToFloat(half) > value) {
    half = half == 0              ? 0x8001
           : (half & 0x8000) != 0 ? static_cast<uint16_t>(half + 1)
                                  : static_cast<uint16_t>(half - 1);
  }
  return (half & 0x7fff) == 0 ? 0 : half;
}

// The smallest non-negative binary16 h with zero + h * levels >= max, or kHalfInfinity when there is none. Float64
// holds that sum exactly for every binary16 zero and h. REQUIRES: zero a binary16 value <= max, max finite.
[[maybe_unused]] static uint16_t SmallestValueScale(float zero, float max, uint32_t levels) {
  const double target = max;
  const double low = zero;
  uint16_t half = FloatToHalf(static_cast<float>((target - low) / levels));
  if (half >= kHalfInfinity) half = kHalfInfinity - 1;
  if (low + static_cast<double>(HalfToFloat(half)) * levels < target) return half + 1;
  while (half > 0 && low + static_cast<double>(HalfToFloat(half - 1)) * levels >= target) --half;
  return half;
}

}  // namespace ctkvr
