// SPDX-License-Identifier: Apache-2.0
//
// Key clusters in float64, written from the text of kernels/cluster_ops.h; see oracle.h for the manner.
// Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cluster_ops.h"
#include "tests/testing/oracle.h"

namespace ctkvr::oracle {

// Blocks of clusters as they are stored, decoded: keys and values as the model sees them.
struct Clusters {
  Matrix keys;                       // [clusters of all blocks][head_dim]; zeros where the count is 0
  Matrix values;                     // [clusters of all blocks][value_dim]
  std::vector<uint32_t> counts;      // [clusters of all blocks]
  Row spreads;                       // [clusters of all blocks]; 0 where the count is 0
  std::vector<uint32_t> cluster_of;  // [end - begin]
};
// Clusters of positions [begin, end). `codec` is that of the head they were made of.
Clusters DecodeClusters(const ClusterLayout& layout, std::span<const std::byte* const> blocks, uint32_t begin,
                        uint32_t end, const Codec& codec);

// The number of the cluster of each key, by the text; keys [tokens][head_dim], less their mean.
std::vector<uint32_t> ClusterKeys(const Matrix& keys, uint32_t clusters);
// Sum over the keys of the cosine with the direction of their cluster: what k-means makes large.
double SumOfCosines(const Matrix& keys, const std::vector<uint32_t>& cluster_of);

// The remainder, given the positions that are left out: `begin` is the position of the first clustered token.
Attention Remainder(const Clusters& clusters, const std::vector<uint32_t>& left_out, uint32_t begin,
                    const Matrix& queries, const Softmax& softmax);

// The ranking value of each cluster, by the text of kernels/cluster_search_ops.h; -infinity where the count is 0.
// forced_scores [R][forced tokens].
struct ClusterRanking {
  uint32_t tokens_per_cluster = 0;
  Softmax softmax;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
};
Row ClusterRanks(const Clusters& clusters, const Matrix& queries, const Matrix& forced_scores,
                 const ClusterRanking& ranking);

}  // namespace ctkvr::oracle
