// SPDX-License-Identifier: Apache-2.0
//
// For scan_avx512.cc alone: softmax sums, group ranks and the passes of top-K with AVX-512, by the formulas of
// softmax_avx2.h. Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {
namespace {

inline __m512 Broadcast(float value) { return _mm512_set1_ps(value); }
inline __m512 AsFloats(__m512i bits) { return _mm512_castsi512_ps(bits); }
inline __m512i AsBits(__m512 x) { return _mm512_castps_si512(x); }

// exp(x) for x up to 88; below -87.3, where the result would not be a normal number, something below 1e-37.
inline __m512 Exp(__m512 x) {
  x = _mm512_max_ps(x, Broadcast(-87.3f));
  // Adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits.
  const __m512 shift = Broadcast(12582912.0f);
  const __m512 rounded = _mm512_fmadd_ps(x, Broadcast(1.44269504088896341f), shift);
  const __m512 n = _mm512_sub_ps(rounded, shift);
  // ln 2 in two parts, the first exact in few bits.
  __m512 r = _mm512_fnmadd_ps(n, Broadcast(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, Broadcast(-2.12194440e-4f), r);
  __m512 p = Broadcast(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, Broadcast(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, Broadcast(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, Broadcast(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, Broadcast(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, Broadcast(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, r, Broadcast(1));
  p = _mm512_fmadd_ps(p, r, Broadcast(1));
  return AsFloats(_mm512_add_epi32(AsBits(p), _mm512_slli_epi32(AsBits(rounded), 23)));
}

// log(x) for normal x > 0.
inline __m512 Log(__m512 x) {
  const __m512i bits = AsBits(x);
  // Mantissa in [0.5, 1), then in [sqrt(1/2), sqrt(2)) less 1.
  __m512 e = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(126)));
  __m512 m =
      AsFloats(_mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x007fffff)), _mm512_set1_epi32(0x3f000000)));
  const __mmask16 small = _mm512_cmp_ps_mask(m, Broadcast(0.707106781186547524f), _CMP_LT_OQ);
  e = _mm512_mask_sub_ps(e, small, e, Broadcast(1));
  m = _mm512_sub_ps(_mm512_mask_add_ps(m, small, m, m), Broadcast(1));
  static constexpr float kTerms[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                     -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                     2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  __m512 p = Broadcast(kTerms[0]);
  for (int i = 1; i < 9; ++i) p = _mm512_fmadd_ps(p, m, Broadcast(kTerms[i]));
  const __m512 square = _mm512_mul_ps(m, m);
  __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, m), square);
  tail = _mm512_fmadd_ps(e, Broadcast(-2.12194440e-4f), tail);
  tail = _mm512_fnmadd_ps(Broadcast(0.5f), square, tail);
  return _mm512_fmadd_ps(e, Broadcast(0.693359375f), _mm512_add_ps(m, tail));
}

inline __m512 Tanh(__m512 x) {
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512i sign = _mm512_and_si512(AsBits(x), sign_bit);
  const __m512 magnitude = AsFloats(_mm512_andnot_si512(sign_bit, AsBits(x)));
  const __m512 square = _mm512_mul_ps(x, x);
  __m512 p = Broadcast(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, square, Broadcast(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, square, Broadcast(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, square, Broadcast(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, square, Broadcast(-3.33332819422e-1f));
  const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
  // Beyond 9 the result is 1.
  const __m512 bounded = _mm512_min_ps(magnitude, Broadcast(10));
  const __m512 grown = Exp(_mm512_add_ps(bounded, bounded));
  const __m512 far = _mm512_sub_ps(Broadcast(1), _mm512_div_ps(Broadcast(2), _mm512_add_ps(grown, Broadcast(1))));
  const __mmask16 is_near = _mm512_cmp_ps_mask(magnitude, Broadcast(0.625f), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(is_near, AsFloats(_mm512_or_si512(AsBits(far), sign)), near);
}

// x(score) of LogShare.
inline __m512 Exponent(__m512 score, const LogShare& log_share) {
  if (log_share.softcap > 0) {
    const __m512 bent = Tanh(_mm512_mul_ps(Broadcast(log_share.scale / log_share.softcap), score));
    return _mm512_sub_ps(_mm512_mul_ps(Broadcast(log_share.softcap), bent), Broadcast(log_share.origin));
  }
  return _mm512_mul_ps(Broadcast(log_share.scale), _mm512_sub_ps(score, Broadcast(log_share.origin)));
}

// The lowest `count` lanes of 16; all of them from 16 on.
inline __mmask16 FirstLanes(size_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

float MaxOf(const float* values, size_t count) {
  __m512 max = Broadcast(values[0]);
  for (size_t t = 0; t < count; t += 16) {
    const __mmask16 lanes = FirstLanes(count - t);
    max = _mm512_mask_max_ps(max, lanes, max, _mm512_maskz_loadu_ps(lanes, values + t));
  }
  return _mm512_reduce_max_ps(max);
}

// Sums of two terms, added up in float64: a million terms lose nothing.
double SumExp(const float* scores, size_t count, const LogShare& log_share, float* terms) {
  const auto term = [&](size_t at) {
    const __mmask16 lanes = at < count ? FirstLanes(count - at) : __mmask16{0};
    const __m512 sixteen = Exp(Exponent(_mm512_maskz_loadu_ps(lanes, scores + at), log_share));
    if (terms != nullptr && lanes != 0) _mm512_mask_storeu_ps(terms + at, lanes, sixteen);
    return _mm512_maskz_mov_ps(lanes, sixteen);
  };
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  for (size_t t = 0; t < count; t += 32) {
    const __m512 sum = _mm512_add_ps(term(t), term(t + 16));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(sum)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(sum, 1)));
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

// Ranks of 16 tokens whose log shares are logs [heads].
inline __m512 RankOf(const __m512* logs, uint32_t heads, bool sum) {
  __m512 max = logs[0];
  for (uint32_t r = 1; r < heads; ++r) max = _mm512_max_ps(max, logs[r]);
  if (!sum) return max;
  __m512 total = _mm512_setzero_ps();
  for (uint32_t r = 0; r < heads; ++r) total = _mm512_add_ps(total, Exp(_mm512_sub_ps(logs[r], max)));
  return _mm512_add_ps(max, Log(total));
}

void GroupRanks(const GroupRankRun& run) {
  for (size_t t = 0; t < run.count; t += 16) {
    const __mmask16 lanes = FirstLanes(run.count - t);
    const auto log_share = [&](uint32_t r) {
      const __m512 scores = _mm512_maskz_loadu_ps(lanes, run.scores + r * run.stride + t);
      return _mm512_sub_ps(Exponent(scores, run.log_share[r]), Broadcast(run.log_share[r].shift));
    };
    __m512 logs[kGroupHeadsMax];
    logs[0] = log_share(0);
    for (uint32_t r = 1; r < run.heads; ++r) logs[r] = log_share(r);
    _mm512_mask_storeu_ps(run.ranks + t, lanes, RankOf(logs, run.heads, run.sum));
  }
}

// The lowest `count` bits that are set.
inline unsigned LowestBits(unsigned mask, size_t count) {
  unsigned kept = 0;
  for (; mask != 0 && count > 0; mask &= mask - 1, --count) kept |= mask & (0u - mask);
  return kept;
}

// Compressed in a register and stored whole: compressing stores are slow on some processors. The entries past those
// taken lie in front of the next value, so inside the array.
size_t TakeAbove(const float* values, size_t count, float threshold, size_t ties, uint32_t* indices) {
  const __m512 limit = Broadcast(threshold);
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  size_t taken = 0, t = 0;
  for (; t + 16 <= count; t += 16) {
    const __m512 sixteen = _mm512_loadu_ps(values + t);
    unsigned mask = _mm512_cmp_ps_mask(sixteen, limit, _CMP_GE_OQ);
    if (mask == 0) continue;
    const unsigned equal = _mm512_cmp_ps_mask(sixteen, limit, _CMP_EQ_OQ);
    if (equal != 0) {
      const unsigned kept = LowestBits(equal, ties);
      ties -= static_cast<size_t>(__builtin_popcount(kept));
      mask = (mask & ~equal) | kept;
    }
    const __m512i found = _mm512_add_epi32(step, _mm512_set1_epi32(static_cast<int>(t)));
    _mm512_storeu_si512(indices + taken, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), found));
    taken += static_cast<size_t>(__builtin_popcount(mask));
  }
  for (; t < count; ++t) {
    const bool tie = values[t] == threshold && ties > 0;
    ties -= tie;
    if (values[t] > threshold || tie) indices[taken++] = static_cast<uint32_t>(t);
  }
  return taken;
}

size_t TakeBetween(std::span<const float> values, float lower, float upper, float* taken, size_t* above) {
  const __m512 low = Broadcast(lower), high = Broadcast(upper);
  size_t count = 0, higher = 0, t = 0;
  for (; t + 16 <= values.size(); t += 16) {
    const __m512 sixteen = _mm512_loadu_ps(values.data() + t);
    const unsigned reach = _mm512_cmp_ps_mask(sixteen, low, _CMP_GE_OQ);
    const unsigned over = _mm512_cmp_ps_mask(sixteen, high, _CMP_GT_OQ);
    higher += static_cast<size_t>(__builtin_popcount(over));
    const unsigned mask = reach & ~over;
    if (mask == 0) continue;
    _mm512_storeu_ps(taken + count, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), sixteen));
    count += static_cast<size_t>(__builtin_popcount(mask));
  }
  for (; t < values.size(); ++t) {
    higher += values[t] > upper;
    if (values[t] >= lower && values[t] <= upper) taken[count++] = values[t];
  }
  *above = higher;
  return count;
}

}  // namespace
}  // namespace ctkvr::cpu
