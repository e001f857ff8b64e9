// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/random_kv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace ctkvr::testing {
namespace {

using Floats = std::vector<float>;

Floats NormalRow(std::mt19937_64& random, size_t count, float deviation = 1) {
  std::normal_distribution<float> normal(0, deviation);
  Floats row(count);
  for (float& element : row) element = normal(random);
  return row;
}

// One row for each token: drawn from `distinct` rows, each moved by noise of deviation `noise`, about `offset`.
Floats RowsNear(std::mt19937_64& random, size_t tokens, size_t dim, size_t distinct, float noise, float offset) {
  std::vector<Floats> centres;
  for (size_t i = 0; i < distinct; ++i) centres.push_back(NormalRow(random, dim));
  const Floats mean = NormalRow(random, dim, offset);
  Floats rows;
  for (size_t t = 0; t < tokens; ++t) {
    const Floats& centre = centres[random() % distinct];
    const Floats moved = NormalRow(random, dim, noise);
    for (size_t i = 0; i < dim; ++i) rows.push_back(centre[i] + (noise > 0 ? moved[i] : 0.0f) + mean[i]);
  }
  return rows;
}

Floats Keys(std::mt19937_64& random, size_t tokens, size_t dim, KvPattern pattern) {
  switch (pattern) {
    case KvPattern::kNormal:
    case KvPattern::kNeedle:
      return NormalRow(random, tokens * dim);
    case KvPattern::kClustered:
      return RowsNear(random, tokens, dim, 16, 0.3f, 4);
    case KvPattern::kTies:
      return RowsNear(random, tokens, dim, 5, 0, 1);
    case KvPattern::kEqual:
      return RowsNear(random, tokens, dim, 1, 0, 1);
    case KvPattern::kZero:
      return Floats(tokens * dim, 0.0f);
    case KvPattern::kLarge:
      break;
  }
  Floats rows = NormalRow(random, tokens * dim);
  for (float& element : rows) element = std::clamp(element * std::pow(10.0f, NormalRow(random, 1)[0]), -1e4f, 1e4f);
  return rows;
}

}  // namespace

uint64_t TestSeed() {
  const char* seed = std::getenv("CTKVR_TEST_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 0) : 20260829;
}

std::mt19937_64 MakeRandom(uint64_t salt) {
  std::seed_seq sequence{TestSeed() & 0xffffffffu, TestSeed() >> 32, salt & 0xffffffffu, salt >> 32};
  return std::mt19937_64(sequence);
}

const char* KvPatternName(KvPattern pattern) {
  switch (pattern) {
    case KvPattern::kNormal:
      return "Normal";
    case KvPattern::kClustered:
      return "Clustered";
    case KvPattern::kNeedle:
      return "Needle";
    case KvPattern::kTies:
      return "Ties";
    case KvPattern::kEqual:
      return "Equal";
    case KvPattern::kZero:
      return "Zero";
    case KvPattern::kLarge:
      return "Large";
  }
  return "?";
}

RandomKv MakeRandomKv(const KvShape& shape, KvPattern pattern, uint64_t salt) {
  std::mt19937_64 random = MakeRandom(salt);
  RandomKv kv;
  kv.keys.resize(shape.tokens * shape.kv_heads * shape.head_dim);
  kv.values = NormalRow(random, shape.tokens * shape.kv_heads * shape.value_dim);
  for (size_t h = 0; h < shape.kv_heads; ++h) {
    const Floats rows = Keys(random, shape.tokens, shape.head_dim, pattern);
    for (size_t t = 0; t < shape.tokens; ++t) {
      std::copy_n(rows.begin() + t * shape.head_dim, shape.head_dim,
                  kv.keys.begin() + (t * shape.kv_heads + h) * shape.head_dim);
    }
  }
  const size_t q_heads = shape.kv_heads * shape.group_heads;
  for (size_t q = 0; q < shape.query_positions * q_heads; ++q) {
    Floats query = pattern == KvPattern::kZero ? Floats(shape.head_dim, 0.0f) : NormalRow(random, shape.head_dim);
    if (pattern == KvPattern::kNeedle && shape.tokens > 0) {
      const size_t kv_head = q % q_heads / shape.group_heads, token = random() % shape.tokens;
      for (size_t i = 0; i < shape.head_dim; ++i) {
        query[i] = 2 * kv.keys[(token * shape.kv_heads + kv_head) * shape.head_dim + i] + 0.2f * query[i];
      }
    }
    kv.queries.insert(kv.queries.end(), query.begin(), query.end());
  }
  return kv;
}

std::vector<std::byte> ToBytes(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * DTypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) StoreElement(bytes.data(), dtype, i, values[i]);
  return bytes;
}

std::vector<float> RoundedTo(const std::vector<float>& values, DType dtype) {
  const std::vector<std::byte> bytes = ToBytes(values, dtype);
  std::vector<float> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) rounded[i] = LoadElement(bytes.data(), dtype, i);
  return rounded;
}

}  // namespace ctkvr::testing
