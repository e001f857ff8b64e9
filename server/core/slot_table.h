// SPDX-License-Identifier: Apache-2.0
//
// Which token's row lies in which slot of the worker's row cache: one layer of one session, `slots` slots for each of
// its sets (a KV head; a query head under per_head). The server decides and the worker obeys.
//
// The token chosen least often of late leaves first: each choice since a token came counts 2^(-age / kHalfLife), age in
// answers; being in the window counts once, however long. Rows that this sends, as a share of the chosen ones (exact
// top 256, window aside, 2,048 slots, 1,024 steps of the 8,192-token traces of SmolLM2-135M, means over layers; "best"
// knows the future):
//
//                least recently   half-life 16   32      48      64      best
//     records    0.090            0.078          0.071   0.070   0.070   0.047
//     code       0.058            0.054          0.051   0.052   0.055   0.032
//     prose      0.065            0.062          0.064   0.065   0.067   0.037
//
// Counting choices from before a token last left sends more on records (0.072), less on prose (0.062).
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
  // tokens whose rows the worker lacks, ascending. Tokens at and after `window_begin` are chosen whatever the query.
  // False when the tokens placed since Begin need more slots than there
  // are, and the tables are empty then.
  bool Place(uint32_t set, std::span<const uint32_t> tokens, uint32_t window_begin, uint16_t* slots,
             std::vector<uint32_t>& missing);

  // Positions at and after `length` are gone.
  void Truncate(uint32_t length);
  // The answer begun last will not be sent: all are gone, and no worker holds the version.
  void Reset();

 private:
  static constexpr uint16_t kNone = 0xffff;
  static constexpr float kHalfLife = 48;  // answers
  struct Slot {
    uint32_t token = 0;
    uint32_t answer = 0;  // the last one that chose it; 0: empty
    // kHalfLife * log2 of its decayed count of choices at that answer. The count falls to 1 at answer + lead, and so
    // the earliest answer + lead has the lowest count at any time.
    float lead = 0;
    uint16_t place = 0;  // in the heap

    double Key() const { return static_cast<double>(answer) + static_cast<double>(lead); }
  };
  struct Set {
    std::vector<Slot> slots;
    std::vector<uint16_t> buckets;  // open addressing, linear probing; kNone where empty
    std::vector<uint16_t> heap;     // slots, the one to leave first on top
  };

  void Clear(Set& set);
  void Choose(Slot& slot, bool counts) const;
  // Slots to leave first come up, to the top of the heap.
  static bool Before(const Set& set, uint16_t slot, uint16_t other);
  static void Put(Set& set, uint32_t place, uint16_t slot);
  static void Rise(Set& set, uint32_t place);
  static void Sink(Set& set, uint32_t place);
  static uint16_t TakeFirst(Set& set);
  uint32_t Bucket(uint32_t token) const;
  uint16_t Find(const Set& set, uint32_t token) const;
  void Insert(Set& set, uint16_t slot);
  void Erase(Set& set, uint16_t slot);

  const uint32_t slots_;
  const uint32_t bucket_shift_;
  std::vector<Set> sets_;
  std::vector<uint16_t> taken_;  // off the heap while tokens find their places
  RowKind kind_;
  uint64_t version_;
  uint32_t answer_ = 0;
};

}  // namespace ctkvr
