// SPDX-License-Identifier: Apache-2.0
//
// Attention over the tokens of a list. Belongs to ops.h, whose rules and symbols hold here too. Thread-safe: values.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace ctkvr {

// One part of an attention, ready to be merged with others: over the tokens listed,
//   log_sum_exp[r] = log(sum_t exp(logit(r, t)))
//   output[r, i] = sum_t exp(logit(r, t) - log_sum_exp[r]) * decoded stored value(t, i)
// and -infinity and zeros where none is listed. softmax.sink_logits is not looked at: a sink logit counts once in the
// merged attention, so it is a part of its own.
//
// The largest logit is subtracted before exp, so no logit is too large. For the scores given, with V the largest
// |zero| + |scale * c| (floats: |value|) of dimension i among the tokens listed:
//   |output error| <= (2^-16 + softcap * 2^-20) * V,  |log_sum_exp error| <= 2^-17 + softcap * 2^-20 + |it| * 2^-23
// REQUIRES: values within +-2^120.
struct AttendItem {
  HeadView view;
  uint32_t heads = 0;                // R
  const uint32_t* tokens = nullptr;  // [*count], or null: begin, begin + 1, ...
  uint32_t begin = 0;
  const uint32_t* count = nullptr;
  uint32_t count_max = 0;
  const float* scores = nullptr;  // [R, stride], of the tokens in their order
  size_t stride = 0;
  SoftmaxParams softmax;
  float* output = nullptr;       // [R, value_dim]
  float* log_sum_exp = nullptr;  // [R]
};

}  // namespace ctkvr
