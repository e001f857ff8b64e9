// SPDX-License-Identifier: Apache-2.0
//
// What everything is measured against, written here from scratch: a memory copy, a plain read, and a plain scan of
// fp16 keys that lie one after another. Nothing of kernels is used. Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ctkvr::bench {

// 2 MiB-aligned memory, huge pages asked for; touched.
class BigBuffer {
 public:
  explicit BigBuffer(size_t bytes);
  ~BigBuffer();
  BigBuffer(const BigBuffer&) = delete;
  BigBuffer& operator=(const BigBuffer&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Sum of the 64-bit words; bytes a multiple of 64.
uint64_t PlainRead(const std::byte* data, size_t bytes);

// scores [heads, tokens] = inner products of queries [heads, head_dim] with keys [tokens, head_dim] binary16.
// REQUIRES: heads is 1 or 4, head_dim a multiple of 16.
void PlainScanF16(const uint16_t* keys, size_t tokens, size_t head_dim, const float* queries, size_t heads,
                  float* scores);

// `count` binary16 numbers of a standard normal distribution, cut off a longer repeating row of them at an offset that
// depends on `seed`.
void FillNormalF16(uint64_t seed, uint16_t* to, size_t count);

}  // namespace ctkvr::bench
