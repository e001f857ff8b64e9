// SPDX-License-Identifier: Apache-2.0
//
// The loops of ScanKernels that only selections use, on every instruction set against float64: their stated errors, and
// that a value's result does not depend on where it stands.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

using cpu::LogShare;

class ScanKernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  const cpu::ScanKernels& scan() { return *KernelsByName(GetParam())->scan; }

  std::vector<float> Ranks(const std::vector<float>& scores, uint32_t heads, const std::vector<LogShare>& log_share,
                           bool sum) {
    const size_t count = scores.size() / heads;
    GuardedArray<float> ranks(count, 4);
    scan().group_ranks({.scores = scores.data(),
                        .stride = count,
                        .heads = heads,
                        .count = count,
                        .log_share = log_share.data(),
                        .sum = sum,
                        .ranks = ranks.data()});
    EXPECT_TRUE(ranks.IsUntouchedFrom(count));
    return {ranks.data(), ranks.data() + count};
  }
};

TEST_P(ScanKernelsTest, SumsOfExponentialsKeepTheirError) {
  for (const size_t count : {1u, 7u, 8u, 9u, 15u, 16u, 17u, 511u, 512u, 513u, 5000u}) {
    const std::vector<float> scores = RandomFloats(count, count);
    for (const float scale : {0.001f, 1.0f, 30.0f}) {
      const LogShare log_share = {.scale = scale, .origin = *std::max_element(scores.begin(), scores.end())};
      // The exponent is rounded to float32 before its exponential is taken.
      const double bound = 4e-7 + std::ldexp(scale * 8, -23);
      GuardedArray<float> terms(count, 4);
      const double sum = scan().sum_exp(scores.data(), count, log_share, terms.data());
      double expected = 0;
      for (size_t t = 0; t < count; ++t) {
        const double term = std::exp(double{scale} * (scores[t] - log_share.origin));
        ASSERT_TRUE(IsWithin(terms[t], term, bound * term + 1e-37)) << t << " of " << count;
        expected += term;
      }
      EXPECT_TRUE(IsWithin(sum, expected, bound * expected)) << count;
      EXPECT_EQ(scan().sum_exp(scores.data(), count, log_share, nullptr), sum) << count;
      EXPECT_TRUE(terms.IsUntouchedFrom(count));
    }
  }
}

TEST_P(ScanKernelsTest, AMillionEqualTermsLoseNothing) {
  const std::vector<float> scores(1000001, 2.5f);
  EXPECT_TRUE(
      IsWithin(scan().sum_exp(scores.data(), scores.size(), {.scale = 1, .origin = 2.5f}, nullptr), 1000001, 1e-3));
  const double expected = 1000001 * std::exp(-3.0);
  EXPECT_TRUE(IsWithin(scan().sum_exp(scores.data(), scores.size(), {.scale = 2, .origin = 4}, nullptr), expected,
                       expected * 6e-7));
}

TEST_P(ScanKernelsTest, WeightedRowsAreAddedToWhatIsThere) {
  for (const uint32_t dim : {16u, 32u, 48u, 64u, 80u, 128u, 240u, 256u}) {
    for (const uint32_t heads : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 16u}) {
      for (const uint32_t tokens : {0u, 1u, 2u, 15u, 16u}) {
        const std::vector<float> rows = RandomFloats(size_t{tokens} * dim, dim + tokens);
        const uint32_t stride = tokens + 3;
        const std::vector<float> weights = RandomFloats(size_t{heads} * stride, heads);
        const std::vector<float> before = RandomFloats(size_t{heads} * dim, 9);
        GuardedArray<float> sums(size_t{heads} * dim, 4);
        std::copy(before.begin(), before.end(), sums.data());
        scan().add_weighted({.rows = rows.data(),
                             .weights = weights.data(),
                             .weight_stride = stride,
                             .tokens = tokens,
                             .heads = heads,
                             .padded_dim = dim,
                             .sums = sums.data()});
        EXPECT_TRUE(sums.IsUntouchedFrom(sums.size()));
        for (uint32_t h = 0; h < heads; ++h) {
          for (uint32_t i = 0; i < dim; ++i) {
            double expected = before[h * dim + i], magnitude = std::abs(expected);
            for (uint32_t t = 0; t < tokens; ++t) {
              const double product = double{weights[h * stride + t]} * rows[t * dim + i];
              expected += product;
              magnitude += std::abs(product);
            }
            ASSERT_TRUE(IsWithin(sums[h * dim + i], expected, magnitude * std::ldexp(tokens + 1, -24)))
                << dim << " dimensions, " << heads << " heads, " << tokens << " tokens";
          }
        }
      }
    }
  }
}

TEST_P(ScanKernelsTest, ExponentialsFarBelowOneVanish) {
  for (const float score : {-88.0f, -104.0f, -1e4f, -1e36f}) {
    EXPECT_LT(scan().sum_exp(&score, 1, {.scale = 1}, nullptr), 1e-37) << score;
  }
}

TEST_P(ScanKernelsTest, GroupRanksAreWithinTheirError) {
  std::vector<float> scores;
  for (int i = 0; i < 3001; ++i) scores.push_back(static_cast<float>(i - 1500) * 0.07f);
  const size_t count = scores.size();
  for (const uint32_t heads : {2u, 3u, 16u}) {
    std::vector<float> all;
    std::vector<LogShare> log_share;
    for (uint32_t r = 0; r < heads; ++r) {
      for (size_t t = 0; t < count; ++t) all.push_back(scores[(t * (r + 1)) % count]);
      log_share.push_back({.scale = 0.5f + 0.25f * static_cast<float>(r), .origin = 3, .shift = static_cast<float>(r)});
    }
    for (const bool sum : {true, false}) {
      const std::vector<float> ranks = Ranks(all, heads, log_share, sum);
      for (size_t t = 0; t < count; ++t) {
        double max = -std::numeric_limits<double>::infinity(), total = 0;
        std::vector<double> logs;
        for (uint32_t r = 0; r < heads; ++r) {
          logs.push_back(double{log_share[r].scale} * (double{all[r * count + t]} - 3) - r);
          max = std::max(max, logs.back());
        }
        for (const double log : logs) total += std::exp(log - max);
        const double expected = sum ? max + std::log(total) : max;
        ASSERT_TRUE(IsWithin(ranks[t], expected, 5e-7 + std::ldexp(std::abs(expected) + 20, -22))) << "token " << t;
      }
    }
  }
}

TEST_P(ScanKernelsTest, SoftcapsBendAsTanh) {
  std::vector<float> scores;
  for (int i = -2000; i <= 2000; ++i) scores.push_back(static_cast<float>(i) * 0.01f);
  for (const float big : {100.0f, 1e6f, 1e30f, -1e30f}) scores.push_back(big);
  const size_t count = scores.size();
  std::vector<float> twice = scores;
  twice.insert(twice.end(), scores.begin(), scores.end());
  const LogShare log_share = {.scale = 1.5f, .softcap = 3, .origin = 0.25f, .shift = 0.5f};
  const std::vector<float> ranks = Ranks(twice, 2, {log_share, log_share}, false);
  for (size_t t = 0; t < count; ++t) {
    EXPECT_TRUE(IsWithin(ranks[t], 3 * std::tanh(0.5 * scores[t]) - 0.75, 1.5e-6)) << scores[t];
  }
}

TEST_P(ScanKernelsTest, EqualValuesHaveEqualRanksWhereverTheyStand) {
  for (size_t count = 1; count <= 40; ++count) {
    for (const float softcap : {0.0f, 2.0f}) {
      std::vector<float> scores(3 * count);
      for (size_t t = 0; t < count; ++t) scores[t] = 1.7f, scores[count + t] = -0.3f, scores[2 * count + t] = 0.9f;
      const std::vector<LogShare> log_share(3, {.scale = 1.1f, .softcap = softcap, .origin = 2, .shift = 1});
      const std::vector<float> ranks = Ranks(scores, 3, log_share, true);
      EXPECT_EQ(ranks, std::vector<float>(count, ranks[0])) << count;
    }
  }
}

TEST_P(ScanKernelsTest, TheLargestIsFoundWhereverItStands) {
  for (size_t count = 1; count <= 40; ++count) {
    for (size_t at = 0; at < count; ++at) {
      std::vector<float> values(count, -5.0f);
      values[at] = -4;
      EXPECT_EQ(scan().max_of(values.data(), count), -4);
    }
  }
}

TEST_P(ScanKernelsTest, TakingAboveKeepsOrderAndTies) {
  std::mt19937_64 random = MakeRandom(91);
  for (size_t count = 0; count <= 70; ++count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random() % 5);
    for (const size_t ties : {0u, 1u, 3u, 100u}) {
      std::vector<uint32_t> expected;
      size_t left = ties;
      for (uint32_t t = 0; t < count; ++t) {
        const bool tie = values[t] == 2 && left > 0;
        if (values[t] > 2 || tie) expected.push_back(t);
        left -= tie;
      }
      GuardedArray<uint32_t> indices(count);
      const size_t taken = scan().take_above(values.data(), count, 2, ties, indices.data());
      EXPECT_EQ(std::vector<uint32_t>(indices.data(), indices.data() + taken), expected);
      EXPECT_TRUE(indices.IsUntouchedFrom(count));
    }
  }
}

TEST_P(ScanKernelsTest, TakingBetweenCountsWhatIsAbove) {
  std::mt19937_64 random = MakeRandom(92);
  const float infinity = std::numeric_limits<float>::infinity();
  for (size_t count = 0; count <= 70; ++count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random() % 6);
    for (const auto& [lower, upper] : {std::pair{1.0f, 3.0f}, {2.0f, 2.0f}, {-infinity, infinity}, {4.0f, infinity}}) {
      std::vector<float> expected;
      for (const float value : values) {
        if (value >= lower && value <= upper) expected.push_back(value);
      }
      GuardedArray<float> taken(count);
      size_t above = 0;
      const size_t taken_count = scan().take_between(values, lower, upper, taken.data(), &above);
      EXPECT_EQ(std::vector<float>(taken.data(), taken.data() + taken_count), expected);
      EXPECT_EQ(above, static_cast<size_t>(std::count_if(values.begin(), values.end(),
                                                         [upper = upper](float value) { return value > upper; })));
      EXPECT_TRUE(taken.IsUntouchedFrom(count));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ScanKernelsTest, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
