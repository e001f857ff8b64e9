// SPDX-License-Identifier: Apache-2.0
//
// Integer arithmetic on sizes. Thread-safe: pure functions.

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace ctkvr {

template <std::unsigned_integral T>
constexpr T CeilDiv(T a, T b) {
  return a / b + (a % b != 0);
}

template <std::unsigned_integral T>
constexpr T RoundUp(T value, T multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// The product, or nothing when it does not fit 64 bits.
constexpr std::optional<uint64_t> CheckedProduct(std::initializer_list<uint64_t> factors) {
  uint64_t product = 1;
  for (uint64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

}  // namespace ctkvr
