// SPDX-License-Identifier: Apache-2.0
//
// The query centroids of one layer, a KV head each:
//   ring    the last queries appended, as centroids in waiting: the next build takes the newest C of them. A few more
//           than C are kept, so that a rejected draft leaves the newest C as they were
//   live    what retrievals search: C centroids, for each its best tokens of [begin, indexed_length)
//   build   the next live set while it is made, beside the live one; a half-built set is never searched
//
// Not thread-safe: belongs to one lane. Lives in blocks of the arena, at most 2 MiB each.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "server/core/batch_memory.h"
#include "server/core/limits.h"
#include "server/core/memory_plan.h"
#include "server/core/types.h"

namespace ctkvr {

// Shapes that fix the blocks. Values.
struct IndexShape {
  uint32_t kv_heads = 0;
  uint32_t group_heads = 0;  // R
  uint32_t head_dim = 0;     // D
  uint32_t centroids = 0;    // C
  uint32_t list_tokens = 0;  // rho, at most the token limit

  uint32_t ring_slots() const { return centroids + limits::kQueryPositionsMax; }
  size_t centroid_bytes() const { return size_t{2} * group_heads * head_dim; }
  size_t list_bytes() const { return size_t{4} * list_tokens; }
  size_t norms_bytes() const { return size_t{4} * ring_slots() * group_heads; }
  auto operator<=>(const IndexShape&) const = default;
};
IndexShape MakeIndexShape(const LayerConfig& layer, uint32_t token_limit);

// Which reservations a layer's index takes from.
struct IndexRequests {
  size_t centroids = MemoryPlan::kNone;
  size_t lists = MemoryPlan::kNone;
  size_t norms = MemoryPlan::kNone;
};
// Adds ring and live set to the plan, and one more set when `spare`: a session builds one set at a time, so layers of
// one shape share the spare.
IndexRequests PlanIndex(const IndexShape& shape, bool spare, MemoryPlan& plan);

// Equal elements laid into blocks.
struct BlockedArray {
  std::vector<Block> blocks;
  std::vector<std::byte*> elements;
};

// Centroids with their lists. Pointers and counts are the host's, staged when used.
struct IndexSet {
  struct Head {
    BlockedArray centroid_blocks;
    BlockedArray list_blocks;
    std::vector<uint16_t*> centroids;   // [C], each [R, D] binary16
    std::vector<uint32_t*> lists;       // [C], each [rho]
    std::vector<uint32_t> list_counts;  // [C]
    std::vector<float> mean_norms;      // [R]
  };
  std::vector<Head> heads;          // [kv_heads]
  std::vector<uint32_t> positions;  // [C] of the centroids' queries, ascending
  uint32_t begin = 0;               // lists hold tokens of [begin, indexed_length)
  uint32_t indexed_length = 0;
  uint32_t centroid_count() const { return static_cast<uint32_t>(positions.size()); }
  uint64_t held_bytes() const;
};

class QueryIndex {
 public:
  // The reservations must outlive the index.
  struct Memory {
    Reservation* centroids = nullptr;
    Reservation* lists = nullptr;
    Reservation* norms = nullptr;
  };
  QueryIndex(const IndexShape& shape, const Memory& memory);

  // ---- Ring ----
  // Where the next queries go: the last `count` of those offered, into these slots. Entries that the write may reach
  // are forgotten at once, so that a failed write leaves nothing wrong behind; CommitRing makes the new ones known.
  struct RingWrite {
    uint32_t skipped = 0;         // of the queries offered, from the front
    std::vector<uint32_t> slots;  // [count]
  };
  RingWrite BeginRingWrite(uint32_t query_positions);
  // first_position: of the first query that was not skipped.
  void CommitRing(const RingWrite& write, uint32_t first_position);
  // Slots of a KV head [ring_slots], each [R, D] binary16, and norms [ring_slots, R].
  const std::vector<uint16_t*>& ring_centroids(uint32_t kv_head) const { return ring_[kv_head].centroids; }
  float* ring_norms(uint32_t kv_head) const { return ring_[kv_head].norms; }
  uint32_t ring_count() const { return ring_count_; }

  // ---- Live set ----
  const IndexSet* live() const { return live_.get(); }
  uint32_t indexed_length() const { return live_ == nullptr ? 0 : live_->indexed_length; }
  uint32_t centroid_count() const { return live_ == nullptr ? 0 : live_->centroid_count(); }

  // ---- Building ----
  // A set with the newest queries as centroids and no lists yet. REQUIRES: ring_count() > 0.
  absl::StatusOr<std::unique_ptr<IndexSet>> StartSet(LaneDevice device, uint32_t begin, uint32_t end) const;
  // Lists of centroids [first, first + count) of a KV head.
  struct ListRange {
    uint32_t kv_head = 0;
    uint32_t first = 0;
    uint32_t count = 0;
  };
  static absl::Status BuildLists(LaneDevice device, const LayerConfig& layer, const HeadView& view, IndexSet& set,
                                 const ListRange& range);
  void Publish(std::unique_ptr<IndexSet> set) { live_ = std::move(set); }

  // ---- Truncation ----
  // List counts [kv_heads][centroids that stay] once positions >= length are gone. Changes nothing.
  using ListCounts = std::vector<std::vector<uint32_t>>;
  absl::StatusOr<ListCounts> PlanTruncate(LaneDevice device, uint32_t length) const;
  void Truncate(uint32_t length, const ListCounts& counts);

  uint64_t held_bytes() const;  // ring and live set

 private:
  struct RingHead {
    BlockedArray blocks;
    Block norms_block;
    std::vector<uint16_t*> centroids;
    float* norms = nullptr;
  };
  // Whether the live set lists tokens, or was made of queries, at or after `length`.
  bool LiveReaches(uint32_t length) const;
  uint32_t SlotOf(uint64_t entry) const { return static_cast<uint32_t>(entry % shape_.ring_slots()); }

  const IndexShape shape_;
  const Memory memory_;
  std::vector<RingHead> ring_;            // [kv_heads]; empty until the first query
  std::vector<uint32_t> ring_positions_;  // [ring_slots]
  uint64_t ring_next_ = 0;                // entries ever written; entries [next - count, next) are there
  uint32_t ring_count_ = 0;
  std::unique_ptr<IndexSet> live_;
};

}  // namespace ctkvr
