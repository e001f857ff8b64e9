// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <optional>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/sketch_scan.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kWordBits = 64;
constexpr uint32_t kWords = kSketchTokens / kWordBits;

// Sketch block by sketch block, as blocks of clusters hold the tokens of one each.
class ClusterScanner {
 public:
  ClusterScanner(const CpuKernels& kernels, const ScanClustersItem& item)
      : item_(item), heads_(item.query.heads), order_of_blocks_(item.layout.Order(nullptr, item.begin)) {
    if (item.estimates != nullptr) scan_.emplace(kernels, item.view.layout, item.query);
  }

  void Run() {
    for (uint32_t position = item_.visible_begin; position < item_.visible_end;) {
      index_ = position / kSketchTokens;
      const uint32_t end = std::min(item_.visible_end, (index_ + 1) * kSketchTokens);
      RunBlock(position % kSketchTokens, end - index_ * kSketchTokens);
      position = end;
    }
    *item_.count = count_;
  }

 private:
  // Offsets [from, to) of the block are visible.
  void RunBlock(uint32_t from, uint32_t to) {
    std::fill_n(bits_, kWords, uint64_t{0});
    from_ = from;
    to_ = to;
    sketch_order_ = BlockOrder();
    if (scan_.has_value()) sketch_order_ = BlockOrder(item_.view.order, index_);
    const uint32_t first_block = item_.begin / kSketchTokens, clusters = item_.layout.clusters;
    const bool clustered = index_ >= first_block && index_ - first_block < ClusterBlocks(item_.begin, item_.end);
    if (clustered) {
      const uint32_t base = (index_ - first_block) * clusters;
      while (next_ < *item_.opened_count && item_.opened[next_] < base) ++next_;
      const std::byte* block = item_.blocks[index_ - first_block];
      const BlockOrder order(order_of_blocks_, index_, block);
      const bool as_it_lies =
          scan_.has_value() && item_.view.order.blocks != nullptr && item_.view.order.blocks[index_] == block;
      for (; next_ < *item_.opened_count && item_.opened[next_] < base + clusters; ++next_) {
        Open(order, item_.opened[next_] - base, as_it_lies);
      }
    }
    const uint32_t first = index_ * kSketchTokens;
    Force(from, std::min(to, std::max(item_.force_below, first) - first));
    Force(std::max(from, std::max(item_.force_from, first) - first), to);
    Emit();
  }

  bool Marked(uint32_t offset) const { return bits_[offset / kWordBits] >> (offset % kWordBits) & 1; }
  void Mark(uint32_t offset) { bits_[offset / kWordBits] |= uint64_t{1} << (offset % kWordBits); }

  void Open(const BlockOrder& order, uint32_t cluster, bool as_it_lies) {
    if (scan_.has_value()) FindMean(cluster);
    const uint32_t begin = order.ClusterBegin(cluster), end = order.ClusterEnd(cluster);
    if (as_it_lies) scan_->Run(item_.view.sketches[index_], begin, end, run_, kSketchTokens);
    for (uint32_t slot = begin; slot < end; ++slot) {
      const uint32_t offset = order.OffsetAt(slot);
      if (offset < from_ || offset >= to_) continue;
      Mark(offset);
      if (!scan_.has_value()) continue;
      if (!as_it_lies) Estimate(offset, offset + 1);
      for (uint32_t r = 0; r < heads_; ++r) {
        float& estimate = estimates_[r * kSketchTokens + offset];
        if (as_it_lies) estimate = run_[r * kSketchTokens + slot - begin];
        estimate = scores_[r] + share_ * (estimate - scores_[r]);
      }
    }
  }

  // What estimates of the cluster's tokens are drawn to, and the share of their distance from it that is left.
  void FindMean(uint32_t cluster) {
    const ClusterLayout& layout = item_.layout;
    const uint32_t block_index = index_ - item_.begin / kSketchTokens;
    const std::byte* block = item_.blocks[block_index];
    const size_t entry = size_t{block_index} * layout.clusters + cluster;
    const size_t stride = size_t{ClusterBlocks(item_.begin, item_.end)} * layout.clusters;
    for (uint32_t r = 0; r < heads_; ++r) scores_[r] = item_.mean_scores[r * stride + entry];
    const auto* levels = reinterpret_cast<const int8_t*>(block + layout.key_means_offset) + cluster * layout.head_dim;
    int32_t squares = 0;
    for (uint32_t i = 0; i < layout.head_dim; ++i) squares += levels[i] * levels[i];
    const float scale = LoadElement(block + layout.key_scales_offset, DType::kBF16, cluster);
    const float spread = LoadElement(block + layout.spreads_offset, DType::kF16, cluster);
    const float variance = spread * spread;
    const float mean_square = scale * scale * static_cast<float>(squares) / static_cast<float>(layout.head_dim);
    const float error = kPlaneError[item_.view.layout.first_planes - 1] * (variance + mean_square);
    share_ = variance > 0 ? variance / (variance + error) : 0;
  }

  void Force(uint32_t from, uint32_t to) {
    for (uint32_t offset = from; offset < to;) {
      uint32_t end = offset;
      while (end < to && !Marked(end)) Mark(end++);
      if (scan_.has_value()) Estimate(offset, end);
      offset = end + 1;
    }
  }

  // Tokens wherever they lie.
  void Estimate(uint32_t from, uint32_t to) {
    const std::byte* sketch = item_.view.sketches[index_];
    if (!sketch_order_.clustered()) return scan_->Run(sketch, from, to, estimates_ + from, kSketchTokens);
    for (uint32_t offset = from; offset < to; ++offset) {
      const uint32_t slot = sketch_order_.SlotOf(offset);
      scan_->Run(sketch, slot, slot + 1, estimates_ + offset, kSketchTokens);
    }
  }

  void Emit() {
    const uint32_t first = index_ * kSketchTokens;
    for (uint32_t word = 0; word < kWords; ++word) {
      for (uint64_t left = bits_[word]; left != 0; left &= left - 1) {
        const uint32_t offset = word * kWordBits + std::countr_zero(left);
        for (uint32_t r = 0; scan_.has_value() && r < heads_; ++r) {
          item_.estimates[r * item_.stride + count_] = estimates_[r * kSketchTokens + offset];
        }
        item_.tokens[count_++] = first + offset;
      }
    }
  }

  const ScanClustersItem& item_;
  const uint32_t heads_;
  const SketchOrder order_of_blocks_;
  std::optional<SketchScan> scan_;
  // Of the block at work; offsets [from, to) of it are visible.
  uint32_t index_ = 0, from_ = 0, to_ = 0;
  BlockOrder sketch_order_;
  uint64_t bits_[kWords];
  float estimates_[kGroupHeadsMax * kSketchTokens];
  float run_[kGroupHeadsMax * kSketchTokens];
  float scores_[kGroupHeadsMax];  // of the mean of the cluster at work
  float share_ = 0;
  uint32_t next_ = 0;   // of the opened
  uint32_t count_ = 0;  // of the tokens
};

}  // namespace

void ScanClusters(const CpuKernels& kernels, const ScanClustersItem& item) { ClusterScanner(kernels, item).Run(); }

}  // namespace ctkvr::cpu
