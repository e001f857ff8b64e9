// SPDX-License-Identifier: Apache-2.0
//
// The worker's side of ANSWER_MODE_NEW_ROWS: the rows of one layer of one session, by slot. The server decides what
// lies where; Apply obeys.
//
//   query.set_cache_version(cache.version());           ask
//   cache.Apply(answer);                                take the new rows in
//   for (uint16_t slot : cache.slots(0, kv_head)) use(cache.key(kv_head, slot), cache.value(kv_head, slot));
//
// An answer that is lost, or fails, needs no care: the version stays, and the next answer brings every row.
// Not thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

class RowCache {
 public:
  // sets: the layer's KV heads, or its query heads under GROUP_REDUCTION_PER_HEAD. slots: SessionOptions.cache_slots.
  // Memory is taken with the first rows: sets * slots of them.
  RowCache(uint32_t sets, uint32_t slots) : sets_(sets), slots_(slots) {}

  // For Query.cache_version; 0 while nothing is held.
  uint64_t version() const { return version_; }

  // Takes the answer's new rows in; `slots` are then those of its chosen tokens.
  // INVALID_ARGUMENT: sizes that do not fit each other, a slot past the last, or one that was never filled (the answer
  // is not of this layer, or was damaged on its way). The cache is empty then, and the next answer complete.
  absl::Status Apply(const v1::Answer& answer);

  // Of the answer applied last: P positions, and the slots of a set's chosen tokens, in ascending position of the
  // tokens. REQUIRES: position < P, set < sets.
  uint32_t positions() const { return positions_; }
  std::span<const uint16_t> slots(uint32_t position, uint32_t set) const;
  size_t new_rows() const { return new_rows_; }

  // What a slot holds: the token's cache position, and its rows in the row format of the answers. Valid until Apply.
  // REQUIRES: a slot that `slots` gave.
  uint32_t token(uint32_t set, uint16_t slot) const { return tokens_[Place(set, slot)]; }
  std::span<const std::byte> key(uint32_t set, uint16_t slot) const;
  std::span<const std::byte> value(uint32_t set, uint16_t slot) const;

 private:
  static constexpr uint32_t kEmpty = 0xffffffff;  // no position: token limits lie far below
  size_t Place(uint32_t set, uint16_t slot) const { return size_t{set} * slots_ + slot; }
  absl::Status Check(const v1::Answer& answer, size_t chosen, size_t rows) const;
  absl::Status Take(const v1::Answer& answer);
  void Resize(size_t key_row_bytes, size_t value_row_bytes);

  const uint32_t sets_;
  const uint32_t slots_;
  uint64_t version_ = 0;
  uint32_t positions_ = 0;
  size_t new_rows_ = 0;
  std::vector<size_t> begins_;        // [P * sets + 1], in chosen_slots_
  std::vector<uint16_t> chosen_slots_;
  std::vector<uint32_t> tokens_;      // [sets, slots]
  std::vector<std::byte> keys_;       // [sets, slots] rows
  std::vector<std::byte> values_;     // [sets, slots] rows
  size_t key_row_bytes_ = 0;
  size_t value_row_bytes_ = 0;
};

}  // namespace ctkvr::client
