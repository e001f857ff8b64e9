// SPDX-License-Identifier: Apache-2.0
//
// For scan_avx2.cc alone: softmax sums, group ranks and the passes of top-K with AVX2. exp, log and tanh follow Cephes
// (https://www.netlib.org/cephes/), single precision. Thread-safe: pure functions.

#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {
namespace {

__m256 Broadcast(float value) { return _mm256_set1_ps(value); }

// exp(x) for x up to 88; below -87.3, where the result would not be a normal number, something below 1e-37.
inline __m256 Exp(__m256 x) {
  x = _mm256_max_ps(x, Broadcast(-87.3f));
  // Adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits.
  const __m256 shift = Broadcast(12582912.0f);
  const __m256 rounded = _mm256_fmadd_ps(x, Broadcast(1.44269504088896341f), shift);
  const __m256 n = _mm256_sub_ps(rounded, shift);
  // ln 2 in two parts, the first exact in few bits.
  __m256 r = _mm256_fnmadd_ps(n, Broadcast(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, Broadcast(-2.12194440e-4f), r);
  __m256 p = Broadcast(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, Broadcast(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, Broadcast(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, Broadcast(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, Broadcast(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, Broadcast(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, r, Broadcast(1));
  p = _mm256_fmadd_ps(p, r, Broadcast(1));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

// log(x) for normal x > 0.
inline __m256 Log(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  // Mantissa in [0.5, 1), then in [sqrt(1/2), sqrt(2)) less 1.
  __m256 e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(126)));
  __m256 m = _mm256_castsi256_ps(
      _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f000000)));
  const __m256 small = _mm256_cmp_ps(m, Broadcast(0.707106781186547524f), _CMP_LT_OQ);
  e = _mm256_sub_ps(e, _mm256_and_ps(small, Broadcast(1)));
  m = _mm256_sub_ps(_mm256_add_ps(m, _mm256_and_ps(small, m)), Broadcast(1));
  static constexpr float kTerms[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                     -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                     2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  __m256 p = Broadcast(kTerms[0]);
  for (int i = 1; i < 9; ++i) p = _mm256_fmadd_ps(p, m, Broadcast(kTerms[i]));
  const __m256 square = _mm256_mul_ps(m, m);
  __m256 tail = _mm256_mul_ps(_mm256_mul_ps(p, m), square);
  tail = _mm256_fmadd_ps(e, Broadcast(-2.12194440e-4f), tail);
  tail = _mm256_fnmadd_ps(Broadcast(0.5f), square, tail);
  return _mm256_fmadd_ps(e, Broadcast(0.693359375f), _mm256_add_ps(m, tail));
}

inline __m256 Tanh(__m256 x) {
  const __m256 sign = _mm256_and_ps(x, Broadcast(-0.0f));
  const __m256 magnitude = _mm256_andnot_ps(Broadcast(-0.0f), x);
  const __m256 square = _mm256_mul_ps(x, x);
  __m256 p = Broadcast(-5.70498872745e-3f);
  p = _mm256_fmadd_ps(p, square, Broadcast(2.06390887954e-2f));
  p = _mm256_fmadd_ps(p, square, Broadcast(-5.37397155531e-2f));
  p = _mm256_fmadd_ps(p, square, Broadcast(1.33314422036e-1f));
  p = _mm256_fmadd_ps(p, square, Broadcast(-3.33332819422e-1f));
  const __m256 near = _mm256_fmadd_ps(_mm256_mul_ps(p, square), x, x);
  // Beyond 9 the result is 1.
  const __m256 bounded = _mm256_min_ps(magnitude, Broadcast(10));
  const __m256 grown = Exp(_mm256_add_ps(bounded, bounded));
  const __m256 far = _mm256_sub_ps(Broadcast(1), _mm256_div_ps(Broadcast(2), _mm256_add_ps(grown, Broadcast(1))));
  return _mm256_blendv_ps(_mm256_or_ps(far, sign), near, _mm256_cmp_ps(magnitude, Broadcast(0.625f), _CMP_LT_OQ));
}

// x(score) of LogShare.
inline __m256 Exponent(__m256 score, const LogShare& log_share) {
  if (log_share.softcap > 0) {
    const __m256 bent = Tanh(_mm256_mul_ps(Broadcast(log_share.scale / log_share.softcap), score));
    return _mm256_sub_ps(_mm256_mul_ps(Broadcast(log_share.softcap), bent), Broadcast(log_share.origin));
  }
  return _mm256_mul_ps(Broadcast(log_share.scale), _mm256_sub_ps(score, Broadcast(log_share.origin)));
}

inline __m256 LoadUpTo8(const float* from, size_t count, float fill) {
  float padded[8];
  for (float& value : padded) value = fill;
  std::memcpy(padded, from, (count < 8 ? count : 8) * sizeof(float));
  return _mm256_loadu_ps(padded);
}

float MaxOf(const float* values, size_t count) {
  __m256 max = LoadUpTo8(values, count, values[0]);
  size_t t = 8;
  for (; t + 8 <= count; t += 8) max = _mm256_max_ps(max, _mm256_loadu_ps(values + t));
  if (t < count) max = _mm256_max_ps(max, LoadUpTo8(values + t, count - t, values[0]));
  float lanes[8];
  _mm256_storeu_ps(lanes, max);
  for (int i = 1; i < 8; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

// Sums of four terms, added up in float64: a million terms lose nothing.
double SumExp(const float* scores, size_t count, const LogShare& log_share, float* terms) {
  const auto term = [&](size_t at) {
    const __m256 eight = Exp(Exponent(_mm256_loadu_ps(scores + at), log_share));
    if (terms != nullptr) _mm256_storeu_ps(terms + at, eight);
    return eight;
  };
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  const auto add = [&](__m256 x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  };
  size_t t = 0;
  for (; t + 32 <= count; t += 32) {
    add(_mm256_add_ps(_mm256_add_ps(term(t), term(t + 8)), _mm256_add_ps(term(t + 16), term(t + 24))));
  }
  for (; t + 8 <= count; t += 8) add(term(t));
  double sums[4];
  _mm256_storeu_pd(sums, _mm256_add_pd(low, high));
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  if (t == count) return sum;
  float lanes[8];
  _mm256_storeu_ps(lanes, Exp(Exponent(LoadUpTo8(scores + t, count - t, 0), log_share)));
  if (terms != nullptr) std::memcpy(terms + t, lanes, (count - t) * sizeof(float));
  for (size_t i = 0; i < count - t; ++i) sum += lanes[i];
  return sum;
}

// Ranks of 8 tokens whose log shares are logs [heads].
inline __m256 RankOf(const __m256* logs, uint32_t heads, bool sum) {
  __m256 max = logs[0];
  for (uint32_t r = 1; r < heads; ++r) max = _mm256_max_ps(max, logs[r]);
  if (!sum) return max;
  __m256 total = _mm256_setzero_ps();
  for (uint32_t r = 0; r < heads; ++r) total = _mm256_add_ps(total, Exp(_mm256_sub_ps(logs[r], max)));
  return _mm256_add_ps(max, Log(total));
}

void GroupRanks(const GroupRankRun& run) {
  for (size_t t = 0; t < run.count; t += 8) {
    const size_t count = run.count - t < 8 ? run.count - t : 8;
    const auto log_share = [&](uint32_t r) {
      const float* scores = run.scores + r * run.stride + t;
      const __m256 eight = count == 8 ? _mm256_loadu_ps(scores) : LoadUpTo8(scores, count, scores[0]);
      return _mm256_sub_ps(Exponent(eight, run.log_share[r]), Broadcast(run.log_share[r].shift));
    };
    __m256 logs[kGroupHeadsMax];
    logs[0] = log_share(0);
    for (uint32_t r = 1; r < run.heads; ++r) logs[r] = log_share(r);
    const __m256 ranks = RankOf(logs, run.heads, run.sum);
    if (count == 8) {
      _mm256_storeu_ps(run.ranks + t, ranks);
    } else {
      float lanes[8];
      _mm256_storeu_ps(lanes, ranks);
      std::memcpy(run.ranks + t, lanes, count * sizeof(float));
    }
  }
}

// For each set of lanes their numbers, ascending, one a byte: a permutation that brings them to the front.
struct LaneLists {
  uint64_t at[256];
  constexpr LaneLists() : at{} {
    for (int mask = 0; mask < 256; ++mask) {
      int shift = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        at[mask] |= lane << shift;
        shift += 8;
      }
    }
  }
};
constexpr LaneLists kLaneLists;

inline __m256i LanesOf(unsigned mask) {
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLaneLists.at[mask])));
}

// The lowest `count` bits that are set.
inline unsigned LowestBits(unsigned mask, size_t count) {
  unsigned kept = 0;
  for (; mask != 0 && count > 0; mask &= mask - 1, --count) kept |= mask & (0u - mask);
  return kept;
}

// Eight results are stored at once; the entries past those taken lie in front of the next value, so inside the array.
size_t TakeAbove(const float* values, size_t count, float threshold, size_t ties, uint32_t* indices) {
  const __m256 limit = Broadcast(threshold);
  size_t taken = 0, t = 0;
  for (; t + 8 <= count; t += 8) {
    const __m256 eight = _mm256_loadu_ps(values + t);
    auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(eight, limit, _CMP_GE_OQ)));
    if (mask == 0) continue;
    const auto equal = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(eight, limit, _CMP_EQ_OQ)));
    if (equal != 0) {
      const unsigned kept = LowestBits(equal, ties);
      ties -= static_cast<size_t>(__builtin_popcount(kept));
      mask = (mask & ~equal) | kept;
    }
    const __m256i found = _mm256_add_epi32(LanesOf(mask), _mm256_set1_epi32(static_cast<int>(t)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + taken), found);
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
  const __m256 low = Broadcast(lower), high = Broadcast(upper);
  size_t count = 0, higher = 0, t = 0;
  for (; t + 8 <= values.size(); t += 8) {
    const __m256 eight = _mm256_loadu_ps(values.data() + t);
    const auto reach = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(eight, low, _CMP_GE_OQ)));
    const auto over = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(eight, high, _CMP_GT_OQ)));
    higher += static_cast<size_t>(__builtin_popcount(over));
    const unsigned mask = reach & ~over;
    if (mask == 0) continue;
    _mm256_storeu_ps(taken + count, _mm256_permutevar8x32_ps(eight, LanesOf(mask)));
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
