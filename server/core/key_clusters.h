// SPDX-License-Identifier: Apache-2.0
//
// The key clusters of one layer (kernels/cluster_ops.h), from which the remainder of an answer is estimated. Tokens of
// [begin, clustered_length) are in them, a block of kClusterBlockTokens and KV head at a time; what comes after is the
// tail.
//
// A block is built beside the live ones, one KV head a step, and published for all heads at once; the last block, when
// it is not full, is built anew with the tokens that follow. A half-built block is never searched. Truncation drops the
// blocks that reach past the new end: their tokens are tail again until the next step takes them in, so no mean ever
// holds a token that is gone.
//
// Not thread-safe: belongs to one lane. A block is one block of the arena.

#pragma once

#include <cstdint>
#include <optional>
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

  auto operator<=>(const ClusterShape&) const = default;
};
ClusterShape MakeClusterShape(const LayerConfig& layer, uint32_t token_limit);
ClusterLayout MakeLayerClusterLayout(const LayerConfig& layer);
// Adds kv_heads * blocks_max blocks, and kv_heads more when `spare`: a session builds one block at a time, so layers of
// one shape share the spare. Bytes a token, layer and KV head, for long limits:
//   ((head_dim + value_dim + 10) / tokens_per_cluster + 1)    coded keys; float keys: + head_dim / 256
size_t PlanClusters(const ClusterShape& shape, bool spare, MemoryPlan& plan);

class KeyClusters {
 public:
  // The reservation must outlive the clusters.
  KeyClusters(const LayerConfig& layer, uint32_t token_limit, Reservation* blocks);

  const ClusterLayout& layout() const { return layout_; }
  uint32_t begin() const { return shape_.begin; }
  uint32_t clustered_length() const { return clustered_length_; }  // 0: nothing is clustered
  // [ClusterBlocks(begin, clustered_length)] of a KV head.
  const std::vector<std::byte*>& blocks(uint32_t kv_head) const { return heads_[kv_head].table; }
  uint64_t held_bytes() const;

  // ---- Building ----
  bool building() const { return build_.has_value(); }
  // The KV head of the next step.
  uint32_t next_head() const { return build_.has_value() ? static_cast<uint32_t>(build_->blocks.size()) : 0; }
  // One KV head of a block. Begins a block, which reaches to `end` at most, when none is being built. `view` is that of
  // next_head(). REQUIRES: clustered_length() < end, begin() < end <= view.length. An error drops the block.
  absl::Status Step(LaneDevice device, const HeadView& view, uint32_t end);

  // Positions >= length are gone, and a block being built with them. Cannot fail.
  void Truncate(uint32_t length);

 private:
  struct Head {
    std::vector<Block> blocks;
    std::vector<std::byte*> table;
  };
  struct Build {
    uint32_t index = 0;  // of the block
    uint32_t begin = 0;
    uint32_t count = 0;         // tokens
    std::vector<Block> blocks;  // of the heads done
  };
  absl::Status BuildBlock(LaneDevice device, const HeadView& view);
  void Publish();

  const ClusterShape shape_;
  const ClusterLayout layout_;
  Reservation* const reservation_;
  std::vector<Head> heads_;  // [kv_heads]
  uint32_t clustered_length_ = 0;
  std::optional<Build> build_;
};

}  // namespace ctkvr
