// SPDX-License-Identifier: Apache-2.0
//
// Lists of positions packed as kernels/packed_list.h says, bit by bit, and back: a part of oracle.h.
// Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <vector>

namespace ctkvr::oracle {

inline std::vector<uint64_t> PackList(const std::vector<uint32_t>& tokens, uint32_t low_bits, uint32_t low_words,
                                      uint32_t words) {
  std::vector<uint64_t> list(words);
  const auto set_bit = [&](uint64_t at) { list[at / 64] |= uint64_t{1} << (at % 64); };
  for (uint64_t i = 0; i < tokens.size(); ++i) {
    for (uint32_t b = 0; b < low_bits; ++b) {
      if ((tokens[i] >> b & 1) != 0) set_bit(i * low_bits + b);
    }
    set_bit(uint64_t{64} * low_words + (tokens[i] >> low_bits) + i);
  }
  return list;
}

inline std::vector<uint32_t> UnpackList(const uint64_t* list, uint32_t count, uint32_t low_bits, uint32_t low_words) {
  const auto bit = [&](uint64_t at) { return list[at / 64] >> (at % 64) & 1; };
  std::vector<uint32_t> tokens;
  for (uint64_t at = 0; tokens.size() < count; ++at) {
    if (bit(uint64_t{64} * low_words + at) == 0) continue;
    const uint64_t i = tokens.size();
    uint64_t token = (at - i) << low_bits;
    for (uint32_t b = 0; b < low_bits; ++b) token |= bit(i * low_bits + b) << b;
    tokens.push_back(static_cast<uint32_t>(token));
  }
  return tokens;
}

}  // namespace ctkvr::oracle
