// SPDX-License-Identifier: Apache-2.0
//
// Reads the packed arrays of an Answer: which tokens were chosen, at which scores, and where their rows lie.
// Thread-safe: const after Create.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

// A copy of ids and scores with checked sizes. P positions, G sets a position (kv_heads, or q_heads where the answer
// used GROUP_REDUCTION_PER_HEAD), R query heads a set.
class AnswerView {
 public:
  // INVALID_ARGUMENT: counts, ids or scores do not fit each other or `shape` (the answer is not of that layer, or was
  // damaged on its way, or is an attention: see attention.h).
  static absl::StatusOr<AnswerView> Create(const v1::Answer& answer, const LayerShape& shape);

  uint32_t positions() const { return positions_; }  // P
  uint32_t sets() const { return sets_; }            // G
  uint32_t set_heads() const { return set_heads_; }  // R

  // Cache positions chosen for a set, ascending. REQUIRES: position < P, set < G.
  std::span<const uint32_t> ids(uint32_t position, uint32_t set) const;
  // Unscaled inner products of query head `head` of the set with those tokens, in the order of ids; empty when the
  // answer carries no scores. REQUIRES: head < R.
  std::span<const float> scores(uint32_t position, uint32_t set, uint32_t head) const;
  // Index of the set's first row in Answer.keys and Answer.values; its rows follow in the order of ids.
  size_t first_row(uint32_t position, uint32_t set) const;
  // Rows of the whole answer.
  size_t rows() const { return ids_.size(); }

 private:
  AnswerView() = default;

  uint32_t positions_ = 0;
  uint32_t sets_ = 0;
  uint32_t set_heads_ = 0;
  std::vector<size_t> begins_;  // [P * G + 1], in tokens
  std::vector<uint32_t> ids_;
  std::vector<float> scores_;
};

}  // namespace ctkvr::client
