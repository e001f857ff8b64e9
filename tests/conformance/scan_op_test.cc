// SPDX-License-Identifier: Apache-2.0
//
// ScanPlanes, RefinePlanes and ScoreTokens on every backend against the oracle: coarse estimates bit for bit, scores
// within what float32 sums may differ by. Outputs are poisoned and guarded.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

// Heads take turns, so that every number from 1 to 16 meets every kind of shape.
uint32_t HeadsOf(uint32_t turn) { return 1 + turn % kGroupHeadsMax; }

struct Range {
  uint32_t begin, end;
};
constexpr Range kRanges[] = {{0, 0},    {0, 1},     {0, 63},    {0, 64},  {0, 65},    {1, 64},
                             {5, 37},   {63, 65},   {64, 128},  {64, 64}, {127, 129}, {3, 200},
                             {63, 193}, {128, 200}, {199, 200}, {0, 128}, {32, 96},   {0, 200}};
constexpr uint32_t kTokens = 200;

class ScanPlanesConformance : public OpConformance {
 protected:
  void Check(const StoredHead& head, QueryHeads& query, Range range, size_t misalignment) {
    const size_t stride = range.end - range.begin + 5;
    GuardedArray<float> estimates(query.heads() * stride, misalignment);
    const ScanPlanesItem item = {.view = head.view(),
                                 .query = query.prepared(),
                                 .begin = range.begin,
                                 .end = range.end,
                                 .estimates = estimates.data(),
                                 .stride = stride};
    ASSERT_TRUE(backend().ScanPlanes(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    for (uint32_t r = 0; r < query.heads(); ++r) {
      for (uint32_t t = range.begin; t < range.end; ++t) {
        const uint32_t planes = head.options().first_planes;
        const int64_t sum = oracle::CoarseSum(query.scan(r), head.CodesAt(t, planes), planes);
        ASSERT_EQ(estimates[r * stride + t - range.begin],
                  oracle::Estimate(sum, query.scan_scale(r), head.SketchScaleAt(t), query.mean_dot(r)))
            << "head " << r << " token " << t;
      }
      for (size_t i = range.end - range.begin; i < stride; ++i) ASSERT_TRUE(estimates.IsUntouched(r * stride + i));
    }
    ASSERT_TRUE(estimates.IsUntouchedFrom(estimates.size()));
  }
};

TEST_P(ScanPlanesConformance, EstimatesAreTheOraclesBitForBit) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : kHeadDims) {
    for (const uint32_t first_planes : {1u, 2u}) {
      for (const Format format : {Format::kK8V4, Format::kK6V4}) {
        const StoredHead head(
            {.format = format, .head_dim = head_dim, .value_dim = 48, .first_planes = first_planes, .tokens = kTokens},
            turn);
        for (int n = 0; n < 3; ++n, ++turn) {
          SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " P " << first_planes << " turn " << turn);
          QueryHeads query(head, RandomFloats(size_t{HeadsOf(turn)} * head_dim, turn));
          ASSERT_NO_FATAL_FAILURE(Check(head, query, kRanges[turn % std::size(kRanges)], turn % 16 * 4));
          ASSERT_NO_FATAL_FAILURE(Check(head, query, {0, kTokens}, 0));
        }
      }
    }
  }
}

TEST_P(ScanPlanesConformance, EveryRangeIsReadAlone) {
  const StoredHead head({.head_dim = 128, .first_planes = 2, .tokens = kTokens}, 7);
  QueryHeads query(head, RandomFloats(4 * 128, 8));
  for (const Range range : kRanges) ASSERT_NO_FATAL_FAILURE(Check(head, query, range, 4));
}

TEST_P(ScanPlanesConformance, NoSumOverflows) {
  for (const uint32_t first_planes : {1u, 2u}) {
    for (const KeyPattern pattern : {KeyPattern::kFull, KeyPattern::kRandom}) {
      const StoredHead head({.head_dim = 256, .first_planes = first_planes, .tokens = 70, .pattern = pattern}, 9);
      // Rotated queries whose elements are all +31, all -31 and of alternating sign.
      const oracle::Row signs = oracle::CodecOf(head.view()).signs;
      std::vector<float> plain;
      for (int kind = 0; kind < 3; ++kind) {
        oracle::Row rotated(256);
        for (size_t i = 0; i < 256; ++i) rotated[i] = kind == 0 || (kind == 2 && i % 2 == 0) ? 31 : -31;
        for (const double element : oracle::Unrotated(rotated, signs)) plain.push_back(static_cast<float>(element));
      }
      QueryHeads query(head, plain);
      ASSERT_GE(std::abs(query.scan(0)[0]), 30);
      ASSERT_NO_FATAL_FAILURE(Check(head, query, {0, 70}, 0));
    }
  }
}

TEST_P(ScanPlanesConformance, ZeroQueriesAndZeroKeysGiveTheMeansProduct) {
  const StoredHead zero_keys({.head_dim = 80, .tokens = 66, .pattern = KeyPattern::kZero}, 10);
  QueryHeads query(zero_keys, RandomFloats(2 * 80, 11));
  ASSERT_NO_FATAL_FAILURE(Check(zero_keys, query, {0, 66}, 0));
  const StoredHead keys({.head_dim = 80, .tokens = 66, .pattern = KeyPattern::kEqual}, 12);
  QueryHeads zero_query(keys, std::vector<float>(3 * 80, 0.0f));
  ASSERT_NO_FATAL_FAILURE(Check(keys, zero_query, {0, 66}, 0));
}

TEST_P(ScanPlanesConformance, ABatchEqualsItsItemsAlone) {
  const StoredHead head({.head_dim = 112, .first_planes = 2, .tokens = kTokens}, 13);
  std::vector<QueryHeads> queries;
  for (uint32_t n = 0; n < 5; ++n) queries.emplace_back(head, RandomFloats(size_t{n + 1} * 112, 20 + n));
  std::vector<std::vector<float>> together(5, std::vector<float>(5 * kTokens)), alone = together;
  std::vector<ScanPlanesItem> items;
  for (uint32_t n = 0; n < 5; ++n) {
    items.push_back({.view = head.view(),
                     .query = queries[n].prepared(),
                     .begin = 11 * n,
                     .end = kTokens - n,
                     .estimates = together[n].data(),
                     .stride = kTokens});
  }
  ASSERT_TRUE(backend().ScanPlanes(stream(), items).ok());
  for (uint32_t n = 0; n < 5; ++n) {
    items[n].estimates = alone[n].data();
    ASSERT_TRUE(backend().ScanPlanes(stream(), {&items[n], 1}).ok());
  }
  EXPECT_EQ(together, alone);
  ASSERT_TRUE(backend().ScanPlanes(stream(), {}).ok());
}

// Blocks in cluster order (the first one in part, with a tail), in position order and in an order that reaches past the
// tokens held.
constexpr uint32_t kOrderTokens = 2 * kSketchTokens + 300;
std::vector<StoreOptions> OrderedStores() {
  std::vector<StoreOptions> stores;
  for (const uint32_t clusters : {1u, 64u, 128u}) {
    for (const uint32_t head_dim : {24u, 64u, 128u}) {
      stores.push_back({.format = head_dim == 64 ? Format::kK6V4 : Format::kK8V4,
                        .head_dim = head_dim,
                        .value_dim = 16,
                        .first_planes = clusters == 64 ? 2u : 1u,
                        .tokens = kOrderTokens,
                        .order_clusters = clusters,
                        .order_begin = clusters == 1 ? 0u : 5u});
    }
  }
  return stores;
}
constexpr Range kOrderRanges[] = {{0, kOrderTokens}, {3, 5},       {4, 6},       {5, 1024},   {1000, 1100},
                                  {1023, 1025},      {1024, 2048}, {2048, 2049}, {700, 2100}, {2200, kOrderTokens}};

TEST_P(ScanPlanesConformance, BlocksInClusterOrderGiveEstimatesByPosition) {
  uint64_t salt = 50;
  for (const StoreOptions& options : OrderedStores()) {
    const StoredHead head(options, ++salt);
    QueryHeads query(head, RandomFloats(size_t{3} * options.head_dim, salt));
    for (const Range range : kOrderRanges) {
      SCOPED_TRACE(::testing::Message() << options.order_clusters << " clusters, head_dim " << options.head_dim << ", "
                                        << range.begin << " to " << range.end);
      ASSERT_NO_FATAL_FAILURE(Check(head, query, range, 4));
    }
  }
}

class RefinePlanesConformance : public OpConformance {
 protected:
  void Check(const StoredHead& head, QueryHeads& query, uint32_t planes, const std::vector<uint32_t>& tokens) {
    const auto count = static_cast<uint32_t>(tokens.size());
    const size_t stride = count + 3;
    GuardedArray<float> estimates(query.heads() * stride, 4);
    const RefinePlanesItem item = {.view = head.view(),
                                   .query = query.prepared(),
                                   .planes = planes,
                                   .tokens = tokens.data(),
                                   .count = &count,
                                   .count_max = count + 3,
                                   .estimates = estimates.data(),
                                   .stride = stride};
    ASSERT_TRUE(backend().RefinePlanes(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    const auto bits = static_cast<int>(KeyPlanes(head.options().format));
    for (uint32_t r = 0; r < query.heads(); ++r) {
      for (uint32_t n = 0; n < count; ++n) {
        const int64_t sum = oracle::CoarseSum(query.refine(r), head.CodesAt(tokens[n], planes), planes);
        const float key_scale = std::ldexp(head.CodeScaleAt(tokens[n]), bits - static_cast<int>(planes) - 1);
        ASSERT_EQ(estimates[r * stride + n], oracle::Estimate(sum, query.refine_scale(r), key_scale, query.mean_dot(r)))
            << "head " << r << " token " << tokens[n];
      }
      for (size_t i = count; i < stride; ++i) ASSERT_TRUE(estimates.IsUntouched(r * stride + i));
    }
    ASSERT_TRUE(estimates.IsUntouchedFrom(estimates.size()));
  }
};

// Some ascending positions below `limit`.
std::vector<uint32_t> RandomPositions(uint32_t limit, uint32_t one_in, uint64_t salt) {
  std::mt19937_64 random = MakeRandom(salt);
  std::vector<uint32_t> positions;
  for (uint32_t t = 0; t < limit; ++t) {
    if (random() % one_in == 0) positions.push_back(t);
  }
  return positions;
}

TEST_P(RefinePlanesConformance, EstimatesAreTheOraclesBitForBit) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : kHeadDims) {
    for (const uint32_t first_planes : {1u, 2u}) {
      for (const Format format : {Format::kK8V8, Format::kK6V4}) {
        const StoredHead head(
            {.format = format, .head_dim = head_dim, .value_dim = 40, .first_planes = first_planes, .tokens = kTokens},
            turn);
        for (uint32_t planes = first_planes; planes <= KeyPlanes(format); ++planes, ++turn) {
          SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " planes " << planes << " turn " << turn);
          QueryHeads query(head, RandomFloats(size_t{HeadsOf(turn)} * head_dim, turn));
          ASSERT_NO_FATAL_FAILURE(Check(head, query, planes, RandomPositions(kTokens, 1 + turn % 9, turn)));
        }
      }
    }
  }
}

TEST_P(RefinePlanesConformance, ListsOfAnyLengthAreReadWhole) {
  const StoredHead head({.head_dim = 128, .tokens = kTokens}, 30);
  QueryHeads query(head, RandomFloats(4 * 128, 31));
  for (const uint32_t count : {0u, 1u, 7u, 8u, 9u, 63u, 64u, 65u, kTokens}) {
    std::vector<uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), kTokens - count);
    ASSERT_NO_FATAL_FAILURE(Check(head, query, 4, tokens));
  }
}

TEST_P(RefinePlanesConformance, NoSumOverflows) {
  for (const uint32_t planes : {1u, 4u, 7u, 8u}) {
    const StoredHead head({.head_dim = 256, .tokens = 3, .pattern = KeyPattern::kFull}, 32);
    const oracle::Row signs = oracle::CodecOf(head.view()).signs;
    std::vector<float> plain;
    for (const double level : {127.0, -127.0}) {
      for (const double element : oracle::Unrotated(oracle::Row(256, level), signs)) {
        plain.push_back(static_cast<float>(element));
      }
    }
    QueryHeads query(head, plain);
    ASSERT_NO_FATAL_FAILURE(Check(head, query, planes, {0, 1, 2}));
  }
}

TEST_P(RefinePlanesConformance, ZeroQueriesAndZeroKeysGiveTheMeansProduct) {
  const StoredHead zero_keys({.head_dim = 96, .tokens = 5, .pattern = KeyPattern::kZero}, 33);
  QueryHeads query(zero_keys, RandomFloats(2 * 96, 34));
  ASSERT_NO_FATAL_FAILURE(Check(zero_keys, query, 4, {0, 2, 4}));
  QueryHeads zero_query(zero_keys, std::vector<float>(96, 0.0f));
  ASSERT_NO_FATAL_FAILURE(Check(zero_keys, zero_query, 8, {1, 2}));
}

TEST_P(RefinePlanesConformance, ABatchEqualsItsItemsAlone) {
  const StoredHead head({.head_dim = 64, .tokens = kTokens}, 35);
  QueryHeads query(head, RandomFloats(3 * 64, 36));
  std::vector<std::vector<uint32_t>> tokens;
  std::vector<uint32_t> counts;
  for (uint32_t n = 0; n < 4; ++n) {
    tokens.push_back(RandomPositions(kTokens, n + 1, n));
    counts.push_back(static_cast<uint32_t>(tokens[n].size()));
  }
  std::vector<std::vector<float>> together(4, std::vector<float>(3 * kTokens)), alone = together;
  std::vector<RefinePlanesItem> items;
  for (uint32_t n = 0; n < 4; ++n) {
    items.push_back({.view = head.view(),
                     .query = query.prepared(),
                     .planes = 2 + n,
                     .tokens = tokens[n].data(),
                     .count = &counts[n],
                     .count_max = kTokens,
                     .estimates = together[n].data(),
                     .stride = kTokens});
  }
  ASSERT_TRUE(backend().RefinePlanes(stream(), items).ok());
  for (uint32_t n = 0; n < 4; ++n) {
    items[n].estimates = alone[n].data();
    ASSERT_TRUE(backend().RefinePlanes(stream(), {&items[n], 1}).ok());
  }
  EXPECT_EQ(together, alone);
}

TEST_P(RefinePlanesConformance, BlocksInClusterOrderAreReadByPosition) {
  uint64_t salt = 70;
  for (const StoreOptions& options : OrderedStores()) {
    SCOPED_TRACE(::testing::Message() << options.order_clusters << " clusters, head_dim " << options.head_dim);
    const StoredHead head(options, ++salt);
    QueryHeads query(head, RandomFloats(size_t{2} * options.head_dim, salt));
    ASSERT_NO_FATAL_FAILURE(Check(head, query, 4, RandomPositions(kOrderTokens, 5, salt)));
    ASSERT_NO_FATAL_FAILURE(Check(head, query, 3, {1023, 1024, 2047, 2048, kOrderTokens - 1}));
  }
}

class ScoreTokensConformance : public OpConformance {
 protected:
  // tokens empty: the range [begin, begin + count).
  void Check(const StoredHead& head, QueryHeads& query, const std::vector<uint32_t>& tokens, uint32_t begin,
             uint32_t count) {
    const size_t stride = count + 2;
    GuardedArray<float> scores(query.heads() * stride, 8);
    const ScoreTokensItem item = {.view = head.view(),
                                  .query = query.prepared(),
                                  .tokens = tokens.empty() ? nullptr : tokens.data(),
                                  .begin = begin,
                                  .count = &count,
                                  .count_max = count + 1,
                                  .scores = scores.data(),
                                  .stride = stride};
    ASSERT_TRUE(backend().ScoreTokens(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    const oracle::Matrix rows = query.rows();
    for (uint32_t r = 0; r < query.heads(); ++r) {
      for (uint32_t n = 0; n < count; ++n) {
        const uint32_t token = tokens.empty() ? begin + n : tokens[n];
        ASSERT_TRUE(IsWithin(scores[r * stride + n], oracle::Dot(rows[r], head.keys()[token]),
                             ScoreBound(head, rows[r], token)))
            << "head " << r << " token " << token;
      }
      for (size_t i = count; i < stride; ++i) ASSERT_TRUE(scores.IsUntouched(r * stride + i));
    }
    ASSERT_TRUE(scores.IsUntouchedFrom(scores.size()));
  }
};

TEST_P(ScoreTokensConformance, ScoresOfEveryFormatAreTheOracles) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : kHeadDims) {
    for (const Format format : kAllFormats) {
      const StoredHead head({.format = format,
                             .head_dim = head_dim,
                             .value_dim = head_dim == 64 ? 128u : 64u,
                             .first_planes = 1 + turn % 2,
                             .tokens = kTokens},
                            turn);
      for (int n = 0; n < 2; ++n, ++turn) {
        SCOPED_TRACE(::testing::Message() << FormatName(format) << " head_dim " << head_dim << " turn " << turn);
        QueryHeads query(head, RandomFloats(size_t{HeadsOf(turn)} * head_dim, turn));
        const std::vector<uint32_t> tokens = RandomPositions(kTokens, 1 + turn % 7, turn);
        ASSERT_NO_FATAL_FAILURE(Check(head, query, tokens, 0, static_cast<uint32_t>(tokens.size())));
        ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, turn % 70, turn % 67));
      }
    }
  }
}

TEST_P(ScoreTokensConformance, RawKeysAreScoredAsTheyCame) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : {24u, 80u, 128u}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const Format format : {Format::kK8V8, Format::kK6V4}) {
        const StoredHead head({.format = format, .head_dim = head_dim, .tokens = 130, .raw = true, .raw_dtype = dtype},
                              turn);
        ++turn;
        QueryHeads query(head, RandomFloats(size_t{HeadsOf(turn)} * head_dim, turn));
        ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, 0, 130));
        ASSERT_NO_FATAL_FAILURE(Check(head, query, {3, 64, 129}, 0, 3));
      }
    }
  }
}

TEST_P(ScoreTokensConformance, RangesOfAnyLengthAndStartAreReadAlone) {
  for (const Format format : {Format::kF16, Format::kK8V4}) {
    const StoredHead head({.format = format, .head_dim = 64, .tokens = kTokens}, 40);
    QueryHeads query(head, RandomFloats(2 * 64, 41));
    for (const Range range : kRanges) {
      ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, range.begin, range.end - range.begin));
    }
  }
}

TEST_P(ScoreTokensConformance, EqualKeysHaveEqualScores) {
  for (const Format format : kAllFormats) {
    for (const KeyPattern pattern : {KeyPattern::kEqual, KeyPattern::kZero}) {
      const StoredHead head({.format = format, .head_dim = 112, .tokens = 70, .pattern = pattern}, 42);
      QueryHeads query(head, RandomFloats(5 * 112, 43));
      ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, 0, 70));
      const uint32_t count = 69;
      std::vector<float> scores(5 * count);
      const ScoreTokensItem item = {.view = head.view(),
                                    .query = query.prepared(),
                                    .begin = 1,
                                    .count = &count,
                                    .count_max = count,
                                    .scores = scores.data(),
                                    .stride = count};
      ASSERT_TRUE(backend().ScoreTokens(stream(), {&item, 1}).ok());
      for (size_t i = 0; i < scores.size(); ++i) ASSERT_EQ(scores[i], scores[i / count * count]) << "entry " << i;
    }
  }
}

TEST_P(ScoreTokensConformance, ZeroQueriesScoreZero) {
  for (const Format format : kAllFormats) {
    const StoredHead head({.format = format, .head_dim = 40, .tokens = 20}, 44);
    QueryHeads query(head, std::vector<float>(2 * 40, 0.0f));
    ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, 0, 20));
  }
}

TEST_P(ScoreTokensConformance, ABatchEqualsItsItemsAlone) {
  const StoredHead coded({.format = Format::kK6V4, .head_dim = 96, .tokens = kTokens}, 45);
  const StoredHead floats({.format = Format::kBF16, .head_dim = 40, .tokens = kTokens}, 46);
  QueryHeads coded_query(coded, RandomFloats(4 * 96, 47)), float_query(floats, RandomFloats(3 * 40, 48));
  const uint32_t counts[] = {kTokens, 17, kTokens - 3, 1};
  std::vector<std::vector<float>> together(4, std::vector<float>(4 * kTokens)), alone = together;
  std::vector<ScoreTokensItem> items;
  for (uint32_t n = 0; n < 4; ++n) {
    items.push_back({.view = n % 2 == 0 ? coded.view() : floats.view(),
                     .query = n % 2 == 0 ? coded_query.prepared() : float_query.prepared(),
                     .begin = n,
                     .count = &counts[n],
                     .count_max = kTokens,
                     .scores = together[n].data(),
                     .stride = kTokens});
  }
  items[0].begin = 0;
  ASSERT_TRUE(backend().ScoreTokens(stream(), items).ok());
  for (uint32_t n = 0; n < 4; ++n) {
    items[n].scores = alone[n].data();
    ASSERT_TRUE(backend().ScoreTokens(stream(), {&items[n], 1}).ok());
  }
  EXPECT_EQ(together, alone);
}

TEST_P(ScoreTokensConformance, BlocksInClusterOrderAreReadByPosition) {
  uint64_t salt = 90;
  for (const StoreOptions& options : OrderedStores()) {
    SCOPED_TRACE(::testing::Message() << options.order_clusters << " clusters, head_dim " << options.head_dim);
    const StoredHead head(options, ++salt);
    QueryHeads query(head, RandomFloats(size_t{2} * options.head_dim, salt));
    const std::vector<uint32_t> tokens = RandomPositions(kOrderTokens, 20, salt);
    ASSERT_NO_FATAL_FAILURE(Check(head, query, tokens, 0, static_cast<uint32_t>(tokens.size())));
    for (const Range range : kOrderRanges) {
      ASSERT_NO_FATAL_FAILURE(Check(head, query, {}, range.begin, range.end - range.begin));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ScanPlanesConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(Backends, RefinePlanesConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(Backends, ScoreTokensConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
