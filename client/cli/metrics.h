// SPDX-License-Identifier: Apache-2.0
//
// How good a selection was, measured against full attention over every token.
//
//   recall     share of the best k tokens outside the always-included ones, ranked by the group reduction of full
//              attention, that were chosen
//   needle     a (query head, step) pair where one token of the prompt between its sinks and its last window holds over
//              10 % of the head's full attention; found when that token (the heaviest) was chosen
//   mass       attention that falls on chosen tokens
//
// Needles come first: a selector can keep the mass and still miss the one token that answers the question.
// Thread-safe: values.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::cli {

inline constexpr double kNeedleShare = 0.1;
// A head with fewer needles says little about itself.
inline constexpr uint64_t kWorstHeadNeedles = 20;

// One set of one retrieval. Positions are cache positions; `tokens` of them are visible to the query.
struct SetObservation {
  uint32_t first_head = 0;  // of the set, among all query heads
  uint32_t heads = 0;       // R
  uint32_t tokens = 0;
  std::span<const float> scores;  // [R, stride], exact inner products
  size_t stride = 0;
  float softmax_scale = 0;
  std::span<const uint32_t> chosen;  // ascending
  uint32_t k_tokens = 0;
  v1::GroupReduction reduction = v1::GROUP_REDUCTION_SUM_SOFTMAX;
  // Always included: positions below force_below and from force_from on.
  uint32_t force_below = 0;
  uint32_t force_from = 0;
  // Where a needle may lie.
  uint32_t needle_begin = 0;
  uint32_t needle_end = 0;
};

class Metrics {
 public:
  explicit Metrics(uint32_t q_heads) : needles_(q_heads), found_(q_heads) {}

  void Add(const SetObservation& set);
  // Of another part of the same trace. REQUIRES: the same number of query heads.
  void Merge(const Metrics& other);

  uint64_t needles() const;
  uint64_t needles_found() const;
  // Shares in [0, 1]; nothing when there is nothing to divide by.
  std::optional<double> needle_share() const;
  std::optional<double> worst_head() const;  // lowest needle share of a head with kWorstHeadNeedles or more
  std::optional<double> recall() const;
  std::optional<double> mass() const;
  std::optional<double> tokens_chosen() const;  // mean a set

 private:
  void AddNeedles(const SetObservation& set, std::span<const double> weights);
  void AddRecall(const SetObservation& set, std::span<const double> weights);

  std::vector<uint64_t> needles_;  // [q_heads]
  std::vector<uint64_t> found_;    // [q_heads]
  uint64_t best_tokens_ = 0;       // of exact top-k sets
  uint64_t best_chosen_ = 0;
  double mass_ = 0;
  uint64_t head_steps_ = 0;
  uint64_t chosen_ = 0;
  uint64_t sets_ = 0;
};

}  // namespace ctkvr::cli
