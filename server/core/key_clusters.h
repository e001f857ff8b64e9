// SPDX-License-Identifier: Apache-2.0
//
// The key clusters of one layer (kernels/cluster_ops.h), from which the remainder of an answer is estimated. Tokens of
// [begin, clustered_length) are in them, a block of kClusterBlockTokens and KV head at a time; what comes after is the
// tail.
//
// A block is built beside the live ones, one KV head a step, and published for all heads at once, together with the
// sketch blocks in its order (Layer::ClusterStep); the last block, when it is not full, is built anew with the tokens
// that follow. A half-built block is never searched. Truncation drops the blocks that reach past the new end: their
// tokens are tail again until the next step takes them in, so no mean ever holds a token that is gone. Of the block
// that the new end lies in, the order is kept, for its sketch block stays in it: so truncation moves nothing and cannot
// fail.
//
// Not thread-safe: belongs to one lane. A block is one block of the arena.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/arena.h"
#include "kernels/cluster_ops.h"
#include "server/core/batch_memory.h"
#include "server/core/memory_plan.h"
#include "server/core/session_config.h"

namespace ctkvr {

// Shapes that fix the blocks. Values.
struct ClusterShape {
  uint32_t kv_heads = 0;
  uint32_t begin = 0;       // the sinks before it are always included
  uint32_t blocks_max = 0;  // a KV head
  uint32_t block_bytes = 0;
  uint32_t sketch_bytes = 0;  // 0: float keys

  auto operator<=>(const ClusterShape&) const = default;
};
ClusterShape MakeClusterShape(const LayerConfig& layer, uint32_t token_limit, uint32_t first_planes);
ClusterLayout MakeLayerClusterLayout(const LayerConfig& layer);
// Adds kv_heads * blocks_max blocks, and kv_heads more when `spare`: a session builds one block at a time, so layers of
// one shape share the spare. ClusterLayout tells the bytes a token.
size_t PlanClusters(const ClusterShape& shape, bool spare, MemoryPlan& plan);

class KeyClusters {
 public:
  // The reservation must outlive the clusters.
  KeyClusters(const LayerConfig& layer, uint32_t token_limit, Reservation* blocks);

  const ClusterLayout& layout() const { return layout_; }
  uint32_t begin() const { return begin_; }
  uint32_t clustered_length() const { return clustered_length_; }  // 0: nothing is clustered
  // [ClusterBlocks(begin, clustered_length)] of a KV head.
  std::span<std::byte* const> blocks(uint32_t kv_head) const;
  // The orders of a KV head's sketch blocks, for as many as the token limit takes.
  SketchOrder order(uint32_t kv_head) const { return layout_.Order(heads_[kv_head].table.data(), begin_); }
  // The same where the host can read it.
  SketchOrder host_order(uint32_t kv_head) const;
  uint64_t held_bytes() const;

  // ---- Building ----
  bool building() const { return build_.has_value(); }
  // The KV head of the next step.
  uint32_t next_head() const { return build_.has_value() ? static_cast<uint32_t>(build_->blocks.size()) : 0; }
  // One KV head of a block. Begins a block, which reaches to `end` at most, when none is being built. `view` is that of
  // next_head(). REQUIRES: !built(), clustered_length() < end, begin() < end <= view.length. An error drops the block.
  absl::Status Step(LaneDevice device, const HeadView& view, uint32_t end);
  // Whether every KV head of the block is done.
  bool built() const { return build_.has_value() && build_->blocks.size() == heads_.size(); }
  // What puts a sketch block in the order of the block that is built. REQUIRES: built().
  ArrangeSketchItem Arrange(const HeadView& view, uint32_t kv_head, std::byte* sketch) const;
  // The block is live. REQUIRES: built(). Returns its number among the sketch blocks.
  uint32_t Publish();
  void Drop() { build_.reset(); }

  // Positions >= length are gone, and a block being built with them. Cannot fail.
  void Truncate(uint32_t length);

 private:
  // Blocks by the number of their sketch block; those past the clustered length give an order alone.
  struct Head {
    std::vector<Block> blocks;                   // [blocks of the token limit]
    std::vector<std::byte*> table;               // the same, null where there is none
    std::vector<std::vector<std::byte>> copies;  // of orders, where the host cannot read the device
    std::vector<std::byte*> copy_table;
  };
  struct Build {
    uint32_t index = 0;  // of the block
    uint32_t begin = 0;
    uint32_t count = 0;         // tokens
    std::vector<Block> blocks;  // of the heads done
    std::vector<std::vector<std::byte>> copies;
  };
  absl::Status BuildBlock(LaneDevice device, const HeadView& view);

  const uint32_t begin_;
  const ClusterLayout layout_;
  Reservation* const reservation_;
  std::vector<Head> heads_;  // [kv_heads]
  uint32_t clustered_length_ = 0;
  bool copies_ = false;  // whether orders are copied for the host
  std::optional<Build> build_;
};

}  // namespace ctkvr
