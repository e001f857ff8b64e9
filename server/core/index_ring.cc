// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "kernels/base/math.h"
#include "server/core/index.h"

namespace ctkvr {

void QueryIndex::Forget(size_t entry) {
  ++forgotten_;
  free_slots_.push_back(entries_[entry].slot);
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(entry));
}

void QueryIndex::Thin(uint32_t first_position, uint32_t count) {
  const auto wanted = [&](uint32_t stride) {
    return entries_.size() + CeilDiv(uint64_t{first_position} + count, uint64_t{stride}) -
           CeilDiv(first_position, stride);
  };
  while (wanted(stride_) > shape_.ring_slots()) {
    stride_ *= 2;
    std::deque<RingEntry> kept;
    for (const RingEntry& entry : entries_) {
      if (entry.position % stride_ == 0) {
        kept.push_back(entry);
      } else {
        ++forgotten_;
        free_slots_.push_back(entry.slot);
      }
    }
    entries_ = std::move(kept);
  }
}

QueryIndex::RingWrite QueryIndex::BeginRingWrite(uint32_t first_position, uint32_t count) {
  const uint32_t known = entries_.empty() ? 0 : entries_.back().position + 1;
  const uint32_t begin = std::max(first_position, known), end = first_position + count;
  RingWrite write;
  if (begin >= end) return write;
  TakeRing();
  uint32_t next = begin;
  if (shape_.placement == Placement::kLast) {
    next = end - std::min(end - begin, shape_.ring_slots());
    while (entries_.size() + (end - next) > shape_.ring_slots()) Forget(0);
  } else {
    Thin(begin, end - begin);
    next = CeilDiv(begin, stride_) * stride_;
  }
  write.first = next - first_position;
  write.first_position = next;
  write.step = stride_;
  // The last free slots in turn; they stay free until the write is known to have succeeded.
  for (size_t i = free_slots_.size(); next < end; next += stride_) write.slots.push_back(free_slots_[--i]);
  return write;
}

void QueryIndex::StageRingWrite(const RingQueries& offered, const RingWrite& write, BatchMemory& memory,
                                std::vector<WriteCentroidsItem>& items) const {
  if (write.slots.empty()) return;
  const size_t head_bytes = shape_.head_dim * DTypeBytes(offered.dtype) * shape_.group_heads;
  const size_t position_bytes = head_bytes * shape_.kv_heads;
  std::vector<uint16_t* const*> centroids;
  for (const RingHead& head : ring_) centroids.push_back(memory.In(head.centroids.data(), head.centroids.size()));
  // Queries in between are not worth scratch.
  const auto count = static_cast<uint32_t>(write.slots.size());
  const uint32_t together = write.step == 1 || memory.shares_host_memory() ? count : 1;
  for (uint32_t i = 0; i < count; i += together) {
    const std::byte* from = offered.queries.data() + (write.first + size_t{i} * write.step) * position_bytes;
    const std::byte* queries = memory.In(from, ((together - 1) * size_t{write.step} + 1) * position_bytes);
    const uint32_t* slots = memory.In(write.slots.data() + i, together);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      items.push_back({.queries = queries + h * head_bytes,
                       .stride = write.step * position_bytes,
                       .dtype = offered.dtype,
                       .heads = shape_.group_heads,
                       .head_dim = shape_.head_dim,
                       .count = together,
                       .slots = slots,
                       .centroids = centroids[h],
                       .norms = ring_[h].norms});
    }
  }
}

void QueryIndex::CommitRing(const RingWrite& write, bool appended) {
  if (appended) appended_ += static_cast<uint32_t>(write.slots.size());
  free_slots_.resize(free_slots_.size() - write.slots.size());
  for (uint32_t i = 0; i < write.slots.size(); ++i) {
    entries_.push_back({.position = write.first_position + i * write.step, .slot = write.slots[i]});
  }
}

std::vector<RingEntry> QueryIndex::PickEntries() const {
  const uint32_t count = std::min(ring_count(), shape_.centroids);
  std::vector<RingEntry> picked;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t spread = (uint64_t{i} * entries_.size() + entries_.size() - 1) / count;
    picked.push_back(entries_[shape_.placement == Placement::kLast ? entries_.size() - count + i : spread]);
  }
  return picked;
}

const RingEntry* QueryIndex::FindEntry(uint32_t position) const {
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), position,
                                      [](const RingEntry& entry, uint32_t p) { return entry.position < p; });
  return found == entries_.end() || found->position != position ? nullptr : &*found;
}

}  // namespace ctkvr
