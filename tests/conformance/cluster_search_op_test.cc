// SPDX-License-Identifier: Apache-2.0
//
// SelectClusters and ScanClusters on every backend. Opened clusters: logits and ranking against float64 over the
// clusters as stored; tokens and estimates exactly. Outputs are poisoned and guarded.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "kernels/cluster_search_ops.h"
#include "tests/conformance/built_clusters.h"
#include "tests/conformance/op_cases.h"
#include "tests/testing/cluster_oracle.h"

namespace ctkvr::testing {
namespace {

// ---- SelectClusters ------------------------------------------------------------------------------------------------

struct OpenCase {
  StoreOptions options;
  uint32_t tokens_per_cluster = 16;
  uint32_t begin = 0;  // clustered: [begin, options.tokens)
  uint32_t heads = 1;
  uint32_t open_tokens = 60;
  uint32_t forced = 3;
  float scale = 0.2f;
  float softcap = 0;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
};

class SelectClustersConformance : public OpConformance {
 protected:
  struct Result {
    std::vector<float> scores;
    std::vector<uint32_t> opened;
  };

  Result Run(const BuiltClusters& built, QueryHeads& query, const OpenCase& test, const std::vector<float>& forced) {
    const uint32_t all = built.layout.clusters * ClusterBlocks(test.begin, test.options.tokens);
    GuardedArray<float> scores(size_t{test.heads} * all, 4);
    GuardedArray<uint32_t> opened(all), opened_count(1);
    GuardedArray<std::byte> workspace(
        SelectClustersWorkspaceBytes(built.layout, test.heads, test.begin, test.options.tokens), 4);
    const SelectClustersItem item{.query = query.prepared(),
                                  .layout = built.layout,
                                  .blocks = built.blocks(),
                                  .begin = test.begin,
                                  .end = test.options.tokens,
                                  .open_tokens = test.open_tokens,
                                  .forced_scores = forced.data(),
                                  .forced_stride = test.forced,
                                  .forced_count = &test.forced,
                                  .softmax = {.scale = test.scale, .softcap = test.softcap, .sink_logits = nullptr},
                                  .reduction = test.reduction,
                                  .scores = scores.data(),
                                  .opened = opened.data(),
                                  .opened_count = opened_count.data(),
                                  .workspace = workspace.data()};
    EXPECT_TRUE(backend().SelectClusters(stream(), {&item, 1}).ok());
    EXPECT_TRUE(scores.IsUntouchedFrom(scores.size()));
    EXPECT_TRUE(opened.IsUntouchedFrom(opened_count[0]));
    EXPECT_TRUE(opened_count.IsUntouchedFrom(1));
    EXPECT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
    return {.scores = {scores.span().begin(), scores.span().end()},
            .opened = {opened.data(), opened.data() + opened_count[0]}};
  }

  void Check(const OpenCase& test, uint64_t salt) {
    SCOPED_TRACE(::testing::Message() << "case " << salt);
    const StoredHead head(test.options, salt);
    FillValues(head, salt + 1000);
    BuiltClusters built(head, test.tokens_per_cluster, test.begin, test.options.tokens);
    built.Build(backend(), stream(), head);
    QueryHeads query(head, RandomFloats(size_t{test.heads} * test.options.head_dim, salt + 2));
    const std::vector<float> forced = RandomFloats(size_t{test.heads} * test.forced, salt + 3);
    const Result result = Run(built, query, test, forced);

    const oracle::Clusters clusters = built.Decoded(head);
    const oracle::Softmax softmax{.scale = test.scale, .softcap = test.softcap};
    oracle::Matrix forced_rows;
    for (uint32_t r = 0; r < test.heads; ++r) {
      forced_rows.emplace_back(forced.begin() + r * test.forced, forced.begin() + (r + 1) * test.forced);
    }
    const oracle::Matrix scores = oracle::Scores(query.rows(), clusters.keys);
    const size_t all = clusters.counts.size();
    double bound = 0;
    for (uint32_t r = 0; r < test.heads; ++r) {
      for (size_t c = 0; c < all; ++c) {
        if (clusters.counts[c] == 0) continue;
        const double score_bound = 1e-4 / test.scale + 1e-5 * std::abs(scores[r][c]);
        bound = std::max(bound, test.scale * score_bound);
        ASSERT_TRUE(IsWithin(result.scores[r * all + c], scores[r][c], score_bound));
      }
    }
    CheckOpened(result.opened, clusters,
                oracle::ClusterRanks(
                    clusters, query.rows(), forced_rows,
                    {.tokens_per_cluster = test.tokens_per_cluster, .softmax = softmax, .reduction = test.reduction}),
                test, 20 * bound);
  }

  // Ascending, all of them better than all that stay closed, and as few as hold the tokens.
  void CheckOpened(const std::vector<uint32_t>& opened, const oracle::Clusters& clusters, const oracle::Row& ranks,
                   const OpenCase& test, double bound) {
    ASSERT_TRUE(std::is_sorted(opened.begin(), opened.end()));
    ASSERT_EQ(std::adjacent_find(opened.begin(), opened.end()), opened.end());
    std::vector<bool> is_open(clusters.counts.size());
    uint64_t tokens = 0;
    double worst = std::numeric_limits<double>::infinity(), best_closed = -worst;
    uint32_t largest_worst = 0;
    for (const uint32_t c : opened) {
      ASSERT_LT(c, clusters.counts.size());
      ASSERT_GT(clusters.counts[c], 0u);
      is_open[c] = true;
      tokens += clusters.counts[c];
      worst = std::min(worst, ranks[c]);
    }
    for (size_t c = 0; c < is_open.size(); ++c) {
      if (!is_open[c]) best_closed = std::max(best_closed, ranks[c]);
      if (is_open[c] && ranks[c] <= worst + bound) largest_worst = std::max(largest_worst, clusters.counts[c]);
    }
    EXPECT_GE(worst, best_closed - bound);
    EXPECT_GE(tokens, std::min<uint64_t>(test.open_tokens, test.options.tokens - test.begin));
    EXPECT_TRUE(opened.empty() || tokens - largest_worst < test.open_tokens);
    EXPECT_LE(tokens, OpenedTokensMax(test.open_tokens));
  }
};

TEST_P(SelectClustersConformance, EveryFormatAndShape) {
  uint64_t salt = 1500;
  for (const uint32_t head_dim : kHeadDims) {
    for (const Format format : kAllFormats) {
      ++salt;
      Check({.options = {.format = format,
                         .head_dim = head_dim,
                         .value_dim = 16,
                         .first_planes = static_cast<uint32_t>(1 + salt % 2),
                         .tokens = static_cast<uint32_t>(150 + salt % 65)},
             .begin = static_cast<uint32_t>(salt % 7),
             .heads = static_cast<uint32_t>(1 + salt % kGroupHeadsMax),
             .forced = static_cast<uint32_t>(salt % 4),
             .reduction = salt % 3 == 0 ? GroupReduction::kMaxSoftmax : GroupReduction::kSumSoftmax},
            salt);
    }
  }
}

TEST_P(SelectClustersConformance, BudgetsBlocksAndSoftcap) {
  const StoreOptions options{.head_dim = 16, .value_dim = 16, .tokens = 2 * kClusterBlockTokens + 300};
  for (const uint32_t open_tokens : {0u, 1u, 16u, 17u, 500u, 2343u, 2344u, 2345u, 100000u}) {
    Check({.options = options, .begin = 4, .heads = 4, .open_tokens = open_tokens}, 1700 + open_tokens % 97);
  }
  Check({.options = options, .begin = 4, .heads = 3, .softcap = 0.7f}, 1800);
  Check({.options = options, .begin = 4, .heads = 3, .scale = 8}, 1801);  // deviations past the end
  Check({.options = options, .heads = 3, .open_tokens = 300, .forced = 0}, 1802);
  Check({.options = options, .tokens_per_cluster = 4, .heads = 3, .open_tokens = 300}, 1803);
  for (const KeyPattern pattern : {KeyPattern::kTies, KeyPattern::kEqual, KeyPattern::kZero}) {
    for (const uint32_t open_tokens : {1u, 100u}) {
      Check({.options = {.head_dim = 32, .value_dim = 8, .tokens = 200, .pattern = pattern},
             .heads = 2,
             .open_tokens = open_tokens},
            1804);
    }
  }
}

// What has no spread is worth its mean; what has is worth more, and is opened first.
TEST_P(SelectClustersConformance, SpreadOpensWhatTheMeanWouldNot) {
  const StoreOptions options{.format = Format::kF32, .head_dim = 16, .value_dim = 16, .tokens = 64};
  const StoredHead head(options, 12);
  FillValues(head, 13);
  BuiltClusters built(head, 16, 0, 64);
  built.Build(backend(), stream(), head);
  std::byte* block = built.block(0);
  const auto set = [&](uint32_t cluster, float spread) {
    const auto end = static_cast<uint16_t>(16 * (cluster + 1));
    std::memcpy(block + built.layout.ends_offset + 2 * cluster, &end, 2);
    StoreElement(block + built.layout.spreads_offset, DType::kF16, cluster, spread);
    StoreElement(block + built.layout.key_scales_offset, DType::kBF16, cluster, 0.0f);  // all means at the centre
  };
  for (uint32_t cluster = 0; cluster < 4; ++cluster) set(cluster, cluster == 2 ? 0.5f : 0.0f);
  QueryHeads query(head, RandomFloats(2 * 16, 14));
  const Result result = Run(built, query, {.options = options, .heads = 2, .open_tokens = 16}, std::vector<float>(6));
  EXPECT_EQ(result.opened, std::vector<uint32_t>{2});
  for (uint32_t cluster = 0; cluster < 4; ++cluster) set(cluster, 0);
  const Result equal = Run(built, query, {.options = options, .heads = 2, .open_tokens = 32}, std::vector<float>(6));
  EXPECT_EQ(equal.opened, (std::vector<uint32_t>{0, 1})) << "equal values prefer the lower cluster";
}

INSTANTIATE_TEST_SUITE_P(All, SelectClustersConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param_info) { return param_info.param; });

// ---- ScanClusters --------------------------------------------------------------------------------------------------

struct ScanCase {
  StoreOptions options;
  uint32_t begin = 0;  // clustered: [begin, options.tokens - tail)
  uint32_t tail = 0;
  uint32_t heads = 1;
  uint32_t open_one_in = 3;  // 0: none
  uint32_t visible_begin = 0;
  uint32_t visible_end = 0xffffffffu;
  uint32_t force_below = 4;
  uint32_t force_from = 0xffffffffu;
  bool estimates = true;
  bool arranged = true;  // sketch blocks lie in the order of the clusters, but for the second
};

// A view of the head whose sketch blocks lie in the order of its clusters, but for the second.
class ArrangedView {
 public:
  ArrangedView(Backend& backend, Stream& stream, const StoredHead& head, BuiltClusters& built, uint32_t begin)
      : view(head.view()) {
    const uint32_t all = (head.options().tokens + kSketchTokens - 1) / kSketchTokens;
    orders_.resize(all);
    sketches_.assign(view.sketches, view.sketches + all);
    for (uint32_t index = begin / kSketchTokens; index < all; ++index) {
      const uint32_t block = index - begin / kSketchTokens;
      if (index == 1 || block >= built.block_count()) continue;
      std::vector<std::byte>& sketch = arranged_.emplace_back(view.layout.sketch_bytes);
      const ArrangeSketchItem arrange{.view = view,
                                      .index = index,
                                      .layout = built.layout,
                                      .begin = begin,
                                      .block = built.block(block),
                                      .sketch = sketch.data()};
      EXPECT_TRUE(backend.ArrangeSketch(stream, {&arrange, 1}).ok());
      sketches_[index] = sketch.data();
      orders_[index] = built.block(block);
    }
    view.sketches = sketches_.data();
    view.order = built.layout.Order(orders_.data(), begin);
  }

  HeadView view;

 private:
  std::vector<std::byte*> orders_, sketches_;
  std::vector<std::vector<std::byte>> arranged_;
};

class ScanClustersConformance : public OpConformance {
 protected:
  // UINT32_MAX for a token that is in none.
  static uint32_t ClusterOf(const ScanCase& test, const oracle::Clusters& clusters, uint32_t token) {
    const bool clustered = token >= test.begin && token < test.options.tokens - test.tail;
    return clustered ? clusters.cluster_of[token - test.begin] : std::numeric_limits<uint32_t>::max();
  }

  // Of the distance between an estimate and the score of its cluster's mean.
  static oracle::Row SharesLeft(const oracle::Clusters& clusters, const oracle::Codec& codec, uint32_t planes) {
    oracle::Row shares(clusters.counts.size());
    for (size_t c = 0; c < shares.size(); ++c) {
      const double spread = clusters.spreads[c] * clusters.spreads[c];
      double mean = 0;
      const size_t dims = clusters.keys[c].size();
      for (size_t i = 0; i < dims; ++i) mean += std::pow(clusters.keys[c][i] - codec.mean[i], 2) / dims;
      if (spread > 0) shares[c] = spread / (spread + (planes == 1 ? 0.53 : 0.145) * (spread + mean));
    }
    return shares;
  }

  static std::vector<uint32_t> Expected(const ScanCase& test, const oracle::Clusters& clusters,
                                        const std::vector<uint32_t>& opened) {
    std::vector<uint32_t> expected;
    for (uint32_t t = test.visible_begin; t < test.visible_end; ++t) {
      const bool open = std::binary_search(opened.begin(), opened.end(), ClusterOf(test, clusters, t));
      if (open || t < test.force_below || t >= test.force_from) expected.push_back(t);
    }
    return expected;
  }

  void Check(ScanCase test, uint64_t salt) {
    SCOPED_TRACE(::testing::Message() << "case " << salt);
    test.visible_end = std::min(test.visible_end, test.options.tokens);
    const StoredHead head(test.options, salt);
    FillValues(head, salt + 1000);
    const uint32_t end = test.options.tokens - test.tail;
    BuiltClusters built(head, 16, test.begin, end);
    built.Build(backend(), stream(), head);
    QueryHeads query(head, RandomFloats(size_t{test.heads} * test.options.head_dim, salt + 2));
    const oracle::Clusters clusters = built.Decoded(head);
    std::mt19937_64 random = MakeRandom(salt + 3);
    std::vector<uint32_t> opened;
    for (uint32_t c = 0; c < clusters.counts.size(); ++c) {
      if (clusters.counts[c] > 0 && test.open_one_in > 0 && random() % test.open_one_in == 0) opened.push_back(c);
    }
    const std::vector<uint32_t> expected = Expected(test, clusters, opened);
    const auto opened_count = static_cast<uint32_t>(opened.size());
    const size_t stride = expected.size() + 3;
    GuardedArray<uint32_t> tokens(expected.size()), count(1);
    GuardedArray<float> estimates(test.heads * stride, 4);
    std::optional<ArrangedView> arranged;
    if (test.estimates && test.arranged) arranged.emplace(backend(), stream(), head, built, test.begin);
    const HeadView view = arranged.has_value() ? arranged->view : head.view();
    const oracle::Matrix mean_scores = oracle::Scores(query.rows(), clusters.keys);
    std::vector<float> flat_scores;
    for (const oracle::Row& row : mean_scores) flat_scores.insert(flat_scores.end(), row.begin(), row.end());
    const ScanClustersItem item{.view = view,
                                .query = query.prepared(),
                                .layout = built.layout,
                                .blocks = built.blocks(),
                                .begin = test.begin,
                                .end = end,
                                .opened = opened.data(),
                                .opened_count = &opened_count,
                                .mean_scores = test.estimates ? flat_scores.data() : nullptr,
                                .visible_begin = test.visible_begin,
                                .visible_end = test.visible_end,
                                .force_below = test.force_below,
                                .force_from = test.force_from,
                                .tokens = tokens.data(),
                                .count = count.data(),
                                .estimates = test.estimates ? estimates.data() : nullptr,
                                .stride = stride};
    ASSERT_TRUE(backend().ScanClusters(stream(), {&item, 1}).ok());
    EXPECT_TRUE(tokens.IsUntouchedFrom(expected.size()));
    EXPECT_TRUE(count.IsUntouchedFrom(1));
    ASSERT_EQ(std::vector<uint32_t>(tokens.data(), tokens.data() + count[0]), expected);
    const uint32_t planes = test.options.first_planes;
    const oracle::Row shares =
        test.estimates ? SharesLeft(clusters, oracle::CodecOf(head.view()), planes) : oracle::Row();
    for (uint32_t r = 0; r < test.heads; ++r) {
      for (size_t n = 0; n < expected.size() && test.estimates; ++n) {
        const int64_t sum = oracle::CoarseSum(query.scan(r), head.CodesAt(expected[n], planes), planes);
        const float plain =
            oracle::Estimate(sum, query.scan_scale(r), head.SketchScaleAt(expected[n]), query.mean_dot(r));
        const uint32_t cluster = ClusterOf(test, clusters, expected[n]);
        if (!std::binary_search(opened.begin(), opened.end(), cluster)) {
          ASSERT_EQ(estimates[r * stride + n], plain) << "head " << r << " token " << expected[n];
          continue;
        }
        const double mean = mean_scores[r][cluster];
        const double drawn = mean + shares[cluster] * (plain - mean);
        ASSERT_TRUE(IsWithin(estimates[r * stride + n], drawn, 1e-5 * (1 + std::abs(plain) + std::abs(mean))))
            << "head " << r << " token " << expected[n];
      }
      for (size_t i = expected.size(); i < stride; ++i) ASSERT_TRUE(estimates.IsUntouched(r * stride + i));
    }
    ASSERT_TRUE(estimates.IsUntouchedFrom(test.estimates ? estimates.size() : 0));
  }
};

TEST_P(ScanClustersConformance, EstimatesAreTheOracles) {
  uint64_t salt = 1900;
  for (const uint32_t head_dim : kHeadDims) {
    for (const Format format : {Format::kK8V4, Format::kK6V4}) {
      ++salt;
      Check({.options = {.format = format,
                         .head_dim = head_dim,
                         .value_dim = 16,
                         .first_planes = static_cast<uint32_t>(1 + salt % 2),
                         .tokens = static_cast<uint32_t>(150 + salt % 65)},
             .begin = static_cast<uint32_t>(salt % 7),
             .tail = static_cast<uint32_t>(salt % 11),
             .heads = static_cast<uint32_t>(1 + salt % kGroupHeadsMax),
             .force_from = 140},
            salt);
    }
  }
}

TEST_P(ScanClustersConformance, BlocksBordersAndWhatIsForced) {
  const StoreOptions options{
      .head_dim = 16, .value_dim = 16, .first_planes = 2, .tokens = 2 * kClusterBlockTokens + 300};
  for (const bool arranged : {true, false}) {
    Check({.options = options, .begin = 4, .tail = 40, .heads = 4, .force_from = 2300, .arranged = arranged}, 2000);
  }
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 5, .visible_end = 2347}, 2001);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 1000, .visible_end = 1001}, 2002);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 7, .visible_end = 7}, 2003);
  Check({.options = options, .begin = 64, .heads = 2, .open_one_in = 0}, 2004);
  Check({.options = options, .begin = 64, .heads = 2, .open_one_in = 1, .force_below = 0}, 2005);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 1028, .visible_end = 2052, .force_below = 1100},
        2006);
  Check({.options = options, .begin = 4, .heads = 2, .force_below = 0, .force_from = 0}, 2007);
  Check({.options = options, .begin = 4, .open_one_in = 0, .visible_begin = 70, .force_below = 50}, 2008);
}

TEST_P(ScanClustersConformance, ListsKeysOfEveryFormatWithoutEstimates) {
  for (const Format format : kAllFormats) {
    Check({.options = {.format = format, .head_dim = 32, .value_dim = 16, .tokens = 300},
           .begin = 4,
           .tail = 9,
           .force_from = 291,
           .estimates = false},
          2100);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScanClustersConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param_info) { return param_info.param; });

}  // namespace
}  // namespace ctkvr::testing
