// SPDX-License-Identifier: Apache-2.0
//
// How answers are compared with the oracle: numbers within a bound, selections outside a tie band. Thread-safe.

#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ctkvr::testing {

// Positions ascend and none occurs twice.
::testing::AssertionResult IsAscendingSet(std::span<const uint32_t> positions);

// `chosen` (indices into `values`, ascending) are the best k of `values` but for entries within `band` of the k-th
// value: right in number, without duplicates, nothing clearly worse inside, nothing clearly better outside. With band 0
// the tie rule holds exactly: of equal values the lower index.
::testing::AssertionResult IsTopK(std::span<const uint32_t> chosen, std::span<const double> values, size_t k,
                                  double band);

// |actual - expected| <= bound, and both finite.
::testing::AssertionResult IsWithin(double actual, double expected, double bound);

// Sum of squares of the difference over that of `expected` (over 1 where that is 0).
double NormalisedSquaredError(std::span<const double> actual, std::span<const double> expected);

// An array between guard bytes, poisoned before use: what an operation must not touch shows.
template <typename T>
class GuardedArray {
 public:
  // `misalignment` in bytes, a multiple of alignof(T), from a 64-byte boundary.
  explicit GuardedArray(size_t count, size_t misalignment = 0)
      : bytes_(kGuardBytes * 2 + count * sizeof(T) + 128, kPoison), count_(count) {
    const auto start = reinterpret_cast<uintptr_t>(bytes_.data()) + kGuardBytes;
    offset_ = kGuardBytes + (64 - start % 64) % 64 + misalignment;
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + offset_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + offset_); }
  size_t size() const { return count_; }
  T& operator[](size_t index) { return data()[index]; }
  const T& operator[](size_t index) const { return data()[index]; }
  std::span<T> span() { return {data(), count_}; }

  // Whether element `index` still holds poison alone.
  bool IsUntouched(size_t index) const { return Holds(offset_ + index * sizeof(T), offset_ + (index + 1) * sizeof(T)); }
  // Whether nothing around the array, nor any element from `used` on, was written.
  ::testing::AssertionResult IsUntouchedFrom(size_t used) const {
    if (!Holds(0, offset_)) return ::testing::AssertionFailure() << "bytes before the array were written";
    for (size_t i = used; i < count_; ++i) {
      if (!IsUntouched(i)) return ::testing::AssertionFailure() << "element " << i << " was written, past " << used;
    }
    if (!Holds(offset_ + count_ * sizeof(T), bytes_.size())) {
      return ::testing::AssertionFailure() << "bytes after the array were written";
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr size_t kGuardBytes = 256;
  static constexpr unsigned char kPoison = 0xa5;
  bool Holds(size_t from, size_t to) const {
    for (size_t i = from; i < to; ++i) {
      if (bytes_[i] != kPoison) return false;
    }
    return true;
  }
  std::vector<unsigned char> bytes_;
  size_t count_;
  size_t offset_ = 0;
};

}  // namespace ctkvr::testing
