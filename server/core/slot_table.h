// SPDX-License-Identifier: Apache-2.0
//
// Which token's row lies in which slot of the worker's row cache: one layer of one session, `slots` slots for each of
// its sets (a KV head; a query head under per_head). The server decides and the worker obeys. The least recently chosen
// token leaves first.
//
// Every answer gives the cache a new version, which the worker hands back with its next query of the layer. A worker
// that comes with any other version (it lost an answer, restarted, is another worker) starts from empty tables, and its
// answer is complete. So no answer can rest on a row that the worker lacks, whatever became of earlier ones.
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
struct RowKind {
  uint32_t sets = 0;
  RowFormat row_format = RowFormat::kF16;
  uint32_t code_generation = 0;

  bool operator==(const RowKind&) const = default;
};

size_t SlotTableBytes(uint32_t sets, uint32_t slots);

class SlotTable {
 public:
  // sets: as many as any answer has. first_version: no other table's versions lie near it.
  // REQUIRES: 0 < slots <= limits::kCacheSlotsMax.
  SlotTable(uint32_t sets, uint32_t slots, uint64_t first_version);

  uint32_t sets() const { return static_cast<uint32_t>(sets_.size()); }
  uint32_t slots() const { return slots_; }
  // What the worker holds once it has the answer begun last.
  uint64_t version() const { return version_; }

  // Begins an answer to a worker that holds `version`; empties the tables where it lacks rows or they are of another
  // kind.
  void Begin(const RowKind& kind, uint64_t version);

  // Finds or makes places for one position's chosen tokens, ascending. slots [tokens]; `missing` gets the indices of
  // tokens whose rows the worker lacks, ascending. False when the tokens placed since Begin need more slots than there
  // are, and the tables are empty then.
  bool Place(uint32_t set, std::span<const uint32_t> tokens, uint16_t* slots, std::vector<uint32_t>& missing);

  // Positions at and after `length` are gone.
  void Truncate(uint32_t length);
  // The answer begun last will not be sent: all are gone, and no worker holds the version.
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
  RowKind kind_;
  uint64_t version_;
  uint32_t answer_ = 0;
};

}  // namespace ctkvr
