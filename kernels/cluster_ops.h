// SPDX-License-Identifier: Apache-2.0
//
// Key clusters of one layer and KV head, and the attention estimated from them over everything that was not chosen.
// Belongs to ops.h, whose rules and symbols hold here too. Thread-safe: pure functions over caller-owned memory.
//
// Tokens [begin, end) are cut at multiples of kClusterBlockTokens, so a block of clusters has the tokens of one sketch
// block (the first and the last one perhaps fewer), and each block is clustered by itself: building is linear in the
// tokens, new tokens never move old ones, and truncation drops whole blocks. In the sketch block, the tokens of a
// cluster lie together then (sketch_order.h), so that a cluster's first planes are one run of memory. A cluster keeps
// the arithmetic means of its decoded keys and values, in 8 bits:
//
//     mean[i] = scale * level[i],  scale = smallest bfloat16 >= float32(max|mean| / 127),  level within +-127
//     (all 0 where the scale is 0)
//
// and how far its keys lie from their mean: spread, the root of the mean of (key - mean)^2 over its tokens and
// dimensions, at most 65504, in binary16. Means of coded keys are those of x in formats.h (rotated, less the key mean);
// means of float keys are less the mean of the block's keys, its centre, which the block keeps. The estimate is that of
// RetroInfer (https://arxiv.org/abs/2505.02922): a cluster's tokens that are left, all taken to lie at the means.
//
// Why so: relative error of the attention output against full attention, median over steps and 99th percentile,
// averaged over the query heads; 8,192-token traces of SmolLM2-135M, best K tokens exact beside sinks and window:
//
//     trace             records, layer 7                  records, layer 17   code, layer 4       prose, layer 18
//     K                 64            256                 256                 256                 256
//     nothing else      0.108  0.387  0.071  0.258        0.038  0.123        0.024  0.093        0.0030  0.043
//     8 tokens          0.046  0.169  0.021  0.068        0.007  0.025        0.008  0.029        0.0006  0.013
//     16 tokens         0.061  0.201  0.025  0.082        0.009  0.030        0.009  0.033        0.0008  0.016
//     32 tokens         0.062  0.215  0.032  0.098        0.011  0.035        0.009  0.035        0.0009  0.019
//     16, no 1,024      0.059  0.202  0.027  0.085        0.009  0.031        0.010  0.034        0.0008  0.016
//     16, 0 rounds      0.054  0.215  0.027  0.091        0.010  0.035        0.012  0.042        0.0010  0.020
//
// ("no 1,024": one k-means of 10 rounds over all tokens and means in float32; the lines above it, means in 8 bits.) So
// blocks of 1,024 and three rounds lose little (most in records, layer 4: 0.014 against 0.012 at K = 256), 8 bits lose
// less than 0.001, and 16 tokens take half the memory of 8. Taken with clusters whose first partition halved sets of
// tokens along a line; directions far apart, as now, change no error by more than chance, and the needles found by a
// lot (cluster_search_ops.h).

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/lines.h"
#include "kernels/base/math.h"
#include "kernels/ops.h"

namespace ctkvr {

inline constexpr uint32_t kClusterBlockTokens = kSketchTokens;
// Rounds of k-means after the first directions.
inline constexpr uint32_t kClusterRounds = 3;
// So that a cluster's number within its block is a byte.
inline constexpr uint32_t kTokensPerClusterMin = kClusterBlockTokens / 256;

// Offsets in bytes within a block of clusters; arrays begin on lines. Plain data.
//
// Bytes a token in long sessions, for C = 1024 / tokens_per_cluster <= 64: (head_dim + value_dim + 8) * C / 1024 + 2.
// At head_dim = value_dim = 128 that is 18.5 for 16 tokens a cluster and 17.75 for 17, beside the 212 of k8v4 and the
// 180 of k6v4: 22.51 % and 22.44 % of float32, 19.38 % and 19.31 %.
struct ClusterLayout {
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  uint32_t tokens_per_cluster = 0;
  uint32_t clusters = 0;             // C
  bool coded = false;                // means of keys as x in formats.h; else about the centre
  uint32_t key_means_offset = 0;     // [C][head_dim] int8
  uint32_t value_means_offset = 0;   // [C][value_dim] int8
  uint32_t key_scales_offset = 0;    // [C] bfloat16
  uint32_t value_scales_offset = 0;  // [C] bfloat16
  uint32_t centre_offset = 0;        // [head_dim] float32; float keys only
  uint32_t spreads_offset = 0;       // [C] binary16
  uint32_t ends_offset = 0;          // as in SketchOrder, as the next two, and the last arrays
  uint32_t places_offset = 0;
  uint32_t members_offset = 0;
  uint32_t block_bytes = 0;

  // Of blocks that begin at position `begin`.
  SketchOrder Order(std::byte* const* blocks, uint32_t begin) const {
    return {.blocks = blocks,
            .begin = begin,
            .clusters = clusters,
            .ends_offset = ends_offset,
            .places_offset = places_offset,
            .members_offset = members_offset};
  }
};

// REQUIRES: head_dim and value_dim positive multiples of 8, tokens_per_cluster >= kTokensPerClusterMin.
constexpr ClusterLayout MakeClusterLayout(Format format, uint32_t head_dim, uint32_t value_dim,
                                          uint32_t tokens_per_cluster) {
  ClusterLayout layout{.head_dim = head_dim, .value_dim = value_dim, .tokens_per_cluster = tokens_per_cluster};
  layout.clusters = CeilDiv(kClusterBlockTokens, tokens_per_cluster);
  layout.coded = KeysAreCoded(format);
  uint32_t offset = 0;
  const auto place = [&offset](uint32_t bytes) {
    const uint32_t begin = offset;
    offset += RoundUp(bytes, kLineBytes);
    return begin;
  };
  layout.key_means_offset = place(layout.clusters * head_dim);
  layout.value_means_offset = place(layout.clusters * value_dim);
  layout.key_scales_offset = place(layout.clusters * 2);
  layout.value_scales_offset = place(layout.clusters * 2);
  layout.spreads_offset = place(layout.clusters * 2);
  layout.centre_offset = place(layout.coded ? 0 : head_dim * 4);
  layout.ends_offset = place(layout.clusters * 2);
  layout.places_offset = place(kClusterBlockTokens * 2);
  if (layout.clusters > kPackedClustersMax) layout.members_offset = place(kClusterBlockTokens);
  layout.block_bytes = offset;
  return layout;
}

// Clusters of tokens [begin, begin + count): ceil(count / tokens_per_cluster) of them, by k-means on the directions of
// the mean-free keys. The first direction is that of the first token, each further one that of the token whose largest
// cosine with those before is the smallest (ties: the lower; T. F. Gonzalez, 1985,
// https://doi.org/10.1016/0304-3975(85)90224-5), so that keys like few others, as needles are, get clusters of their
// own; a round gives each token to the cluster of the largest cosine (ties: the lower one) and makes the cluster's
// direction the sum of its tokens' directions, where there is one; at the end each token goes to its cluster once more.
// No random numbers. Clusters may end up empty. Written: means, scales and spreads of clusters that are not empty, the
// centre of float keys, the whole order: of tokens of the block that are not in [begin, begin + count), the offset is
// the slot, and a member among those counts for nothing. REQUIRES: !view.raw(), count >= 1, begin % kClusterBlockTokens
// + count <= kClusterBlockTokens, begin + count <= view.length.
struct BuildClustersItem {
  HeadView view;
  ClusterLayout layout;
  uint32_t begin = 0;
  uint32_t count = 0;
  std::byte* block = nullptr;  // [layout.block_bytes]
  void* workspace = nullptr;   // BuildClustersWorkspaceBytes(layout)
};
constexpr size_t BuildClustersWorkspaceBytes(const ClusterLayout& layout) {
  const size_t key_dim = RoundUp(layout.head_dim, 16u), value_dim = RoundUp(layout.value_dim, 16u);
  const size_t floats = (kClusterBlockTokens + 2 * size_t{layout.clusters}) * key_dim + layout.clusters * value_dim;
  return 4 * (floats + size_t{16} * layout.clusters + 3 * kClusterBlockTokens) + 64;
}

// The sketch block of a block of clusters in its order: what `view` holds of the token at each of the 1,024 offsets,
// whatever order that is in, goes to the slot that the block of clusters gives it. REQUIRES: coded keys, not raw.
struct ArrangeSketchItem {
  HeadView view;
  uint32_t index = 0;  // of the sketch block
  ClusterLayout layout;
  uint32_t begin = 0;                // of all clusters
  const std::byte* block = nullptr;  // [layout.block_bytes]
  std::byte* sketch = nullptr;       // [view.layout.sketch_bytes], none of the view's
};

// The remainder: with left[c] the tokens of cluster c that lie in [visible_begin, visible_end) and are not listed,
//   weight(r, c) = left[c] * exp(logit of <query r, mean key of c>)
//   log_sum_exp[r] = log(sum_c weight(r, c)),  output[r] = sum_c weight(r, c) * mean value of c / sum_c weight(r, c)
// -infinity and zeros where nothing is left. The sink logit has no part in it. Clusters that together weigh less than
// 2^-16 of a head's sum may be left out of its output; lines_read counts the 64-byte lines of the blocks that were
// read: all ends, the place or member of each token that is left out or listed, means, scales and centres, each once;
// with mean_scores no ends, and nothing of listed tokens: what found them has read those.
// REQUIRES: tokens ascending, all within [visible_begin, visible_end).
struct EstimateRestItem {
  PreparedQuery query;
  ClusterLayout layout;
  const std::byte* const* blocks = nullptr;  // [ClusterBlocks(begin, end)]
  uint32_t begin = 0;                        // clustered: [begin, end)
  uint32_t end = 0;
  uint32_t visible_begin = 0;
  uint32_t visible_end = 0;
  const uint32_t* tokens = nullptr;  // [*count]
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;
  SoftmaxParams softmax;
  // [R, clusters of all blocks]: what SelectClusters left of the same query, or null; then the means of keys are read.
  const float* mean_scores = nullptr;
  float* output = nullptr;       // [R, value_dim]
  float* log_sum_exp = nullptr;  // [R]
  uint64_t* lines_read = nullptr;
  void* workspace = nullptr;  // EstimateRestWorkspaceBytes(layout, R, begin, end)
};
// Blocks that [begin, end) is cut into.
constexpr uint32_t ClusterBlocks(uint32_t begin, uint32_t end) {
  return end <= begin ? 0 : CeilDiv(end, kClusterBlockTokens) - begin / kClusterBlockTokens;
}
constexpr size_t EstimateRestWorkspaceBytes(const ClusterLayout& layout, uint32_t heads, uint32_t begin, uint32_t end) {
  return (size_t{heads} + 2) * 4 * layout.clusters * ClusterBlocks(begin, end) + 64;
}

}  // namespace ctkvr
