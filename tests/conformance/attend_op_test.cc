// SPDX-License-Identifier: Apache-2.0
//
// Attend on every backend against float64: the bounds that attention_ops.h states, for every format, at the borders of
// vectors, blocks and float32, outputs poisoned and guarded.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kValueDims[] = {8, 16, 24, 40, 64, 72, 88, 128, 136, 200, 248, 256};

// Scores [heads][count] and what the softmax makes of them.
struct Case {
  std::vector<uint32_t> tokens;  // ascending
  std::vector<float> scores;     // [heads, stride]
  size_t stride = 0;
  uint32_t heads = 1;
  SoftmaxParams softmax;
};

class AttendConformance : public OpConformance {
 protected:
  static Case RandomCase(std::vector<uint32_t> tokens, uint32_t heads, uint64_t salt, float spread = 3) {
    Case made{.tokens = std::move(tokens), .scores = {}, .stride = 0, .heads = heads, .softmax = {}};
    made.stride = made.tokens.size() + salt % 5;
    made.scores = RandomFloats(heads * made.stride, salt + 7);
    for (float& score : made.scores) score *= spread;
    return made;
  }

  // Runs the case and holds it to the oracle. Where `begin` is set, tokens are [begin, begin + count) and not listed.
  void Check(const StoredHead& head, const Case& given, std::optional<uint32_t> begin = std::nullopt) {
    const HeadView view = head.view();
    const uint32_t value_dim = view.layout.value_dim;
    const auto count = static_cast<uint32_t>(given.tokens.size());
    GuardedArray<float> output(size_t{given.heads} * value_dim, 4), log_sum_exp(given.heads, 8);
    const AttendItem item{.view = view,
                          .heads = given.heads,
                          .tokens = begin.has_value() ? nullptr : given.tokens.data(),
                          .begin = begin.value_or(0),
                          .count = &count,
                          .count_max = count,
                          .scores = given.scores.data(),
                          .stride = given.stride,
                          .softmax = given.softmax,
                          .output = output.data(),
                          .log_sum_exp = log_sum_exp.data()};
    ASSERT_TRUE(backend().Attend(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_TRUE(output.IsUntouchedFrom(output.size()));
    EXPECT_TRUE(log_sum_exp.IsUntouchedFrom(log_sum_exp.size()));
    Compare(view, given, output.span(), log_sum_exp.span());
  }

 private:
  static void Compare(const HeadView& view, const Case& given, std::span<const float> output,
                      std::span<const float> log_sum_exp) {
    const uint32_t value_dim = view.layout.value_dim;
    const oracle::Codec codec = oracle::CodecOf(view);
    oracle::Matrix values, scores;
    oracle::Row largest(value_dim, 0.0);  // V of each dimension
    for (const uint32_t token : given.tokens) {
      const std::vector<std::byte> row = oracle::ValueRowAt(view, token);
      values.push_back(oracle::DecodeValue(codec, row));
      for (uint32_t i = 0; i < value_dim; ++i) {
        double magnitude = std::abs(values.back()[i]);
        if (KeysAreCoded(codec.format)) {
          const double zero = oracle::FromElements(row, DType::kF16)[i / kValueGroup * 2 + 1];
          magnitude = std::abs(zero) + std::abs(values.back()[i] - zero);
        }
        largest[i] = std::max(largest[i], magnitude);
      }
    }
    for (uint32_t r = 0; r < given.heads; ++r) {
      const auto first = given.scores.begin() + static_cast<ptrdiff_t>(r * given.stride);
      scores.emplace_back(first, first + static_cast<ptrdiff_t>(given.tokens.size()));
    }
    const double softcap = given.softmax.softcap;
    const oracle::Attention expected = oracle::Attend(
        scores, values, {.scale = given.softmax.scale, .softcap = softcap, .sink_logits = {}}, value_dim);
    for (uint32_t r = 0; r < given.heads; ++r) {
      const double lse = expected.log_sum_exp[r];
      if (given.tokens.empty()) {
        EXPECT_EQ(log_sum_exp[r], -kInfinity);
      } else {
        EXPECT_TRUE(IsWithin(log_sum_exp[r], lse, 0x1p-17 + softcap * 0x1p-20 + std::abs(lse) * 0x1p-23)) << r;
      }
      for (uint32_t i = 0; i < value_dim; ++i) {
        const double bound = (0x1p-16 + softcap * 0x1p-20) * largest[i];
        ASSERT_TRUE(IsWithin(output[r * value_dim + i], expected.output[r][i], bound)) << r << ", " << i;
      }
    }
  }
};

std::vector<uint32_t> Range(uint32_t begin, uint32_t end) {
  std::vector<uint32_t> tokens(end - begin);
  std::iota(tokens.begin(), tokens.end(), begin);
  return tokens;
}

TEST_P(AttendConformance, EveryFormatAndShapeIsTheOracles) {
  uint32_t turn = 0;
  for (const Format format : kAllFormats) {
    for (const uint32_t value_dim : kValueDims) {
      const StoredHead head({.format = format, .head_dim = 16, .value_dim = value_dim, .tokens = 150}, turn);
      FillValues(head, turn);
      for (const uint32_t heads : {1u, 2u, 3u, 4u, 5u, 8u, 13u, 16u}) {
        SCOPED_TRACE(::testing::Message() << FormatName(format) << " " << value_dim << ", heads " << heads);
        ASSERT_NO_FATAL_FAILURE(Check(head, RandomCase({0, 7, 63, 64, 65, 127, 128, 149}, heads, turn++)));
      }
    }
  }
}

TEST_P(AttendConformance, ListsOfEveryLengthAboutTheBlocks) {
  const StoredHead head({.head_dim = 16, .value_dim = 40, .tokens = 520}, 3);
  FillValues(head, 3);
  for (const uint32_t count : {0u, 1u, 2u, 15u, 16u, 17u, 31u, 33u, 63u, 64u, 65u, 80u, 127u, 128u, 129u, 500u}) {
    SCOPED_TRACE(count);
    ASSERT_NO_FATAL_FAILURE(Check(head, RandomCase(Range(20, 20 + count), 3, count)));
    ASSERT_NO_FATAL_FAILURE(Check(head, RandomCase(Range(20, 20 + count), 3, count), 20));
  }
}

TEST_P(AttendConformance, RawKeysHaveCodedValues) {
  const StoredHead head({.head_dim = 16, .value_dim = 24, .tokens = 70, .raw = true, .raw_dtype = DType::kF16}, 4);
  FillValues(head, 4);
  ASSERT_NO_FATAL_FAILURE(Check(head, RandomCase(Range(0, 70), 4, 1)));
}

TEST_P(AttendConformance, SoftcapsBendTheLogits) {
  const StoredHead head({.head_dim = 16, .value_dim = 32, .tokens = 200}, 5);
  FillValues(head, 5);
  for (const float softcap : {0.5f, 2.0f, 30.0f, 50.0f}) {
    for (const float spread : {0.1f, 3.0f, 1e4f}) {
      Case given = RandomCase(Range(0, 200), 2, 5, spread);
      given.softmax = {.scale = 0.25f, .softcap = softcap};
      SCOPED_TRACE(::testing::Message() << softcap << ", " << spread);
      ASSERT_NO_FATAL_FAILURE(Check(head, given));
    }
  }
}

TEST_P(AttendConformance, LogitsOfAnySizeNeitherOverflowNorVanish) {
  const StoredHead head({.head_dim = 16, .value_dim = 48, .tokens = 130}, 6);
  FillValues(head, 6);
  for (const float scale : {1e-30f, 1e-3f, 1.0f, 1e4f}) {
    for (const float offset : {0.0f, 1e3f, -1e3f, 1e32f, -1e32f}) {
      Case given = RandomCase(Range(0, 130), 3, 6);
      for (float& score : given.scores) score += offset;
      given.softmax.scale = scale;
      SCOPED_TRACE(::testing::Message() << scale << ", " << offset);
      ASSERT_NO_FATAL_FAILURE(Check(head, given));
    }
  }
  // One token outweighs everything, wherever it stands.
  for (const uint32_t at : {0u, 1u, 63u, 64u, 129u}) {
    Case given = RandomCase(Range(0, 130), 1, 6);
    given.scores[at] = 1e30f;
    ASSERT_NO_FATAL_FAILURE(Check(head, given));
  }
}

TEST_P(AttendConformance, TiesShareEvenly) {
  const StoredHead head({.head_dim = 16, .value_dim = 16, .tokens = 300}, 7);
  FillValues(head, 7);
  for (const float score : {0.0f, -0.0f, 5.5f, -1e30f}) {
    Case given = RandomCase(Range(0, 300), 4, 7);
    std::fill(given.scores.begin(), given.scores.end(), score);
    ASSERT_NO_FATAL_FAILURE(Check(head, given));
  }
}

// Value elements up to what the bound allows: products and sums stay finite.
TEST_P(AttendConformance, ValuesOfAnySizeAreWeighted) {
  const StoredHead head({.format = Format::kF32, .head_dim = 16, .value_dim = 24, .tokens = 100}, 8);
  std::vector<float> row(24);
  for (uint32_t t = 0; t < 100; ++t) {
    for (uint32_t i = 0; i < 24; ++i) row[i] = std::ldexp(t % 3 == 0 ? -1.0f : 1.0f, 120 - static_cast<int>(10 * i));
    std::memcpy(head.view().pages[t / kPageTokens] + head.view().layout.values_offset + t % kPageTokens * 96,
                row.data(), 96);
  }
  ASSERT_NO_FATAL_FAILURE(Check(head, RandomCase(Range(0, 100), 2, 8)));
}

TEST_P(AttendConformance, SinkLogitsAreNotLookedAt) {
  const StoredHead head({.head_dim = 16, .value_dim = 16, .tokens = 30}, 9);
  FillValues(head, 9);
  Case given = RandomCase(Range(0, 30), 2, 9);
  const float sinks[] = {50, 60};
  given.softmax.sink_logits = sinks;
  ASSERT_NO_FATAL_FAILURE(Check(head, given));
}

// One float32 sum of so many equal terms would round the same way each time, and end over 1e-4 off.
TEST_P(AttendConformance, ALongListKeepsItsBound) {
  constexpr uint32_t kLong = 40000;
  const StoredHead head({.format = Format::kF32, .head_dim = 16, .value_dim = 8, .tokens = kLong}, 10);
  const std::vector<float> row(8, 1.1f);
  for (uint32_t t = 0; t < kLong; ++t) {
    std::memcpy(head.view().pages[t / kPageTokens] + head.view().layout.values_offset + t % kPageTokens * 32,
                row.data(), 32);
  }
  Case given = RandomCase(Range(0, kLong), 1, 10);
  std::fill(given.scores.begin(), given.scores.end(), 0.5f);
  ASSERT_NO_FATAL_FAILURE(Check(head, given));
}

TEST_P(AttendConformance, ItemsOfOneCallAreIndependent) {
  const StoredHead one({.head_dim = 16, .value_dim = 16, .tokens = 40}, 11);
  const StoredHead other({.format = Format::kF16, .head_dim = 16, .value_dim = 32, .tokens = 90}, 12);
  FillValues(one, 11);
  FillValues(other, 12);
  const Case cases[] = {RandomCase(Range(3, 40), 2, 11), RandomCase({}, 3, 12), RandomCase(Range(0, 90), 4, 13)};
  const StoredHead* heads[] = {&one, &one, &other};
  std::vector<GuardedArray<float>> together, apart;
  std::vector<AttendItem> items;
  const uint32_t counts[] = {37, 0, 90};
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < 3; ++i) {
      auto& outputs = pass == 0 ? together : apart;
      outputs.emplace_back(cases[i].heads * (heads[i]->view().layout.value_dim + 1));
    }
  }
  const auto item_of = [&](int i, GuardedArray<float>& to) {
    return AttendItem{.view = heads[i]->view(),
                      .heads = cases[i].heads,
                      .tokens = cases[i].tokens.data(),
                      .count = &counts[i],
                      .count_max = counts[i],
                      .scores = cases[i].scores.data(),
                      .stride = cases[i].stride,
                      .output = to.data(),
                      .log_sum_exp = to.data() + cases[i].heads * heads[i]->view().layout.value_dim};
  };
  for (int i = 0; i < 3; ++i) items.push_back(item_of(i, together[i]));
  ASSERT_TRUE(backend().Attend(stream(), items).ok());
  for (int i = 0; i < 3; ++i) {
    const AttendItem item = item_of(i, apart[i]);
    ASSERT_TRUE(backend().Attend(stream(), {&item, 1}).ok());
    EXPECT_TRUE(together[i].IsUntouchedFrom(together[i].size()));
    EXPECT_EQ(std::memcmp(together[i].data(), apart[i].data(), apart[i].size() * sizeof(float)), 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AttendConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
