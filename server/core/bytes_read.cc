// SPDX-License-Identifier: Apache-2.0

#include "server/core/bytes_read.h"

#include <algorithm>
#include <bitset>
#include <span>

#include "kernels/base/lines.h"
#include "kernels/base/math.h"
#include "kernels/sketch_order.h"

namespace ctkvr {
namespace {

// Pages and sketch blocks begin on lines and their arrays are whole numbers of lines, so an array that goes on from one
// to the next counts as if it were one: element i at i * stride.
uint64_t RunLines(uint64_t begin, uint64_t end, uint64_t stride) {
  LineCount count;
  count.Add(begin * stride, end * stride);
  return count.lines();
}

// Records of `refined` as far as plane `planes`, and of `scored` whole.
uint64_t RecordLines(const PageLayout& layout, std::span<const uint32_t> refined, uint32_t planes,
                     std::span<const uint32_t> scored) {
  const uint64_t stride = layout.record_bytes, whole = layout.record_bytes_of(layout.planes);
  const uint64_t part = refined.empty() ? 0 : layout.record_bytes_of(planes);
  LineCount count;
  size_t next = 0;
  for (const uint32_t token : refined) {
    for (; next < scored.size() && scored[next] < token; ++next) {
      count.Add(scored[next] * stride, scored[next] * stride + whole);
    }
    const bool is_scored = next < scored.size() && scored[next] == token;
    next += is_scored;
    count.Add(token * stride, token * stride + (is_scored ? whole : part));
  }
  for (const uint32_t token : scored.subspan(next)) count.Add(token * stride, token * stride + whole);
  return count.lines();
}

// What lies at slots of sketch blocks: first planes, and what tells the slots. Blocks ascend; a block's slots may come
// in any order. Of a block in cluster order, the ends of clusters count whole.
class SlotLines {
 public:
  // `ends`: whether the ends of clusters are counted here.
  SlotLines(const Layer& layer, uint32_t kv_head, bool ends = true)
      : order_(layer.clusters() == nullptr ? SketchOrder() : layer.clusters()->host_order(kv_head)),
        token_bytes_(layer.layout().sketch_token_bytes()),
        counts_ends_(ends) {}

  // Every token of [begin, end): its planes, and in a scan its sketch scale.
  void AddRange(uint32_t begin, uint32_t end, bool scan) {
    for (uint32_t index = begin / kSketchTokens; begin < end; ++index) {
      const uint32_t first = index * kSketchTokens, stop = std::min(end, first + kSketchTokens);
      Enter(index);
      if (block_.clustered()) {
        AddClustered(begin - first, stop - first, scan);
      } else {
        AddSlots(begin - first, stop - first, scan);
      }
      begin = stop;
    }
  }
  // Tokens ascending: their planes, in a scan with their sketch scales, each slot looked for.
  void AddTokens(std::span<const uint32_t> tokens, bool scan = false) {
    for (const uint32_t token : tokens) {
      Enter(token / kSketchTokens);
      Find(token % kSketchTokens);
      const uint32_t slot = block_.SlotOf(token % kSketchTokens);
      AddSlots(slot, slot + 1, scan);
    }
  }
  // An opened cluster of block `index`: the places of its tokens and, in a scan, their planes and sketch scales.
  void AddCluster(uint32_t index, uint32_t cluster, bool scan) {
    Enter(index);
    LookAtEnds();
    const uint32_t begin = block_.ClusterBegin(cluster), end = block_.ClusterEnd(cluster);
    Mark(places_, begin, end, sizeof(uint16_t));
    if (scan) AddSlots(begin, end, true);
  }
  // Slots of tokens ascending whose planes are counted already.
  void FindTokens(std::span<const uint32_t> tokens) {
    for (const uint32_t token : tokens) {
      Enter(token / kSketchTokens);
      Find(token % kSketchTokens);
    }
  }
  uint64_t lines() const {
    return lines_ + planes_.count() + scales_.count() + places_.count() + members_.count() + ends_;
  }

 private:
  static constexpr uint32_t kPlaneLinesMax = kSketchTokens * 2 * (kDimMax / 8) / kLineBytes;
  static constexpr uint32_t kPlaceLines = kSketchTokens * sizeof(uint16_t) / kLineBytes;

  void Enter(uint32_t index) {
    if (index == index_) return;
    lines_ = lines();
    planes_.reset();
    scales_.reset();
    places_.reset();
    members_.reset();
    ends_ = 0;
    index_ = index;
    block_ = BlockOrder(order_, index);
  }
  template <size_t kBits>
  static void Mark(std::bitset<kBits>& lines, uint32_t begin, uint32_t end, uint32_t bytes) {
    if (begin == end) return;
    for (uint32_t line = begin * bytes / kLineBytes; line <= (end * bytes - 1) / kLineBytes; ++line) lines.set(line);
  }
  void AddSlots(uint32_t begin, uint32_t end, bool scaled) {
    Mark(planes_, begin, end, token_bytes_);
    if (scaled) Mark(scales_, begin, end, sizeof(uint16_t));
  }
  // As the operations do: a scan takes all clusters where it needs any; a run of keys takes their slots apart.
  void AddClustered(uint32_t from, uint32_t to, bool scan) {
    LookAtEnds();
    const bool needs = from < block_.last() && to > block_.first();
    if (needs || !scan) Mark(places_, block_.first(), block_.last(), sizeof(uint16_t));
    if (scan) {
      const uint32_t begin = from < block_.last() ? std::min(from, block_.first()) : from;
      return AddSlots(begin, to > block_.first() ? std::max(to, block_.last()) : to, true);
    }
    for (uint32_t offset = from; offset < to; ++offset) {
      const uint32_t slot = block_.SlotOf(offset);
      Mark(planes_, slot, slot + 1, token_bytes_);
    }
  }
  void Find(uint32_t offset) {
    if (!block_.clustered()) return;
    LookAtEnds();
    if (offset < block_.first() || offset >= block_.last()) return;
    const uint32_t cluster = block_.ClusterOf(offset);
    Mark(places_, block_.ClusterBegin(cluster), block_.ClusterEnd(cluster), sizeof(uint16_t));
    if (order_.members_offset == 0) {
      Mark(places_, offset, offset + 1, sizeof(uint16_t));
    } else {
      Mark(members_, offset, offset + 1, sizeof(uint8_t));
    }
  }
  void LookAtEnds() {
    if (counts_ends_) ends_ = CeilDiv<uint32_t>(order_.clusters * sizeof(uint16_t), kLineBytes);
  }

  const SketchOrder order_;
  const uint32_t token_bytes_;
  const bool counts_ends_;
  uint64_t lines_ = 0;  // of the blocks before
  uint32_t index_ = UINT32_MAX;
  BlockOrder block_;
  std::bitset<kPlaneLinesMax> planes_;
  std::bitset<kPlaceLines> scales_, places_;
  std::bitset<kSketchTokens / kLineBytes> members_;
  uint32_t ends_ = 0;
};

// Scoring every key of [begin, end).
uint64_t KeyLines(const Layer& layer, uint32_t kv_head, uint32_t begin, uint32_t end) {
  if (!layer.has_codes()) return RunLines(begin, end, layer.key_bytes());
  SlotLines slots(layer, kv_head);
  slots.AddRange(begin, end, false);
  // Padding fills a record up to whole lines, so no line of padding alone lies between.
  return slots.lines() + RunLines(begin, end, layer.layout().record_bytes);
}

// Scoring the keys listed.
uint64_t KeyLines(const Layer& layer, uint32_t kv_head, std::span<const uint32_t> tokens) {
  const uint64_t records = layer.has_codes() ? RecordLines(layer.layout(), {}, 0, tokens) : 0;
  if (layer.has_codes() && layer.clusters() != nullptr) {
    SlotLines slots(layer, kv_head);
    slots.AddTokens(tokens);
    return slots.lines() + records;
  }
  const uint64_t bytes = layer.has_codes() ? layer.layout().sketch_token_bytes() : layer.key_bytes();
  LineCount count;
  for (const uint64_t token : tokens) count.Add(token * bytes, (token + 1) * bytes);
  return count.lines() + records;
}

uint64_t SketchLines(const RetrievalSet& set) {
  const Layer& layer = *set.item->layer;
  const PageLayout& layout = layer.layout();
  const PositionPlan& plan = *set.plan;
  uint64_t lines =
      RecordLines(layout, set.survivors.tokens(), set.item->plan.used.refine_planes, set.candidates.tokens());
  if (layer.clusters() == nullptr) {
    return lines + RunLines(plan.begin, plan.end, layout.sketch_token_bytes()) +
           RunLines(plan.begin, plan.end, sizeof(uint16_t));
  }
  SlotLines slots(layer, set.kv_head);
  // Candidates are among the survivors, where there are any.
  std::span<const uint32_t> left = plan.survivors > 0 ? set.survivors.tokens() : set.candidates.tokens();
  for (uint32_t begin = plan.begin; begin < plan.end;) {
    const uint32_t end = std::min(plan.end, (begin / kSketchTokens + 1) * kSketchTokens);
    const size_t count = std::lower_bound(left.begin(), left.end(), end) - left.begin();
    slots.AddRange(begin, end, true);
    slots.FindTokens(left.first(count));
    left = left.subspan(count);
    begin = end;
  }
  return lines + slots.lines();
}

// Every mean of keys, with its scale and spread, and the ends of all clusters.
uint64_t MeanLines(const KeyClusters& clusters, uint32_t kv_head) {
  const ClusterLayout& layout = clusters.layout();
  const auto lines = [](uint64_t bytes) { return CeilDiv<uint64_t>(bytes, kLineBytes); };
  const uint64_t centre_lines = layout.coded ? 0 : lines(layout.head_dim * sizeof(float));
  const uint64_t block_lines =
      lines(uint64_t{layout.clusters} * layout.head_dim) + 3 * lines(layout.clusters * sizeof(uint16_t)) + centre_lines;
  return clusters.blocks(kv_head).size() * block_lines;
}

// Means, then what is read of the tokens in opened clusters, of the always-included and of the candidates. The ends of
// clusters are among the means.
uint64_t ClusterLines(const RetrievalSet& set) {
  const Layer& layer = *set.item->layer;
  const KeyClusters& clusters = *layer.clusters();
  const PositionPlan& plan = *set.plan;
  const std::span<const uint32_t> scored = set.candidates.tokens(), opened = set.opened.tokens();
  const bool scan = set.scans_sketch();
  uint64_t lines = MeanLines(clusters, set.kv_head);
  SlotLines slots(layer, set.kv_head, false);
  const uint32_t first_block = clusters.begin() / kSketchTokens, per_block = clusters.layout().clusters;
  size_t next = 0, next_opened = 0;
  for (uint32_t index = plan.begin / kSketchTokens; index * kSketchTokens < plan.end; ++index) {
    for (; next_opened < opened.size() && first_block + opened[next_opened] / per_block <= index; ++next_opened) {
      slots.AddCluster(first_block + opened[next_opened] / per_block, opened[next_opened] % per_block, scan);
    }
    const size_t first = next;
    while (next < scored.size() && scored[next] / kSketchTokens == index) ++next;
    if (layer.has_codes()) slots.AddTokens(scored.subspan(first, next - first), scan);
  }
  const uint64_t keys =
      layer.has_codes() ? RecordLines(layer.layout(), {}, 0, scored) : KeyLines(layer, set.kv_head, scored);
  return lines + slots.lines() + keys;
}

// Elements that lie where they may, each of `bytes`; one may share a line with the one before it.
template <typename T>
uint64_t ElementLines(std::span<T* const> elements, std::span<const uint64_t> bytes) {
  uint64_t lines = 0, last = UINT64_MAX;
  for (size_t i = 0; i < elements.size(); ++i) {
    if (bytes[i] == 0) continue;
    const auto at = reinterpret_cast<uintptr_t>(elements[i]);
    const uint64_t first = at / kLineBytes;
    lines += (at + bytes[i] - 1) / kLineBytes - first + (first == last ? 0 : 1);
    last = (at + bytes[i] - 1) / kLineBytes;
  }
  return lines;
}

// Every centroid, and the lists of those selected.
uint64_t ListLines(const RetrievalSet& set) {
  const Layer& layer = *set.item->layer;
  const IndexSet::Head& head = layer.index()->live()->heads[set.kv_head];
  const uint64_t centroid_bytes = uint64_t{layer.config().group_heads()} * layer.config().head_dim * sizeof(uint16_t);
  std::vector<uint16_t*> centroids = head.centroids;
  std::vector<uint64_t*> lists;
  for (const uint32_t list : set.selected_lists) {
    if (head.list_counts[list] > 0) lists.push_back(head.lists[list]);
  }
  // An index that adjusts to its use gives elements to centroids in any order.
  if (!std::is_sorted(centroids.begin(), centroids.end())) std::sort(centroids.begin(), centroids.end());
  std::sort(lists.begin(), lists.end());
  const std::vector<uint64_t> bytes(centroids.size(), centroid_bytes);
  const std::vector<uint64_t> list_bytes(lists.size(), layer.index()->packing().list_bytes());
  return ElementLines<uint16_t>(centroids, bytes) + ElementLines<uint64_t>(lists, list_bytes);
}

uint64_t ChoosingLines(const RetrievalSet& set) {
  const Layer& layer = *set.item->layer;
  const PositionPlan& plan = *set.plan;
  switch (plan.path) {
    case Path::kEmpty:
      return 0;
    case Path::kDense:
      return set.scores() ? KeyLines(layer, set.kv_head, plan.begin, plan.end) : 0;
    case Path::kExact:
      return KeyLines(layer, set.kv_head, plan.begin, plan.end);
    case Path::kSketch:
      return SketchLines(set);
    case Path::kCentroids:
      return ListLines(set) + KeyLines(layer, set.kv_head, set.candidates.tokens());
    case Path::kClusters:
    case Path::kClusterSketch:
      return ClusterLines(set);
  }
  return 0;
}

}  // namespace

uint64_t BytesRead(const RetrievalSet& set) {
  return kLineBytes * (ChoosingLines(set) + (set.estimates() ? set.rest_lines : 0));
}

}  // namespace ctkvr
