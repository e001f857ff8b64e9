// SPDX-License-Identifier: Apache-2.0
//
// Seeded keys, values and queries for tests. Thread-safe: no shared state.

#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/base/dtype.h"

namespace ctkvr::testing {

// CTKVR_TEST_SEED, or a fixed number where that is not set. Tests show it with SCOPED_TRACE.
uint64_t TestSeed();

// A generator of its own for every use: the seed of the run and `salt`.
std::mt19937_64 MakeRandom(uint64_t salt);

enum class KvPattern {
  kNormal,     // independent normal numbers
  kClustered,  // tokens near one of 16 centres, with the large mean that real keys have
  kNeedle,     // normal keys, but queries look for one token each
  kTies,       // few distinct tokens, each many times
  kEqual,      // every token the same
  kZero,       // keys and queries all zero
  kLarge,      // elements of very different magnitudes, up to 1e4
};
inline constexpr KvPattern kAllKvPatterns[] = {KvPattern::kNormal, KvPattern::kClustered, KvPattern::kNeedle,
                                               KvPattern::kTies,   KvPattern::kEqual,     KvPattern::kZero,
                                               KvPattern::kLarge};
const char* KvPatternName(KvPattern pattern);

struct KvShape {
  size_t tokens = 0;
  size_t kv_heads = 1;
  size_t group_heads = 1;  // query heads a KV head
  size_t head_dim = 64;
  size_t value_dim = 64;
  size_t query_positions = 1;
};

struct RandomKv {
  std::vector<float> keys;     // [tokens, kv_heads, head_dim]
  std::vector<float> values;   // [tokens, kv_heads, value_dim]
  std::vector<float> queries;  // [query_positions, kv_heads * group_heads, head_dim]
};
RandomKv MakeRandomKv(const KvShape& shape, KvPattern pattern, uint64_t salt);

// Elements in `dtype`, and the float32 they then stand for.
std::vector<std::byte> ToBytes(const std::vector<float>& values, DType dtype);
std::vector<float> RoundedTo(const std::vector<float>& values, DType dtype);

}  // namespace ctkvr::testing
