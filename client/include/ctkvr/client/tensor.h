// SPDX-License-Identifier: Apache-2.0
//
// Shapes and arrays: what a layer looks like, views of the caller's keys, values and queries, and conversion between
// binary16, bfloat16 and float32. All arrays are little-endian and row-major, the last dimension fastest.
// Thread-safe: values and pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

// One layer of a session as its options resolve.
struct LayerShape {
  uint32_t q_heads = 0;  // a multiple of kv_heads; query head h reads KV head h / group_heads()
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;  // of queries and keys
  uint32_t value_dim = 0;
  v1::DType dtype = v1::DTYPE_F16;  // of the tensors that calls carry
  bool absent = false;              // the layer keeps no cache

  uint32_t group_heads() const { return q_heads / kv_heads; }
};

// The shape of `layer`, overrides applied in order. OUT_OF_RANGE: a layer that is not there.
// INVALID_ARGUMENT: options no server accepts (a count is 0, heads that do not divide, an unknown dtype).
absl::StatusOr<LayerShape> ShapeOfLayer(const v1::SessionOptions& options, uint32_t layer);

// Bytes of one element; 0 for an unknown dtype.
size_t BytesOf(v1::DType dtype);

// Consecutive tokens of one layer, in the caller's memory, dtype as in LayerShape. The view must stay valid during
// the call it is given to.
struct ChunkView {
  uint32_t layer = 0;
  uint32_t first_position = 0;  // cache index of the first token
  uint32_t tokens = 0;
  std::span<const std::byte> keys{};     // [tokens, kv_heads, head_dim], post-RoPE
  std::span<const std::byte> values{};   // [tokens, kv_heads, value_dim]
  uint32_t query_positions = 0;          // 0: no queries
  std::span<const std::byte> queries{};  // [query_positions, q_heads, head_dim], of the last positions, post-RoPE
  // Tags, of sessions opened with them: [tokens], or empty. See Chunk in the proto.
  std::span<const float> weights{};
  std::span<const uint32_t> classes{};
};

// A copy of `data` as a message. REQUIRES: product(dims) elements.
v1::Tensor MakeTensor(v1::DType dtype, std::span<const uint32_t> dims, std::span<const std::byte> data);

// A query of `positions` consecutive positions, the first at `position`. queries [positions, q_heads, head_dim].
// INVALID_ARGUMENT: the bytes do not match the shape. The selection is left to be filled in.
absl::StatusOr<v1::Query> MakeQuery(const LayerShape& shape, uint32_t layer, uint32_t position, uint32_t positions,
                                    std::span<const std::byte> queries);

// Elements of `data` as float32. out [data.size() / BytesOf(dtype)]. INVALID_ARGUMENT: sizes that do not match, an
// unknown dtype.
absl::Status ToFloat(v1::DType dtype, std::span<const std::byte> data, std::span<float> out);

// One value. FloatToHalf and FloatToBfloat round to nearest, ties to even; values too large become infinite.
float HalfToFloat(uint16_t bits);
uint16_t FloatToHalf(float value);
float BfloatToFloat(uint16_t bits);
uint16_t FloatToBfloat(float value);

}  // namespace ctkvr::client
