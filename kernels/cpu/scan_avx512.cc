// SPDX-License-Identifier: Apache-2.0
//
// ScanKernels with AVX-512 (F, BW, DQ, VL, VBMI, VNNI) and GFNI. The methods are those of scan_avx2.cc, a page a
// register; the planes of one key are used as masks, or turned as codes_avx512.h says.

#include <cstring>

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/codes_avx512.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/softmax_avx512.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kPageBytesMax = kPageTokens * 2 * (kDimMax / 8);  // planes of a first pass

uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }

__m128i Load16(const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// ---- First pass ----------------------------------------------------------------------------------------------------

// Nibbles of a run: [2 * columns][64 tokens], a column being one byte of every token's planes.
struct Nibbles {
  alignas(64) uint8_t at[2 * 2 * (kDimMax / 8)][kPageTokens];
};

// 16 columns of 64 tokens: lane l of row i holds token 16 * l + i on the way in, of column i on the way out.
void TransposeBytes(__m512i* rows) {
  __m512i turned[16];
  for (int round = 0; round < 4; ++round) {
    const __m512i* from = round % 2 == 0 ? rows : turned;
    __m512i* to = round % 2 == 0 ? turned : rows;
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + 8]);
      to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + 8]);
    }
  }
}

// planes [64][columns], followed by readable bytes up to a multiple of 16 columns where columns < 16.
void TransposePlanes(const std::byte* planes, uint32_t columns, Nibbles& nibbles) {
  const __m512i low = _mm512_set1_epi8(15);
  for (uint32_t next = 0; next < columns; next += 16) {
    const uint32_t first = columns < 16 ? 0 : Least(next, columns - 16);
    const uint32_t count = Least(16, columns);
    __m512i rows[16];
    for (uint32_t i = 0; i < 16; ++i) {
      const std::byte* row = planes + i * size_t{columns} + first;
      const size_t step = 16 * size_t{columns};
      rows[i] = _mm512_castsi128_si512(Load16(row));
      rows[i] = _mm512_inserti32x4(rows[i], Load16(row + step), 1);
      rows[i] = _mm512_inserti32x4(rows[i], Load16(row + 2 * step), 2);
      rows[i] = _mm512_inserti32x4(rows[i], Load16(row + 3 * step), 3);
    }
    TransposeBytes(rows);
    for (uint32_t i = 0; i < count; ++i) {
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(rows[i], 4), low);
      _mm512_storeu_si512(nibbles.at[2 * (first + i)], _mm512_and_si512(rows[i], low));
      _mm512_storeu_si512(nibbles.at[2 * (first + i) + 1], high);
    }
  }
}

// Sums of 64 tokens in 16 bits: of the odd bytes, and of all as even + 256 * odd, modulo 2^16.
struct Sums64 {
  __m512i all = _mm512_setzero_si512();
  __m512i odd = _mm512_setzero_si512();

  void Add(__m512i bytes) {
    all = _mm512_add_epi16(all, bytes);
    odd = _mm512_add_epi16(odd, _mm512_srli_epi16(bytes, 8));
  }
  void Double() {
    all = _mm512_add_epi16(all, all);
    odd = _mm512_add_epi16(odd, odd);
  }
};

// For H heads; tables [H][D/4][16].
template <int H>
void SumTables(const ScanRun& run, const uint8_t* tables, const Nibbles& nibbles, Sums64* sums) {
  const uint32_t plane_bytes = run.head_dim / 8;
  Sums64 sum[H];
  const uint8_t* at = nibbles.at[0];
  for (uint32_t j = 0; j < run.first_planes; ++j) {
    for (int h = 0; j > 0 && h < H; ++h) sum[h].Double();
    for (uint32_t i = 0; i < plane_bytes; ++i, at += 2 * kPageTokens) {
      const __m512i even_tokens = _mm512_loadu_si512(at), odd_tokens = _mm512_loadu_si512(at + kPageTokens);
      for (int h = 0; h < H; ++h) {
        const auto* table = reinterpret_cast<const __m128i*>(tables + (size_t{8} * plane_bytes * h + 8 * i) * 4);
        const __m512i even = _mm512_broadcast_i32x4(_mm_load_si128(table));
        const __m512i odd = _mm512_broadcast_i32x4(_mm_load_si128(table + 1));
        sum[h].Add(_mm512_add_epi8(_mm512_shuffle_epi8(even, even_tokens), _mm512_shuffle_epi8(odd, odd_tokens)));
      }
    }
  }
  for (int h = 0; h < H; ++h) sums[h] = sum[h];
}

// Estimates of 64 tokens of head r; tokens 16 * l to 16 * l + 15 come from lane l.
void Estimate(const ScanRun& run, uint32_t r, const Sums64& sums, const float* f, float* estimates) {
  const __m512i even = _mm512_sub_epi16(sums.all, _mm512_slli_epi16(sums.odd, 8));
  alignas(64) uint16_t low[32], high[32];
  _mm512_storeu_si512(low, _mm512_unpacklo_epi16(even, sums.odd));
  _mm512_storeu_si512(high, _mm512_unpackhi_epi16(even, sums.odd));
  const __m512i offset = _mm512_set1_epi32(run.offset[r]);
  const __m512 scale = _mm512_set1_ps(run.scan_scale[r]), mean_dot = _mm512_set1_ps(run.mean_dot[r]);
  for (int lane = 0; lane < 4; ++lane) {
    const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(low + 8 * lane));
    const __m128i second = _mm_load_si128(reinterpret_cast<const __m128i*>(high + 8 * lane));
    const __m512i sum = _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
    const __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(sum, sum), offset));
    // Rounded after every step, as ops.h asks: no fused operation.
    const __m512 product = _mm512_mul_ps(_mm512_mul_ps(exact, scale), _mm512_loadu_ps(f + 16 * lane));
    _mm512_storeu_ps(estimates + 16 * lane, _mm512_add_ps(product, mean_dot));
  }
}

void WriteEstimates(const ScanRun& run, uint32_t r, const Sums64& sums, const float* f) {
  float* row = run.estimates + r * run.stride;
  if (run.tokens == kPageTokens) return Estimate(run, r, sums, f, row);
  float whole[kPageTokens];
  Estimate(run, r, sums, f, whole);
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
  for (uint32_t t = 0; t < kPageTokens; t += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 2 * t));
    _mm512_storeu_ps(f + t, _mm512_cvtph_ps(halves));
  }
  Nibbles nibbles;
  TransposePlanes(planes, columns, nibbles);
  Sums64 sums[4];
  for (uint32_t r = 0; r < run.heads; r += 4) {
    const uint8_t* tables = run.tables + size_t{r} * run.head_dim * 4;
    const uint32_t heads = Least(4, run.heads - r);
    switch (heads) {
      case 4:
        SumTables<4>(run, tables, nibbles, sums);
        break;
      case 3:
        SumTables<3>(run, tables, nibbles, sums);
        break;
      case 2:
        SumTables<2>(run, tables, nibbles, sums);
        break;
      default:
        SumTables<1>(run, tables, nibbles, sums);
        break;
    }
    for (uint32_t h = 0; h < heads; ++h) WriteEstimates(run, r + h, sums[h], f);
  }
}

// ---- Codes of one key ----------------------------------------------------------------------------------------------

// The upper `planes` bits of the codes of dimensions [dim, dim + 64); zeros past the end of the key.
__m512i CodesAt(const CodedKey& key, uint32_t planes, uint32_t dim) {
  const size_t plane_bytes = key.head_dim / 8, at = dim / 8;
  const size_t width = plane_bytes - at < 8 ? plane_bytes - at : 8;
  __m512i codes = _mm512_setzero_si512();
  for (uint32_t j = 0; j < planes; ++j) {
    const std::byte* plane =
        j < key.first_planes ? key.first + j * plane_bytes : key.rest + (j - key.first_planes) * plane_bytes;
    uint64_t bits = 0;
    if (width == 8) {
      std::memcpy(&bits, plane + at, 8);
    } else {
      std::memcpy(&bits, plane + at, width);
    }
    const __m512i weight = _mm512_set1_epi8(static_cast<char>(1u << (planes - 1 - j)));
    codes = _mm512_mask_add_epi8(codes, bits, codes, weight);
  }
  return codes;
}

void RefineToken(const CodedKey& key, const RefineQuery& query, int32_t* sums) {
  if (key.head_dim == kCodesDim) return RefineToken128(key, query, sums);
  const uint32_t padded = PaddedBytes(key.head_dim);
  __m512i codes[kDimMax / 64];
  for (uint32_t dim = 0; dim < padded; dim += 64) codes[dim / 64] = CodesAt(key, query.planes, dim);
  for (uint32_t r = 0; r < query.heads; ++r) {
    const int8_t* row = query.rows + size_t{r} * padded;
    __m512i sum = _mm512_setzero_si512();
    for (uint32_t dim = 0; dim < padded; dim += 64) {
      sum = _mm512_dpbusd_epi32(sum, codes[dim / 64], _mm512_loadu_si512(row + dim));
    }
    sums[r] = _mm512_reduce_add_epi32(sum);
  }
}

// ---- Decoding and inner products -----------------------------------------------------------------------------------

void DecodeCoded(const CodedKey& key, float* decoded) {
  const __m512i middle = _mm512_set1_epi8(static_cast<char>(1u << (key.planes - 1)));
  const uint32_t padded = PaddedFloats(key.head_dim);
  for (uint32_t dim = 0; dim < padded; dim += 64) {
    const uint32_t width = key.head_dim - dim;
    const __mmask64 valid = width >= 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    alignas(64) int8_t centred[64];
    _mm512_storeu_si512(centred, _mm512_maskz_sub_epi8(valid, CodesAt(key, key.planes, dim), middle));
    for (uint32_t i = 0; i < Least(64, padded - dim); i += 16) {
      const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(centred + i));
      _mm512_storeu_ps(decoded + dim + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen)));
    }
  }
}

void DecodeFloat(const std::byte* key, DType dtype, uint32_t head_dim, float* decoded) {
  for (uint32_t i = 0; i < head_dim; i += 16) {
    // Eight elements of the last sixteen are missing where head_dim is an odd multiple of 8.
    const __mmask16 valid = head_dim - i >= 16 ? 0xffff : 0x00ff;
    __m512 sixteen;
    if (dtype == DType::kF32) {
      sixteen = _mm512_maskz_loadu_ps(valid, key + 4 * size_t{i});
    } else {
      const __m256i halves = _mm256_maskz_loadu_epi16(valid, key + 2 * size_t{i});
      sixteen = dtype == DType::kF16 ? _mm512_cvtph_ps(halves)
                                     : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    _mm512_storeu_ps(decoded + i, sixteen);
  }
}

// T tokens by H heads in registers, so that a load serves several products.
template <int T, int H>
void DotsTile(const DotsRun& run, uint32_t token, uint32_t head) {
  const float* keys = run.keys + size_t{token} * run.padded_dim;
  const float* queries = run.queries + size_t{head} * run.padded_dim;
  __m512 sums[T][H];
  for (int t = 0; t < T; ++t) {
    for (int h = 0; h < H; ++h) sums[t][h] = _mm512_setzero_ps();
  }
  for (uint32_t i = 0; i < run.padded_dim; i += 16) {
    __m512 key[T];
    for (int t = 0; t < T; ++t) key[t] = _mm512_loadu_ps(keys + size_t{run.padded_dim} * t + i);
    for (int h = 0; h < H; ++h) {
      const __m512 query = _mm512_loadu_ps(queries + size_t{run.padded_dim} * h + i);
      for (int t = 0; t < T; ++t) sums[t][h] = _mm512_fmadd_ps(key[t], query, sums[t][h]);
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
  for (; token + 4 <= run.tokens; token += 4) DotsRow<4>(run, token);
  for (; token < run.tokens; ++token) DotsRow<1>(run, token);
}

// ---- Weighted sums -------------------------------------------------------------------------------------------------

// C registers of dimensions by H heads, so that a load and a weight serve several products.
template <int C, int H>
void WeightedTile(const WeightedRowsRun& run, uint32_t head, uint32_t dim) {
  const float* rows = run.rows + dim;
  const float* weights = run.weights + head * run.weight_stride;
  float* sums = run.sums + size_t{head} * run.padded_dim + dim;
  __m512 tile[C][H];
  for (int c = 0; c < C; ++c) {
    for (int h = 0; h < H; ++h) tile[c][h] = _mm512_loadu_ps(sums + size_t{run.padded_dim} * h + 16 * c);
  }
  for (uint32_t t = 0; t < run.tokens; ++t) {
    __m512 row[C];
    for (int c = 0; c < C; ++c) row[c] = _mm512_loadu_ps(rows + size_t{run.padded_dim} * t + 16 * c);
    for (int h = 0; h < H; ++h) {
      const __m512 weight = _mm512_set1_ps(weights[run.weight_stride * h + t]);
      for (int c = 0; c < C; ++c) tile[c][h] = _mm512_fmadd_ps(row[c], weight, tile[c][h]);
    }
  }
  for (int c = 0; c < C; ++c) {
    for (int h = 0; h < H; ++h) _mm512_storeu_ps(sums + size_t{run.padded_dim} * h + 16 * c, tile[c][h]);
  }
}

template <int H>
void WeightedHeads(const WeightedRowsRun& run, uint32_t head) {
  uint32_t dim = 0;
  for (; dim + 64 <= run.padded_dim; dim += 64) WeightedTile<4, H>(run, head, dim);
  for (; dim < run.padded_dim; dim += 16) WeightedTile<1, H>(run, head, dim);
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

const ScanKernels& Avx512ScanKernels() {
  static constexpr ScanKernels kKernels = {
      .scan_planes = ScanPlanes,
      .refine_token = RefineToken,
      .decode_coded = DecodeCoded,
      .decode_float = DecodeFloat,
      .dots = Dots,
      .code_dots = CodeDots,
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
