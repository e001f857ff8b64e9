// SPDX-License-Identifier: Apache-2.0

#include "server/core/slot_table.h"

#include <bit>

#include "kernels/base/check.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

// At least two buckets a slot: probes stay short.
uint32_t BucketBits(uint32_t slots) { return static_cast<uint32_t>(std::bit_width(2 * slots - 1)); }

}  // namespace

SlotTable::SlotTable(uint32_t sets, uint32_t slots, uint64_t first_version)
    : slots_(slots), bucket_shift_(32 - BucketBits(slots)), sets_(sets), version_(first_version) {
  CTKVR_CHECK(slots > 0 && slots <= limits::kCacheSlotsMax);
  for (Set& set : sets_) {
    set.slots.resize(slots);
    set.buckets.resize(size_t{1} << BucketBits(slots));
    Clear(set);
  }
}

size_t SlotTableBytes(uint32_t sets, uint32_t slots) {
  constexpr size_t kSlotBytes = 12, kBucketBytes = 2;
  return sets * (slots * kSlotBytes + (size_t{1} << BucketBits(slots)) * kBucketBytes);
}

void SlotTable::Begin(const RowKind& kind, uint64_t version) {
  ++answer_;
  if (kind != kind_ || version != version_ || answer_ == 0) Reset();  // 0: stamps of old answers would look new
  if (answer_ == 0) answer_ = 1;
  kind_ = kind;
  if (++version_ == 0) version_ = 1;  // 0 is a worker with an empty cache
}

bool SlotTable::Place(uint32_t set_index, std::span<const uint32_t> tokens, uint16_t* slots,
                      std::vector<uint32_t>& missing) {
  Set& set = sets_[set_index];
  missing.clear();
  // Tokens that are there first, so that none of them is the one to leave.
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    const uint16_t slot = Find(set, tokens[i]);
    slots[i] = slot;
    if (slot == kNone) {
      missing.push_back(i);
      continue;
    }
    set.slots[slot].answer = answer_;
    Unlink(set, slot);
    LinkNewest(set, slot);
  }
  for (uint32_t i : missing) {
    const uint16_t slot = set.oldest;
    if (set.slots[slot].answer == answer_) {
      Reset();
      return false;
    }
    if (set.slots[slot].answer != 0) Erase(set, slot);
    set.slots[slot].token = tokens[i];
    set.slots[slot].answer = answer_;
    Insert(set, slot);
    Unlink(set, slot);
    LinkNewest(set, slot);
    slots[i] = slot;
  }
  return true;
}

void SlotTable::Truncate(uint32_t length) {
  for (Set& set : sets_) {
    for (uint32_t i = 0; i < slots_; ++i) {
      const auto slot = static_cast<uint16_t>(i);
      if (set.slots[slot].answer == 0 || set.slots[slot].token < length) continue;
      Erase(set, slot);
      set.slots[slot].answer = 0;
      Unlink(set, slot);
      LinkOldest(set, slot);
    }
  }
}

void SlotTable::Reset() {
  for (Set& set : sets_) Clear(set);
  ++version_;
}

void SlotTable::Clear(Set& set) {
  set.newest = set.oldest = kNone;
  for (uint16_t& bucket : set.buckets) bucket = kNone;
  for (uint32_t slot = 0; slot < slots_; ++slot) {
    set.slots[slot] = Slot();
    LinkOldest(set, static_cast<uint16_t>(slot));
  }
}

// Fibonacci hashing: the high bits of a product with 2^32 / golden ratio spread neighbouring tokens.
uint32_t SlotTable::Bucket(uint32_t token) const { return (token * 2654435769u) >> bucket_shift_; }

uint16_t SlotTable::Find(const Set& set, uint32_t token) const {
  const auto mask = static_cast<uint32_t>(set.buckets.size() - 1);
  for (uint32_t bucket = Bucket(token);; bucket = (bucket + 1) & mask) {
    const uint16_t slot = set.buckets[bucket];
    if (slot == kNone || set.slots[slot].token == token) return slot;
  }
}

void SlotTable::Insert(Set& set, uint16_t slot) {
  const auto mask = static_cast<uint32_t>(set.buckets.size() - 1);
  uint32_t bucket = Bucket(set.slots[slot].token);
  while (set.buckets[bucket] != kNone) bucket = (bucket + 1) & mask;
  set.buckets[bucket] = slot;
}

// Closes the gap: entries after it that may live earlier move up, so that no search stops short.
void SlotTable::Erase(Set& set, uint16_t slot) {
  const auto mask = static_cast<uint32_t>(set.buckets.size() - 1);
  uint32_t gap = Bucket(set.slots[slot].token);
  while (set.buckets[gap] != slot) gap = (gap + 1) & mask;
  for (uint32_t bucket = (gap + 1) & mask; set.buckets[bucket] != kNone; bucket = (bucket + 1) & mask) {
    const uint32_t home = Bucket(set.slots[set.buckets[bucket]].token);
    if (((bucket - home) & mask) < ((bucket - gap) & mask)) continue;
    set.buckets[gap] = set.buckets[bucket];
    gap = bucket;
  }
  set.buckets[gap] = kNone;
}

void SlotTable::Unlink(Set& set, uint16_t slot) {
  const Slot& entry = set.slots[slot];
  (entry.newer == kNone ? set.newest : set.slots[entry.newer].older) = entry.older;
  (entry.older == kNone ? set.oldest : set.slots[entry.older].newer) = entry.newer;
}

void SlotTable::LinkNewest(Set& set, uint16_t slot) {
  Slot& entry = set.slots[slot];
  entry.newer = kNone;
  entry.older = set.newest;
  (set.newest == kNone ? set.oldest : set.slots[set.newest].newer) = slot;
  set.newest = slot;
}

void SlotTable::LinkOldest(Set& set, uint16_t slot) {
  Slot& entry = set.slots[slot];
  entry.older = kNone;
  entry.newer = set.oldest;
  (set.oldest == kNone ? set.newest : set.slots[set.oldest].older) = slot;
  set.oldest = slot;
}

}  // namespace ctkvr
