// SPDX-License-Identifier: Apache-2.0
//
// Decodes rows that travel in storage form (ROW_FORMAT_STORAGE) to float32. proto/README.md, section "Rows", gives
// every byte; in short:
//
//   key row, coded    planes 0 to b-1, [head_dim / 8] bytes each, then a binary16 scale s. Plane j holds bit b-1-j of
//                     every code c. x = s * (c + 0.5 - 2^(b-1)); key = inverse rotation of x, plus the mean.
//   key row, raw      [head_dim] elements of the session's dtype, while code_generation is 0
//   value row, coded  [groups of 32] {scale, zero} binary16, then codes, 8 or 4 bits; v = zero + scale * c
//   float formats     [head_dim] or [value_dim] elements of the format
//
// Thread-safe: const after Create; a decoder may be shared by threads.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

class RowDecoder {
 public:
  // `codec` as an answer (or LayerInfo) gives it. INVALID_ARGUMENT: an unknown format, row sizes other than the format
  // and `shape` demand, or a mean of another shape than [kv_heads, head_dim].
  static absl::StatusOr<RowDecoder> Create(const v1::RowCodec& codec, const LayerShape& shape);

  // Generation of the codes this decoder reads; an answer whose code_generation differs needs another decoder.
  uint32_t code_generation() const { return code_generation_; }
  size_t key_row_bytes() const { return key_row_bytes_; }
  size_t value_row_bytes() const { return value_row_bytes_; }

  // rows: n rows of key_row_bytes() of KV head `kv_head` (under per-head sets: of the head the query head reads).
  // out [n, head_dim]. INVALID_ARGUMENT: sizes that do not match, or a head that is not there.
  absl::Status DecodeKeys(uint32_t kv_head, std::span<const std::byte> rows, std::span<float> out) const;

  // rows: n rows of value_row_bytes(). out [n, value_dim]. INVALID_ARGUMENT: sizes that do not match.
  absl::Status DecodeValues(std::span<const std::byte> rows, std::span<float> out) const;

 private:
  RowDecoder() = default;
  void DecodeCodedKey(const std::byte* row, const float* mean, float* out) const;
  void DecodeCodedValue(const std::byte* row, float* out) const;

  LayerShape shape_;
  uint32_t code_generation_ = 0;
  uint32_t planes_ = 0;      // bits a key dimension; 0: keys lie as elements of key_dtype_
  uint32_t value_bits_ = 0;  // 0: values lie as elements of value_dtype_
  v1::DType key_dtype_ = v1::DTYPE_F16;
  v1::DType value_dtype_ = v1::DTYPE_F16;
  size_t key_row_bytes_ = 0;
  size_t value_row_bytes_ = 0;
  std::vector<float> mean_;   // [kv_heads, head_dim]
  std::vector<float> signs_;  // [rounds, head_dim], with the transform's 1/sqrt(block) folded in
};

}  // namespace ctkvr::client
