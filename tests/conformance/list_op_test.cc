// SPDX-License-Identifier: Apache-2.0
//
// BuildLists, SelectLists and MergeCandidates on every backend against the oracle.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/conformance/op_cases.h"
#include "tests/testing/list_oracle.h"

namespace ctkvr::testing {
namespace {

using Positions = std::vector<uint32_t>;

// Centroids [C] of [heads, head_dim] binary16, each row near norm 1.
class Centroids {
 public:
  Centroids(uint32_t count, uint32_t heads, uint32_t head_dim, uint64_t salt) : heads_(heads), head_dim_(head_dim) {
    for (uint32_t c = 0; c < count; ++c) {
      std::vector<float> rows = RandomFloats(size_t{heads} * head_dim, salt * 100 + c);
      for (float& element : rows) element /= std::sqrt(static_cast<float>(head_dim));
      Set(c, rows);
    }
  }
  void Set(uint32_t c, const std::vector<float>& rows) {
    if (c >= halves_.size()) halves_.resize(c + 1);
    const std::vector<std::byte> bytes = ToBytes(rows, DType::kF16);
    halves_[c].resize(rows.size());
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(halves_[c].data()));
    pointers_.clear();
    for (std::vector<uint16_t>& centroid : halves_) pointers_.push_back(centroid.data());
  }
  uint16_t* const* pointers() const { return pointers_.data(); }
  uint32_t count() const { return static_cast<uint32_t>(halves_.size()); }
  oracle::Matrix rows(uint32_t c) const {
    oracle::Matrix rows(heads_);
    for (uint32_t r = 0; r < heads_; ++r) {
      for (uint32_t i = 0; i < head_dim_; ++i) rows[r].push_back(oracle::FromF16(halves_[c][r * head_dim_ + i]));
    }
    return rows;
  }

 private:
  uint32_t heads_, head_dim_;
  std::vector<std::vector<uint16_t>> halves_;
  std::vector<uint16_t*> pointers_;
};

struct BuildOptions {
  uint32_t heads = 1;
  uint32_t centroids = 1;
  uint32_t first = 0, last = 1;
  uint32_t begin = 0, end = 0;
  uint32_t list_tokens = 0;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
  float softcap = 0;
  std::vector<float> sink_logits;
  bool exact_ties = false;
};

class BuildListsConformance : public OpConformance {
 protected:
  void Check(const StoredHead& head, const BuildOptions& options, uint64_t salt) {
    const uint32_t head_dim = head.options().head_dim;
    const Centroids centroids(options.centroids, options.heads, head_dim, salt);
    std::vector<float> mean_norms(options.heads);
    for (uint32_t r = 0; r < options.heads; ++r) mean_norms[r] = 3 + static_cast<float>(r);
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    const uint32_t list_tokens = std::max(1u, options.list_tokens);
    const PackedLists packing = MakePackedLists(list_tokens, std::max(list_tokens, options.end));
    std::vector<GuardedArray<uint64_t>> lists;
    std::vector<uint64_t*> pointers;
    for (uint32_t c = 0; c < options.centroids; ++c) lists.emplace_back(packing.words + 2);
    for (GuardedArray<uint64_t>& list : lists) pointers.push_back(list.data());
    GuardedArray<uint32_t> counts(options.centroids);
    const BuildListsItem item = {
        .view = head.view(),
        .heads = options.heads,
        .centroids = centroids.pointers(),
        .mean_norms = mean_norms.data(),
        .first_centroid = options.first,
        .last_centroid = options.last,
        .begin = options.begin,
        .end = options.end,
        .list_tokens = options.list_tokens,
        .softmax = {.scale = scale,
                    .softcap = options.softcap,
                    .sink_logits = options.sink_logits.empty() ? nullptr : options.sink_logits.data()},
        .reduction = options.reduction,
        .packing = packing,
        .lists = pointers.data(),
        .list_counts = counts.data()};
    ASSERT_TRUE(backend().BuildLists(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    ASSERT_TRUE(counts.IsUntouchedFrom(options.centroids));
    const oracle::Matrix keys(head.keys().begin() + options.begin, head.keys().begin() + options.end);
    for (uint32_t c = 0; c < options.centroids; ++c) {
      if (c < options.first || c >= options.last) {
        ASSERT_TRUE(counts.IsUntouched(c) && lists[c].IsUntouchedFrom(0)) << "centroid " << c;
        continue;
      }
      oracle::Matrix queries = centroids.rows(c);
      for (uint32_t r = 0; r < options.heads; ++r) {
        for (double& element : queries[r]) element *= mean_norms[r];
      }
      const oracle::Matrix scores = oracle::Scores(queries, keys);
      const oracle::Softmax softmax = {.scale = scale,
                                       .softcap = options.softcap,
                                       .sink_logits = {options.sink_logits.begin(), options.sink_logits.end()}};
      const oracle::Row ranks =
          options.heads == 1 ? scores[0] : oracle::GroupRanks(oracle::LogShares(scores, softmax), options.reduction);
      ASSERT_EQ(counts[c], std::min<size_t>(options.list_tokens, keys.size()));
      ASSERT_TRUE(lists[c].IsUntouchedFrom(packing.words));
      Positions list = oracle::UnpackList(lists[c].data(), counts[c], packing.low_bits, packing.low_words);
      for (uint32_t& position : list) position -= options.begin;
      ASSERT_TRUE(IsTopK(list, ranks, options.list_tokens, options.exact_ties ? 0 : Band(head, queries, options)))
          << "centroid " << c;
    }
  }

 private:
  // What the scores' and the logarithms' rounding may move a rank by.
  static double Band(const StoredHead& head, const oracle::Matrix& queries, const BuildOptions& options) {
    double bound = 0;
    for (const oracle::Row& query : queries) {
      for (uint32_t t = options.begin; t < options.end; ++t) bound = std::max(bound, ScoreBound(head, query, t));
    }
    return options.heads == 1 ? bound : bound + 4e-5;
  }
};

TEST_P(BuildListsConformance, ListsHoldTheBestTokensOfEveryFormat) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : {16u, 64u, 80u, 128u, 256u}) {
    for (const Format format : kAllFormats) {
      for (const bool raw : {false, true}) {
        if (raw && !KeysAreCoded(format)) continue;
        ++turn;
        const StoredHead head({.format = format,
                               .head_dim = head_dim,
                               .value_dim = 32,
                               .tokens = 150,
                               .raw = raw,
                               .raw_dtype = DType::kBF16},
                              turn);
        SCOPED_TRACE(::testing::Message() << FormatName(format) << " head_dim " << head_dim << " raw " << raw);
        ASSERT_NO_FATAL_FAILURE(
            Check(head,
                  {.heads = 1 + turn % 7,
                   .centroids = 3,
                   .first = 0,
                   .last = 3,
                   .begin = turn % 5,
                   .end = 150 - turn % 3,
                   .list_tokens = 40,
                   .reduction = turn % 2 == 0 ? GroupReduction::kSumSoftmax : GroupReduction::kMaxSoftmax},
                  turn));
      }
    }
  }
}

TEST_P(BuildListsConformance, OnlyTheCentroidsAskedForAreBuilt) {
  const StoredHead head({.head_dim = 64, .tokens = 90}, 70);
  for (const uint32_t first : {0u, 3u, 10u}) {
    for (const uint32_t last : {first, first + 1, 20u}) {
      ASSERT_NO_FATAL_FAILURE(Check(
          head, {.heads = 2, .centroids = 20, .first = first, .last = last, .begin = 4, .end = 90, .list_tokens = 16},
          71));
    }
  }
}

TEST_P(BuildListsConformance, RangesAndLengthsAtTheBordersAreKept) {
  const StoredHead head({.format = Format::kF16, .head_dim = 40, .tokens = 200}, 72);
  for (const uint32_t begin : {0u, 63u, 64u}) {
    for (const uint32_t width : {0u, 1u, 15u, 16u, 17u, 64u, 65u, 136u}) {
      for (const uint32_t list_tokens : {0u, 1u, 64u, 500u}) {
        ASSERT_NO_FATAL_FAILURE(Check(head,
                                      {.heads = 3,
                                       .centroids = 2,
                                       .first = 0,
                                       .last = 2,
                                       .begin = begin,
                                       .end = begin + width,
                                       .list_tokens = list_tokens},
                                      73));
      }
    }
  }
}

TEST_P(BuildListsConformance, SixteenHeadsSoftcapAndSinksEnterTheRanking) {
  const StoredHead head({.format = Format::kK6V4, .head_dim = 96, .tokens = 180}, 74);
  for (const float softcap : {0.0f, 20.0f}) {
    ASSERT_NO_FATAL_FAILURE(Check(head,
                                  {.heads = 16,
                                   .centroids = 9,
                                   .first = 0,
                                   .last = 9,
                                   .begin = 0,
                                   .end = 180,
                                   .list_tokens = 50,
                                   .softcap = softcap,
                                   .sink_logits = RandomFloats(16, 75)},
                                  76));
  }
}

TEST_P(BuildListsConformance, EqualKeysAreListedFromTheFirst) {
  for (const Format format : {Format::kF32, Format::kK8V8}) {
    for (const KeyPattern pattern : {KeyPattern::kEqual, KeyPattern::kZero}) {
      const StoredHead head({.format = format, .head_dim = 64, .tokens = 140, .pattern = pattern}, 77);
      ASSERT_NO_FATAL_FAILURE(Check(head,
                                    {.heads = 4,
                                     .centroids = 2,
                                     .first = 0,
                                     .last = 2,
                                     .begin = 3,
                                     .end = 140,
                                     .list_tokens = 30,
                                     .exact_ties = true},
                                    78));
    }
  }
}

TEST_P(BuildListsConformance, CentroidsTogetherEqualCentroidsAlone) {
  const StoredHead head({.head_dim = 128, .tokens = 300}, 79);
  const Centroids centroids(11, 4, 128, 80);
  const std::vector<float> mean_norms = {1, 2, 3, 4};
  const PackedLists packing = MakePackedLists(64, 300);
  using Packed = std::vector<uint64_t>;
  std::vector<Packed> together(11, Packed(packing.words)), alone = together;
  std::vector<uint32_t> counts(11), counts_alone(11);
  const auto item = [&](std::vector<Packed>& lists, std::vector<uint64_t*>& pointers, uint32_t* list_counts) {
    for (Packed& list : lists) pointers.push_back(list.data());
    return BuildListsItem{.view = head.view(),
                          .heads = 4,
                          .centroids = centroids.pointers(),
                          .mean_norms = mean_norms.data(),
                          .first_centroid = 0,
                          .last_centroid = 11,
                          .begin = 0,
                          .end = 300,
                          .list_tokens = 64,
                          .softmax = {.scale = 0.1f},
                          .packing = packing,
                          .lists = pointers.data(),
                          .list_counts = list_counts};
  };
  std::vector<uint64_t*> pointers, pointers_alone;
  const BuildListsItem all = item(together, pointers, counts.data());
  ASSERT_TRUE(backend().BuildLists(stream(), {&all, 1}).ok());
  std::vector<BuildListsItem> items(11, item(alone, pointers_alone, counts_alone.data()));
  for (uint32_t c = 0; c < 11; ++c) items[c].first_centroid = c, items[c].last_centroid = c + 1;
  ASSERT_TRUE(backend().BuildLists(stream(), items).ok());
  EXPECT_EQ(together, alone);
  EXPECT_EQ(counts, counts_alone);
}

class SelectListsConformance : public OpConformance {
 protected:
  void Check(const Centroids& centroids, std::vector<float> query, uint32_t head_dim, uint32_t probes, double band) {
    const auto heads = static_cast<uint32_t>(query.size() / head_dim);
    GuardedArray<uint32_t> selected(probes + 2);
    const SelectListsItem item = {.query = {.heads = heads, .plain = query.data()},
                                  .head_dim = head_dim,
                                  .centroids = centroids.pointers(),
                                  .centroid_count = centroids.count(),
                                  .probes = probes,
                                  .selected = selected.data()};
    ASSERT_TRUE(backend().SelectLists(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    ASSERT_TRUE(selected.IsUntouchedFrom(probes));
    oracle::Matrix rows;
    for (uint32_t r = 0; r < heads; ++r) {
      rows.emplace_back(query.begin() + size_t{r} * head_dim, query.begin() + size_t{r + 1} * head_dim);
    }
    std::vector<oracle::Matrix> all;
    for (uint32_t c = 0; c < centroids.count(); ++c) all.push_back(centroids.rows(c));
    ASSERT_TRUE(IsTopK({selected.data(), probes}, oracle::CentroidCosines(rows, all), probes, band));
  }
};

TEST_P(SelectListsConformance, TheNearestCentroidsAreSelected) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : kHeadDims) {
    for (const uint32_t count : {1u, 7u, 64u, 130u}) {
      const uint32_t heads = 1 + ++turn % kGroupHeadsMax;
      const Centroids centroids(count, heads, head_dim, turn);
      for (const uint32_t probes : {0u, 1u, count / 2, count}) {
        SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " C " << count << " probes " << probes);
        std::vector<float> query = RandomFloats(size_t{heads} * head_dim, turn);
        for (float& element : query) element *= 50;
        ASSERT_NO_FATAL_FAILURE(Check(centroids, query, head_dim, probes, heads * 4e-6));
      }
    }
  }
}

TEST_P(SelectListsConformance, LengthsOfQueriesAndCentroidsDoNotCount) {
  Centroids centroids(3, 2, 64, 81);
  const std::vector<float> base = RandomFloats(2 * 64, 82);
  for (uint32_t c = 0; c < 3; ++c) {
    std::vector<float> rows = base;
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] *= c == 1 ? 0.01f : 1.0f;  // the same direction, shorter
      if (c != 1 && i % 3 == 0) rows[i] = -rows[i];
    }
    centroids.Set(c, rows);
  }
  std::vector<float> query = base;
  for (size_t i = 0; i < 64; ++i) query[i] *= 1000;
  ASSERT_NO_FATAL_FAILURE(Check(centroids, query, 64, 1, 1e-5));
}

TEST_P(SelectListsConformance, EqualCentroidsAndZeroQueriesPreferTheFirst) {
  Centroids equal(20, 2, 40, 83);
  for (uint32_t c = 0; c < 20; ++c) equal.Set(c, RandomFloats(2 * 40, 84));
  ASSERT_NO_FATAL_FAILURE(Check(equal, RandomFloats(2 * 40, 85), 40, 5, 0));
  const Centroids centroids(20, 2, 40, 86);
  ASSERT_NO_FATAL_FAILURE(Check(centroids, std::vector<float>(2 * 40, 0.0f), 40, 5, 0));
  Centroids with_zeros(4, 1, 40, 87);
  with_zeros.Set(1, std::vector<float>(40, 0.0f));
  with_zeros.Set(3, std::vector<float>(40, 0.0f));
  ASSERT_NO_FATAL_FAILURE(Check(with_zeros, RandomFloats(40, 88), 40, 2, 4e-6));
}

class MergeCandidatesConformance : public OpConformance {
 protected:
  struct Input {
    std::vector<Positions> lists;
    Positions selected;
    uint32_t begin = 0, end = 0, force_below = 0, force_from = 0xffffffffu;
    uint32_t list_tokens = 200;
  };

  void Check(const Input& input) {
    const PackedLists packing = MakePackedLists(input.list_tokens, 1000);
    std::vector<std::vector<uint64_t>> lists;
    Positions counts;
    for (const Positions& list : input.lists) {
      // Past its count a list may hold more positions: those that truncation took.
      counts.push_back(static_cast<uint32_t>(list.size()));
      Positions longer = list;
      for (uint32_t t = list.empty() ? 0 : list.back() + 1; t < 1000 && longer.size() < input.list_tokens; t += 7) {
        longer.push_back(t);
      }
      lists.push_back(oracle::PackList(longer, packing.low_bits, packing.low_words, packing.words));
    }
    std::vector<const uint64_t*> pointers;
    for (const std::vector<uint64_t>& list : lists) pointers.push_back(list.data());
    const Positions expected = oracle::MergeCandidates(input.lists, input.selected, input.begin, input.end,
                                                       input.force_below, input.force_from);
    GuardedArray<uint32_t> tokens(expected.size() + 3), count(1);
    GuardedArray<uint64_t> workspace(MergeCandidatesWorkspaceBytes(input.begin, input.end) / 8);
    const MergeCandidatesItem item = {.packing = packing,
                                      .lists = pointers.data(),
                                      .list_counts = counts.data(),
                                      .selected = input.selected.data(),
                                      .probes = static_cast<uint32_t>(input.selected.size()),
                                      .begin = input.begin,
                                      .end = input.end,
                                      .force_below = input.force_below,
                                      .force_from = input.force_from,
                                      .tokens = tokens.data(),
                                      .count = count.data(),
                                      .workspace = workspace.data()};
    ASSERT_TRUE(backend().MergeCandidates(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    ASSERT_TRUE(count.IsUntouchedFrom(1));
    ASSERT_EQ(count[0], expected.size());
    ASSERT_TRUE(tokens.IsUntouchedFrom(expected.size()));
    ASSERT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
    ASSERT_EQ(Positions(tokens.data(), tokens.data() + count[0]), expected);
  }

  static std::vector<Positions> RandomLists(uint32_t lists, uint32_t tokens, uint32_t below, uint64_t salt) {
    std::mt19937_64 random = MakeRandom(salt);
    std::vector<Positions> out(lists);
    for (Positions& list : out) {
      for (uint32_t t = 0; t < below; ++t) {
        if (random() % below < tokens) list.push_back(t);
      }
    }
    return out;
  }
};

TEST_P(MergeCandidatesConformance, TheUnionIsAscendingWithoutDuplicates) {
  for (const uint32_t end : {1u, 63u, 64u, 65u, 128u, 1000u}) {
    for (const uint32_t begin : {0u, 1u, 63u, 64u, 500u}) {
      Input input{.lists = RandomLists(6, 40, 1000, end), .selected = {0, 2, 3, 5}, .begin = begin, .end = end};
      if (begin > end) continue;
      ASSERT_NO_FATAL_FAILURE(Check(input));
      input.force_below = 4;
      input.force_from = end > 64 ? end - 64 : 0;
      ASSERT_NO_FATAL_FAILURE(Check(input));
    }
  }
}

TEST_P(MergeCandidatesConformance, ForcedRangesMayBeEmptyOverlapOrLieOutside) {
  const std::vector<Positions> lists = RandomLists(3, 20, 300, 90);
  for (const uint32_t force_below : {0u, 10u, 11u, 64u, 128u, 300u, 400u}) {
    for (const uint32_t force_from : {0u, 5u, 64u, 127u, 200u, 299u, 300u, 301u, 0xffffffffu}) {
      ASSERT_NO_FATAL_FAILURE(Check({.lists = lists,
                                     .selected = {1, 2},
                                     .begin = 10,
                                     .end = 300,
                                     .force_below = force_below,
                                     .force_from = force_from}));
    }
  }
}

TEST_P(MergeCandidatesConformance, ListsMayBeEmptyFullOrTheSame) {
  Positions all(200);
  for (uint32_t i = 0; i < 200; ++i) all[i] = i;
  const std::vector<Positions> lists = {{}, all, all, {7}, {199}};
  for (const Positions& selected : {Positions{}, Positions{0}, Positions{1}, Positions{1, 2}, Positions{0, 3, 4}}) {
    ASSERT_NO_FATAL_FAILURE(Check({.lists = lists, .selected = selected, .begin = 0, .end = 200}));
    ASSERT_NO_FATAL_FAILURE(Check({.lists = lists, .selected = selected, .begin = 100, .end = 150}));
    ASSERT_NO_FATAL_FAILURE(Check({.lists = lists, .selected = selected, .begin = 100, .end = 100}));
  }
}

#define CTKVR_ON_ALL_BACKENDS(suite)                                             \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(BackendNames()), \
                           [](const auto& param) { return param.param; })
CTKVR_ON_ALL_BACKENDS(BuildListsConformance);
CTKVR_ON_ALL_BACKENDS(SelectListsConformance);
CTKVR_ON_ALL_BACKENDS(MergeCandidatesConformance);

}  // namespace
}  // namespace ctkvr::testing
