// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/score_block.h"
#include "kernels/cpu/top_k.h"

namespace ctkvr::cpu {
namespace {

// Centroids scored together, so that a key is decoded once for all of them; fewer when their scores would take more
// memory than this many numbers.
constexpr size_t kCentroidsTogether = 8;
constexpr size_t kScoresMax = size_t{4} << 20;

// The queries of centroids [first, first + count), centroid-major.
struct CentroidQueries {
  std::vector<float> rows;  // [count * R, PaddedFloats(D)]
  std::vector<float> rotated_sum, mean_dot;

  CentroidQueries(const CpuKernels& kernels, const BuildListsItem& item, uint32_t first, uint32_t count)
      : rotated_sum(size_t{count} * item.heads), mean_dot(size_t{count} * item.heads) {
    const uint32_t head_dim = item.view.layout.head_dim, padded = PaddedFloats(head_dim);
    rows.resize(size_t{count} * item.heads * padded);
    for (uint32_t n = 0; n < count * item.heads; ++n) {
      const uint32_t r = n % item.heads;
      const uint16_t* centroid = item.centroids[first + n / item.heads] + size_t{r} * head_dim;
      float* row = rows.data() + size_t{n} * padded;
      kernels.scan->decode_float(reinterpret_cast<const std::byte*>(centroid), DType::kF16, head_dim, row);
      for (uint32_t i = 0; i < head_dim; ++i) row[i] *= item.mean_norms[r];
      if (!ReadsCodes(item.view)) continue;
      double dot = 0, sum = 0;
      for (uint32_t i = 0; i < head_dim; ++i) dot += double{row[i]} * item.view.mean[i];
      kernels.rows->rotate(row, head_dim, item.view.signs);
      for (uint32_t i = 0; i < head_dim; ++i) sum += row[i];
      mean_dot[n] = static_cast<float>(dot);
      rotated_sum[n] = static_cast<float>(sum);
    }
  }
};

// scores [count * R, tokens].
void ScoreRange(const CpuKernels& kernels, const BuildListsItem& item, const CentroidQueries& queries, float* scores) {
  const size_t tokens = item.end - item.begin;
  const ScoreQueries score_queries = {.rows = queries.rows.data(),
                                      .rotated_sum = queries.rotated_sum.data(),
                                      .mean_dot = queries.mean_dot.data(),
                                      .heads = static_cast<uint32_t>(queries.mean_dot.size())};
  SketchSlots slots(item.view, true);
  for (uint32_t token = item.begin; token < item.end; token += kScoreBlockTokens) {
    ScoreBlock(kernels, item.view, score_queries,
               {.begin = token,
                .count = std::min(kScoreBlockTokens, item.end - token),
                .scores = scores + (token - item.begin),
                .stride = tokens,
                .slots = &slots});
  }
}

}  // namespace

// Takes and returns heap memory of its own: scores of the centroids at work, at most 16 MiB or those of one centroid,
// and three numbers a token.
void BuildLists(const CpuKernels& kernels, const BuildListsItem& item) {
  CTKVR_CHECK(item.heads <= kGroupHeadsMax && item.view.layout.head_dim <= kDimMax);
  const size_t tokens = item.end > item.begin ? item.end - item.begin : 0;
  if (tokens == 0) {
    for (uint32_t c = item.first_centroid; c < item.last_centroid; ++c) item.list_counts[c] = 0;
    return;
  }
  const uint32_t together =
      static_cast<uint32_t>(std::clamp<size_t>(kScoresMax / (tokens * item.heads), 1, kCentroidsTogether));
  const auto scores = std::make_unique_for_overwrite<float[]>(size_t{together} * item.heads * tokens);
  const auto ranks = std::make_unique_for_overwrite<float[]>(tokens);
  const auto spare = std::make_unique_for_overwrite<float[]>(tokens);
  const auto indices = std::make_unique_for_overwrite<uint32_t[]>(tokens);
  for (uint32_t first = item.first_centroid; first < item.last_centroid; first += together) {
    const uint32_t count = std::min(together, item.last_centroid - first);
    ScoreRange(kernels, item, CentroidQueries(kernels, item, first, count), scores.get());
    for (uint32_t c = first; c < first + count; ++c) {
      const GroupScores group = {.scores = scores.get() + size_t{c - first} * item.heads * tokens,
                                 .stride = tokens,
                                 .heads = item.heads,
                                 .count = tokens};
      LogShare log_share[kGroupHeadsMax];
      if (item.heads > 1) FitLogShares(kernels, group, item.softmax, log_share);
      const float* values = GroupRanks(kernels, group, log_share, item.reduction, 0, tokens, ranks.get());
      const size_t taken = TakeTopK(kernels, {values, tokens}, item.list_tokens, indices.get(), spare.get());
      for (size_t i = 0; i < taken; ++i) indices[i] += item.begin;
      item.list_counts[c] = static_cast<uint32_t>(taken);
      PackList(item.packing, indices.get(), item.list_counts[c], item.lists[c]);
    }
  }
}

}  // namespace ctkvr::cpu
