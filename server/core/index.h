// SPDX-License-Identifier: Apache-2.0
//
// The query centroids of one layer, a KV head each:
//   ring    queries of appends and retrievals in ascending position, as centroids in waiting. kLast keeps the newest,
//           a few more than the C that the next build takes, so that a rejected draft leaves the newest C as they were.
//           kStrided keeps those at multiples of a stride, which doubles whenever 2 C are too few for all; the next
//           build takes C of them, evenly spread. kClustered keeps up to 4 C so, and a build begins with rounds of
//           spherical k-means that move the C to the middle of their like
//   live    what retrievals search: C centroids, for each its best tokens of [begin, indexed_length)
//   adjustment, when asked for: lists used more than twice as often as the mean of their KV head bring the newest query
//           that used them as one more centroid; where more than the capacity would be there, the least used ones with
//           less than half the mean leave. Counts of uses halve. Its lists are of the live set's tokens, so the others
//           stay as they are. A build then begins from the adjusted centroids, unless there are fewer than C, or C
//           queries were appended since: a new prompt
//   build   the next live set while it is made, beside the live one; a half-built set is never searched
//
// Not thread-safe: belongs to one lane. Lives in blocks of the arena, at most 2 MiB each.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/list_ops.h"
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
  uint32_t centroids = 0;    // C at first
  uint32_t capacity = 0;     // C at most
  Placement placement = Placement::kLast;
  uint32_t adjust_tokens = 0;  // retrieved positions between adjustments; 0: none
  PackedLists packing;         // of rho tokens, at most the token limit

  uint32_t ring_slots() const {
    if (placement == Placement::kLast) return centroids + limits::kQueryPositionsMax;
    return (placement == Placement::kStrided ? 2 : 4) * centroids;
  }
  bool adjusts() const { return adjust_tokens > 0; }
  // Of a set: with room for the centroids that are on their way.
  uint32_t set_elements() const { return capacity + (adjusts() ? limits::kAdjustedCentroidsMax : 0); }
  size_t centroid_bytes() const { return size_t{2} * group_heads * head_dim; }
  size_t list_bytes() const { return packing.list_bytes(); }
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

// A query of the ring.
struct RingEntry {
  uint32_t position = 0;
  uint32_t slot = 0;
};

// Centroids with their lists. Pointers and counts are the host's, staged when used.
struct IndexSet {
  struct Head {
    BlockedArray centroid_blocks;
    BlockedArray list_blocks;
    std::vector<uint16_t*> centroids;   // [C], each [R, D] binary16
    std::vector<uint64_t*> lists;       // [C], each packed
    std::vector<uint32_t> list_counts;  // [C]
    std::vector<uint32_t> positions;    // [C] of the centroids' last queries, ascending
    std::vector<uint32_t> elements;     // [C] of the blocks
    std::vector<uint32_t> free;         // elements of no centroid
    std::vector<float> uses;            // [C] how often retrievals took the list, halved at every adjustment
    std::vector<uint32_t> users;        // [C] position of the last one
    std::vector<float> mean_norms;      // [R]
    std::vector<uint32_t> leaving;      // an adjustment's: centroids of the live set that make room

    void AddCentroid(uint32_t element, uint32_t position);
    // These, in this order; the elements of the others are free.
    void KeepCentroids(const std::vector<uint32_t>& kept);
  };
  // k-means under way.
  struct Clustering {
    std::vector<RingEntry> queries;
    std::vector<uint32_t> nearest;  // [queries], of the KV head at work
    uint64_t forgotten = 0;         // as the ring counted when it began
    uint32_t kv_head = 0;
    uint32_t round = 0;
    uint32_t next = 0;  // query
  };
  std::vector<Head> heads;  // [kv_heads]
  std::optional<Clustering> clustering;
  uint32_t begin = 0;  // lists hold tokens of [begin, indexed_length)
  uint32_t indexed_length = 0;
  uint32_t centroid_count() const;  // that every KV head has
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
  // Where queries of positions [first_position, first_position + count) go: those that the ring wants, later than all
  // it has, into these slots. Entries that make room are forgotten at once, so that a failed write leaves nothing wrong
  // behind; CommitRing makes the new ones known, before the next BeginRingWrite.
  struct RingWrite {
    uint32_t first = 0;  // query first + i * step of those offered goes to slots[i]
    uint32_t step = 1;
    uint32_t first_position = 0;  // of the query in slots[0]
    std::vector<uint32_t> slots;
  };
  RingWrite BeginRingWrite(uint32_t first_position, uint32_t count);
  // The operations that write them, one a KV head. `write` must stay until they have run.
  struct RingQueries {
    std::span<const std::byte> queries;  // [offered, q_heads, head_dim] of dtype
    DType dtype = DType::kF32;
  };
  void StageRingWrite(const RingQueries& offered, const RingWrite& write, BatchMemory& memory,
                      std::vector<WriteCentroidsItem>& items) const;
  // `appended`: by an append, not by a retrieval.
  void CommitRing(const RingWrite& write, bool appended);
  // Slots of a KV head [ring_slots], each [R, D] binary16, and norms [ring_slots, R].
  const std::vector<uint16_t*>& ring_centroids(uint32_t kv_head) const { return ring_[kv_head].centroids; }
  float* ring_norms(uint32_t kv_head) const { return ring_[kv_head].norms; }
  uint32_t ring_count() const { return static_cast<uint32_t>(entries_.size()); }

  const PackedLists& packing() const { return shape_.packing; }

  // ---- Live set ----
  const IndexSet* live() const { return live_.get(); }
  uint32_t indexed_length() const { return live_ == nullptr ? 0 : live_->indexed_length; }
  uint32_t centroid_count() const { return live_ == nullptr ? 0 : live_->centroid_count(); }

  // ---- Building ----
  // Counts that a retrieval at `position` took these lists of the live set.
  void CountUses(uint32_t kv_head, std::span<const uint32_t> lists, uint32_t position);

  // A set of centroids with no lists yet: the live ones, adjusted, or queries of the ring. REQUIRES: ring_count() > 0.
  absl::StatusOr<std::unique_ptr<IndexSet>> StartSet(LaneDevice device, uint32_t begin, uint32_t end) const;
  // A bounded step of the set's clustering, until it has none any more. ABORTED when a query of its own has left the
  // ring: begin anew.
  absl::Status ClusterStep(LaneDevice device, IndexSet& set) const;
  // Lists of centroids [first, first + count) of a KV head.
  struct ListRange {
    uint32_t kv_head = 0;
    uint32_t first = 0;
    uint32_t count = 0;
  };
  absl::Status BuildLists(LaneDevice device, const LayerConfig& layer, const HeadView& view, IndexSet& set,
                          const ListRange& range) const;
  void Publish(std::unique_ptr<IndexSet> set);
  // An adjustment: the centroids that join, no lists yet, in elements of the live set; and those that leave. Nothing is
  // changed until it joins. REQUIRES: the live set stays until then.
  bool adjustment_due() const;
  absl::StatusOr<std::unique_ptr<IndexSet>> StartAdjustment(LaneDevice device) const;
  void Join(std::unique_ptr<IndexSet> adjustment);

  // ---- Truncation ----
  // List counts [kv_heads][centroids that stay: the first so many] once positions >= length are gone. Changes nothing.
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
  void TakeRing();
  // Doubles the stride, and forgets what it passes over, until `count` more queries from first_position on find room.
  void Thin(uint32_t first_position, uint32_t count);
  void Forget(size_t entry);
  std::vector<RingEntry> PickEntries() const;
  const RingEntry* FindEntry(uint32_t position) const;
  // One centroid of a set to come.
  struct Source {
    const uint16_t* from = nullptr;
    uint32_t position = 0;
    float uses = 0;
    uint32_t user = 0;
  };
  bool begins_from_live() const;
  std::vector<Source> Sources(uint32_t kv_head, const std::vector<RingEntry>& picked) const;
  absl::Status FillMeanNorms(LaneDevice device, const std::vector<RingEntry>& picked, IndexSet& set) const;
  // What an adjustment changes in a KV head of the live set.
  struct Change {
    std::vector<uint32_t> leaving;   // ascending
    std::vector<RingEntry> joining;  // later than all centroids, ascending
    float mean_uses = 0;
  };
  Change PlanChange(const IndexSet::Head& head) const;
  absl::Status AssignStep(LaneDevice device, IndexSet& set) const;
  absl::Status AverageStep(LaneDevice device, IndexSet& set) const;
  std::vector<const uint16_t*> QueriesOf(const IndexSet::Clustering& clustering) const;
  const IndexShape shape_;
  const Memory memory_;
  std::vector<RingHead> ring_;        // [kv_heads]; empty until the first query
  std::deque<RingEntry> entries_;     // ascending positions
  std::vector<uint32_t> free_slots_;  // those of no entry
  uint32_t stride_ = 1;               // not kLast: positions that are kept are multiples
  uint64_t forgotten_ = 0;            // entries ever
  std::unique_ptr<IndexSet> live_;
  uint32_t retrieved_ = 0;  // positions since the live set was adjusted or published
  uint32_t appended_ = 0;   // queries since it was published
};

}  // namespace ctkvr
