// SPDX-License-Identifier: Apache-2.0
//
// From a view of many tokens to messages the server accepts. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

// INVALID_ARGUMENT: no token, bytes that do not match `shape`, more query positions than tokens, or tags of some only.
absl::Status CheckChunk(const ChunkView& chunk, const LayerShape& shape);

// Tokens of the chunk that a message may hold: at most ServerLimits.append_tokens_max, about `append_bytes`, and never
// so many that the message exceeds message_bytes_max. At least 1. A limit of 0 is none.
uint32_t TokensPerMessage(const LayerShape& shape, const ChunkView& chunk, const v1::ServerLimits& limits,
                          uint32_t append_bytes);

// Tokens [begin, end) of the chunk, with the queries and tags of these positions. REQUIRES: CheckChunk passed.
ChunkView Part(const ChunkView& chunk, const LayerShape& shape, uint32_t begin, uint32_t end);

v1::Chunk ToMessage(const ChunkView& chunk, const LayerShape& shape);

// XXH3-64, seed 0, of the arrays one after the other.
uint64_t Checksum(const ChunkView& chunk);

}  // namespace ctkvr::client
