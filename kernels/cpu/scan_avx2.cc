// SPDX-License-Identifier: Apache-2.0
//
// ScanKernels with AVX2, FMA and F16C.
//
// The first pass looks up four dimensions at a time by byte shuffle, 32 tokens an instruction, after FAISS's fast scan
// (https://github.com/facebookresearch/faiss/wiki/Fast-accumulation-of-PQ-and-AQ-codes-(FastScan)); planes stay in the
// order of tokens and are transposed in registers.

#include <immintrin.h>

#include <cstring>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/softmax_avx2.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kPageBytesMax = kPageTokens * 2 * (kDimMax / 8);  // planes of a first pass

uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// ---- First pass ----------------------------------------------------------------------------------------------------

// Nibbles of a run: [2 * columns][64 tokens], a column being one byte of every token's planes.
struct Nibbles {
  alignas(32) uint8_t at[2 * 2 * (kDimMax / 8)][kPageTokens];
};

// 16 columns of 32 tokens: row i of the registers holds tokens i and 16 + i on the way in, column i on the way out.
// Unpacking registers i and i + 8 turns the number (register, byte) by one bit; four times exchange its halves.
void TransposeBytes(__m256i* rows) {
  __m256i turned[16];
  for (int round = 0; round < 4; ++round) {
    const __m256i* from = round % 2 == 0 ? rows : turned;
    __m256i* to = round % 2 == 0 ? turned : rows;
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + 8]);
      to[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + 8]);
    }
  }
}

// planes [64][columns], followed by readable bytes up to a multiple of 16 columns where columns < 16.
void TransposePlanes(const std::byte* planes, uint32_t columns, Nibbles& nibbles) {
  const __m256i low = _mm256_set1_epi8(15);
  for (uint32_t next = 0; next < columns; next += 16) {
    const uint32_t first = columns < 16 ? 0 : Least(next, columns - 16);
    const uint32_t count = Least(16, columns);
    for (uint32_t half = 0; half < kPageTokens; half += 32) {
      __m256i rows[16];
      for (uint32_t i = 0; i < 16; ++i) {
        const std::byte* row = planes + (half + i) * size_t{columns} + first;
        rows[i] = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(row + 16 * size_t{columns}),
                                      reinterpret_cast<const __m128i*>(row));
      }
      TransposeBytes(rows);
      for (uint32_t i = 0; i < count; ++i) {
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(rows[i], 4), low);
        _mm256_store_si256(reinterpret_cast<__m256i*>(nibbles.at[2 * (first + i)] + half),
                           _mm256_and_si256(rows[i], low));
        _mm256_store_si256(reinterpret_cast<__m256i*>(nibbles.at[2 * (first + i) + 1] + half), high);
      }
    }
  }
}

// Sums of 32 tokens in 16 bits: of the odd bytes, and of all as even + 256 * odd, modulo 2^16.
struct Sums32 {
  __m256i all = _mm256_setzero_si256();
  __m256i odd = _mm256_setzero_si256();

  void Add(__m256i bytes) {
    all = _mm256_add_epi16(all, bytes);
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(bytes, 8));
  }
  void Double() {
    all = _mm256_add_epi16(all, all);
    odd = _mm256_add_epi16(odd, odd);
  }
};

// Sums of 64 tokens for H heads; tables [H][D/4][16].
template <int H>
void SumTables(const ScanRun& run, const uint8_t* tables, const Nibbles& nibbles, Sums32 (*sums)[2]) {
  const uint32_t plane_bytes = run.head_dim / 8;
  Sums32 sum[H][2];
  const uint8_t* at = nibbles.at[0];
  for (uint32_t j = 0; j < run.first_planes; ++j) {
    for (int h = 0; j > 0 && h < H; ++h) sum[h][0].Double(), sum[h][1].Double();
    for (uint32_t i = 0; i < plane_bytes; ++i, at += 2 * kPageTokens) {
      const auto* tokens = reinterpret_cast<const __m256i*>(at);
      const __m256i even0 = _mm256_load_si256(tokens), even1 = _mm256_load_si256(tokens + 1);
      const __m256i odd0 = _mm256_load_si256(tokens + 2), odd1 = _mm256_load_si256(tokens + 3);
      for (int h = 0; h < H; ++h) {
        const auto* table = reinterpret_cast<const __m128i*>(tables + (size_t{8} * plane_bytes * h + 8 * i) * 4);
        const __m256i even = _mm256_broadcastsi128_si256(_mm_load_si128(table));
        const __m256i odd = _mm256_broadcastsi128_si256(_mm_load_si128(table + 1));
        sum[h][0].Add(_mm256_add_epi8(_mm256_shuffle_epi8(even, even0), _mm256_shuffle_epi8(odd, odd0)));
        sum[h][1].Add(_mm256_add_epi8(_mm256_shuffle_epi8(even, even1), _mm256_shuffle_epi8(odd, odd1)));
      }
    }
  }
  for (int h = 0; h < H; ++h) sums[h][0] = sum[h][0], sums[h][1] = sum[h][1];
}

// Estimates of 32 tokens of head r.
void Estimate(const ScanRun& run, uint32_t r, const Sums32& sums, const float* f, float* estimates) {
  const __m256i even = _mm256_sub_epi16(sums.all, _mm256_slli_epi16(sums.odd, 8));
  const __m256i low = _mm256_unpacklo_epi16(even, sums.odd), high = _mm256_unpackhi_epi16(even, sums.odd);
  const __m128i parts[4] = {_mm256_castsi256_si128(low), _mm256_castsi256_si128(high), _mm256_extracti128_si256(low, 1),
                            _mm256_extracti128_si256(high, 1)};
  const __m256i offset = _mm256_set1_epi32(run.offset[r]);
  const __m256 scale = _mm256_set1_ps(run.scan_scale[r]), mean_dot = _mm256_set1_ps(run.mean_dot[r]);
  for (int i = 0; i < 4; ++i) {
    const __m256i sum = _mm256_cvtepu16_epi32(parts[i]);
    const __m256 exact = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(sum, sum), offset));
    // Rounded after every step, as ops.h asks: no fused operation.
    const __m256 product = _mm256_mul_ps(_mm256_mul_ps(exact, scale), _mm256_loadu_ps(f + 8 * i));
    _mm256_storeu_ps(estimates + 8 * i, _mm256_add_ps(product, mean_dot));
  }
}

void WriteEstimates(const ScanRun& run, uint32_t r, const Sums32* sums, const float* f) {
  float* row = run.estimates + r * run.stride;
  if (run.tokens == kPageTokens) {
    Estimate(run, r, sums[0], f, row);
    Estimate(run, r, sums[1], f + 32, row + 32);
    return;
  }
  float whole[kPageTokens];
  Estimate(run, r, sums[0], f, whole);
  Estimate(run, r, sums[1], f + 32, whole + 32);
  std::memcpy(row, whole, run.tokens * sizeof(float));
}

void ScanPlanes(const ScanRun& run) {
  const uint32_t columns = run.first_planes * run.head_dim / 8;
  const std::byte* planes = run.planes;
  const std::byte* scales = run.sketch_scales;
  std::byte plane_copy[kPageBytesMax + 16], scale_copy[2 * kPageTokens];
  if (run.tokens < kPageTokens || columns < 16) {
    std::memset(plane_copy + size_t{run.tokens} * columns, 0, size_t{kPageTokens - run.tokens} * columns + 16);
    std::memcpy(plane_copy, planes, size_t{run.tokens} * columns);
    planes = plane_copy;
  }
  if (run.tokens < kPageTokens) {
    std::memset(scale_copy, 0, sizeof(scale_copy));
    std::memcpy(scale_copy, scales, 2 * size_t{run.tokens});
    scales = scale_copy;
  }
  float f[kPageTokens];
  for (uint32_t t = 0; t < kPageTokens; t += 8) {
    _mm256_storeu_ps(f + t, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 2 * t))));
  }
  Nibbles nibbles;
  TransposePlanes(planes, columns, nibbles);
  Sums32 sums[2][2];
  for (uint32_t r = 0; r < run.heads; r += 2) {
    const uint8_t* tables = run.tables + size_t{r} * run.head_dim * 4;
    const bool two = r + 1 < run.heads;
    two ? SumTables<2>(run, tables, nibbles, sums) : SumTables<1>(run, tables, nibbles, sums);
    WriteEstimates(run, r, sums[0], f);
    if (two) WriteEstimates(run, r + 1, sums[1], f);
  }
}

// ---- Codes of one key ----------------------------------------------------------------------------------------------

__m128i Load16(const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// `count` < 16 bytes, zeros above.
__m128i LoadUpTo16(const std::byte* from, uint32_t count) {
  uint64_t low = 0, high = 0;
  if (count >= 8) {
    std::memcpy(&low, from, 8);
    if (count > 8) {
      std::memcpy(&high, from + count - 8, 8);
      high >>= 8 * (16 - count);
    }
  } else {
    for (uint32_t i = 0; i < count; ++i) low |= static_cast<uint64_t>(from[i]) << (8 * i);
  }
  return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}

// In each 64 bits: bit j of byte i becomes bit i of byte j.
__m256i TransposeBits(__m256i x) {
  const auto exchange = [&x](int64_t mask, int shift) {
    const __m256i moved = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, shift)), _mm256_set1_epi64x(mask));
    x = _mm256_xor_si256(x, _mm256_xor_si256(moved, _mm256_slli_epi64(moved, shift)));
  };
  exchange(0x00aa00aa00aa00aa, 7);
  exchange(0x0000cccc0000cccc, 14);
  exchange(0x00000000f0f0f0f0, 28);
  return x;
}

// Planes as bits [8][<= 16 bytes], the least significant first, to codes [128].
void CodesFromBits(const __m128i* bits, uint8_t* codes) {
  __m128i pairs[4][2], fours[2][4];
  for (int i = 0; i < 4; ++i) {
    pairs[i][0] = _mm_unpacklo_epi8(bits[2 * i], bits[2 * i + 1]);
    pairs[i][1] = _mm_unpackhi_epi8(bits[2 * i], bits[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    for (int half = 0; half < 2; ++half) {
      fours[i][2 * half] = _mm_unpacklo_epi16(pairs[2 * i][half], pairs[2 * i + 1][half]);
      fours[i][2 * half + 1] = _mm_unpackhi_epi16(pairs[2 * i][half], pairs[2 * i + 1][half]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const __m256i eights =
        _mm256_set_m128i(_mm_unpackhi_epi32(fours[0][i], fours[1][i]), _mm_unpacklo_epi32(fours[0][i], fours[1][i]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes) + i, TransposeBits(eights));
  }
}

// The same of at most four planes, in half the work: dimensions 64 to 127 go through as the upper four bits of
// dimensions 0 to 63.
void CodesFromFourBits(const __m128i* bits, uint8_t* codes) {
  const __m128i low01 = _mm_unpacklo_epi8(bits[0], bits[1]), low23 = _mm_unpacklo_epi8(bits[2], bits[3]);
  const __m128i high01 = _mm_unpackhi_epi8(bits[0], bits[1]), high23 = _mm_unpackhi_epi8(bits[2], bits[3]);
  const __m128i low[2] = {_mm_unpacklo_epi16(low01, low23), _mm_unpackhi_epi16(low01, low23)};
  const __m128i high[2] = {_mm_unpacklo_epi16(high01, high23), _mm_unpackhi_epi16(high01, high23)};
  const __m256i four = _mm256_set1_epi8(15);
  for (int i = 0; i < 2; ++i) {
    const __m256i both =
        TransposeBits(_mm256_set_m128i(_mm_unpackhi_epi32(low[i], high[i]), _mm_unpacklo_epi32(low[i], high[i])));
    auto* to = reinterpret_cast<__m256i*>(codes) + i;
    _mm256_storeu_si256(to, _mm256_and_si256(both, four));
    _mm256_storeu_si256(to + 2, _mm256_and_si256(_mm256_srli_epi16(both, 4), four));
  }
}

// The upper kPlanes bits of each code. codes [D rounded up to 128]; past D zeros, or untouched.
template <int kPlanes>
void UnpackPlanes(const CodedKey& key, uint8_t* codes) {
  const uint32_t plane_bytes = key.head_dim / 8;
  const uint32_t width = Least(16, plane_bytes);
  // Plane j of all is plane j of `first`, or plane j of this.
  const std::byte* rest = key.rest - size_t{key.first_planes} * plane_bytes;
  for (uint32_t next = 0; next < plane_bytes; next += 16) {
    // The last stretch may overlap the one before.
    const uint32_t at = Least(next, plane_bytes - width);
    __m128i bits[8];
    for (int i = 0; i < 8; ++i) {
      const uint32_t j = static_cast<uint32_t>(kPlanes - 1 - i);
      const std::byte* plane = (j < key.first_planes ? key.first : rest) + size_t{j} * plane_bytes + at;
      bits[i] = i >= kPlanes ? _mm_setzero_si128() : width == 16 ? Load16(plane) : LoadUpTo16(plane, width);
    }
    kPlanes <= 4 ? CodesFromFourBits(bits, codes + size_t{8} * at) : CodesFromBits(bits, codes + size_t{8} * at);
  }
}

// ---- Second pass ---------------------------------------------------------------------------------------------------

// Sums of four registers of 8 lanes, in order.
__m128i SumLanes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

// Codes of kPlanes bits with a query row. A product of two neighbours is at most 2 * (2^kPlanes - 1) * kRefineQueryMax;
// kTogether of them fit 16 bits. Codes of 8 bits go in two steps.
template <int kPlanes>
__m256i SumProducts(const uint8_t* codes, const int8_t* row, uint32_t padded_dim) {
  constexpr uint32_t kTogether = kPlanes <= 4 ? 8 : kPlanes == 5 ? 4 : kPlanes == 6 ? 2 : 1;
  static_assert(kPlanes == 8 || kTogether * 2 * ((1 << kPlanes) - 1) * kRefineQueryMax <= 32767);
  const __m256i one8 = _mm256_set1_epi8(1), low7 = _mm256_set1_epi8(127);
  __m256i sum = _mm256_setzero_si256();
  for (uint32_t i = 0; i < padded_dim;) {
    __m256i products = _mm256_setzero_si256();
    for (uint32_t n = 0; n < kTogether && i < padded_dim; ++n, i += 32) {
      const __m256i code = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
      const __m256i query = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i));
      if (kPlanes == 8) {
        const __m256i upper = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(code, 1), low7), query);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(upper, _mm256_set1_epi16(2)));
      }
      const __m256i rest = kPlanes == 8 ? _mm256_and_si256(code, one8) : code;
      products = _mm256_add_epi16(products, _mm256_maddubs_epi16(rest, query));
    }
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  return sum;
}

template <int kPlanes>
void RefinePlanes(const CodedKey& key, const RefineQuery& query, int32_t* sums) {
  alignas(32) uint8_t codes[kDimMax] = {};
  UnpackPlanes<kPlanes>(key, codes);
  const uint32_t padded = PaddedBytes(key.head_dim);
  for (uint32_t r = 0; r < query.heads; r += 4) {
    __m256i four[4];
    for (uint32_t n = 0; n < 4; ++n) {
      const uint32_t row = Least(r + n, query.heads - 1);
      four[n] = SumProducts<kPlanes>(codes, query.rows + size_t{row} * padded, padded);
    }
    const __m128i stored = SumLanes(four[0], four[1], four[2], four[3]);
    if (query.heads - r >= 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + r), stored);
    } else {
      int32_t lanes[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), stored);
      std::memcpy(sums + r, lanes, (query.heads - r) * sizeof(int32_t));
    }
  }
}

void RefineToken(const CodedKey& key, const RefineQuery& query, int32_t* sums) {
  switch (query.planes) {
    case 1:
      return RefinePlanes<1>(key, query, sums);
    case 2:
      return RefinePlanes<2>(key, query, sums);
    case 3:
      return RefinePlanes<3>(key, query, sums);
    case 4:
      return RefinePlanes<4>(key, query, sums);
    case 5:
      return RefinePlanes<5>(key, query, sums);
    case 6:
      return RefinePlanes<6>(key, query, sums);
    case 7:
      return RefinePlanes<7>(key, query, sums);
    case 8:
      return RefinePlanes<8>(key, query, sums);
  }
}

// ---- Decoding and inner products -----------------------------------------------------------------------------------

void DecodeCoded(const CodedKey& key, float* decoded) {
  alignas(32) uint8_t codes[kDimMax];
  key.planes == 6 ? UnpackPlanes<6>(key, codes) : UnpackPlanes<8>(key, codes);
  const __m256i middle = _mm256_set1_epi32(1 << (key.planes - 1));
  for (uint32_t i = 0; i < key.head_dim; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    _mm256_storeu_ps(decoded + i, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, middle)));
  }
  if (key.head_dim % kFloatPad != 0) _mm256_storeu_ps(decoded + key.head_dim, _mm256_setzero_ps());
}

void DecodeFloat(const std::byte* key, DType dtype, uint32_t head_dim, float* decoded) {
  for (uint32_t i = 0; i < head_dim; i += 8) {
    __m256 eight;
    if (dtype == DType::kF32) {
      eight = _mm256_loadu_ps(reinterpret_cast<const float*>(key) + i);
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key + 2 * size_t{i}));
      eight = dtype == DType::kF16 ? _mm256_cvtph_ps(halves)
                                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    _mm256_storeu_ps(decoded + i, eight);
  }
  if (head_dim % kFloatPad != 0) _mm256_storeu_ps(decoded + head_dim, _mm256_setzero_ps());
}

// Sums of the lanes of four registers, in order.
__m128 SumLanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// T tokens by H heads in registers, so that a load serves several products.
template <int T, int H>
void DotsTile(const DotsRun& run, uint32_t token, uint32_t head) {
  const float* keys = run.keys + size_t{token} * run.padded_dim;
  const float* queries = run.queries + size_t{head} * run.padded_dim;
  __m256 sums[T][H];
  for (int t = 0; t < T; ++t) {
    for (int h = 0; h < H; ++h) sums[t][h] = _mm256_setzero_ps();
  }
  for (uint32_t i = 0; i < run.padded_dim; i += 8) {
    __m256 key[T];
    for (int t = 0; t < T; ++t) key[t] = _mm256_loadu_ps(keys + size_t{run.padded_dim} * t + i);
    for (int h = 0; h < H; ++h) {
      const __m256 query = _mm256_loadu_ps(queries + size_t{run.padded_dim} * h + i);
      for (int t = 0; t < T; ++t) sums[t][h] = _mm256_fmadd_ps(key[t], query, sums[t][h]);
    }
  }
  for (int t = 0; t < T; ++t) {
    // Fewer than four heads repeat the last.
    float four[4];
    _mm_storeu_ps(four, SumLanes(sums[t][0], sums[t][H > 1 ? 1 : 0], sums[t][H > 2 ? 2 : H - 1], sums[t][H - 1]));
    for (int h = 0; h < H; ++h) run.dots[(head + h) * run.stride + token + t] = four[h];
  }
}

template <int T>
void DotsRow(const DotsRun& run, uint32_t token) {
  uint32_t head = 0;
  for (; head + 4 <= run.heads; head += 4) DotsTile<T, 4>(run, token, head);
  switch (run.heads - head) {
    case 3:
      return DotsTile<T, 3>(run, token, head);
    case 2:
      return DotsTile<T, 2>(run, token, head);
    case 1:
      return DotsTile<T, 1>(run, token, head);
  }
}

void Dots(const DotsRun& run) {
  uint32_t token = 0;
  for (; token + 2 <= run.tokens; token += 2) DotsRow<2>(run, token);
  if (token < run.tokens) DotsRow<1>(run, token);
}

// ---- Weighted sums -------------------------------------------------------------------------------------------------

// C registers of dimensions by H heads, so that a load and a weight serve several products.
template <int C, int H>
void WeightedTile(const WeightedRowsRun& run, uint32_t head, uint32_t dim) {
  const float* rows = run.rows + dim;
  const float* weights = run.weights + head * run.weight_stride;
  float* sums = run.sums + size_t{head} * run.padded_dim + dim;
  __m256 tile[C][H];
  for (int c = 0; c < C; ++c) {
    for (int h = 0; h < H; ++h) tile[c][h] = _mm256_loadu_ps(sums + size_t{run.padded_dim} * h + 8 * c);
  }
  for (uint32_t t = 0; t < run.tokens; ++t) {
    __m256 row[C];
    for (int c = 0; c < C; ++c) row[c] = _mm256_loadu_ps(rows + size_t{run.padded_dim} * t + 8 * c);
    for (int h = 0; h < H; ++h) {
      const __m256 weight = _mm256_set1_ps(weights[run.weight_stride * h + t]);
      for (int c = 0; c < C; ++c) tile[c][h] = _mm256_fmadd_ps(row[c], weight, tile[c][h]);
    }
  }
  for (int c = 0; c < C; ++c) {
    for (int h = 0; h < H; ++h) _mm256_storeu_ps(sums + size_t{run.padded_dim} * h + 8 * c, tile[c][h]);
  }
}

template <int H>
void WeightedHeads(const WeightedRowsRun& run, uint32_t head) {
  for (uint32_t dim = 0; dim < run.padded_dim; dim += 16) WeightedTile<2, H>(run, head, dim);
}

void AddWeighted(const WeightedRowsRun& run) {
  uint32_t head = 0;
  for (; head + 4 <= run.heads; head += 4) WeightedHeads<4>(run, head);
  switch (run.heads - head) {
    case 3:
      return WeightedHeads<3>(run, head);
    case 2:
      return WeightedHeads<2>(run, head);
    case 1:
      return WeightedHeads<1>(run, head);
  }
}

}  // namespace

const ScanKernels& Avx2ScanKernels() {
  static constexpr ScanKernels kKernels = {
      .scan_planes = ScanPlanes,
      .refine_token = RefineToken,
      .decode_coded = DecodeCoded,
      .decode_float = DecodeFloat,
      .dots = Dots,
      .code_dots = [](const CodeDotsRun&) { return false; },
      .max_of = MaxOf,
      .sum_exp = SumExp,
      .add_weighted = AddWeighted,
      .group_ranks = GroupRanks,
      .take_above = TakeAbove,
      .take_between = TakeBetween,
  };
  return kKernels;
}

}  // namespace ctkvr::cpu
