// SPDX-License-Identifier: Apache-2.0
//
// Searching through key clusters (cluster_ops.h): the clusters that a query opens, and the tokens in them. Belongs to
// ops.h, whose rules and symbols hold here too. Thread-safe: pure functions over caller-owned memory.
//
// A cluster is as good as what one of its tokens may be expected to weigh, exp(logit), not as its mean is: its keys lie
// about the mean with `spread` a dimension, so their logits lie about that of the mean with deviation
//
//     d(r, c) = softmax_scale * |query r| * spread[c]     (with softcap: times 1 - (logit / softcap)^2)
//
// and the logarithm of the mean of exp() of a normal variable is its mean + d^2 / 2. A cluster has too few tokens for
// the far end of that variable; beyond the deviation at which the best of n tokens ends, the term grows as fast as the
// best token does (B. Derrida's random energy model, https://doi.org/10.1103/PhysRevB.24.2613):
//
//     expected(r, c) = logit(r, c) + (d < e ? d^2 / 2 : e * d - e^2 / 2),  e = sqrt(2 * ln tokens_per_cluster)
//
// Needle share (a token of over 10 % of a head's attention is among the 256 chosen) on every second step of 8,192-token
// traces of SmolLM2-135M, and bytes read, remainder included, as a share of an fp16 scan; through the server, clusters
// of 17, a tail of up to 256 tokens, in the opened clusters two bit planes, then 384 candidates:
//
//     opened                  records 7   records 18   records 23   code 4   prose 18   all      bytes
//     30 %                    0.987       1.000        1.000        1.000    1.000      0.9993   16.8 %
//     25 %                    0.987       0.998        1.000        1.000    0.996      0.9986   15.9 %
//     20 %                    0.980       0.996        0.996        1.000    0.991      0.9973   15.1 %
//     30 %, other clusters    0.960       1.000        1.000        1.000    1.000      0.9980   16.6 %
//
// ("other clusters": k-means from sets of tokens halved along a line; cluster_ops.h says from what instead.) The
// default opens 25 %; on every step of ten traces it finds 0.9983 of 7,191 needles (worst head 0.97) and reads 15.8 %.
// Estimates that are not drawn to the mean (ScanClustersItem), in numpy on records 7 and 23 and prose 18 at 50 %:
// 0.9959 against 0.9988 with 384 candidates, 0.9924 against 0.9971 with 256.
//
// And of records 7, 17, 23 and prose 18 with one plane, 25 % opened: ranked by the mean alone 0.9630; by the mean plus
// d^2 / 2 0.9923; by the mean plus 2 d 0.9892; by the best head instead of all 0.9923. Without the forced tokens in
// lse_r records 23 falls from 1.000 to 0.976. A spread fitted to each head (0.6 to 2 times the isotropic one) finds no
// more. One plane, drawn to the mean, finds 0.9955 of ten traces in half of the clusters, two planes in 30 % 0.9987.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cluster_ops.h"

namespace ctkvr {

// Opens the best clusters of [begin, end), as few as hold open_tokens of its tokens, or all. With logit(r, c) that of
// score(r, c) = <query r, mean key of c>, and expected(r, c) as above, clusters are ranked as SelectTokens ranks
// tokens, with
//   expected(r, c) - lse_r in place of log p,
//   lse_r = log(sum_c count[c] * exp(expected(r, c)) + sum over the forced tokens of exp(logit))
// and equal values prefer the lower cluster. Cluster c of block b is number b * layout.clusters + c. One head ranks by
// `expected` itself. The sink logit is not looked at: it changes no order within a head, and between heads little.
struct SelectClustersItem {
  PreparedQuery query;
  ClusterLayout layout;
  const std::byte* const* blocks = nullptr;  // [ClusterBlocks(begin, end)]
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t open_tokens = 0;
  const float* forced_scores = nullptr;  // [R, forced_stride]
  size_t forced_stride = 0;
  const uint32_t* forced_count = nullptr;
  SoftmaxParams softmax;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
  float* scores = nullptr;     // [R, clusters of all blocks]: score(r, c), untouched where the count is 0
  uint32_t* opened = nullptr;  // [clusters of all blocks], ascending
  uint32_t* opened_count = nullptr;
  void* workspace = nullptr;  // SelectClustersWorkspaceBytes(layout, R, begin, end)
};
constexpr size_t SelectClustersWorkspaceBytes(const ClusterLayout& layout, uint32_t heads, uint32_t begin,
                                              uint32_t end) {
  return (size_t{heads} + 4) * 4 * layout.clusters * ClusterBlocks(begin, end) + 64;
}

// Variance of the error of an estimate by one and by two planes, as a share of that of the score if the query were any:
// mean of |sketch - x|^2 / |x|^2 over ten traces of SmolLM2-135M (0.48 to 0.57, 0.13 to 0.16 by KV head).
inline constexpr float kPlaneError[2] = {0.53f, 0.145f};

// The tokens of [visible_begin, visible_end) that lie in an opened cluster, or below force_below, or at or after
// force_from; where `estimates` is set, with the estimates of ScanPlanes, those of opened clusters drawn to the mean:
//   score(r, c) + share(c) * (estimate(r, t) - score(r, c)),  share(c) = s / (s + e),  0 where s is 0
//   s = spread[c]^2,  e = kPlaneError[first_planes - 1] * (s + |mean x of c|^2 / D), x as in formats.h
// REQUIRES: coded and not raw where there are estimates. `tokens` has room for all. Where a sketch block of the view is
// in the order of the block of clusters of the same tokens, opened clusters are read as runs of slots.
struct ScanClustersItem {
  HeadView view;
  PreparedQuery query;
  ClusterLayout layout;
  const std::byte* const* blocks = nullptr;  // [ClusterBlocks(begin, end)]
  uint32_t begin = 0;                        // clustered: [begin, end)
  uint32_t end = 0;
  const uint32_t* opened = nullptr;  // [*opened_count], ascending
  const uint32_t* opened_count = nullptr;
  const float* mean_scores = nullptr;  // [R, clusters of all blocks]: what SelectClusters left; with estimates alone
  uint32_t visible_begin = 0;
  uint32_t visible_end = 0;
  uint32_t force_below = 0;
  uint32_t force_from = 0;
  uint32_t* tokens = nullptr;  // out, ascending
  uint32_t* count = nullptr;
  float* estimates = nullptr;  // [R, stride] or null
  size_t stride = 0;
};
// The most tokens that opened clusters may hold: the last one opened may be a whole block.
constexpr uint64_t OpenedTokensMax(uint32_t open_tokens) { return uint64_t{open_tokens} + kClusterBlockTokens - 1; }

}  // namespace ctkvr
