// SPDX-License-Identifier: Apache-2.0
//
// Inner products of a few queries with many keys, as fast as a plain compiler makes them: the ground truth that a
// replay compares with. Thread-safe: const after construction.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ctkvr::cli {

// Keys of one KV head, laid out [blocks of 16 tokens][head_dim][16], so that the innermost loop runs over tokens and
// needs no horizontal sum. T is float, or double where every bit counts.
template <typename T>
class KeyBlocks {
 public:
  static constexpr uint32_t kBlock = 16;

  // keys [tokens, head_dim].
  KeyBlocks(std::span<const float> keys, uint32_t head_dim)
      : head_dim_(head_dim),
        tokens_(static_cast<uint32_t>(keys.size() / head_dim)),
        data_(Blocks(tokens_) * head_dim * kBlock) {
    for (uint32_t token = 0; token < tokens_; ++token) {
      T* block = data_.data() + size_t{token / kBlock} * head_dim * kBlock + token % kBlock;
      for (uint32_t i = 0; i < head_dim; ++i) block[size_t{i} * kBlock] = keys[size_t{token} * head_dim + i];
    }
  }

  uint32_t tokens() const { return tokens_; }
  // Elements between two rows of scores.
  size_t stride() const { return Blocks(tokens_) * kBlock; }

  // scores [heads, stride()] = <query h, key t> for t < count (what follows in a row is unspecified).
  // queries [heads, head_dim]. REQUIRES: count <= tokens().
  void Score(std::span<const float> queries, uint32_t count, std::span<T> scores) const {
    const auto heads = static_cast<uint32_t>(queries.size() / head_dim_);
    for (uint32_t head = 0; head < heads; head += 3) {
      const float* q = queries.data() + size_t{head} * head_dim_;
      T* out = scores.data() + head * stride();
      switch (std::min(heads - head, 3u)) {
        case 1:
          ScoreHeads<1>(q, count, out);
          break;
        case 2:
          ScoreHeads<2>(q, count, out);
          break;
        default:
          ScoreHeads<3>(q, count, out);
          break;
      }
    }
  }

 private:
  static size_t Blocks(uint32_t tokens) { return (size_t{tokens} + kBlock - 1) / kBlock; }

  // Three heads times 16 tokens are the most sums that fit the registers of plain x86-64.
  template <uint32_t kHeads>
  void ScoreHeads(const float* queries, uint32_t count, T* out) const {
    for (size_t block = 0; block < Blocks(count); ++block) {
      const T* keys = data_.data() + block * head_dim_ * kBlock;
      T sums[kHeads][kBlock] = {};
      for (uint32_t i = 0; i < head_dim_; ++i) {
        for (uint32_t head = 0; head < kHeads; ++head) {
          const T q = queries[size_t{head} * head_dim_ + i];
          for (uint32_t t = 0; t < kBlock; ++t) sums[head][t] += q * keys[size_t{i} * kBlock + t];
        }
      }
      for (uint32_t head = 0; head < kHeads; ++head) {
        std::copy(sums[head], sums[head] + kBlock, out + head * stride() + block * kBlock);
      }
    }
  }

  uint32_t head_dim_;
  uint32_t tokens_;
  std::vector<T> data_;
};

}  // namespace ctkvr::cli
