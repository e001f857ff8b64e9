// SPDX-License-Identifier: Apache-2.0
//
// The rotation against its definition: signs from SplitMix64 written out here, a Hadamard matrix by parity of index
// bits, in float64.

#include "kernels/rotation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "tests/testing/compare.h"
#include "tests/testing/random_kv.h"

namespace ctkvr {
namespace {

constexpr uint32_t kDims[] = {8, 16, 24, 40, 64, 72, 80, 96, 112, 120, 128, 192, 200, 248, 256};

std::vector<double> OracleBlocks(const std::vector<double>& x, const std::vector<uint32_t>& sizes) {
  std::vector<double> out(x.size());
  size_t begin = 0;
  for (uint32_t size : sizes) {
    for (uint32_t row = 0; row < size; ++row) {
      double sum = 0;
      for (uint32_t column = 0; column < size; ++column) {
        sum += (std::popcount(row & column) % 2 == 0 ? 1 : -1) * x[begin + column];
      }
      out[begin + row] = sum / std::sqrt(size);
    }
    begin += size;
  }
  return out;
}

std::vector<double> OracleRotate(const std::vector<float>& key, const std::vector<float>& signs) {
  const auto dim = static_cast<uint32_t>(key.size());
  std::vector<uint32_t> descending;
  for (uint32_t size = 1u << 31; size != 0; size >>= 1) {
    if (dim & size) descending.push_back(size);
  }
  const std::vector<uint32_t> ascending(descending.rbegin(), descending.rend());
  std::vector<double> x(key.begin(), key.end());
  for (uint32_t round = 0; round * dim < signs.size(); ++round) {
    for (uint32_t i = 0; i < dim; ++i) x[i] *= signs[round * dim + i];
    x = OracleBlocks(x, round == 0 ? descending : ascending);
  }
  return x;
}

std::vector<float> RandomVector(uint32_t dim, uint64_t salt) {
  std::mt19937_64 random = testing::MakeRandom(salt);
  std::normal_distribution<float> normal(1, 3);
  std::vector<float> x(dim);
  for (float& element : x) element = normal(random);
  return x;
}

TEST(RotationTest, SignsAreTheBitsOfSplitMix64) {
  // The first outputs of the published generator for seeds 0 and 1234567.
  for (const auto& [seed, words] :
       {std::pair<uint64_t, std::vector<uint64_t>>{0, {0xe220a8397b1dcdafull, 0x6e789e6aa1b965f4ull}},
        {1234567, {6457827717110365317ull, 3203168211198807973ull}}}) {
    const std::vector<float> signs = RotationSigns(128, seed);
    ASSERT_EQ(signs.size(), 128u);
    for (uint32_t i = 0; i < 128; ++i) {
      EXPECT_EQ(signs[i], (words[i / 64] >> (i % 64) & 1) != 0 ? -1.0f : 1.0f) << seed << " " << i;
    }
  }
}

TEST(RotationTest, SecondRoundGoesOnWhereTheFirstStopped) {
  const std::vector<float> two_rounds = RotationSigns(80, 42);
  ASSERT_EQ(two_rounds.size(), 160u);
  const std::vector<float> one_round = RotationSigns(256, 42);
  for (uint32_t i = 0; i < 160; ++i) EXPECT_EQ(two_rounds[i], one_round[i]) << i;
}

TEST(RotationTest, AgreesWithTheMatrixForEveryDimension) {
  SCOPED_TRACE(testing::TestSeed());
  for (uint32_t dim : kDims) {
    SCOPED_TRACE(dim);
    const std::vector<float> key = RandomVector(dim, dim);
    const std::vector<float> signs = RotationSigns(dim, 1000 + dim);
    testing::GuardedArray<float> x(dim);
    std::copy(key.begin(), key.end(), x.data());
    Rotate(x.data(), dim, signs.data());
    EXPECT_TRUE(x.IsUntouchedFrom(dim));
    const std::vector<double> expected = OracleRotate(key, signs);
    for (uint32_t i = 0; i < dim; ++i) EXPECT_TRUE(testing::IsWithin(x[i], expected[i], 1e-4)) << i;
  }
}

TEST(RotationTest, UnrotateBringsTheKeyBack) {
  SCOPED_TRACE(testing::TestSeed());
  for (uint32_t dim : kDims) {
    SCOPED_TRACE(dim);
    const std::vector<float> key = RandomVector(dim, dim);
    const std::vector<float> signs = RotationSigns(dim, 5);
    std::vector<float> x = key;
    Rotate(x.data(), dim, signs.data());
    EXPECT_NE(x, key);
    Unrotate(x.data(), dim, signs.data());
    for (uint32_t i = 0; i < dim; ++i) EXPECT_TRUE(testing::IsWithin(x[i], key[i], 1e-4)) << i;
  }
}

// What the rotation is for: one channel far out must not decide the code of the others, whatever the dimension.
TEST(RotationTest, OneChannelSpreadsOverManyDimensions) {
  for (uint32_t dim : kDims) {
    SCOPED_TRACE(dim);
    const bool one_block = dim == std::bit_floor(dim);
    for (uint32_t channel = 0; channel < dim; ++channel) {
      std::vector<float> x(dim, 0.0f);
      x[channel] = 1;
      Rotate(x.data(), dim, RotationSigns(dim, 17).data());
      const double even = 1 / std::sqrt(dim);
      double energy = 0;
      for (uint32_t i = 0; i < dim; ++i) {
        if (one_block) {
          EXPECT_TRUE(testing::IsWithin(std::fabs(x[i]), even, 1e-6)) << channel << " " << i;
        }
        EXPECT_LT(std::fabs(x[i]), 0.75) << channel << " " << i;
        energy += double{x[i]} * x[i];
      }
      EXPECT_TRUE(testing::IsWithin(energy, 1, 1e-5)) << channel;
    }
  }
}

}  // namespace
}  // namespace ctkvr
