// SPDX-License-Identifier: Apache-2.0
//
// Requests that are right in every field, for a small session of two layers; tests break one field at a time.
// Contents follow from the numbers given, so that the same call makes the same bytes. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "ctkvr/v1/cache.pb.h"
#include "ctkvr/v1/session.pb.h"

namespace ctkvr::testing {

inline constexpr uint32_t kLayers = 2;
inline constexpr uint32_t kQHeads = 4;
inline constexpr uint32_t kKvHeads = 2;
inline constexpr uint32_t kHeadDim = 32;
inline constexpr uint32_t kValueDim = 16;
inline constexpr uint32_t kTokenLimit = 2048;

// F32 elements in [-1, 1), drawn from `seed`.
v1::Tensor MakeTensor(std::initializer_list<uint32_t> dims, uint64_t seed);

v1::SessionOptions MakeOptions(v1::Format format = v1::FORMAT_F32);
v1::OpenSessionRequest MakeOpen(const std::string& id, v1::Format format = v1::FORMAT_F32);

// Tokens [first, first + tokens) of `layer`: the same token has the same bytes in every chunk.
v1::Chunk MakeChunk(uint32_t layer, uint32_t first, uint32_t tokens);
v1::AppendRequest MakeAppend(const std::string& id, uint32_t layer, uint32_t first, uint32_t tokens);
uint64_t Checksum(const v1::Chunk& chunk);

v1::Query MakeQuery(uint32_t layer, uint32_t position, uint32_t positions = 1);
v1::RetrieveRequest MakeRetrieve(const std::string& id, uint32_t layer, uint32_t position);

// A decode step: token `position` appended to `layer`, then asked about.
v1::DecodeRequest MakeDecode(const std::string& id, uint32_t layer, uint32_t position, uint64_t sequence);

}  // namespace ctkvr::testing
