// SPDX-License-Identifier: Apache-2.0

#include "server/core/index.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {
namespace {

// Small enough that short sets waste little, large enough that a set is few blocks.
constexpr size_t kBlockTargetBytes = size_t{64} << 10;

struct BlockShape {
  size_t element_bytes = 0;
  uint32_t per_block = 0;
  size_t block_bytes() const { return element_bytes * per_block; }
  uint64_t blocks(uint32_t elements) const { return CeilDiv(elements, per_block); }
};

BlockShape MakeBlockShape(size_t element_bytes, uint32_t elements) {
  const size_t per_block = std::max<size_t>(1, kBlockTargetBytes / element_bytes);
  return {.element_bytes = element_bytes, .per_block = static_cast<uint32_t>(std::min<size_t>(per_block, elements))};
}

// Ring and sets cut centroids alike, so that both take from one reservation.
BlockShape CentroidBlocks(const IndexShape& shape) { return MakeBlockShape(shape.centroid_bytes(), shape.centroids); }
BlockShape ListBlocks(const IndexShape& shape) { return MakeBlockShape(shape.list_bytes(), shape.centroids); }

BlockedArray TakeBlocks(Reservation& reservation, const BlockShape& shape, uint32_t elements) {
  BlockedArray array;
  for (uint64_t i = shape.blocks(elements); i > 0; --i) array.blocks.push_back(reservation.Take());
  for (uint32_t i = 0; i < elements; ++i) {
    array.elements.push_back(array.blocks[i / shape.per_block].data() + i % shape.per_block * shape.element_bytes);
  }
  return array;
}

template <typename T>
std::vector<T*> PointersTo(const BlockedArray& array) {
  std::vector<T*> pointers;
  for (std::byte* element : array.elements) pointers.push_back(reinterpret_cast<T*>(element));
  return pointers;
}

uint64_t BytesOf(const BlockedArray& array) {
  uint64_t bytes = 0;
  for (const Block& block : array.blocks) bytes += block.bytes();
  return bytes;
}

}  // namespace

IndexShape MakeIndexShape(const LayerConfig& layer, uint32_t token_limit) {
  return {.kv_heads = layer.kv_heads,
          .group_heads = layer.group_heads(),
          .head_dim = layer.head_dim,
          .centroids = layer.query_centroids.centroids,
          .list_tokens = std::min(layer.query_centroids.list_tokens, token_limit)};
}

IndexRequests PlanIndex(const IndexShape& shape, bool spare, MemoryPlan& plan) {
  const BlockShape centroids = CentroidBlocks(shape);
  const BlockShape lists = ListBlocks(shape);
  const uint64_t sets = spare ? 2 : 1;
  return {.centroids = plan.Add(centroids.block_bytes(), shape.kv_heads * (centroids.blocks(shape.ring_slots()) +
                                                                           sets * centroids.blocks(shape.centroids))),
          .lists = plan.Add(lists.block_bytes(), shape.kv_heads * sets * lists.blocks(shape.centroids)),
          .norms = plan.Add(shape.norms_bytes(), shape.kv_heads)};
}

uint64_t IndexSet::held_bytes() const {
  uint64_t bytes = 0;
  for (const Head& head : heads) bytes += BytesOf(head.centroid_blocks) + BytesOf(head.list_blocks);
  return bytes;
}

QueryIndex::QueryIndex(const IndexShape& shape, const Memory& memory)
    : shape_(shape), memory_(memory), ring_positions_(shape.ring_slots()) {}

QueryIndex::RingWrite QueryIndex::BeginRingWrite(uint32_t query_positions) {
  if (ring_.empty()) {
    ring_.resize(shape_.kv_heads);
    for (RingHead& head : ring_) {
      head.blocks = TakeBlocks(*memory_.centroids, CentroidBlocks(shape_), shape_.ring_slots());
      head.centroids = PointersTo<uint16_t>(head.blocks);
      head.norms_block = memory_.norms->Take();
      head.norms = reinterpret_cast<float*>(head.norms_block.data());
    }
  }
  const uint32_t count = std::min(query_positions, shape_.ring_slots());
  ring_count_ = std::min(ring_count_, shape_.ring_slots() - count);
  RingWrite write{.skipped = query_positions - count, .slots = {}};
  for (uint32_t i = 0; i < count; ++i) write.slots.push_back(SlotOf(ring_next_ + i));
  return write;
}

void QueryIndex::CommitRing(const RingWrite& write, uint32_t first_position) {
  for (uint32_t i = 0; i < write.slots.size(); ++i) ring_positions_[write.slots[i]] = first_position + i;
  ring_next_ += write.slots.size();
  ring_count_ += static_cast<uint32_t>(write.slots.size());
}

absl::StatusOr<std::unique_ptr<IndexSet>> QueryIndex::StartSet(LaneDevice device, uint32_t begin, uint32_t end) const {
  CTKVR_CHECK(ring_count_ > 0);
  const uint32_t count = std::min(ring_count_, shape_.centroids);
  auto set = std::make_unique<IndexSet>();
  set->begin = begin;
  set->indexed_length = end;
  std::vector<uint32_t> slots;
  for (uint32_t i = 0; i < count; ++i) slots.push_back(SlotOf(ring_next_ - count + i));
  for (uint32_t slot : slots) set->positions.push_back(ring_positions_[slot]);
  set->heads.resize(shape_.kv_heads);
  std::vector<DeviceCopy> copies;
  std::vector<std::vector<float>> norms(shape_.kv_heads);
  BatchMemory memory(device);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    IndexSet::Head& head = set->heads[h];
    head.centroid_blocks = TakeBlocks(*memory_.centroids, CentroidBlocks(shape_), count);
    head.list_blocks = TakeBlocks(*memory_.lists, ListBlocks(shape_), count);
    head.centroids = PointersTo<uint16_t>(head.centroid_blocks);
    head.lists = PointersTo<uint32_t>(head.list_blocks);
    head.list_counts.assign(count, 0);
    head.mean_norms.assign(shape_.group_heads, 0);
    for (uint32_t i = 0; i < count; ++i) {
      copies.push_back({.to = reinterpret_cast<std::byte*>(head.centroids[i]),
                        .from = reinterpret_cast<const std::byte*>(ring_[h].centroids[slots[i]]),
                        .bytes = shape_.centroid_bytes()});
    }
    norms[h].resize(size_t{shape_.ring_slots()} * shape_.group_heads);
    memory.CopyOut(norms[h].data(), ring_[h].norms, norms[h].size());
  }
  if (absl::Status status = memory.Finish(); !status.ok()) {
    (void)memory.Settle();
    return status;
  }
  CTKVR_RETURN_IF_ERROR(CopyOnDevice(device, copies));
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    for (uint32_t r = 0; r < shape_.group_heads; ++r) {
      double sum = 0;
      for (uint32_t slot : slots) sum += norms[h][size_t{slot} * shape_.group_heads + r];
      set->heads[h].mean_norms[r] = static_cast<float>(sum / count);
    }
  }
  return set;
}

absl::Status QueryIndex::BuildLists(LaneDevice device, const LayerConfig& layer, const HeadView& view, IndexSet& set,
                                    const ListRange& range) {
  IndexSet::Head& head = set.heads[range.kv_head];
  const uint32_t group_heads = layer.group_heads();
  const std::vector<float>& sinks = layer.softmax.sink_logits;
  BatchMemory memory(device);
  BuildListsItem item{
      .view = memory.Stage(view, CeilDiv(set.indexed_length, kPageTokens)),
      .heads = group_heads,
      .centroids = memory.In(head.centroids.data() + range.first, range.count),
      .mean_norms = memory.In(head.mean_norms.data(), group_heads),
      .first_centroid = 0,
      .last_centroid = range.count,
      .begin = set.begin,
      .end = set.indexed_length,
      .list_tokens = std::min(layer.query_centroids.list_tokens, set.indexed_length - set.begin),
      .softmax = {.scale = layer.softmax.scale, .softcap = layer.softmax.softcap, .sink_logits = nullptr},
      .reduction = layer.selection.reduction == Reduction::kMaxSoftmax ? GroupReduction::kMaxSoftmax
                                                                       : GroupReduction::kSumSoftmax,
      .lists = memory.In(head.lists.data() + range.first, range.count),
      .list_counts = memory.Out(head.list_counts.data() + range.first, range.count)};
  if (!sinks.empty()) item.softmax.sink_logits = memory.In(sinks.data() + range.kv_head * group_heads, group_heads);
  if (memory.exhausted()) return memory.ExhaustedError("a maintenance step");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.BuildLists(device.stream, {&item, 1});
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  return status;
}

absl::StatusOr<QueryIndex::ListCounts> QueryIndex::PlanTruncate(LaneDevice device, uint32_t length) const {
  ListCounts counts;
  if (!LiveReaches(length)) return counts;
  const auto kept = static_cast<uint32_t>(std::lower_bound(live_->positions.begin(), live_->positions.end(), length) -
                                          live_->positions.begin());
  for (const IndexSet::Head& head : live_->heads) {
    std::vector<std::vector<uint32_t>> lists(kept);
    BatchMemory memory(device);
    for (uint32_t c = 0; c < kept; ++c) {
      lists[c].resize(head.list_counts[c]);
      memory.CopyOut(lists[c].data(), head.lists[c], lists[c].size());
    }
    if (absl::Status status = memory.Finish(); !status.ok()) {
      (void)memory.Settle();
      return status;
    }
    // Lists ascend, so what stays of each is a prefix.
    std::vector<uint32_t>& head_counts = counts.emplace_back();
    for (const std::vector<uint32_t>& list : lists) {
      head_counts.push_back(static_cast<uint32_t>(std::lower_bound(list.begin(), list.end(), length) - list.begin()));
    }
  }
  return counts;
}

void QueryIndex::Truncate(uint32_t length, const ListCounts& counts) {
  while (ring_count_ > 0 && ring_positions_[SlotOf(ring_next_ - 1)] >= length) {
    --ring_next_;
    --ring_count_;
  }
  if (!LiveReaches(length)) return;
  const size_t kept = counts.front().size();
  // Without centroids, or with nothing left to list, retrievals are exact.
  if (kept == 0 || length <= live_->begin) {
    live_.reset();
    return;
  }
  live_->indexed_length = std::min(live_->indexed_length, length);
  live_->positions.resize(kept);
  for (size_t h = 0; h < live_->heads.size(); ++h) {
    IndexSet::Head& head = live_->heads[h];
    head.centroids.resize(kept);
    head.lists.resize(kept);
    head.list_counts = counts[h];
  }
}

bool QueryIndex::LiveReaches(uint32_t length) const {
  return live_ != nullptr && (live_->indexed_length > length || live_->positions.back() >= length);
}

uint64_t QueryIndex::held_bytes() const {
  uint64_t bytes = 0;
  for (const RingHead& head : ring_) bytes += BytesOf(head.blocks) + head.norms_block.bytes();
  return live_ == nullptr ? bytes : bytes + live_->held_bytes();
}

}  // namespace ctkvr
