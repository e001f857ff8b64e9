// SPDX-License-Identifier: Apache-2.0
//
// Counting what memory is read by: lines of 64 bytes. Thread-safe: values.

#pragma once

#include <algorithm>
#include <cstdint>

namespace ctkvr {

inline constexpr uint32_t kLineBytes = 64;

// The lines that parts of one array touch, each line once. The array begins on a line.
class LineCount {
 public:
  // Bytes [begin, end). REQUIRES: neither lies below that of the call before.
  void Add(uint64_t begin, uint64_t end) {
    if (begin == end) return;
    const uint64_t first = std::max(begin / kLineBytes, next_);
    next_ = std::max(next_, (end - 1) / kLineBytes + 1);
    lines_ += next_ - std::min(first, next_);
  }
  uint64_t lines() const { return lines_; }

 private:
  uint64_t next_ = 0;  // all lines below it are counted or skipped
  uint64_t lines_ = 0;
};

}  // namespace ctkvr
