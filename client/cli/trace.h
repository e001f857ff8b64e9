// SPDX-License-Identifier: Apache-2.0
//
// A recorded layer of a real model: post-RoPE queries, keys and values of consecutive tokens of one text, the first
// part of it a prompt. A folder of q.npy, k.npy, v.npy (float16, C order) and meta.json.
// Thread-safe: const after LoadTrace.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ctkvr::cli {

// All arrays are binary16 bits, token-major: as Append and Retrieve carry them.
struct Trace {
  std::string name;  // of the folder
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  uint32_t tokens = 0;
  uint32_t prompt_tokens = 0;         // tokens before the first decoded one
  uint32_t query_first_position = 0;  // position of the first query kept
  float scale = 0;                    // softmax scale
  std::vector<uint16_t> queries;      // [tokens - query_first_position, q_heads, head_dim]
  std::vector<uint16_t> keys;         // [tokens, kv_heads, head_dim]
  std::vector<uint16_t> values;       // [tokens, kv_heads, value_dim]

  uint32_t group_heads() const { return q_heads / kv_heads; }
  // Of tokens [begin, begin + count).
  std::span<const uint16_t> keys_of(uint32_t begin, uint32_t count) const;
  std::span<const uint16_t> values_of(uint32_t begin, uint32_t count) const;
  // REQUIRES: begin >= query_first_position.
  std::span<const uint16_t> queries_of(uint32_t begin, uint32_t count) const;
};

// NOT_FOUND: a file is missing. INVALID_ARGUMENT: it is malformed, or shapes and meta.json contradict each other.
absl::StatusOr<Trace> LoadTrace(const std::string& folder);

}  // namespace ctkvr::cli
