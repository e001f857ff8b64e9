// SPDX-License-Identifier: Apache-2.0
//
// What a session asks of the arena, gathered before anything is taken: blocks of equal size share one request, except
// those that are given back before the session ends. Not thread-safe: a local value.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "kernels/arena.h"
#include "kernels/base/math.h"

namespace ctkvr {

class MemoryPlan {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  // Both return the index of the request, whose Reservation has the same index; kNone when count is 0.
  size_t Add(size_t block_bytes, uint64_t count) {
    if (count == 0) return kNone;
    const size_t rounded = RoundUp(block_bytes, Arena::kBlockAlignment);
    const auto [entry, fresh] = shared_.try_emplace(rounded, requests_.size());
    if (fresh) requests_.push_back({.block_bytes = rounded, .count = 0});
    requests_[entry->second].count += count;
    return entry->second;
  }
  size_t AddAlone(size_t block_bytes, uint64_t count) {
    if (count == 0) return kNone;
    requests_.push_back({.block_bytes = RoundUp(block_bytes, Arena::kBlockAlignment), .count = count});
    return requests_.size() - 1;
  }

  const std::vector<Arena::Request>& requests() const { return requests_; }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const Arena::Request& request : requests_) sum += request.block_bytes * request.count;
    return sum;
  }

 private:
  std::vector<Arena::Request> requests_;
  std::map<size_t, size_t> shared_;
};

}  // namespace ctkvr
