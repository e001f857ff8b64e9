// SPDX-License-Identifier: Apache-2.0

#include "server/core/slot_table.h"

#include <algorithm>
#include <bit>
#include <cmath>

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
  taken_.reserve(slots);
  for (Set& set : sets_) {
    set.slots.resize(slots);
    set.buckets.resize(size_t{1} << BucketBits(slots));
    set.heap.resize(slots);
    Clear(set);
  }
}

size_t SlotTableBytes(uint32_t sets, uint32_t slots) {
  constexpr size_t kSlotBytes = 16, kNumberBytes = 2;
  return sets * (slots * (kSlotBytes + kNumberBytes) + (size_t{1} << BucketBits(slots)) * kNumberBytes) +
         slots * kNumberBytes;
}

void SlotTable::Begin(const RowKind& kind, uint64_t version) {
  ++answer_;
  if (kind != kind_ || version != version_ || answer_ == 0) Reset();  // 0: stamps of old answers would look new
  if (answer_ == 0) answer_ = 1;
  kind_ = kind;
  if (++version_ == 0) version_ = 1;  // 0 is a worker with an empty cache
}

bool SlotTable::Place(uint32_t set_index, std::span<const uint32_t> tokens, uint32_t window_begin, uint16_t* slots,
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
    Choose(set.slots[slot], tokens[i] < window_begin);
    Sink(set, set.slots[slot].place);
  }
  taken_.clear();
  uint32_t placed = 0;
  while (placed < missing.size() && !set.heap.empty()) {
    const uint16_t slot = TakeFirst(set);
    taken_.push_back(slot);
    // Tokens of this very answer stay, however rarely they were chosen before.
    if (set.slots[slot].answer == answer_) continue;
    if (set.slots[slot].answer != 0) Erase(set, slot);
    const uint32_t i = missing[placed++];
    set.slots[slot].token = tokens[i];
    set.slots[slot].answer = answer_;
    set.slots[slot].lead = 0;
    Insert(set, slot);
    slots[i] = slot;
  }
  for (uint16_t slot : taken_) {
    set.heap.push_back(slot);
    Rise(set, static_cast<uint32_t>(set.heap.size() - 1));
  }
  if (placed < missing.size()) Reset();
  return placed == missing.size();
}

void SlotTable::Truncate(uint32_t length) {
  for (Set& set : sets_) {
    for (uint32_t i = 0; i < slots_; ++i) {
      const auto slot = static_cast<uint16_t>(i);
      if (set.slots[slot].answer == 0 || set.slots[slot].token < length) continue;
      Erase(set, slot);
      set.slots[slot].answer = 0;
      set.slots[slot].lead = 0;
      Rise(set, set.slots[slot].place);
    }
  }
}

void SlotTable::Reset() {
  for (Set& set : sets_) Clear(set);
  ++version_;
}

void SlotTable::Clear(Set& set) {
  for (uint16_t& bucket : set.buckets) bucket = kNone;
  set.heap.resize(slots_);
  for (uint32_t slot = 0; slot < slots_; ++slot) {
    set.slots[slot] = Slot();
    Put(set, slot, static_cast<uint16_t>(slot));
  }
}

// count <- 1 + count * 2^(-age / kHalfLife), or at least 1, in the log domain.
void SlotTable::Choose(Slot& slot, bool counts) const {
  const float lead = slot.lead - static_cast<float>(answer_ - slot.answer);
  slot.lead = counts ? kHalfLife * std::log2(1 + std::exp2(lead / kHalfLife)) : std::max(lead, 0.0f);
  slot.answer = answer_;
}

bool SlotTable::Before(const Set& set, uint16_t slot, uint16_t other) {
  const double key = set.slots[slot].Key(), other_key = set.slots[other].Key();
  return key != other_key ? key < other_key : slot < other;
}

void SlotTable::Put(Set& set, uint32_t place, uint16_t slot) {
  set.heap[place] = slot;
  set.slots[slot].place = static_cast<uint16_t>(place);
}

void SlotTable::Rise(Set& set, uint32_t place) {
  const uint16_t slot = set.heap[place];
  while (place > 0 && Before(set, slot, set.heap[(place - 1) / 2])) {
    Put(set, place, set.heap[(place - 1) / 2]);
    place = (place - 1) / 2;
  }
  Put(set, place, slot);
}

void SlotTable::Sink(Set& set, uint32_t place) {
  const uint16_t slot = set.heap[place];
  for (uint32_t child = 2 * place + 1; child < set.heap.size(); child = 2 * place + 1) {
    if (child + 1 < set.heap.size() && Before(set, set.heap[child + 1], set.heap[child])) ++child;
    if (!Before(set, set.heap[child], slot)) break;
    Put(set, place, set.heap[child]);
    place = child;
  }
  Put(set, place, slot);
}

uint16_t SlotTable::TakeFirst(Set& set) {
  const uint16_t slot = set.heap.front();
  Put(set, 0, set.heap.back());
  set.heap.pop_back();
  if (!set.heap.empty()) Sink(set, 0);
  return slot;
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

}  // namespace ctkvr
