// SPDX-License-Identifier: Apache-2.0
//
// The stored tokens of one layer of one session: pages and sketch blocks a KV head, the key mean, and the index and
// key clusters where there are any.
//
// Keys of a coded format are raw (code generation 0) until the layer has held sink_tokens + limits::kMeanTokens tokens;
// then the mean of those after the sinks is fixed for the session's life and every key is coded about it
// (generation 1). Writing and publishing are apart: places are made by Grow, filled by operations, and seen only after
// Commit, which cannot fail.
//
// Not thread-safe: belongs to one lane.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/arena.h"
#include "kernels/formats.h"
#include "kernels/ops.h"
#include "server/core/index.h"
#include "server/core/key_clusters.h"
#include "server/core/memory_plan.h"
#include "server/core/slot_table.h"
#include "server/core/token_tags.h"
#include "server/core/types.h"

namespace ctkvr {

// Which reservations a layer takes from.
struct LayerRequests {
  size_t pages = MemoryPlan::kNone;
  size_t sketches = MemoryPlan::kNone;   // coded keys alone
  size_t raw_pages = MemoryPlan::kNone;  // a request of its own: given back when the mean is fixed
  size_t mean = MemoryPlan::kNone;
  IndexRequests index;
  size_t clusters = MemoryPlan::kNone;
};
// Whether the layer brings the spare blocks that layers of one shape share: see PlanIndex, PlanClusters.
struct LayerSpares {
  bool index = false;
  bool clusters = false;
};
// Adds what the layer may ever hold.
LayerRequests PlanLayer(const LayerConfig& layer, const SessionConfig& session, LayerSpares spares, MemoryPlan& plan);

class Layer {
 public:
  // Reservations must outlive the layer. `signs` is [RotationRounds(head_dim)][head_dim] in device memory, null unless
  // keys are coded. `config` and `session` must outlive it too.
  struct Memory {
    Reservation* pages = nullptr;
    Reservation* sketches = nullptr;
    Reservation* raw_pages = nullptr;
    Reservation* mean = nullptr;
    QueryIndex::Memory index;
    Reservation* clusters = nullptr;
    const float* signs = nullptr;
    uint64_t first_cache_version = 0;
  };
  Layer(const LayerConfig& config, const SessionConfig& session, const Memory& memory);

  const LayerConfig& config() const { return config_; }
  const PageLayout& layout() const { return layout_; }
  DType dtype() const { return dtype_; }
  uint32_t length() const { return length_; }
  bool coded() const { return KeysAreCoded(config_.format); }
  bool raw() const { return coded() && code_generation_ == 0; }
  bool has_codes() const { return coded() && !raw(); }
  uint32_t code_generation() const { return code_generation_; }
  // Tokens at which raw keys become codes.
  uint32_t coding_length() const;
  // Bytes that scoring one key reads.
  size_t key_bytes() const;
  // Bytes of a token's rows in storage form.
  uint32_t storage_key_bytes() const {
    return raw() ? static_cast<uint32_t>(key_bytes()) : StorageKeyRowBytes(layout_);
  }
  uint32_t storage_value_bytes() const { return StorageValueRowBytes(layout_); }
  RowCodec Codec(uint64_t rotation_seed) const;

  // The visible tokens of a KV head, page tables in host memory: [page_count(length)].
  HeadView View(uint32_t kv_head) const;
  static size_t page_count(uint32_t tokens) { return (size_t{tokens} + kPageTokens - 1) / kPageTokens; }
  static size_t sketch_count(uint32_t tokens) { return (size_t{tokens} + kSketchTokens - 1) / kSketchTokens; }

  // ---- Writing ----
  // Makes places for positions below `length`. REQUIRES: within the token limit.
  void Grow(uint32_t length);
  // Places of positions from first_block * kSketchTokens on, counted from there. `raw` chooses where keys go.
  HeadView Places(uint32_t kv_head, uint32_t first_block, bool raw) const;
  // Where FitMean puts the mean of a KV head, [head_dim].
  float* MeanPlace(uint32_t kv_head);
  // From now on keys are codes about `mean` [kv_heads, head_dim], which the device holds already. Gives raw pages back.
  void FixMean(std::vector<float> mean);
  // Positions below `length` are visible, and places past it given back.
  void Commit(uint32_t length);
  // Gives back what Grow and MeanPlace took for a write that failed.
  void Abandon();

  QueryIndex* index() { return index_.has_value() ? &*index_ : nullptr; }
  const QueryIndex* index() const { return index_.has_value() ? &*index_ : nullptr; }
  // Null where the session has no row cache. Sets: KV heads; query heads where the layer selects per head.
  SlotTable* slot_table() { return slot_table_.has_value() ? &*slot_table_ : nullptr; }
  const SlotTable* slot_table() const { return slot_table_.has_value() ? &*slot_table_ : nullptr; }
  static size_t SlotTablesBytes(const LayerConfig& config, uint32_t cache_slots);
  // One KV head of a block of key clusters that reaches to `end` at most; with the last one, the block is live, and its
  // sketch blocks lie in its order. After an error all is as it was, and the block is dropped.
  // REQUIRES: clusters() != nullptr, !raw(), and as KeyClusters::Step.
  absl::Status ClusterStep(LaneDevice device, uint32_t end);
  KeyClusters* clusters() { return clusters_.has_value() ? &*clusters_ : nullptr; }
  const KeyClusters* clusters() const { return clusters_.has_value() ? &*clusters_ : nullptr; }
  // Null where the session takes no tags. Length is the layer's.
  TokenTags* tags() { return tags_.has_value() ? &*tags_ : nullptr; }
  const TokenTags* tags() const { return tags_.has_value() ? &*tags_ : nullptr; }
  // Adds what the layer holds.
  void AddTo(MemoryInfo& memory) const;

 private:
  struct Head {
    std::vector<Block> pages;
    std::vector<std::byte*> page_table;
    std::vector<Block> raw_pages;
    std::vector<std::byte*> raw_table;
    std::vector<Block> sketches;
    std::vector<std::byte*> sketch_table;
  };
  void Shrink(uint32_t length);
  // Sketch blocks of all KV heads in the order of the block that is built.
  absl::Status ArrangeSketches(LaneDevice device, std::vector<Block>& sketches);

  const LayerConfig& config_;
  const DType dtype_;  // of the session's tensors, and so of raw keys
  const Memory memory_;
  const PageLayout layout_;
  std::vector<Head> heads_;  // [kv_heads]
  Block mean_block_;         // [kv_heads, head_dim]
  std::vector<float> mean_;  // the same for the host; empty while keys are raw
  uint32_t length_ = 0;
  uint32_t code_generation_ = 0;
  std::optional<QueryIndex> index_;
  std::optional<SlotTable> slot_table_;
  std::optional<KeyClusters> clusters_;
  std::optional<TokenTags> tags_;
};

}  // namespace ctkvr
