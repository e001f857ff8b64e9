// SPDX-License-Identifier: Apache-2.0
//
// Lists of positions in few bits: the code of P. Elias (1974) and R. M. Fano (1971) for ascending numbers. Of each
// position the low_bits lowest bits stand in a row of their own; the others, as a number h[i] for the i-th position,
// are the bit h[i] + i of a second row. A list takes at most 2 + log2(position_limit / list_tokens) bits a position,
// whatever they are: 512 of 100,000 in 9.6 bits each, against 17 of plain binary numbers and 32 of an array. The first
// positions of a list are a list themselves, so truncation only lowers its count.
// Thread-safe: pure functions over caller-owned memory. Read by device compilers too.

#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>

namespace ctkvr {

// How the lists of one index are packed. Plain data; MakePackedLists.
struct PackedLists {
  uint32_t list_tokens = 0;  // most positions a list
  uint32_t low_bits = 0;     // of each position, in the first row; at most 31
  uint32_t low_words = 0;    // of 64 bits, in the first row
  uint32_t words = 0;        // of both rows; the second one follows the first

  size_t list_bytes() const { return size_t{8} * words; }
  auto operator<=>(const PackedLists&) const = default;
};

// For ascending positions below position_limit. REQUIRES: 1 <= list_tokens <= position_limit < 2^31.
constexpr PackedLists MakePackedLists(uint32_t list_tokens, uint32_t position_limit) {
  PackedLists lists{.list_tokens = list_tokens};
  lists.low_bits = static_cast<uint32_t>(std::bit_width(position_limit / list_tokens)) - 1;
  const uint64_t low = uint64_t{list_tokens} * lists.low_bits;
  const uint64_t high = uint64_t{list_tokens} + ((position_limit - 1) >> lists.low_bits);
  lists.low_words = static_cast<uint32_t>((low + 63) / 64);
  lists.words = lists.low_words + static_cast<uint32_t>((high + 63) / 64);
  return lists;
}

// tokens [count], ascending, without duplicates, below the limit -> list [words]. REQUIRES: count <= list_tokens.
inline void PackList(const PackedLists& lists, const uint32_t* tokens, uint32_t count, uint64_t* list) {
  for (uint32_t w = 0; w < lists.words; ++w) list[w] = 0;
  const uint64_t low_mask = (uint64_t{1} << lists.low_bits) - 1;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t low_at = uint64_t{i} * lists.low_bits, low = tokens[i] & low_mask, shift = low_at % 64;
    if (lists.low_bits > 0) list[low_at / 64] |= low << shift;
    if (shift + lists.low_bits > 64) list[low_at / 64 + 1] |= low >> (64 - shift);
    const uint64_t high_at = uint64_t{tokens[i] >> lists.low_bits} + i;
    list[lists.low_words + high_at / 64] |= uint64_t{1} << (high_at % 64);
  }
}

// Calls visit(position) for the first `count` positions of a list, in order. REQUIRES: it was packed with as many.
template <typename Visit>
void VisitPackedList(const PackedLists& lists, const uint64_t* list, uint32_t count, Visit visit) {
  const uint64_t low_mask = (uint64_t{1} << lists.low_bits) - 1;
  const uint64_t* const high = list + lists.low_words;
  uint32_t i = 0;
  for (uint64_t word = 0; i < count; ++word) {
    for (uint64_t left = high[word]; left != 0 && i < count; left &= left - 1, ++i) {
      const uint64_t above = word * 64 + static_cast<uint64_t>(std::countr_zero(left)) - i;
      const uint64_t low_at = uint64_t{i} * lists.low_bits, shift = low_at % 64;
      uint64_t low = lists.low_bits == 0 ? 0 : list[low_at / 64] >> shift;
      if (shift + lists.low_bits > 64) low |= list[low_at / 64 + 1] << (64 - shift);
      visit(static_cast<uint32_t>(above << lists.low_bits | (low & low_mask)));
    }
  }
}

}  // namespace ctkvr
