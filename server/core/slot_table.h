// SPDX-License-Identifier: Apache-2.0
//
// Which token's row lies in which slot of the worker's row cache: one layer of one session, `slots` slots for each of
// its sets (a KV head; a query head under per_head). The server decides and the worker obeys, so that both hold the
// same table. The least recently chosen token leaves first.
//
// Rows are those of one kind (Kind) only, delivered by one stream; anything else, a reply the worker has not applied,
// or an error after a table moved empties the tables and starts a new epoch, and the next answer is complete.
//
// Memory is taken by the constructor alone: SlotTableBytes, in host memory. Not thread-safe: belongs to one lane.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/formats.h"

namespace ctkvr {

// What makes the rows of two answers interchangeable.
struct SlotTableKind {
  uint64_t stream = 0;  // the Decode stream that delivers
  uint32_t sets = 0;
  RowFormat row_format = RowFormat::kF16;
  uint32_t code_generation = 0;

  bool operator==(const SlotTableKind&) const = default;
};

size_t SlotTableBytes(uint32_t sets, uint32_t slots);

class SlotTable {
 public:
  // sets: as many as any answer has. REQUIRES: 0 < slots <= limits::kCacheSlotsMax.
  SlotTable(uint32_t sets, uint32_t slots);

  uint32_t slots() const { return slots_; }
  uint64_t epoch() const { return epoch_; }

  // Begins the answer that carries `sequence`. `applied`: of the last reply the worker applied.
  // Empties the tables where they are of another kind or the worker lacks the last reply of this table.
  void Begin(const SlotTableKind& kind, uint64_t applied, uint64_t sequence);

  // Finds or makes places for one position's chosen tokens, ascending. slots [tokens]; `missing` gets the indices of
  // tokens whose rows the worker lacks, ascending. False when the tokens placed since Begin need more slots than there
  // are: the caller must Reset.
  bool Place(uint32_t set, std::span<const uint32_t> tokens, uint16_t* slots, std::vector<uint32_t>& missing);

  // Positions at and after `length` are gone.
  void Truncate(uint32_t length);
  // All are gone; the epoch is a new one.
  void Reset();

 private:
  static constexpr uint16_t kNone = 0xffff;
  struct Slot {
    uint32_t token = 0;
    uint32_t answer = 0;  // the last one that chose it; 0: empty
    // Neighbours in the order of use; kNone at the ends.
    uint16_t newer = kNone;
    uint16_t older = kNone;
  };
  struct Set {
    std::vector<Slot> slots;
    std::vector<uint16_t> buckets;  // open addressing, linear probing; kNone where empty
    uint16_t newest = kNone;
    uint16_t oldest = kNone;
  };

  void Clear(Set& set);
  uint32_t Bucket(uint32_t token) const;
  uint16_t Find(const Set& set, uint32_t token) const;
  void Insert(Set& set, uint16_t slot);
  void Erase(Set& set, uint16_t slot);
  void Unlink(Set& set, uint16_t slot);
  void LinkNewest(Set& set, uint16_t slot);
  void LinkOldest(Set& set, uint16_t slot);

  const uint32_t slots_;
  const uint32_t bucket_shift_;
  std::vector<Set> sets_;
  SlotTableKind kind_;
  uint64_t epoch_ = 1;
  uint64_t last_sequence_ = 0;
  uint32_t answer_ = 0;
};

}  // namespace ctkvr
