// SPDX-License-Identifier: Apache-2.0
//
// BuildClusters and EstimateRest on every backend. Clusters: counts, members and means against the stored rows, and the
// partition as good as the oracle's. Estimates: against float64 over the clusters as stored. Outputs are poisoned and
// guarded.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "kernels/cluster_ops.h"
#include "tests/conformance/built_clusters.h"
#include "tests/conformance/op_cases.h"
#include "tests/testing/cluster_oracle.h"

namespace ctkvr::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- BuildClusters -------------------------------------------------------------------------------------------------

class BuildClustersConformance : public OpConformance {
 protected:
  // Means of the members, to half a level of the stored mean and float32 sums.
  void CheckMeans(const oracle::Matrix& stored, const oracle::Matrix& rows, const oracle::Clusters& clusters,
                  double slack = 0) {
    const size_t dim = rows[0].size();
    oracle::Matrix means(stored.size(), oracle::Row(dim));
    std::vector<double> largest(stored.size());
    for (size_t t = 0; t < rows.size(); ++t) {
      const uint32_t c = clusters.cluster_of[t];
      for (size_t i = 0; i < dim; ++i) {
        means[c][i] += rows[t][i] / clusters.counts[c];
        largest[c] = std::max(largest[c], std::abs(rows[t][i]));
      }
    }
    for (size_t c = 0; c < stored.size(); ++c) {
      double mean_largest = 0;
      for (const double element : means[c]) mean_largest = std::max(mean_largest, std::abs(element));
      for (size_t i = 0; i < dim; ++i) {
        ASSERT_TRUE(IsWithin(stored[c][i], means[c][i], mean_largest * 0.507 / 127 + largest[c] * 1e-4 + slack))
            << "cluster " << c << " dimension " << i;
      }
    }
  }

  void Check(const StoreOptions& options, uint32_t tokens_per_cluster, uint32_t begin, uint64_t salt) {
    SCOPED_TRACE(::testing::Message() << FormatName(options.format) << " head_dim " << options.head_dim << " tokens "
                                      << options.tokens << " from " << begin << " a cluster " << tokens_per_cluster);
    const StoredHead head(options, salt);
    FillValues(head, salt + 1000);
    BuiltClusters built(head, tokens_per_cluster, begin, options.tokens);
    built.Build(backend(), stream(), head);
    const oracle::Clusters clusters = built.Decoded(head);
    std::vector<uint32_t> counts(clusters.counts.size());
    oracle::Matrix keys, values;
    for (uint32_t token = begin; token < options.tokens; ++token) {
      ++counts[clusters.cluster_of[token - begin]];
      keys.push_back(head.keys()[token]);
      values.push_back(oracle::DecodeValue(oracle::CodecOf(head.view()), oracle::ValueRowAt(head.view(), token)));
    }
    ASSERT_EQ(counts, clusters.counts);
    ASSERT_NO_FATAL_FAILURE(built.CheckOrder(clusters));
    for (uint32_t block = 0; block < ClusterBlocks(begin, options.tokens); ++block) {
      const uint32_t used = (built.count(block) + tokens_per_cluster - 1) / tokens_per_cluster;
      for (uint32_t c = used; c < built.layout.clusters; ++c) ASSERT_EQ(counts[block * built.layout.clusters + c], 0u);
    }
    CheckMeans(clusters.values, values, clusters);
    // Keys in the space the means are coded in: rotated about the mean where keys are coded.
    const oracle::Codec codec = oracle::CodecOf(head.view());
    oracle::Matrix stored = clusters.keys;
    for (oracle::Matrix* rows : {&keys, &stored}) {
      for (oracle::Row& row : *rows) {
        if (!built.layout.coded) continue;
        for (size_t i = 0; i < row.size(); ++i) row[i] -= codec.mean[i];
        row = oracle::Rotated(row, codec.signs);
      }
    }
    for (size_t c = 0; c < stored.size(); ++c) {
      if (counts[c] == 0) stored[c].assign(stored[c].size(), 0);
    }
    CheckSpreads(clusters, head, begin);
    if (built.layout.coded) CheckMeans(stored, keys, clusters);
    if (!built.layout.coded) CheckCentredMeans(stored, keys, clusters);
    BuiltClusters again(head, tokens_per_cluster, begin, options.tokens);
    again.Build(backend(), stream(), head);
    EXPECT_EQ(again.Bytes(), built.Bytes());
  }
  // About the mean of the members, not about the mean as it is stored.
  void CheckSpreads(const oracle::Clusters& clusters, const StoredHead& head, uint32_t begin) {
    const size_t dim = head.options().head_dim;
    oracle::Matrix means(clusters.counts.size(), oracle::Row(dim));
    oracle::Row squares(clusters.counts.size()), largest(clusters.counts.size());
    for (size_t t = 0; t < clusters.cluster_of.size(); ++t) {
      const uint32_t c = clusters.cluster_of[t];
      for (size_t i = 0; i < dim; ++i) means[c][i] += head.keys()[begin + t][i] / clusters.counts[c];
    }
    for (size_t t = 0; t < clusters.cluster_of.size(); ++t) {
      const uint32_t c = clusters.cluster_of[t];
      for (size_t i = 0; i < dim; ++i) {
        const double key = head.keys()[begin + t][i];
        squares[c] += std::pow(key - means[c][i], 2) / (static_cast<double>(dim) * clusters.counts[c]);
        largest[c] = std::max(largest[c], std::abs(key));
      }
    }
    for (size_t c = 0; c < squares.size(); ++c) {
      const double expected = std::min(std::sqrt(squares[c]), 65504.0);
      ASSERT_TRUE(IsWithin(clusters.spreads[c], expected, expected * 1e-3 + largest[c] * 1e-4)) << "cluster " << c;
    }
  }
  // One block of float keys: about its centre.
  void CheckCentredMeans(oracle::Matrix stored, oracle::Matrix keys, const oracle::Clusters& clusters) {
    ASSERT_LE(keys.size(), kClusterBlockTokens);
    oracle::Row centre(keys[0].size());
    for (const oracle::Row& key : keys) {
      for (size_t i = 0; i < key.size(); ++i) centre[i] += key[i] / static_cast<double>(keys.size());
    }
    for (size_t c = 0; c < stored.size(); ++c) {
      for (size_t i = 0; i < centre.size(); ++i) stored[c][i] -= clusters.counts[c] == 0 ? 0 : centre[i];
    }
    for (oracle::Row& key : keys) {
      for (size_t i = 0; i < centre.size(); ++i) key[i] -= centre[i];
    }
    CheckMeans(stored, keys, clusters, 1e-6);  // of normal numbers, whose centre is rounded
  }
};

TEST_P(BuildClustersConformance, CountsMembersAndMeansAreThoseOfTheTokens) {
  uint64_t salt = 900;
  for (const uint32_t head_dim : kHeadDims) {
    for (const Format format : kAllFormats) {
      ++salt;
      const StoreOptions options{.format = format,
                                 .head_dim = head_dim,
                                 .value_dim = kHeadDims[salt % std::size(kHeadDims)],
                                 .first_planes = static_cast<uint32_t>(1 + salt % 2),
                                 .tokens = static_cast<uint32_t>(100 + salt % 65)};
      Check(options, 16, static_cast<uint32_t>(salt % 7), salt);
    }
  }
}

TEST_P(BuildClustersConformance, EveryNumberOfTokensAndEveryKindOfKeys) {
  uint64_t salt = 950;
  for (const uint32_t tokens : {1u, 4u, 5u, 16u, 17u, 63u, 65u, 1023u, 1024u}) {
    for (const uint32_t tokens_per_cluster : {kTokensPerClusterMin, 10u, 16u, 128u}) {
      Check({.head_dim = 16, .value_dim = 24, .tokens = 3 + tokens}, tokens_per_cluster, 3, ++salt);
    }
  }
  for (const KeyPattern pattern : {KeyPattern::kTies, KeyPattern::kEqual, KeyPattern::kZero, KeyPattern::kFull}) {
    for (const Format format : {Format::kK6V4, Format::kF32}) {
      Check({.format = format, .head_dim = 40, .value_dim = 16, .tokens = 200, .pattern = pattern}, 16, 0, ++salt);
    }
  }
  Check({.head_dim = 16, .value_dim = 16, .tokens = 2 * kClusterBlockTokens + 77}, 16, 0, ++salt);
}

TEST_P(BuildClustersConformance, EqualKeysAreOneCluster) {
  for (const KeyPattern pattern : {KeyPattern::kEqual, KeyPattern::kZero}) {
    for (const Format format : {Format::kK8V4, Format::kF16}) {
      const StoredHead head({.format = format, .head_dim = 64, .tokens = 333, .pattern = pattern}, 5);
      BuiltClusters built(head, 16, 0, 333);
      built.Build(backend(), stream(), head);
      const oracle::Clusters clusters = built.Decoded(head);
      EXPECT_EQ(*std::max_element(clusters.counts.begin(), clusters.counts.end()), 333u);
    }
  }
}

TEST_P(BuildClustersConformance, IsAsGoodAPartitionAsTheOracles) {
  for (const Format format : {Format::kK8V4, Format::kBF16}) {
    for (const KvPattern pattern : {KvPattern::kNormal, KvPattern::kClustered}) {
      const uint32_t tokens = 400, dim = 32;
      const RandomKv kv = MakeRandomKv({.tokens = tokens, .head_dim = dim, .value_dim = 16}, pattern, 31);
      StoredHead head({.format = Format::kF32, .head_dim = dim, .value_dim = 16, .tokens = tokens}, 6);
      const HeadView view = head.view();
      oracle::Matrix keys;
      oracle::Row centre(dim);
      for (uint32_t t = 0; t < tokens; ++t) {
        std::byte* to = view.pages[t / kPageTokens] + view.layout.keys_offset + t % kPageTokens * dim * sizeof(float);
        std::memcpy(to, kv.keys.data() + size_t{t} * dim, dim * sizeof(float));
        keys.emplace_back(kv.keys.begin() + size_t{t} * dim, kv.keys.begin() + size_t{t + 1} * dim);
        for (uint32_t i = 0; i < dim; ++i) centre[i] += keys[t][i] / tokens;
      }
      for (oracle::Row& key : keys) {
        for (uint32_t i = 0; i < dim; ++i) key[i] -= centre[i];
      }
      BuiltClusters built(head, 16, 0, tokens);
      built.Build(backend(), stream(), head);
      const double actual = oracle::SumOfCosines(keys, built.Decoded(head).cluster_of);
      const double expected = oracle::SumOfCosines(keys, oracle::ClusterKeys(keys, tokens / 16));
      EXPECT_GE(actual, 0.995 * expected) << KvPatternName(pattern) << " " << FormatName(format);
    }
  }
}

TEST_P(BuildClustersConformance, ReadsKeysInAnyOrder) {
  for (const uint32_t clusters : {64u, 128u}) {
    StoreOptions options{.head_dim = 40, .value_dim = 16, .tokens = 2300};
    const StoredHead plain(options, 8);
    options.order_clusters = clusters;
    const StoredHead ordered(options, 8);
    FillValues(plain, 9);
    FillValues(ordered, 9);
    BuiltClusters a(plain, 16, 4, 2300), b(ordered, 16, 4, 2300);
    a.Build(backend(), stream(), plain);
    b.Build(backend(), stream(), ordered);
    EXPECT_EQ(a.Bytes(), b.Bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(All, BuildClustersConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param_info) { return param_info.param; });

// ---- EstimateRest --------------------------------------------------------------------------------------------------

struct RestCase {
  StoreOptions options;
  uint32_t tokens_per_cluster = 16;
  uint32_t begin = 0;  // clustered: [begin, options.tokens - tail)
  uint32_t tail = 0;
  uint32_t heads = 1;
  uint32_t visible_begin = 0;
  uint32_t visible_end = 0xffffffffu;
  uint32_t chosen_one_in = 5;  // of the visible tokens; 0: none
  float scale = 0.2f;
  float softcap = 0;
};

class EstimateRestConformance : public OpConformance {
 protected:
  struct Result {
    std::vector<float> output, log_sum_exp;
    uint64_t lines_read = 0;
  };

  Result Run(const BuiltClusters& built, QueryHeads& query, const RestCase& test, const std::vector<uint32_t>& chosen) {
    const uint32_t end = test.options.tokens - test.tail, value_dim = test.options.value_dim;
    GuardedArray<float> output(size_t{test.heads} * value_dim, 4), log_sum_exp(test.heads, 8);
    GuardedArray<uint64_t> read(1);
    GuardedArray<std::byte> workspace(EstimateRestWorkspaceBytes(built.layout, test.heads, test.begin, end), 4);
    const auto count = static_cast<uint32_t>(chosen.size());
    const EstimateRestItem item{.query = query.prepared(),
                                .layout = built.layout,
                                .blocks = built.blocks(),
                                .begin = test.begin,
                                .end = end,
                                .visible_begin = test.visible_begin,
                                .visible_end = test.visible_end,
                                .tokens = chosen.data(),
                                .count = &count,
                                .count_max = count,
                                .softmax = {.scale = test.scale, .softcap = test.softcap, .sink_logits = nullptr},
                                .output = output.data(),
                                .log_sum_exp = log_sum_exp.data(),
                                .lines_read = read.data(),
                                .workspace = workspace.data()};
    EXPECT_TRUE(backend().EstimateRest(stream(), {&item, 1}).ok());
    EXPECT_TRUE(output.IsUntouchedFrom(output.size()));
    EXPECT_TRUE(log_sum_exp.IsUntouchedFrom(test.heads));
    EXPECT_TRUE(read.IsUntouchedFrom(1));
    EXPECT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
    return {.output = {output.span().begin(), output.span().end()},
            .log_sum_exp = {log_sum_exp.span().begin(), log_sum_exp.span().end()},
            .lines_read = read[0]};
  }

  // Lines by brute force: of the value means, those of clusters that have weight are read.
  struct LineBounds {
    size_t without_values = 0, with_all_values = 0;
  };
  static LineBounds LinesOf(const BuiltClusters& built, const oracle::Clusters& clusters, const RestCase& test,
                            const std::vector<uint32_t>& left_out) {
    const ClusterLayout& layout = built.layout;
    std::set<size_t> lines;
    const auto read = [&](size_t block, size_t offset, size_t bytes) {
      for (size_t i = 0; i < bytes; ++i) lines.insert((block * layout.block_bytes + offset + i) / 64);
    };
    std::vector<uint32_t> left = clusters.counts;
    for (const uint32_t token : left_out) {
      if (token < test.begin || token >= test.begin + clusters.cluster_of.size()) continue;
      --left[clusters.cluster_of[token - test.begin]];
      const size_t block = token / 1024 - test.begin / 1024, offset = token % 1024;
      const bool apart = layout.members_offset != 0;
      read(block, apart ? layout.members_offset + offset : layout.places_offset + 2 * offset, apart ? 1 : 2);
    }
    for (uint32_t block = 0; block < built.block_count(); ++block) {
      read(block, layout.ends_offset, 2 * layout.clusters);
      if (!layout.coded) read(block, layout.centre_offset, 4 * layout.head_dim);
    }
    for (size_t c = 0; c < left.size(); ++c) {
      if (left[c] == 0) continue;
      const size_t block = c / layout.clusters, own = c % layout.clusters;
      read(block, layout.key_means_offset + own * layout.head_dim, layout.head_dim);
      read(block, layout.key_scales_offset + 2 * own, 2);
    }
    LineBounds bounds{.without_values = lines.size()};
    for (size_t c = 0; c < left.size(); ++c) {
      if (left[c] == 0) continue;
      const size_t block = c / layout.clusters, own = c % layout.clusters;
      read(block, layout.value_means_offset + own * layout.value_dim, layout.value_dim);
      read(block, layout.value_scales_offset + 2 * own, 2);
    }
    bounds.with_all_values = lines.size();
    return bounds;
  }

  void Check(const RestCase& test, uint64_t salt) {
    SCOPED_TRACE(::testing::Message() << "case " << salt);
    const StoredHead head(test.options, salt);
    FillValues(head, salt + 1000);
    BuiltClusters built(head, test.tokens_per_cluster, test.begin, test.options.tokens - test.tail);
    built.Build(backend(), stream(), head);
    QueryHeads query(head, RandomFloats(size_t{test.heads} * test.options.head_dim, salt + 2));
    std::mt19937_64 random = MakeRandom(salt + 3);
    std::vector<uint32_t> chosen, left_out;
    for (uint32_t token = 0; token < test.options.tokens; ++token) {
      const bool visible = token >= test.visible_begin && token < test.visible_end;
      const bool is_chosen = visible && test.chosen_one_in > 0 && random() % test.chosen_one_in == 0;
      if (is_chosen) chosen.push_back(token);
      if (is_chosen || !visible) left_out.push_back(token);
    }
    const Result result = Run(built, query, test, chosen);
    const oracle::Clusters clusters = built.Decoded(head);
    const oracle::Attention expected =
        oracle::Remainder(clusters, left_out, test.begin, query.rows(), {.scale = test.scale, .softcap = test.softcap});
    const LineBounds lines = LinesOf(built, clusters, test, left_out);
    EXPECT_GE(result.lines_read, lines.without_values);
    EXPECT_LE(result.lines_read, lines.with_all_values);
    if (test.scale == 0) {
      EXPECT_EQ(result.lines_read, lines.with_all_values);
    }
    double value_max = 0;
    for (const oracle::Row& value : clusters.values) {
      for (const double element : value) value_max = std::max(value_max, std::abs(element));
    }
    for (uint32_t r = 0; r < test.heads; ++r) {
      if (std::isinf(expected.log_sum_exp[r])) {
        EXPECT_EQ(result.log_sum_exp[r], -kInfinity);
      } else {
        EXPECT_TRUE(
            IsWithin(result.log_sum_exp[r], expected.log_sum_exp[r], 1e-4 + 1e-5 * std::abs(expected.log_sum_exp[r])));
      }
      for (uint32_t i = 0; i < test.options.value_dim; ++i) {
        // What may be left out of the output weighs 2^-16.
        const double bound = std::isinf(expected.log_sum_exp[r]) ? 0 : value_max * (std::ldexp(1, -15) + 2e-4);
        ASSERT_TRUE(IsWithin(result.output[r * test.options.value_dim + i], expected.output[r][i], bound))
            << "head " << r << " dimension " << i;
      }
    }
  }
};

TEST_P(EstimateRestConformance, EveryFormatAndShape) {
  uint64_t salt = 1200;
  for (const uint32_t head_dim : kHeadDims) {
    for (const Format format : kAllFormats) {
      ++salt;
      Check({.options = {.format = format,
                         .head_dim = head_dim,
                         .value_dim = kHeadDims[salt % std::size(kHeadDims)],
                         .first_planes = static_cast<uint32_t>(1 + salt % 2),
                         .tokens = static_cast<uint32_t>(150 + salt % 65)},
             .begin = static_cast<uint32_t>(salt % 7),
             .tail = static_cast<uint32_t>(salt % 11),
             .heads = static_cast<uint32_t>(1 + salt % kGroupHeadsMax)},
            salt);
    }
  }
}

TEST_P(EstimateRestConformance, BlocksBordersAndSoftcap) {
  const StoreOptions options{.head_dim = 16, .value_dim = 16, .tokens = 2 * kClusterBlockTokens + 300};
  Check({.options = options, .begin = 4, .tail = 40, .heads = 4}, 1300);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 5}, 1301);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = kClusterBlockTokens + 4}, 1302);
  Check({.options = options, .begin = 4, .heads = 2, .visible_end = kClusterBlockTokens + 4}, 1303);
  Check({.options = options, .heads = 2, .visible_begin = 100, .visible_end = 2 * kClusterBlockTokens + 299}, 1304);
  Check({.options = options, .heads = 3, .softcap = 0.7f}, 1305);
  Check({.options = options, .heads = 3, .scale = 30}, 1306);  // all the weight in one cluster
  Check({.options = options, .heads = 3, .chosen_one_in = 0}, 1307);
  Check({.options = options, .tokens_per_cluster = 4, .heads = 3}, 1308);
  Check({.options = options, .begin = 4, .tail = 40, .heads = 2, .visible_begin = 900, .scale = 0}, 1310);
  Check({.options = options, .tokens_per_cluster = 4, .begin = 7, .heads = 1, .chosen_one_in = 3, .scale = 0}, 1311);
  Check({.options = {.format = Format::kF16, .head_dim = 24, .value_dim = 40, .tokens = 1500}, .scale = 0}, 1312);
  Check({.options = {.head_dim = 40, .value_dim = 24, .tokens = 3500}, .begin = 1100, .heads = 2, .scale = 0}, 1313);
  for (const KeyPattern pattern : {KeyPattern::kTies, KeyPattern::kEqual, KeyPattern::kZero}) {
    Check({.options = {.head_dim = 32, .value_dim = 8, .tokens = 200, .pattern = pattern}, .heads = 2}, 1309);
  }
}

TEST_P(EstimateRestConformance, IsEmptyWhenNothingIsLeft) {
  const StoreOptions options{.head_dim = 16, .value_dim = 16, .tokens = 1100};
  Check({.options = options, .begin = 4, .tail = 3, .heads = 2, .chosen_one_in = 1}, 1400);
  Check({.options = options, .begin = 4, .tail = 3, .heads = 2, .visible_begin = 1097}, 1401);
  Check({.options = options, .begin = 4, .tail = 3, .heads = 2, .visible_end = 4}, 1402);
  Check({.options = options, .begin = 4, .heads = 2, .visible_begin = 50, .visible_end = 1000, .chosen_one_in = 1},
        1403);
}

TEST_P(EstimateRestConformance, ReadsNoValueOfAClusterWithoutWeight) {
  const StoreOptions options{.format = Format::kF32, .head_dim = 64, .value_dim = 16, .tokens = 1024};
  const RestCase test{.options = options, .scale = 20};
  const StoredHead head(options, 7);
  FillValues(head, 8);
  BuiltClusters built(head, 16, 0, 1024);
  built.Build(backend(), stream(), head);
  std::vector<float> like_the_first(head.keys()[0].begin(), head.keys()[0].end());
  QueryHeads query(head, like_the_first);
  const Result result = Run(built, query, test, {});
  const LineBounds lines = LinesOf(built, built.Decoded(head), test, {});
  EXPECT_GT(result.lines_read, lines.without_values);
  // Means of 16 bytes: 64 take 16 lines, and few of them are read.
  EXPECT_LE(result.lines_read, lines.without_values + 8);
}

INSTANTIATE_TEST_SUITE_P(All, EstimateRestConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param_info) { return param_info.param; });

}  // namespace
}  // namespace ctkvr::testing
