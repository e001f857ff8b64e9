// SPDX-License-Identifier: Apache-2.0
//
// For scan_avx512.cc alone: keys of 128 dimensions out of their bit planes, 64 codes at a time. Bytes of the planes are
// put so that each 8 by 8 bits hold eight dimensions, and one affine transformation over GF(2), whose matrix they are,
// turns rows into columns. Thread-safe: pure functions.

#pragma once

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kCodesDim = 128;
constexpr uint32_t kCodesPlaneBytes = kCodesDim / 8;

// Which byte of planes 0 to 7 goes where: byte m of every 8 is of plane m - down, zero where that is none.
struct CodeOrder {
  __m512i order[2];
  __mmask64 some;
};

// The upper bits of codes, `planes` of them, moved down to bit 0; or all left at the top of a byte where !to_bottom.
inline CodeOrder MakeCodeOrder(uint32_t planes, bool to_bottom) {
  const __m512i first =
      _mm512_setr_epi64(0x7060504030201000, 0x7161514131211101, 0x7262524232221202, 0x7363534333231303,
                        0x7464544434241404, 0x7565554535251505, 0x7666564636261606, 0x7767574737271707);
  const uint32_t down = to_bottom ? 8 - planes : 0;
  const uint64_t byte_mask = (0xffu >> (8 - planes)) << down;
  const __m512i order = _mm512_sub_epi8(first, _mm512_set1_epi8(static_cast<char>(kCodesPlaneBytes * down)));
  return {.order = {order, _mm512_add_epi8(order, _mm512_set1_epi8(8))}, .some = byte_mask * 0x0101010101010101u};
}

// kFlip is xored to every code.
template <int kFlip>
inline void LoadCodes128(const CodedKey& key, uint32_t planes, const CodeOrder& order, __m512i* codes) {
  const auto from_first = static_cast<__mmask16>((1u << (4 * key.first_planes)) - 1);
  const std::byte* rest = key.rest - key.first_planes * kCodesPlaneBytes;  // where plane 0 would be
  const __m512i upper = _mm512_or_si512(_mm512_maskz_loadu_epi32(from_first, key.first),
                                        _mm512_maskz_loadu_epi32(static_cast<__mmask16>(~from_first), rest));
  __m512i turned[2];
  if (planes <= 4) {
    for (int half = 0; half < 2; ++half) {
      turned[half] = _mm512_maskz_permutexvar_epi8(order.some, order.order[half], upper);
    }
  } else {
    const auto last = static_cast<__mmask16>((1u << (4 * (planes - 4))) - 1);
    const __m512i lower = _mm512_maskz_loadu_epi32(last, rest + 4 * kCodesPlaneBytes);
    for (int half = 0; half < 2; ++half) {
      turned[half] = _mm512_maskz_permutex2var_epi8(order.some, upper, order.order[half], lower);
    }
  }
  const __m512i columns = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201u));
  for (int half = 0; half < 2; ++half) {
    codes[half] = _mm512_gf2p8affine_epi64_epi8(columns, turned[half], kFlip);
  }
}

// Sums of the lanes of four registers, in order; SumLanes below the same of floats.
inline __m128i SumLanes32(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// refine_token of one key of 128 dimensions.
inline void RefineToken128(const CodedKey& key, const RefineQuery& query, int32_t* sums) {
  __m512i codes[2];
  LoadCodes128<0>(key, query.planes, MakeCodeOrder(query.planes, true), codes);
  for (uint32_t first = 0; first < query.heads; first += 4) {
    __m512i sum[4];
    for (uint32_t n = 0; n < 4; ++n) {
      const uint32_t r = first + n < query.heads ? first + n : query.heads - 1;  // repeats the last
      const int8_t* row = query.rows + size_t{r} * kCodesDim;
      sum[n] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], _mm512_loadu_si512(row));
      sum[n] = _mm512_dpbusd_epi32(sum[n], codes[1], _mm512_loadu_si512(row + 64));
    }
    alignas(16) int32_t four[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(four), SumLanes32(sum[0], sum[1], sum[2], sum[3]));
    for (uint32_t n = 0; n < 4 && first + n < query.heads; ++n) sums[first + n] = four[n];
  }
}

inline __m128 SumLanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// T keys by H heads in registers. Codes become floats as the top bytes of 32-bit integers, 2^24 times too large.
template <int T, int H>
inline void CodeDotsTile(const CodeDotsRun& run, const CodeOrder& order, uint32_t token, uint32_t head) {
  const float* queries = run.queries + size_t{head} * kCodesDim;
  const uint32_t planes = run.keys[token].planes;
  __m512i codes[T][2];
  for (int t = 0; t < T; ++t) LoadCodes128<0x80>(run.keys[token + t], planes, order, codes[t]);
  __m512 sums[T][H];
  for (int t = 0; t < T; ++t) {
    for (int h = 0; h < H; ++h) sums[t][h] = _mm512_setzero_ps();
  }
  for (int i = 0; i < 8; ++i) {
    const __m512i to_top =
        _mm512_add_epi8(_mm512_set1_epi8(static_cast<char>(16 * (i % 4))),
                        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 24));
    __m512 key[T];
    for (int t = 0; t < T; ++t) {
      const __m512i top = _mm512_maskz_permutexvar_epi8(0x8888888888888888u, to_top, codes[t][i / 4]);
      key[t] = _mm512_cvtepi32_ps(top);
    }
    for (int h = 0; h < H; ++h) {
      const __m512 query = _mm512_loadu_ps(queries + size_t{kCodesDim} * h + 16 * i);
      for (int t = 0; t < T; ++t) sums[t][h] = _mm512_fmadd_ps(key[t], query, sums[t][h]);
    }
  }
  const __m128 unit = _mm_set1_ps(planes == 8 ? 0x1p-24f : 0x1p-26f);
  for (int t = 0; t < T; ++t) {
    // Fewer than four heads repeat the last.
    float four[4];
    _mm_storeu_ps(four, _mm_mul_ps(unit, SumLanes(sums[t][0], sums[t][H > 1 ? 1 : 0], sums[t][H > 2 ? 2 : H - 1],
                                                  sums[t][H - 1])));
    for (int h = 0; h < H; ++h) run.dots[(head + h) * run.stride + token + t] = four[h];
  }
}

template <int T>
inline void CodeDotsRow(const CodeDotsRun& run, const CodeOrder& order, uint32_t token) {
  uint32_t head = 0;
  for (; head + 4 <= run.heads; head += 4) CodeDotsTile<T, 4>(run, order, token, head);
  switch (run.heads - head) {
    case 3:
      return CodeDotsTile<T, 3>(run, order, token, head);
    case 2:
      return CodeDotsTile<T, 2>(run, order, token, head);
    case 1:
      return CodeDotsTile<T, 1>(run, order, token, head);
  }
}

bool CodeDots(const CodeDotsRun& run) {
  if (run.padded_dim != kCodesDim || run.keys[0].head_dim != kCodesDim) return false;
  const CodeOrder order = MakeCodeOrder(run.keys[0].planes, false);
  uint32_t token = 0;
  for (; token + 2 <= run.tokens; token += 2) CodeDotsRow<2>(run, order, token);
  for (; token < run.tokens; ++token) CodeDotsRow<1>(run, order, token);
  return true;
}

}  // namespace
}  // namespace ctkvr::cpu
