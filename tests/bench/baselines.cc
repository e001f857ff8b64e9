// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/baselines.h"

#include <fp16.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

namespace ctkvr::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

__attribute__((target("avx2,fma,f16c"))) inline __m256 LoadF16(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

__attribute__((target("avx2,fma,f16c"))) inline float Sum(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Sixteen dimensions at a time, two sums a head so that additions do not wait for each other.
template <size_t kHeads>
__attribute__((target("avx2,fma,f16c"))) void ScanAvx2(const uint16_t* keys, size_t tokens, size_t head_dim,
                                                       const float* queries, float* scores) {
  for (size_t t = 0; t < tokens; ++t) {
    const uint16_t* key = keys + t * head_dim;
    __m256 even[kHeads] = {};
    __m256 odd[kHeads] = {};
    for (size_t i = 0; i < head_dim; i += 16) {
      const __m256 low = LoadF16(key + i);
      const __m256 high = LoadF16(key + i + 8);
#pragma GCC unroll 4
      for (size_t r = 0; r < kHeads; ++r) {
        const float* query = queries + r * head_dim + i;
        even[r] = _mm256_fmadd_ps(_mm256_loadu_ps(query), low, even[r]);
        odd[r] = _mm256_fmadd_ps(_mm256_loadu_ps(query + 8), high, odd[r]);
      }
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < kHeads; ++r) scores[r * tokens + t] = Sum(_mm256_add_ps(even[r], odd[r]));
  }
}

void ScanPortable(const uint16_t* keys, size_t tokens, size_t head_dim, const float* queries, size_t heads,
                  float* scores) {
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t r = 0; r < heads; ++r) {
      float sum = 0;
      for (size_t i = 0; i < head_dim; ++i) {
        sum += queries[r * head_dim + i] * fp16_ieee_to_fp32_value(keys[t * head_dim + i]);
      }
      scores[r * tokens + t] = sum;
    }
  }
}

}  // namespace

BigBuffer::BigBuffer(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  data_ = static_cast<std::byte*>(std::aligned_alloc(kHugePage, bytes_));
  if (data_ == nullptr) std::abort();
  madvise(data_, bytes_, MADV_HUGEPAGE);
  std::memset(data_, 1, bytes_);
}

BigBuffer::~BigBuffer() { std::free(data_); }

uint64_t PlainRead(const std::byte* data, size_t bytes) {
  uint64_t sums[8] = {};
  for (size_t at = 0; at + 64 <= bytes; at += 64) {
    uint64_t words[8];
    std::memcpy(words, data + at, 64);
    for (int i = 0; i < 8; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

void PlainScanF16(const uint16_t* keys, size_t tokens, size_t head_dim, const float* queries, size_t heads,
                  float* scores) {
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!has_avx2) return ScanPortable(keys, tokens, head_dim, queries, heads, scores);
  if (heads == 4) return ScanAvx2<4>(keys, tokens, head_dim, queries, scores);
  ScanAvx2<1>(keys, tokens, head_dim, queries, scores);
}

void FillNormalF16(uint64_t seed, uint16_t* to, size_t count) {
  static const auto* const row = [] {
    auto* numbers = new std::vector<uint16_t>(1048583);  // a prime: rows of head_dim never fall on the same place
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (uint16_t& number : *numbers) number = fp16_ieee_from_fp32_value(normal(random));
    return numbers;
  }();
  size_t at = static_cast<size_t>(seed * 7919 % row->size());
  for (size_t i = 0; i < count; ++i) {
    to[i] = (*row)[at];
    if (++at == row->size()) at = 0;
  }
}

}  // namespace ctkvr::bench
