// SPDX-License-Identifier: Apache-2.0
//
// SelectTokens on every backend against the oracle. One head ranks by its scores, so the choice is exact; several heads
// rank by float32 logarithms, so the choice is exact outside a band around the k-th value.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

using Positions = std::vector<uint32_t>;

// One selection, its inputs owned.
struct Case {
  uint32_t heads = 1;
  std::vector<float> scores;  // [heads][count]
  Positions tokens;           // [count]
  bool consecutive = false;   // hand over `begin` instead of the list
  oracle::SelectOptions options;
  std::vector<float> sink_logits;

  uint32_t count() const { return static_cast<uint32_t>(tokens.size()); }
  oracle::Matrix rows() const {
    oracle::Matrix rows;
    for (uint32_t r = 0; r < heads; ++r) {
      rows.emplace_back(scores.begin() + size_t{r} * count(), scores.begin() + size_t{r + 1} * count());
    }
    return rows;
  }
  bool IsForced(uint32_t token) const { return token < options.force_below || token >= options.force_from; }
};

Positions Consecutive(uint32_t begin, uint32_t count) {
  Positions positions(count);
  std::iota(positions.begin(), positions.end(), begin);
  return positions;
}

// Ascending positions with gaps.
Positions WithGaps(uint32_t count, uint64_t salt) {
  std::mt19937_64 random = MakeRandom(salt);
  Positions positions;
  for (uint32_t i = 0, at = 0; i < count; ++i) positions.push_back(at += 1 + static_cast<uint32_t>(random() % 7));
  return positions;
}

Case RandomCase(uint32_t heads, uint32_t count, uint64_t salt) {
  Case input{.heads = heads, .scores = RandomFloats(size_t{heads} * count, salt), .tokens = WithGaps(count, salt)};
  for (float& score : input.scores) score *= 8;
  input.options.softmax.scale = 0.125;
  return input;
}

class SelectTokensConformance : public OpConformance {
 protected:
  // Runs with poisoned, guarded outputs and checks what holds for every input: order, no duplicates, forced tokens in,
  // scores in their places, nothing written past the counts.
  Positions Run(const Case& input) {
    const uint32_t count = input.count(), stride = count + 3;
    std::vector<float> scores(size_t{input.heads} * stride, std::numeric_limits<float>::quiet_NaN());
    for (uint32_t r = 0; r < input.heads; ++r) {
      std::copy_n(input.scores.begin() + size_t{r} * count, count, scores.begin() + size_t{r} * stride);
    }
    const auto forced = static_cast<uint32_t>(
        std::count_if(input.tokens.begin(), input.tokens.end(), [&](uint32_t t) { return input.IsForced(t); }));
    const size_t room = std::min<size_t>(size_t{input.options.k} + forced, count);
    GuardedArray<uint32_t> chosen(room + 4), chosen_count(1);
    GuardedArray<float> chosen_scores(input.heads * (room + 4));
    GuardedArray<std::byte> workspace(SelectTokensWorkspaceBytes(count + 2));
    const SelectTokensItem item = {
        .heads = input.heads,
        .scores = scores.data(),
        .stride = stride,
        .tokens = input.consecutive ? nullptr : input.tokens.data(),
        .begin = input.consecutive && count > 0 ? input.tokens[0] : 0,
        .count = &count,
        .count_max = count + 2,
        .k = input.options.k,
        .force_below = input.options.force_below,
        .force_from = input.options.force_from,
        .softmax = {.scale = static_cast<float>(input.options.softmax.scale),
                    .softcap = static_cast<float>(input.options.softmax.softcap),
                    .sink_logits = input.sink_logits.empty() ? nullptr : input.sink_logits.data()},
        .reduction = input.options.reduction,
        .min_score = static_cast<float>(input.options.min_score),
        .min_share = static_cast<float>(input.options.min_share),
        .top_p = static_cast<float>(input.options.top_p),
        .chosen = chosen.data(),
        .chosen_count = chosen_count.data(),
        .chosen_scores = chosen_scores.data(),
        .chosen_stride = room + 4,
        .workspace = workspace.data()};
    EXPECT_TRUE(backend().SelectTokens(stream(), {&item, 1}).ok());
    EXPECT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_TRUE(chosen_count.IsUntouchedFrom(1));
    const uint32_t taken = chosen_count[0];
    EXPECT_LE(taken, room);
    if (taken > room) return {};
    EXPECT_TRUE(chosen.IsUntouchedFrom(taken));
    EXPECT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
    EXPECT_TRUE(chosen_scores.IsUntouchedFrom(chosen_scores.size()));
    Positions positions(chosen.data(), chosen.data() + taken);
    EXPECT_TRUE(IsAscendingSet(positions));
    for (uint32_t n = 0; n < taken; ++n) {
      const auto place =
          std::lower_bound(input.tokens.begin(), input.tokens.end(), positions[n]) - input.tokens.begin();
      EXPECT_TRUE(place < count && input.tokens[place] == positions[n]) << positions[n] << " is no candidate";
      if (place >= count) return {};
      for (uint32_t r = 0; r < input.heads; ++r) {
        EXPECT_EQ(chosen_scores[r * (room + 4) + n], input.scores[size_t{r} * count + place]);
      }
    }
    for (uint32_t r = 0; r < input.heads; ++r) {
      for (size_t i = taken; i < room + 4; ++i) EXPECT_TRUE(chosen_scores.IsUntouched(r * (room + 4) + i));
    }
    for (const uint32_t token : input.tokens) {
      if (!input.IsForced(token)) continue;
      EXPECT_TRUE(std::binary_search(positions.begin(), positions.end(), token)) << "forced " << token << " is missing";
    }
    return positions;
  }

  // Of a run without thresholds: the others are the best k within `band`.
  void ExpectBest(const Case& input, double band) {
    const Positions positions = Run(input);
    const oracle::Matrix rows = input.rows();
    const oracle::Row ranks =
        input.heads == 1 ? rows[0]
                         : oracle::GroupRanks(oracle::LogShares(rows, input.options.softmax), input.options.reduction);
    oracle::Row others;
    Positions chosen_others;
    for (uint32_t i = 0; i < input.count(); ++i) {
      if (input.IsForced(input.tokens[i])) continue;
      if (std::binary_search(positions.begin(), positions.end(), input.tokens[i])) {
        chosen_others.push_back(static_cast<uint32_t>(others.size()));
      }
      others.push_back(ranks[i]);
    }
    EXPECT_TRUE(IsTopK(chosen_others, others, input.options.k, band));
  }
};

// What float32 logits, exponentials and logarithms may move a rank by.
double Band(const Case& input) {
  double largest = input.options.softmax.softcap;
  for (const float score : input.scores) {
    if (input.options.softmax.softcap == 0) largest = std::max(largest, std::abs(input.options.softmax.scale * score));
  }
  return 1e-5 + std::ldexp(largest, -20);
}

constexpr uint32_t kCounts[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 130, 600};

TEST_P(SelectTokensConformance, OneHeadChoosesExactlyTheBest) {
  for (const uint32_t count : kCounts) {
    for (const uint32_t k : {0u, 1u, 2u, 8u, 64u, 599u, 600u, 1000u}) {
      for (const bool consecutive : {false, true}) {
        Case input = RandomCase(1, count, count + k);
        if (consecutive) input.tokens = Consecutive(5, count);
        input.consecutive = consecutive;
        input.options.k = k;
        SCOPED_TRACE(::testing::Message() << "count " << count << " k " << k);
        ExpectBest(input, 0);
        EXPECT_EQ(Run(input), oracle::Select(input.rows(), input.tokens, input.options));
      }
    }
  }
}

TEST_P(SelectTokensConformance, SeveralHeadsChooseTheBestByGroupShares) {
  for (uint32_t heads = 1; heads <= kGroupHeadsMax; ++heads) {
    for (const GroupReduction reduction : {GroupReduction::kSumSoftmax, GroupReduction::kMaxSoftmax}) {
      for (const uint32_t count : kCounts) {
        Case input = RandomCase(heads, count, heads * 1000 + count);
        input.options.k = 1 + count / 3;
        input.options.reduction = reduction;
        SCOPED_TRACE(::testing::Message() << "heads " << heads << " count " << count);
        ExpectBest(input, heads == 1 ? 0 : Band(input));
      }
    }
  }
}

TEST_P(SelectTokensConformance, SoftcapAndSinkLogitsEnterTheShares) {
  for (const uint32_t heads : {2u, 5u}) {
    for (const double softcap : {0.0, 0.5, 30.0}) {
      for (const bool sinks : {false, true}) {
        Case input = RandomCase(heads, 500, heads + static_cast<uint64_t>(softcap));
        input.options.k = 60;
        input.options.softmax.softcap = softcap;
        // One head's sink takes nearly all of its share, so that it hardly counts; another's takes about half.
        if (sinks) input.sink_logits = RandomFloats(heads, 5), input.sink_logits[0] = 12, input.sink_logits[1] = 6.7f;
        input.options.softmax.sink_logits.assign(input.sink_logits.begin(), input.sink_logits.end());
        ExpectBest(input, Band(input));
      }
    }
  }
}

TEST_P(SelectTokensConformance, ForcedTokensComeBesideTheBest) {
  struct Forced {
    uint32_t below, from;
  };
  const Forced cases[] = {{0, 0xffffffffu}, {4, 0xffffffffu}, {0, 200},  {4, 200},    {64, 64},
                          {100, 50},        {0, 0},           {1000, 0}, {9999, 9999}};
  for (const Forced forced : cases) {
    for (const uint32_t heads : {1u, 4u}) {
      for (const uint32_t k : {0u, 1u, 20u, 500u}) {
        Case input = RandomCase(heads, 100, forced.below + k);
        input.options.k = k;
        input.options.force_below = forced.below;
        input.options.force_from = forced.from;
        ExpectBest(input, heads == 1 ? 0 : Band(input));
      }
    }
  }
}

TEST_P(SelectTokensConformance, EqualScoresPreferLowerPositions) {
  for (const uint32_t heads : {1u, 3u, 8u}) {
    for (const uint32_t distinct : {1u, 2u, 5u}) {
      for (const uint32_t count : {9u, 65u, 1000u, 9000u}) {
        Case input = RandomCase(heads, count, distinct);
        const std::vector<float> columns = RandomFloats(size_t{distinct} * heads, 6);
        for (uint32_t i = 0; i < count; ++i) {
          const uint32_t column = i * 2654435761u % distinct;
          for (uint32_t r = 0; r < heads; ++r) input.scores[size_t{r} * count + i] = columns[column * heads + r];
        }
        for (const uint32_t k : {1u, count / 7, count / 2, count - 1}) {
          input.options.k = k;
          ExpectBest(input, 0);
        }
      }
    }
  }
}

TEST_P(SelectTokensConformance, ThousandsOfEqualScoresAreCountedExactly) {
  Case input = RandomCase(1, 8320, 50);
  std::fill(input.scores.begin(), input.scores.end(), 1.5f);
  std::mt19937_64 random = MakeRandom(51);
  for (int i = 0; i < 60; ++i) input.scores[random() % 8320] = 2 + static_cast<float>(i);
  for (int i = 0; i < 40; ++i) input.scores[random() % 8320] = -static_cast<float>(i);
  for (const uint32_t k : {30u, 256u, 2048u, 8300u}) {
    input.options.k = k;
    EXPECT_EQ(Run(input), oracle::Select(input.rows(), input.tokens, input.options));
  }
}

// Distributions that a look at some of the values does not foretell.
float ScoreOfKind(int kind, uint32_t i, float normal) {
  switch (kind) {
    case 1:
      return static_cast<float>(i);
    case 2:
      return -static_cast<float>(i);
    case 3:
      return std::round(normal);
    case 4:
      return i % 64 == 0 ? normal : 100 + normal;
    case 5:
      return i % 64 == 0 ? 100 + normal : normal;
    case 6:
      return i < 300 ? 1e30f * normal : 1e-30f * normal;
    case 7:
      return normal < 0 ? -0.0f : 0.0f;
    default:
      return normal;
  }
}

TEST_P(SelectTokensConformance, LongListsOfAnyDistributionAreExact) {
  for (const uint32_t count : {65536u, 70001u}) {
    const std::vector<float> normal = RandomFloats(count, 52);
    for (int kind = 0; kind < 8; ++kind) {
      Case input{.heads = 1, .scores = normal, .tokens = Consecutive(0, count), .consecutive = true};
      for (uint32_t i = 0; i < count; ++i) input.scores[i] = ScoreOfKind(kind, i, normal[i]);
      const std::vector<size_t> best = oracle::TopK(input.rows()[0], count);
      for (const uint32_t k : {1u, 256u, 1100u, 14000u, 35000u, count - 1}) {
        SCOPED_TRACE(::testing::Message() << "count " << count << " kind " << kind << " k " << k);
        input.options.k = k;
        Positions expected(best.begin(), best.begin() + k);
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(Run(input), expected);
      }
    }
  }
}

TEST_P(SelectTokensConformance, HugeLogitsStayNumbers) {
  for (const uint32_t heads : {1u, 2u, 16u}) {
    for (const float scale : {1.0f, 1e4f}) {
      for (const bool sinks : {false, true}) {
        Case input = RandomCase(heads, 300, heads);
        for (float& score : input.scores) score *= 1e31f;
        input.options.softmax.scale = scale;
        input.options.k = 50;
        if (sinks) input.sink_logits.assign(heads, -1e6f);
        input.options.softmax.sink_logits.assign(input.sink_logits.begin(), input.sink_logits.end());
        ExpectBest(input, heads == 1 ? 0 : Band(input));
        input.options.min_share = 1e-9;
        input.options.top_p = 0.5;
        EXPECT_LE(Run(input).size(), 50u);
      }
    }
  }
}

TEST_P(SelectTokensConformance, SmallSharesAreStillRanked) {
  // Every share but one underflows float32.
  for (const uint32_t heads : {2u, 4u}) {
    for (const GroupReduction reduction : {GroupReduction::kSumSoftmax, GroupReduction::kMaxSoftmax}) {
      Case input = RandomCase(heads, 400, 53);
      for (uint32_t r = 0; r < heads; ++r) input.scores[size_t{r} * 400 + 17] = 4000;
      input.options.softmax.scale = 1;
      input.options.k = 40;
      input.options.reduction = reduction;
      ExpectBest(input, Band(input));
    }
  }
}

TEST_P(SelectTokensConformance, MinScoreLeavesOutTokensNoHeadLikes) {
  for (const uint32_t heads : {1u, 3u}) {
    for (const double min_score : {-1e30, -8.0, 0.0, 6.5, 1e30}) {
      Case input = RandomCase(heads, 200, 54);
      input.scores[20] = 6.5f;
      input.options.k = 200;  // every token, so that nothing but the threshold decides
      input.options.min_score = min_score;
      input.options.force_below = 30;
      EXPECT_EQ(Run(input), oracle::Select(input.rows(), input.tokens, input.options));
    }
  }
}

// Where a threshold moves by less than float32 error, the choice lies between those of its neighbours.
void ExpectBetween(const Positions& positions, const Positions& fewest, const Positions& most) {
  EXPECT_TRUE(std::includes(positions.begin(), positions.end(), fewest.begin(), fewest.end()));
  EXPECT_TRUE(std::includes(most.begin(), most.end(), positions.begin(), positions.end()));
}

TEST_P(SelectTokensConformance, MinShareLeavesOutSmallShares) {
  for (const uint32_t heads : {1u, 4u}) {
    for (const double min_share : {1e-7, 1e-3, 1e-2, 0.5, 1.0}) {
      Case input = RandomCase(heads, 300, 55);
      input.options.softmax.scale = 0.3;
      input.options.k = 300;
      input.options.min_share = min_share;
      input.options.force_from = input.tokens[280];
      oracle::SelectOptions lower = input.options, higher = input.options;
      lower.min_share *= 1 - 1e-5;
      higher.min_share *= 1 + 1e-5;
      ExpectBetween(Run(input), oracle::Select(input.rows(), input.tokens, higher),
                    oracle::Select(input.rows(), input.tokens, lower));
    }
  }
}

TEST_P(SelectTokensConformance, TopPStopsAtTheTokenThatReachesIt) {
  for (const uint32_t heads : {1u, 4u}) {
    for (const double top_p : {1e-6, 0.1, 0.5, 0.9, 0.999}) {
      for (const uint32_t force_below : {0u, 40u}) {
        Case input = RandomCase(heads, 300, 56);
        input.options.softmax.scale = 0.3;
        input.options.k = heads == 1 ? 100 : 300;
        input.options.top_p = top_p;
        input.options.force_below = force_below;
        oracle::SelectOptions lower = input.options, higher = input.options;
        lower.top_p *= 1 - 1e-5;
        higher.top_p *= 1 + 1e-5;
        ExpectBetween(Run(input), oracle::Select(input.rows(), input.tokens, lower),
                      oracle::Select(input.rows(), input.tokens, higher));
      }
    }
  }
}

TEST_P(SelectTokensConformance, ThresholdsApplyInTheirOrder) {
  Case input = RandomCase(1, 200, 57);
  input.options.softmax.scale = 0.3;
  input.options.k = 50;
  input.options.min_score = 3;
  input.options.min_share = 1e-3;
  input.options.top_p = 0.7;
  input.options.force_below = 12;
  EXPECT_EQ(Run(input), oracle::Select(input.rows(), input.tokens, input.options));
}

TEST_P(SelectTokensConformance, ASmallerKChoosesAPartOfALarger) {
  for (const uint32_t heads : {1u, 6u}) {
    Case input = RandomCase(heads, 6000, 58);
    for (float& score : input.scores) score = std::round(score);  // many ties
    Positions smaller;
    for (const uint32_t k : {1u, 3u, 64u, 65u, 700u, 4000u, 5999u}) {
      input.options.k = k;
      const Positions larger = Run(input);
      EXPECT_EQ(larger.size(), k);
      EXPECT_TRUE(std::includes(larger.begin(), larger.end(), smaller.begin(), smaller.end())) << "k " << k;
      smaller = larger;
    }
  }
}

TEST_P(SelectTokensConformance, ABatchEqualsItsItemsAlone) {
  std::vector<Case> inputs;
  for (uint32_t n = 0; n < 6; ++n) inputs.push_back(RandomCase(1 + n % 4, 100 + 700 * n, 60 + n));
  std::vector<Positions> chosen(6, Positions(64));
  std::vector<uint32_t> taken(6), counts(6);
  std::vector<std::vector<std::byte>> workspaces(6);
  std::vector<SelectTokensItem> items;
  for (uint32_t n = 0; n < 6; ++n) {
    inputs[n].options.k = 10 * n;
    counts[n] = inputs[n].count();
    workspaces[n].resize(SelectTokensWorkspaceBytes(counts[n]) + 64);
    items.push_back({.heads = inputs[n].heads,
                     .scores = inputs[n].scores.data(),
                     .stride = counts[n],
                     .tokens = inputs[n].tokens.data(),
                     .count = &counts[n],
                     .count_max = counts[n],
                     .k = inputs[n].options.k,
                     .softmax = {.scale = 0.125f},
                     .chosen = chosen[n].data(),
                     .chosen_count = &taken[n],
                     .workspace = workspaces[n].data()});
  }
  ASSERT_TRUE(backend().SelectTokens(stream(), items).ok());
  for (uint32_t n = 0; n < 6; ++n) {
    chosen[n].resize(taken[n]);
    EXPECT_EQ(chosen[n], Run(inputs[n]));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, SelectTokensConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
