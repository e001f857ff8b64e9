// SPDX-License-Identifier: Apache-2.0

#include "tests/server/rpc/messages.h"

#include <cstring>
#include <random>

#include "xxhash.h"

namespace ctkvr::testing {
namespace {

void AppendFloats(uint64_t seed, size_t count, std::string* data) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u + 1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (size_t i = 0; i < count; ++i) {
    const float value = uniform(random);
    char bytes[sizeof(float)];
    std::memcpy(bytes, &value, sizeof(float));
    data->append(bytes, sizeof(float));
  }
}

// [tokens, heads, dim], each token from its own seed.
v1::Tensor MakeTokens(uint32_t first, uint32_t tokens, uint32_t heads, uint32_t dim, uint64_t seed) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  for (uint32_t value : {tokens, heads, dim}) tensor.add_dims(value);
  for (uint32_t t = 0; t < tokens; ++t) {
    AppendFloats(seed + 16 * (uint64_t{first} + t), size_t{heads} * dim, tensor.mutable_data());
  }
  return tensor;
}

}  // namespace

v1::Tensor MakeTensor(std::initializer_list<uint32_t> dims, uint64_t seed) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  size_t count = 1;
  for (uint32_t dim : dims) {
    tensor.add_dims(dim);
    count *= dim;
  }
  AppendFloats(seed, count, tensor.mutable_data());
  return tensor;
}

v1::SessionOptions MakeOptions(v1::Format format) {
  v1::SessionOptions options;
  v1::Geometry* geometry = options.mutable_geometry();
  geometry->set_layers(kLayers);
  geometry->set_q_heads(kQHeads);
  geometry->set_kv_heads(kKvHeads);
  geometry->set_head_dim(kHeadDim);
  geometry->set_value_dim(kValueDim);
  geometry->set_dtype(v1::DTYPE_F32);
  options.set_format(format);
  options.mutable_selection()->set_k_tokens(8);
  options.mutable_selection()->set_dense_below_tokens(0);
  options.mutable_selection()->set_window_tokens(4);
  options.set_token_limit(kTokenLimit);
  return options;
}

v1::OpenSessionRequest MakeOpen(const std::string& id, v1::Format format) {
  v1::OpenSessionRequest request;
  request.set_session_id(id);
  *request.mutable_options() = MakeOptions(format);
  return request;
}

v1::Chunk MakeChunk(uint32_t layer, uint32_t first, uint32_t tokens) {
  v1::Chunk chunk;
  chunk.set_layer(layer);
  chunk.set_first_position(first);
  *chunk.mutable_keys() = MakeTokens(first, tokens, kKvHeads, kHeadDim, layer);
  *chunk.mutable_values() = MakeTokens(first, tokens, kKvHeads, kValueDim, layer + 8);
  return chunk;
}

v1::AppendRequest MakeAppend(const std::string& id, uint32_t layer, uint32_t first, uint32_t tokens) {
  v1::AppendRequest request;
  request.mutable_session()->set_session_id(id);
  *request.mutable_chunk() = MakeChunk(layer, first, tokens);
  return request;
}

uint64_t Checksum(const v1::Chunk& chunk) {
  const std::string data = chunk.keys().data() + chunk.values().data() + chunk.queries().data();
  return XXH3_64bits(data.data(), data.size());
}

v1::Query MakeQuery(uint32_t layer, uint32_t position, uint32_t positions) {
  v1::Query query;
  query.set_layer(layer);
  query.set_position(position);
  *query.mutable_queries() = MakeTensor({positions, kQHeads, kHeadDim}, 1000 + position);
  return query;
}

v1::RetrieveRequest MakeRetrieve(const std::string& id, uint32_t layer, uint32_t position) {
  v1::RetrieveRequest request;
  v1::RetrieveItem* item = request.add_items();
  item->mutable_session()->set_session_id(id);
  *item->mutable_query() = MakeQuery(layer, position);
  return request;
}

v1::DecodeRequest MakeDecode(const std::string& id, uint32_t layer, uint32_t position, uint64_t sequence) {
  v1::DecodeRequest request;
  request.set_sequence(sequence);
  v1::DecodeItem* item = request.add_items();
  item->mutable_session()->set_session_id(id);
  *item->mutable_chunk() = MakeChunk(layer, position, 1);
  *item->mutable_query() = MakeQuery(layer, position);
  return request;
}

}  // namespace ctkvr::testing
