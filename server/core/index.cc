// SPDX-License-Identifier: Apache-2.0

#include "server/core/index.h"

#include <algorithm>
#include <numeric>
#include <set>

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
          .capacity = layer.query_centroids.capacity(),
          .placement = layer.query_centroids.placement,
          .adjust_tokens = layer.query_centroids.adjust_tokens,
          .packing = MakePackedLists(std::min(layer.query_centroids.list_tokens, token_limit), token_limit)};
}

IndexRequests PlanIndex(const IndexShape& shape, bool spare, MemoryPlan& plan) {
  const BlockShape centroids = CentroidBlocks(shape);
  const BlockShape lists = ListBlocks(shape);
  const uint64_t sets = spare ? 2 : 1;
  return {.centroids = plan.Add(
              centroids.block_bytes(),
              shape.kv_heads * (centroids.blocks(shape.ring_slots()) + sets * centroids.blocks(shape.set_elements()))),
          .lists = plan.Add(lists.block_bytes(), shape.kv_heads * sets * lists.blocks(shape.set_elements())),
          .norms = plan.Add(shape.norms_bytes(), shape.kv_heads)};
}

uint64_t IndexSet::held_bytes() const {
  uint64_t bytes = 0;
  for (const Head& head : heads) bytes += BytesOf(head.centroid_blocks) + BytesOf(head.list_blocks);
  return bytes;
}

uint32_t IndexSet::centroid_count() const {
  size_t count = heads.front().centroids.size();
  for (const Head& head : heads) count = std::min(count, head.centroids.size());
  return static_cast<uint32_t>(count);
}

QueryIndex::QueryIndex(const IndexShape& shape, const Memory& memory) : shape_(shape), memory_(memory) {}

void QueryIndex::TakeRing() {
  if (!ring_.empty()) return;
  ring_.resize(shape_.kv_heads);
  for (RingHead& head : ring_) {
    head.blocks = TakeBlocks(*memory_.centroids, CentroidBlocks(shape_), shape_.ring_slots());
    head.centroids = PointersTo<uint16_t>(head.blocks);
    head.norms_block = memory_.norms->Take();
    head.norms = reinterpret_cast<float*>(head.norms_block.data());
  }
  for (uint32_t slot = shape_.ring_slots(); slot > 0; --slot) free_slots_.push_back(slot - 1);
}

bool QueryIndex::begins_from_live() const {
  return shape_.adjusts() && live_ != nullptr && live_->centroid_count() >= shape_.centroids &&
         appended_ < shape_.centroids;
}

std::vector<QueryIndex::Source> QueryIndex::Sources(uint32_t kv_head, const std::vector<RingEntry>& picked) const {
  std::vector<Source> sources;
  const auto add_entry = [&](const RingEntry& entry, float uses) {
    sources.push_back({.from = ring_[kv_head].centroids[entry.slot], .position = entry.position, .uses = uses});
  };
  if (!begins_from_live()) {
    for (const RingEntry& entry : picked) add_entry(entry, 0);
    return sources;
  }
  const IndexSet::Head& live = live_->heads[kv_head];
  const Change change = PlanChange(live);
  for (uint32_t c = 0; c < live.centroids.size(); ++c) {
    if (std::binary_search(change.leaving.begin(), change.leaving.end(), c)) continue;
    sources.push_back({live.centroids[c], live.positions[c], live.uses[c] / 2, live.users[c]});
  }
  for (const RingEntry& entry : change.joining) add_entry(entry, change.mean_uses / 2);
  return sources;
}

absl::StatusOr<std::unique_ptr<IndexSet>> QueryIndex::StartSet(LaneDevice device, uint32_t begin, uint32_t end) const {
  CTKVR_CHECK(ring_count() > 0);
  const std::vector<RingEntry> picked = PickEntries();
  auto set = std::make_unique<IndexSet>();
  set->begin = begin;
  set->indexed_length = end;
  set->heads.resize(shape_.kv_heads);
  std::vector<DeviceCopy> copies;
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    IndexSet::Head& head = set->heads[h];
    const std::vector<Source> sources = Sources(h, picked);
    const auto count = static_cast<uint32_t>(sources.size());
    const uint32_t elements = shape_.adjusts() ? shape_.set_elements() : count;
    head.centroid_blocks = TakeBlocks(*memory_.centroids, CentroidBlocks(shape_), elements);
    head.list_blocks = TakeBlocks(*memory_.lists, ListBlocks(shape_), elements);
    for (uint32_t e = elements; e > count; --e) head.free.push_back(e - 1);
    for (uint32_t i = 0; i < count; ++i) {
      head.AddCentroid(i, sources[i].position);
      head.uses.back() = sources[i].uses;
      head.users.back() = sources[i].user;
      copies.push_back({.to = head.centroid_blocks.elements[i],
                        .from = reinterpret_cast<const std::byte*>(sources[i].from),
                        .bytes = shape_.centroid_bytes()});
    }
  }
  // Nothing to move where every query is a centroid.
  if (shape_.placement == Placement::kClustered && !begins_from_live() && entries_.size() > picked.size()) {
    set->clustering = IndexSet::Clustering{.queries = {entries_.begin(), entries_.end()},
                                           .nearest = std::vector<uint32_t>(entries_.size()),
                                           .forgotten = forgotten_};
  }
  CTKVR_RETURN_IF_ERROR(FillMeanNorms(device, picked, *set));
  CTKVR_RETURN_IF_ERROR(CopyOnDevice(device, copies));
  return set;
}

absl::Status QueryIndex::FillMeanNorms(LaneDevice device, const std::vector<RingEntry>& picked, IndexSet& set) const {
  std::vector<std::vector<float>> norms(shape_.kv_heads);
  BatchMemory memory(device);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    norms[h].resize(size_t{shape_.ring_slots()} * shape_.group_heads);
    memory.CopyOut(norms[h].data(), ring_[h].norms, norms[h].size());
  }
  if (absl::Status status = memory.Finish(); !status.ok()) {
    (void)memory.Settle();
    return status;
  }
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    for (uint32_t r = 0; r < shape_.group_heads; ++r) {
      double sum = 0;
      for (const RingEntry& entry : picked) sum += norms[h][size_t{entry.slot} * shape_.group_heads + r];
      set.heads[h].mean_norms.push_back(static_cast<float>(sum / static_cast<double>(picked.size())));
    }
  }
  return absl::OkStatus();
}

absl::Status QueryIndex::BuildLists(LaneDevice device, const LayerConfig& layer, const HeadView& view, IndexSet& set,
                                    const ListRange& range) const {
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
      .list_tokens = std::min(shape_.packing.list_tokens, set.indexed_length - set.begin),
      .softmax = {.scale = layer.softmax.scale, .softcap = layer.softmax.softcap, .sink_logits = nullptr},
      .reduction = layer.selection.reduction == Reduction::kMaxSoftmax ? GroupReduction::kMaxSoftmax
                                                                       : GroupReduction::kSumSoftmax,
      .packing = shape_.packing,
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

void QueryIndex::Publish(std::unique_ptr<IndexSet> set) {
  live_ = std::move(set);
  retrieved_ = 0;
  appended_ = 0;
}

// ---- Adjustment ----------------------------------------------------------------------------------------------------

void IndexSet::Head::AddCentroid(uint32_t element, uint32_t position) {
  centroids.push_back(reinterpret_cast<uint16_t*>(centroid_blocks.elements[element]));
  lists.push_back(reinterpret_cast<uint64_t*>(list_blocks.elements[element]));
  list_counts.push_back(0);
  positions.push_back(position);
  elements.push_back(element);
  uses.push_back(0);
  users.push_back(0);
}

void IndexSet::Head::KeepCentroids(const std::vector<uint32_t>& kept) {
  std::vector<bool> stays(centroids.size());
  for (uint32_t c : kept) stays[c] = true;
  for (uint32_t c = 0; c < centroids.size(); ++c) {
    if (!stays[c]) free.push_back(elements[c]);
  }
  const auto keep = [&](auto& array) {
    auto in_order = array;
    in_order.clear();
    for (uint32_t c : kept) in_order.push_back(array[c]);
    array = std::move(in_order);
  };
  keep(centroids);
  keep(lists);
  keep(list_counts);
  keep(positions);
  keep(elements);
  keep(uses);
  keep(users);
}

void QueryIndex::CountUses(uint32_t kv_head, std::span<const uint32_t> lists, uint32_t position) {
  if (!shape_.adjusts()) return;
  IndexSet::Head& head = live_->heads[kv_head];
  for (uint32_t list : lists) {
    head.uses[list] += 1;
    head.users[list] = std::max(head.users[list], position);
  }
  if (kv_head == 0) ++retrieved_;
}

bool QueryIndex::adjustment_due() const {
  return shape_.adjusts() && live_ != nullptr && retrieved_ >= shape_.adjust_tokens;
}

QueryIndex::Change QueryIndex::PlanChange(const IndexSet::Head& head) const {
  const auto count = static_cast<uint32_t>(head.uses.size());
  double sum = 0;
  for (float uses : head.uses) sum += uses;
  const double mean = sum / count;
  Change change{.leaving = {}, .joining = {}, .mean_uses = static_cast<float>(mean)};
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  // Least used first, the older of equals first.
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return head.uses[a] < head.uses[b]; });
  std::set<uint32_t> taken;
  for (uint32_t i = count; i > 0 && head.uses[order[i - 1]] > 2 * mean; --i) {
    const uint32_t user = head.users[order[i - 1]];
    const RingEntry* entry = user > head.positions.back() ? FindEntry(user) : nullptr;
    if (entry == nullptr || !taken.insert(user).second) continue;
    change.joining.push_back(*entry);
    if (change.joining.size() == limits::kAdjustedCentroidsMax) break;
  }
  const size_t wanted = count + change.joining.size();
  const size_t room = wanted > shape_.capacity ? wanted - shape_.capacity : 0;
  for (uint32_t c : order) {
    if (change.leaving.size() == room || !(head.uses[c] < mean / 2)) break;
    change.leaving.push_back(c);
  }
  // The most used come first.
  change.joining.resize(change.joining.size() - (room - change.leaving.size()));
  std::sort(change.leaving.begin(), change.leaving.end());
  std::sort(change.joining.begin(), change.joining.end(),
            [](const RingEntry& a, const RingEntry& b) { return a.position < b.position; });
  return change;
}

absl::StatusOr<std::unique_ptr<IndexSet>> QueryIndex::StartAdjustment(LaneDevice device) const {
  auto set = std::make_unique<IndexSet>();
  set->begin = live_->begin;
  set->indexed_length = live_->indexed_length;
  std::vector<DeviceCopy> copies;
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    const IndexSet::Head& live = live_->heads[h];
    const Change change = PlanChange(live);
    IndexSet::Head& head = set->heads.emplace_back();
    head.centroid_blocks.elements = live.centroid_blocks.elements;
    head.list_blocks.elements = live.list_blocks.elements;
    head.mean_norms = live.mean_norms;
    head.leaving = change.leaving;
    size_t next = live.free.size();
    for (const RingEntry& entry : change.joining) {
      const uint32_t element = live.free[--next];
      head.AddCentroid(element, entry.position);
      head.uses.back() = change.mean_uses / 2;
      copies.push_back({.to = live.centroid_blocks.elements[element],
                        .from = reinterpret_cast<const std::byte*>(ring_[h].centroids[entry.slot]),
                        .bytes = shape_.centroid_bytes()});
    }
  }
  CTKVR_RETURN_IF_ERROR(CopyOnDevice(device, copies));
  return set;
}

void QueryIndex::Join(std::unique_ptr<IndexSet> adjustment) {
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    IndexSet::Head& live = live_->heads[h];
    const IndexSet::Head& joining = adjustment->heads[h];
    live.free.resize(live.free.size() - joining.elements.size());
    for (float& uses : live.uses) uses /= 2;
    std::vector<uint32_t> kept;
    for (uint32_t c = 0; c < live.centroids.size(); ++c) {
      if (!std::binary_search(joining.leaving.begin(), joining.leaving.end(), c)) kept.push_back(c);
    }
    live.KeepCentroids(kept);
    for (size_t i = 0; i < joining.elements.size(); ++i) {
      live.AddCentroid(joining.elements[i], joining.positions[i]);
      live.list_counts.back() = joining.list_counts[i];
      live.uses.back() = joining.uses[i];
    }
  }
  retrieved_ = 0;
}

// ---- Truncation ----------------------------------------------------------------------------------------------------

absl::StatusOr<QueryIndex::ListCounts> QueryIndex::PlanTruncate(LaneDevice device, uint32_t length) const {
  ListCounts counts;
  if (!LiveReaches(length)) return counts;
  for (const IndexSet::Head& head : live_->heads) {
    const auto kept = static_cast<uint32_t>(std::lower_bound(head.positions.begin(), head.positions.end(), length) -
                                            head.positions.begin());
    std::vector<std::vector<uint64_t>> lists(kept, std::vector<uint64_t>(shape_.packing.words));
    BatchMemory memory(device);
    for (uint32_t c = 0; c < kept; ++c) memory.CopyOut(lists[c].data(), head.lists[c], lists[c].size());
    if (absl::Status status = memory.Finish(); !status.ok()) {
      (void)memory.Settle();
      return status;
    }
    // Lists ascend, so what stays of each is a prefix.
    std::vector<uint32_t>& head_counts = counts.emplace_back();
    for (uint32_t c = 0; c < kept; ++c) {
      uint32_t count = 0;
      VisitPackedList(shape_.packing, lists[c].data(), head.list_counts[c],
                      [&](uint32_t token) { count += token < length; });
      head_counts.push_back(count);
    }
  }
  return counts;
}

void QueryIndex::Truncate(uint32_t length, const ListCounts& counts) {
  while (!entries_.empty() && entries_.back().position >= length) Forget(entries_.size() - 1);
  if (entries_.empty()) stride_ = 1;
  if (live_ == nullptr) return;
  for (IndexSet::Head& head : live_->heads) {
    for (uint32_t& user : head.users) user = user < length ? user : 0;
  }
  if (!LiveReaches(length)) return;
  const bool any_empty = std::any_of(counts.begin(), counts.end(), [](const auto& head) { return head.empty(); });
  // Without centroids, or with nothing left to list, retrievals are exact.
  if (any_empty || length <= live_->begin) {
    live_.reset();
    return;
  }
  live_->indexed_length = std::min(live_->indexed_length, length);
  for (size_t h = 0; h < live_->heads.size(); ++h) {
    IndexSet::Head& head = live_->heads[h];
    std::vector<uint32_t> kept(counts[h].size());
    std::iota(kept.begin(), kept.end(), 0);
    head.KeepCentroids(kept);
    head.list_counts = counts[h];
  }
}

bool QueryIndex::LiveReaches(uint32_t length) const {
  if (live_ == nullptr) return false;
  const auto reaches = [&](const IndexSet::Head& head) { return head.positions.back() >= length; };
  return live_->indexed_length > length || std::any_of(live_->heads.begin(), live_->heads.end(), reaches);
}

uint64_t QueryIndex::held_bytes() const {
  uint64_t bytes = 0;
  for (const RingHead& head : ring_) bytes += BytesOf(head.blocks) + head.norms_block.bytes();
  return live_ == nullptr ? bytes : bytes + live_->held_bytes();
}

}  // namespace ctkvr
