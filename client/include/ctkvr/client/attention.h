// SPDX-License-Identifier: Apache-2.0
//
// Parts of an attention: reading the one that an answer of ANSWER_MODE_ATTENTION carries, and merging it with the
// worker's own. An attention over disjoint sets of tokens is merged from its parts by their log-sum-exps; the formula
// stands with AnswerOptions.remainder in cache.proto. Thread-safe: values and pure functions.
//
//     auto chosen = AttentionOf(*answer, shape);            // what the server attended
//     const AttentionView parts[] = {chosen->view(), own};  // what the worker attended: from local_begin, local_sinks
//     auto whole = MergeAttention(parts, sink_logits);

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

// One part, in the caller's memory. A row is one query head of one position: rows = positions * q_heads, in the order
// [positions, q_heads].
struct AttentionView {
  std::span<const float> output{};       // [rows, value_dim]: softmax-weighted values; not looked at for an empty row
  std::span<const float> log_sum_exp{};  // [rows]: natural log of the sum of exp(logit); -infinity for an empty row
};

struct Attention {
  std::vector<float> output{};       // [rows, value_dim]
  std::vector<float> log_sum_exp{};  // [rows]

  AttentionView view() const { return {.output = output, .log_sum_exp = log_sum_exp}; }
};

// The attention of an answer over its chosen tokens, as float32. rows = positions * shape.q_heads.
// INVALID_ARGUMENT: the answer carries none, or its dims or bytes do not fit `shape` (the answer is not of that layer,
// or was damaged on its way).
absl::StatusOr<Attention> AttentionOf(const v1::Answer& answer, const LayerShape& shape);

// The same of the remainder, for answers to AnswerOptions.remainder in any mode.
absl::StatusOr<Attention> RemainderOf(const v1::Answer& answer, const LayerShape& shape);

// The attention over the tokens of all parts together; tokens of two parts must not overlap. With sink_logits
// [q_heads], which enter once, exp(sink_logits[h]) joins the sum of every row of query head h. A row that is empty in
// all parts, sinks included, has output 0 and log_sum_exp -infinity. Computed in float64, then rounded once.
// INVALID_ARGUMENT: no part, parts of different shapes, rows that are no multiple of q_heads, a log_sum_exp that is NaN
// or +infinity (the message says where).
absl::StatusOr<Attention> MergeAttention(std::span<const AttentionView> parts, std::span<const float> sink_logits = {});

}  // namespace ctkvr::client
