// SPDX-License-Identifier: Apache-2.0

#include "server/core/partial_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "server/core/error.h"

namespace ctkvr {
namespace {

const char* RowFormatName(RowFormat format) {
  switch (format) {
    case RowFormat::kF32:
      return "f32";
    case RowFormat::kF16:
      return "f16";
    case RowFormat::kBF16:
      return "bf16";
    case RowFormat::kStorage:
      return "storage";
  }
  return "?";
}

}  // namespace

absl::Status RowOverflowError(RowFormat format, uint64_t overflow, const char* what) {
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("row_format is ", RowFormatName(format), "; ", overflow, " elements of the ", what,
                                " do not fit it"),
                   kReasonRowOverflow);
}

PartialAttention EmptyAttention(const LayerConfig& layer, uint32_t positions) {
  PartialAttention attention{.positions = positions, .q_heads = layer.q_heads, .value_dim = layer.value_dim};
  const size_t rows = size_t{positions} * layer.q_heads;
  attention.output.resize(rows * layer.value_dim * sizeof(float));
  attention.log_sum_exp.resize(rows * sizeof(float));
  auto* log_sum_exp = reinterpret_cast<float*>(attention.log_sum_exp.data());
  std::fill(log_sum_exp, log_sum_exp + rows, -std::numeric_limits<float>::infinity());
  return attention;
}

absl::Status ConvertOutput(DType dtype, RowFormat format, const char* what, PartialAttention& attention) {
  attention.dtype = dtype;
  if (attention.dtype == DType::kF32) return absl::OkStatus();
  auto* bytes = reinterpret_cast<std::byte*>(attention.output.data());
  const size_t count = attention.output.size() / sizeof(float);
  uint64_t overflow = 0;
  for (size_t i = 0; i < count; ++i) {
    StoreElement(bytes, attention.dtype, i, LoadElement(bytes, DType::kF32, i));
    overflow += !std::isfinite(LoadElement(bytes, attention.dtype, i));
  }
  attention.output.resize(count * DTypeBytes(attention.dtype));
  return overflow == 0 ? absl::OkStatus() : RowOverflowError(format, overflow, what);
}

}  // namespace ctkvr
