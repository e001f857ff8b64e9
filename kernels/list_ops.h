// SPDX-License-Identifier: Apache-2.0
//
// Query centroids and their lists: the two-stage index of CTkvr (https://arxiv.org/abs/2512.15550). A centroid is a
// query of the group, head by head of norm 1; its list holds the tokens that matter most to it. A query looks at the
// lists of the centroids nearest to it.
// Belongs to ops.h, whose rules and symbols hold here too. Thread-safe: pure functions over caller-owned memory.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"
#include "kernels/packed_list.h"

namespace ctkvr {

// Makes query centroids of queries: each head's D numbers divided by their 2-norm (zeros stay zeros), stored as
// binary16; norms [R] float32 are kept beside. centroid [R, D].
struct WriteCentroidsItem {
  const std::byte* queries = nullptr;  // query i at queries + i * stride, [R, D] of dtype
  size_t stride = 0;
  DType dtype = DType::kF32;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  uint32_t count = 0;
  const uint32_t* slots = nullptr;       // [count]: query i becomes centroid slots[i]; no slot twice
  uint16_t* const* centroids = nullptr;  // [C] pointers to [R, D] binary16
  float* norms = nullptr;                // [C, R]
};

// Half a round of spherical k-means over groups of unit rows: nearest[q], for q of [first, last), is the centroid c of
// the highest sum over r of <query[q, r], centroid[c, r]>; ties prefer the lower c.
struct AssignQueriesItem {
  const uint16_t* const* queries = nullptr;    // [Q] pointers to [R, D] binary16
  const uint16_t* const* centroids = nullptr;  // [C] pointers to the same
  uint32_t first = 0;
  uint32_t last = 0;
  uint32_t centroid_count = 0;                 // C >= 1
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  uint32_t* nearest = nullptr;                 // [Q]
};

// The other half: every centroid of [first, last) that is some query's nearest becomes, head by head, the float64 sum
// of its queries in their order divided by its 2-norm (zeros where the sum is zero); the others are untouched.
struct AverageQueriesItem {
  const uint16_t* const* queries = nullptr;  // [Q] pointers to [R, D] binary16
  const uint32_t* nearest = nullptr;         // [Q]
  uint32_t query_count = 0;                  // Q
  uint16_t* const* centroids = nullptr;      // [C] pointers to [R, D] binary16
  uint32_t first = 0;
  uint32_t last = 0;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
};

// For each centroid c of [first_centroid, last_centroid): the best list_tokens tokens of [begin, end) by the group
// ranking of SelectTokens for the query mean_norm[r] * centroids[c, r], nothing forced, ties as ever; packed.
struct BuildListsItem {
  HeadView view;
  uint32_t heads = 0;
  uint16_t* const* centroids = nullptr;  // [C] pointers to [R, D] binary16
  const float* mean_norms = nullptr;     // [R]
  uint32_t first_centroid = 0;
  uint32_t last_centroid = 0;
  uint32_t begin = 0;
  uint32_t end = 0;          // at most the packing's limit
  uint32_t list_tokens = 0;  // rho <= packing.list_tokens
  SoftmaxParams softmax;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
  PackedLists packing;
  uint64_t* const* lists = nullptr;  // [C] pointers to [packing.words]
  uint32_t* list_counts = nullptr;   // [C] = min(rho, end - begin)
};

// The `probes` centroids of the highest sum over r of cosine(query r, centroid[c, r]); ties prefer the lower c.
struct SelectListsItem {
  PreparedQuery query;
  uint32_t head_dim = 0;
  uint16_t* const* centroids = nullptr;  // [C] pointers to [R, D] binary16
  uint32_t centroid_count = 0;           // C
  uint32_t probes = 0;                   // <= C
  uint32_t* selected = nullptr;          // [probes], ascending
};

// The union of the selected lists and of the positions [begin, force_below) and [force_from, end), within [begin, end).
struct MergeCandidatesItem {
  PackedLists packing;
  const uint64_t* const* lists = nullptr;  // [C] pointers to [packing.words]
  const uint32_t* list_counts = nullptr;   // [C]: the first so many positions of each
  const uint32_t* selected = nullptr;      // [probes]
  uint32_t probes = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t force_below = 0;
  uint32_t force_from = 0;
  uint32_t* tokens = nullptr;  // [min(end - begin, probes * rho + forced)]
  uint32_t* count = nullptr;
  void* workspace = nullptr;  // MergeCandidatesWorkspaceBytes(begin, end)
};
constexpr size_t MergeCandidatesWorkspaceBytes(uint32_t begin, uint32_t end) {
  return ((size_t{end} - begin) / 64 + 2) * 8;
}

}  // namespace ctkvr
