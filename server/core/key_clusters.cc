// SPDX-License-Identifier: Apache-2.0

#include "server/core/key_clusters.h"

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {

ClusterShape MakeClusterShape(const LayerConfig& layer, uint32_t token_limit, uint32_t first_planes) {
  const uint32_t begin = std::min(layer.selection.sink_tokens, token_limit);
  return {.kv_heads = layer.kv_heads,
          .begin = begin,
          .blocks_max = ClusterBlocks(begin, token_limit),
          .block_bytes = MakeLayerClusterLayout(layer).block_bytes,
          .sketch_bytes = MakePageLayout(layer.format, layer.head_dim, layer.value_dim, first_planes).sketch_bytes};
}

ClusterLayout MakeLayerClusterLayout(const LayerConfig& layer) {
  return MakeClusterLayout(layer.format, layer.head_dim, layer.value_dim, layer.tokens_per_cluster);
}

size_t PlanClusters(const ClusterShape& shape, bool spare, MemoryPlan& plan) {
  const uint64_t blocks = uint64_t{shape.blocks_max} + (spare ? 1 : 0);
  return plan.Add(shape.block_bytes, shape.kv_heads * blocks);
}

KeyClusters::KeyClusters(const LayerConfig& layer, uint32_t token_limit, Reservation* blocks)
    : begin_(std::min(layer.selection.sink_tokens, token_limit)),
      layout_(MakeLayerClusterLayout(layer)),
      reservation_(blocks),
      heads_(layer.kv_heads) {
  const size_t count = CeilDiv(token_limit, kClusterBlockTokens);
  for (Head& head : heads_) {
    head.blocks.resize(count);
    head.table.resize(count);
    head.copies.resize(count);
    head.copy_table.resize(count);
  }
}

std::span<std::byte* const> KeyClusters::blocks(uint32_t kv_head) const {
  const std::vector<std::byte*>& table = heads_[kv_head].table;
  return std::span(table).subspan(std::min<size_t>(begin_ / kClusterBlockTokens, table.size()),
                                  ClusterBlocks(begin_, clustered_length_));
}

SketchOrder KeyClusters::host_order(uint32_t kv_head) const {
  const Head& head = heads_[kv_head];
  if (!copies_) return order(kv_head);
  SketchOrder order = layout_.Order(head.copy_table.data(), begin_);
  order.ends_offset = 0;
  order.places_offset -= layout_.ends_offset;
  order.members_offset -= order.members_offset == 0 ? 0 : layout_.ends_offset;
  return order;
}

uint64_t KeyClusters::held_bytes() const {
  uint64_t bytes = 0;
  for (const Head& head : heads_) {
    for (const Block& block : head.blocks) bytes += block.bytes();
  }
  for (size_t i = 0; build_.has_value() && i < build_->blocks.size(); ++i) bytes += build_->blocks[i].bytes();
  return bytes;
}

absl::Status KeyClusters::Step(LaneDevice device, const HeadView& view, uint32_t end) {
  if (!build_.has_value()) {
    const uint32_t clustered = std::max(clustered_length_, begin_);
    Build& build = build_.emplace();
    // The last block anew where it is not full.
    build.index = clustered / kClusterBlockTokens;
    build.begin = std::max(begin_, build.index * kClusterBlockTokens);
    build.count = std::min((build.index + 1) * kClusterBlockTokens, end) - build.begin;
  }
  const absl::Status status = BuildBlock(device, view);
  if (!status.ok()) build_.reset();
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
  copies_ = !memory.shares_host_memory();
  std::vector<std::byte>& copy = build_->copies.emplace_back();
  if (status.ok() && copies_) {
    copy.resize(layout_.block_bytes - layout_.ends_offset);
    memory.CopyOut(copy.data(), block.data() + layout_.ends_offset, copy.size());
  }
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  return status;
}

ArrangeSketchItem KeyClusters::Arrange(const HeadView& view, uint32_t kv_head, std::byte* sketch) const {
  return {.view = view,
          .index = build_->index,
          .layout = layout_,
          .begin = begin_,
          .block = build_->blocks[kv_head].data(),
          .sketch = sketch};
}

uint32_t KeyClusters::Publish() {
  const uint32_t index = build_->index;
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    head.blocks[index] = std::move(build_->blocks[h]);
    head.table[index] = head.blocks[index].data();
    head.copies[index] = std::move(build_->copies[h]);
    head.copy_table[index] = head.copies[index].data();
  }
  clustered_length_ = build_->begin + build_->count;
  build_.reset();
  return index;
}

void KeyClusters::Truncate(uint32_t length) {
  build_.reset();
  for (Head& head : heads_) {
    for (uint32_t index = 0; index < head.blocks.size(); ++index) {
      // Tokens that are no longer in a cluster, or before the first, lie at their offsets.
      if (length > std::max(begin_, index * kClusterBlockTokens)) continue;
      head.blocks[index] = Block();
      head.table[index] = head.copy_table[index] = nullptr;
      head.copies[index] = {};
    }
  }
  if (length >= clustered_length_) return;
  const uint32_t full = length / kClusterBlockTokens * kClusterBlockTokens;
  clustered_length_ = full > begin_ ? full : 0;
}

}  // namespace ctkvr
