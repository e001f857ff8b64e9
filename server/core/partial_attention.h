// SPDX-License-Identifier: Apache-2.0
//
// Attention over part of the tokens, as answers carry it: empty at first, float32 while a retrieval works, then of the
// element type that was asked for. Thread-safe: pure functions.

#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/core/types.h"

namespace ctkvr {

// Of no token: outputs 0, log-sum-exps -infinity.
PartialAttention EmptyAttention(const LayerConfig& layer, uint32_t positions);

// The output from float32 to `dtype`, in place: elements only ever move down. FAILED_PRECONDITION (ROW_OVERFLOW): an
// element does not fit; `format` is what was asked for, `what` it is, for the text.
absl::Status ConvertOutput(DType dtype, RowFormat format, const char* what, PartialAttention& attention);

absl::Status RowOverflowError(RowFormat format, uint64_t overflow, const char* what);

}  // namespace ctkvr
