// SPDX-License-Identifier: Apache-2.0
//
// The checks that the codec's files share, with the wording of their errors. Thread-safe: pure functions.

#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ctkvr/v1/cache.pb.h"
#include "ctkvr/v1/tensor.pb.h"
#include "kernels/base/dtype.h"
#include "server/rpc/field_path.h"

namespace ctkvr::rpc {

// "chunk.layer is 9; the limit is 8"
absl::Status AboveLimit(const FieldPath& field, uint64_t value, uint64_t limit);
absl::Status BelowLimit(const FieldPath& field, uint64_t value, uint64_t minimum);
absl::Status Missing(const FieldPath& field);
// A number that the enum does not have. `last` is its highest one.
absl::Status UnknownEnum(const FieldPath& field, int value, int last);
// A field of the contract that this server does not serve.
absl::Status NotServed(const FieldPath& field);

// OK unless `value` exceeds `limit`.
inline absl::Status AtMost(const FieldPath& field, uint64_t value, uint64_t limit) {
  return value > limit ? AboveLimit(field, value, limit) : absl::OkStatus();
}

absl::StatusOr<DType> DecodeDType(v1::DType dtype, const FieldPath& field);

}  // namespace ctkvr::rpc
