// SPDX-License-Identifier: Apache-2.0
//
// Proves the blocked inner products against the plain sum, at every border of blocks and groups of heads.
#include "client/cli/scores.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::cli {
namespace {

template <typename T>
void ExpectPlainSums(uint32_t tokens, uint32_t heads, uint32_t dim, double tolerance) {
  SCOPED_TRACE(::testing::Message() << "seed " << testing::TestSeed() << " tokens " << tokens << " heads " << heads);
  auto random = testing::MakeRandom(tokens * 100 + heads);
  std::normal_distribution<float> normal;
  std::vector<float> keys(size_t{tokens} * dim), queries(size_t{heads} * dim);
  for (auto* array : {&keys, &queries}) {
    for (float& x : *array) x = normal(random);
  }
  const KeyBlocks<T> blocks(keys, dim);
  ASSERT_EQ(blocks.tokens(), tokens);
  for (const uint32_t count : {1u, tokens / 2 + 1, tokens}) {
    std::vector<T> scores(heads * blocks.stride(), std::nan(""));
    blocks.Score(queries, count, scores);
    for (uint32_t h = 0; h < heads; ++h) {
      for (uint32_t t = 0; t < count; ++t) {
        double expected = 0;
        for (uint32_t i = 0; i < dim; ++i) expected += static_cast<double>(queries[h * dim + i]) * keys[t * dim + i];
        ASSERT_NEAR(scores[h * blocks.stride() + t], expected, tolerance) << t;
      }
    }
  }
}

TEST(Scores, BlockedSumsArePlainSums) {
  for (const uint32_t tokens : {1u, 15u, 16u, 17u, 100u}) {
    for (const uint32_t heads : {1u, 2u, 3u, 4u, 7u}) {
      ExpectPlainSums<float>(tokens, heads, 24, 1e-4);
      ExpectPlainSums<double>(tokens, heads, 24, 1e-12);
    }
  }
}

}  // namespace
}  // namespace ctkvr::cli
