// SPDX-License-Identifier: Apache-2.0
//
// What the conformance cases of the storing operations share: inputs as a worker sends them, and their rows as the
// oracle takes them. Thread-safe: no shared state.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {

inline constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

inline std::vector<float> FloatSigns(uint32_t head_dim, uint64_t seed) {
  const oracle::Row signs = oracle::Signs(head_dim, seed);
  return {signs.begin(), signs.end()};
}

inline oracle::Row RowOf(const std::vector<float>& floats, size_t row, size_t dim) {
  return {floats.begin() + row * dim, floats.begin() + (row + 1) * dim};
}

// Input elements at an odd address.
class Misaligned {
 public:
  Misaligned(const std::vector<float>& values, DType dtype) : bytes_(ToBytes(values, dtype)) {
    bytes_.insert(bytes_.begin(), std::byte{0});
  }
  const std::byte* data() const { return bytes_.data() + 1; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace ctkvr::testing
