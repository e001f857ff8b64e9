// SPDX-License-Identifier: Apache-2.0
//
// What the operations mean. Every operation takes an array of one plain struct, so that one call serves everything a
// lane has queued. Implementations follow this page, and the cases of tests/conformance hold them to it.
//
// - Pointers are to memory the backend can read (Backend::Allocate, CopyIn). Arrays are row-major; shapes in brackets.
// - R is the number of query heads that share the item's KV head; D head_dim; tokens are cache positions.
// - score(r, t) = <query r, decoded stored key t>, float32 accumulation, any order of summation.
// - logit = softmax_scale * score, then softcap * tanh(logit / softcap) where softcap > 0.
// - Ranking: higher is better, equal values prefer the lower position. Inputs are finite; outputs are finite.
// - Lists of positions are ascending and without duplicates. Counts are explicit: entries past a count are untouched.
// - Items of one call are independent and may run in any order or at once.
// - Estimates of coarse passes use integers and separately rounded float32 operations (no fused multiply-add), so
//   every implementation computes the same bits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/base/dtype.h"
#include "kernels/formats.h"
#include "kernels/head_view.h"
#include "kernels/rank_policy.h"

namespace ctkvr {

inline constexpr uint32_t kGroupHeadsMax = 16;  // R

// A query ready for scoring. All arrays in device memory, written by PrepareQueries.
struct PreparedQuery {
  uint32_t heads = 0;               // R
  float* plain = nullptr;           // [R, D] as it came
  float* rotated = nullptr;         // [R, D]; coded keys only, as all below
  float* rotated_sum = nullptr;     // [R] sum over dimensions
  float* mean_dot = nullptr;        // [R] <query, mean>
  int8_t* scan = nullptr;           // [R, D] round(rotated / scan_scale), within +-kScanQueryMax
  float* scan_scale = nullptr;      // [R] max|rotated| / kScanQueryMax; 0 for a zero query
  int32_t* scan_sum = nullptr;      // [R]
  int8_t* refine = nullptr;         // the same within +-kRefineQueryMax
  float* refine_scale = nullptr;    // [R]
  int32_t* refine_sum = nullptr;    // [R]
};

// query [R, D] of `dtype` -> everything in `out` (only `plain` when signs is null).
struct PrepareQueriesItem {
  const std::byte* query = nullptr;
  DType dtype = DType::kF32;
  uint32_t head_dim = 0;
  const float* mean = nullptr;
  const float* signs = nullptr;
  PreparedQuery out;
};

// mean [D] = float32 of (float64 sum, one key after another in ascending position, of raw keys [begin, end)) / count.
// REQUIRES: view.raw(), begin < end <= view.length.
struct FitMeanItem {
  HeadView view;
  uint32_t begin = 0;
  uint32_t end = 0;
  float* mean = nullptr;
};

// Encodes `count` tokens into their places of `view` (whose length is not looked at), starting at first_position.
// Keys go to raw_pages when view.raw(), else to pages, coded about view.mean. Null keys or values are left alone.
// An element the storage type cannot hold is reported, and the bytes of that call's tokens are then unspecified
// (callers publish the length only after success).
struct WriteTokensItem {
  HeadView view;
  uint32_t first_position = 0;
  uint32_t count = 0;
  const std::byte* keys = nullptr;    // token t at keys + t * key_stride, [D] of dtype
  const std::byte* values = nullptr;  // token t at values + t * value_stride, [value_dim] of dtype
  size_t key_stride = 0;              // bytes
  size_t value_stride = 0;
  DType dtype = DType::kF32;
  // Out: -1, or the first bad element as token * dim + dimension (for a key whose scales overflow: dimension 0).
  int64_t* bad_key_element = nullptr;
  int64_t* bad_value_element = nullptr;
};

// First pass over the first P planes of tokens [begin, end):
//   E = sum_i scan[r, i] * u[i],  u as in formats.h;  estimate = (float(E) * scan_scale[r]) * f + mean_dot[r]
// REQUIRES: coded, not raw.
struct ScanPlanesItem {
  HeadView view;
  PreparedQuery query;
  uint32_t begin = 0;
  uint32_t end = 0;
  float* estimates = nullptr;  // [R, stride], first end - begin of each row written
  size_t stride = 0;
};

// Second pass over the first p planes of the tokens listed:
//   E = sum_i refine[r, i] * (2 * (c[i] >> (b-p)) + 1 - 2^p)
//   estimate = (float(E) * refine_scale[r]) * (s * 2^(b-p-1)) + mean_dot[r]
// REQUIRES: coded, not raw; first_planes <= planes <= b.
struct RefinePlanesItem {
  HeadView view;
  PreparedQuery query;
  uint32_t planes = 0;
  const uint32_t* tokens = nullptr;  // [*count]
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;            // a bound the host knows
  float* estimates = nullptr;        // [R, stride]
  size_t stride = 0;
};

// score(r, t) of the tokens listed, or of [begin, begin + *count) when tokens is null.
struct ScoreTokensItem {
  HeadView view;
  PreparedQuery query;
  const uint32_t* tokens = nullptr;
  uint32_t begin = 0;
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;
  float* scores = nullptr;  // [R, stride]
  size_t stride = 0;
};

enum class GroupReduction : uint8_t { kSumSoftmax, kMaxSoftmax };

struct SoftmaxParams {
  float scale = 1;
  float softcap = 0;                   // 0: none
  const float* sink_logits = nullptr;  // [R] or null: exp(sink) joins the denominator
};

// Keeps the forced tokens and the best k of the others, from scores over a list of tokens.
//   p(r, t) = softmax over all tokens listed (and the sink logit) of logit(r, t)
//   group(t) = sum over r of p(r, t), or the maximum; ranked in the log domain so that small shares do not vanish:
//   g(t) = log(sum_r exp(logit(r, t) - lse_r)), or max_r(logit(r, t) - lse_r); one head ranks by its scores: same order
// Forced are tokens < force_below and tokens >= force_from. Of the k others, less those that `policy` calls redundant:
//   min_score: leave out those whose max over r of score(r, t) is below it   (-inf switches it off)
//   min_share: leave out those whose mean over r of p(r, t) is below it      (0 switches it off)
//   top_p: walk them best first and stop as soon as forced and walked shares reach it (1 switches it off); shares as
//          in min_share, the token that reaches it is kept
struct SelectTokensItem {
  uint32_t heads = 0;                // R
  const float* scores = nullptr;     // [R, stride]
  size_t stride = 0;
  const uint32_t* tokens = nullptr;  // [*count], or null: begin, begin + 1, ...
  uint32_t begin = 0;
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;
  uint32_t k = 0;                    // 0: forced tokens only
  uint32_t force_below = 0;
  uint32_t force_from = 0xffffffffu;
  SoftmaxParams softmax;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
  float min_score = -std::numeric_limits<float>::infinity();
  float min_share = 0;
  float top_p = 1;
  RankPolicy policy;  // moves the ranking
  // Out, ascending by position.
  uint32_t* chosen = nullptr;        // [k + forced tokens]
  uint32_t* chosen_count = nullptr;
  float* chosen_scores = nullptr;    // [R, chosen_stride] or null
  size_t chosen_stride = 0;
  void* workspace = nullptr;         // SelectTokensWorkspaceBytes(count_max)
};
constexpr size_t SelectTokensWorkspaceBytes(uint32_t count_max) { return 16 * size_t{count_max} + 64; }

// Keys and values of the tokens listed, in their order. Storage rows as in formats.h (raw keys: [D] raw_dtype).
// A null output is left out. `overflow` counts elements that do not fit the row format (their row is unspecified).
struct GatherRowsItem {
  HeadView view;
  const uint32_t* tokens = nullptr;  // [*count]
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;
  RowFormat row_format = RowFormat::kF16;
  std::byte* keys = nullptr;         // [*count][key row]
  std::byte* values = nullptr;       // [*count][value row]
  uint64_t* overflow = nullptr;
};

}  // namespace ctkvr
