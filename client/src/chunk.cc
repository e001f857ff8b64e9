// SPDX-License-Identifier: Apache-2.0
#include "client/src/chunk.h"

#define XXH_INLINE_ALL  // no library to link: consumers of ctkvr::client need none either
#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ctkvr::client {
namespace {

// Room for session id, fingerprint, dims and field tags beside the arrays of a message.
constexpr uint64_t kMessageOverheadBytes = 1024;
constexpr uint64_t kClassBytes = 2;  // a number up to 255 as the wire packs it

uint64_t KeyBytes(const LayerShape& shape) { return uint64_t{shape.kv_heads} * shape.head_dim * BytesOf(shape.dtype); }
uint64_t ValueBytes(const LayerShape& shape) {
  return uint64_t{shape.kv_heads} * shape.value_dim * BytesOf(shape.dtype);
}
uint64_t QueryBytes(const LayerShape& shape) { return uint64_t{shape.q_heads} * shape.head_dim * BytesOf(shape.dtype); }

absl::Status CheckBytes(const char* name, size_t given, uint64_t count, uint64_t each) {
  if (given == count * each) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chunk.", name, " has ", given, " bytes; ", count, " of ", each, " bytes are expected"));
}

absl::Status CheckTags(const char* name, size_t given, uint32_t tokens) {
  if (given == 0 || given == tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("chunk.", name, " has ", given, " elements; none or one for each of ",
                                                 tokens, " tokens is expected"));
}

// Elements [begin, begin + count) where there are any.
template <typename T>
std::span<const T> Slice(std::span<const T> tags, uint32_t begin, uint32_t count) {
  return tags.empty() ? tags : tags.subspan(begin, count);
}

}  // namespace

absl::Status CheckChunk(const ChunkView& chunk, const LayerShape& shape) {
  if (chunk.tokens == 0) return absl::InvalidArgumentError("chunk.tokens is 0; at least one is needed");
  if (chunk.query_positions > chunk.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk.query_positions is ", chunk.query_positions, "; the chunk has ", chunk.tokens, " tokens"));
  }
  if (auto s = CheckBytes("keys", chunk.keys.size(), chunk.tokens, KeyBytes(shape)); !s.ok()) return s;
  if (auto s = CheckBytes("values", chunk.values.size(), chunk.tokens, ValueBytes(shape)); !s.ok()) return s;
  if (auto s = CheckTags("weights", chunk.weights.size(), chunk.tokens); !s.ok()) return s;
  if (auto s = CheckTags("classes", chunk.classes.size(), chunk.tokens); !s.ok()) return s;
  return CheckBytes("queries", chunk.queries.size(), chunk.query_positions, QueryBytes(shape));
}

uint32_t TokensPerMessage(const LayerShape& shape, const ChunkView& chunk, const v1::ServerLimits& limits,
                          uint32_t append_bytes) {
  uint64_t bytes = append_bytes;
  if (limits.message_bytes_max() > 0) {
    const uint64_t limit = limits.message_bytes_max();
    bytes = std::min(bytes, limit > kMessageOverheadBytes ? limit - kMessageOverheadBytes : 1);
  }
  uint64_t token_bytes = KeyBytes(shape) + ValueBytes(shape);
  if (chunk.query_positions > 0) token_bytes += QueryBytes(shape);
  if (!chunk.weights.empty()) token_bytes += sizeof(float);
  if (!chunk.classes.empty()) token_bytes += kClassBytes;
  uint64_t tokens = bytes / token_bytes;
  if (limits.append_tokens_max() > 0) tokens = std::min<uint64_t>(tokens, limits.append_tokens_max());
  return static_cast<uint32_t>(std::max<uint64_t>(tokens, 1));
}

ChunkView Part(const ChunkView& chunk, const LayerShape& shape, uint32_t begin, uint32_t end) {
  const uint32_t tokens = end - begin;
  // Queries belong to the chunk's last positions, so those of a part belong to the part's last positions.
  const uint32_t first_query = chunk.tokens - chunk.query_positions;
  const uint32_t query_begin = std::max(begin, first_query);
  const uint32_t query_positions = end > query_begin ? end - query_begin : 0;
  const uint64_t query_offset = query_positions == 0 ? 0 : (query_begin - first_query) * QueryBytes(shape);
  return {.layer = chunk.layer,
          .first_position = chunk.first_position + begin,
          .tokens = tokens,
          .keys = chunk.keys.subspan(begin * KeyBytes(shape), tokens * KeyBytes(shape)),
          .values = chunk.values.subspan(begin * ValueBytes(shape), tokens * ValueBytes(shape)),
          .query_positions = query_positions,
          .queries = chunk.queries.subspan(query_offset, query_positions * QueryBytes(shape)),
          .weights = Slice(chunk.weights, begin, tokens),
          .classes = Slice(chunk.classes, begin, tokens)};
}

v1::Chunk ToMessage(const ChunkView& chunk, const LayerShape& shape) {
  v1::Chunk message;
  message.set_layer(chunk.layer);
  message.set_first_position(chunk.first_position);
  const uint32_t key_dims[] = {chunk.tokens, shape.kv_heads, shape.head_dim};
  const uint32_t value_dims[] = {chunk.tokens, shape.kv_heads, shape.value_dim};
  *message.mutable_keys() = MakeTensor(shape.dtype, key_dims, chunk.keys);
  *message.mutable_values() = MakeTensor(shape.dtype, value_dims, chunk.values);
  if (chunk.query_positions > 0) {
    const uint32_t query_dims[] = {chunk.query_positions, shape.q_heads, shape.head_dim};
    *message.mutable_queries() = MakeTensor(shape.dtype, query_dims, chunk.queries);
  }
  message.mutable_weights()->Assign(chunk.weights.begin(), chunk.weights.end());
  message.mutable_classes()->Assign(chunk.classes.begin(), chunk.classes.end());
  return message;
}

uint64_t Checksum(const ChunkView& chunk) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, chunk.keys.data(), chunk.keys.size());
  XXH3_64bits_update(&state, chunk.values.data(), chunk.values.size());
  if (!chunk.queries.empty()) XXH3_64bits_update(&state, chunk.queries.data(), chunk.queries.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace ctkvr::client
