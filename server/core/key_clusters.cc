// SPDX-License-Identifier: Apache-2.0

#include "server/core/key_clusters.h"

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {

ClusterShape MakeClusterShape(const LayerConfig& layer, uint32_t token_limit) {
  const uint32_t begin = std::min(layer.selection.sink_tokens, token_limit);
  return {.kv_heads = layer.kv_heads,
          .begin = begin,
          .blocks_max = ClusterBlocks(begin, token_limit),
          .block_bytes = MakeLayerClusterLayout(layer).block_bytes};
}

ClusterLayout MakeLayerClusterLayout(const LayerConfig& layer) {
  return MakeClusterLayout(layer.format, layer.head_dim, layer.value_dim, layer.tokens_per_cluster);
}

size_t PlanClusters(const ClusterShape& shape, bool spare, MemoryPlan& plan) {
  const uint64_t blocks = uint64_t{shape.blocks_max} + (spare ? 1 : 0);
  return plan.Add(shape.block_bytes, shape.kv_heads * blocks);
}

KeyClusters::KeyClusters(const LayerConfig& layer, uint32_t token_limit, Reservation* blocks)
    : shape_(MakeClusterShape(layer, token_limit)),
      layout_(MakeLayerClusterLayout(layer)),
      reservation_(blocks),
      heads_(layer.kv_heads) {}

uint64_t KeyClusters::held_bytes() const {
  size_t blocks = build_.has_value() ? build_->blocks.size() : 0;
  for (const Head& head : heads_) blocks += head.blocks.size();
  return blocks == 0 ? 0 : blocks * reservation_->block_bytes();
}

absl::Status KeyClusters::Step(LaneDevice device, const HeadView& view, uint32_t end) {
  if (!build_.has_value()) {
    const uint32_t clustered = std::max(clustered_length_, shape_.begin);
    Build& build = build_.emplace();
    build.index = (clustered - shape_.begin) / kClusterBlockTokens;
    build.begin = shape_.begin + build.index * kClusterBlockTokens;
    build.count = std::min(kClusterBlockTokens, end - build.begin);
  }
  const absl::Status status = BuildBlock(device, view);
  if (!status.ok()) {
    build_.reset();
  } else if (build_->blocks.size() == heads_.size()) {
    Publish();
  }
  return status;
}

absl::Status KeyClusters::BuildBlock(LaneDevice device, const HeadView& view) {
  Block& block = build_->blocks.emplace_back(reservation_->Take());
  BatchMemory memory(device);
  const BuildClustersItem item{.view = memory.Stage(view, CeilDiv(view.length, kPageTokens)),
                               .layout = layout_,
                               .begin = build_->begin,
                               .count = build_->count,
                               .block = block.data(),
                               .workspace = memory.Take<std::byte>(BuildClustersWorkspaceBytes(layout_))};
  if (memory.exhausted()) return memory.ExhaustedError("a maintenance step");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.BuildClusters(device.stream, {&item, 1});
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  return status;
}

void KeyClusters::Publish() {
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    head.blocks.resize(build_->index + 1);
    head.blocks[build_->index] = std::move(build_->blocks[h]);
    head.table.resize(build_->index + 1);
    head.table[build_->index] = head.blocks[build_->index].data();
  }
  clustered_length_ = build_->begin + build_->count;
  build_.reset();
}

void KeyClusters::Truncate(uint32_t length) {
  build_.reset();
  if (length >= clustered_length_) return;
  const uint32_t kept = length <= shape_.begin ? 0 : (length - shape_.begin) / kClusterBlockTokens;
  for (Head& head : heads_) {
    head.blocks.resize(kept);
    head.table.resize(kept);
  }
  clustered_length_ = kept == 0 ? 0 : shape_.begin + kept * kClusterBlockTokens;
}

}  // namespace ctkvr
