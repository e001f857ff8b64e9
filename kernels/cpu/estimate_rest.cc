// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "kernels/base/check.h"
#include "kernels/base/lines.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/mean_scores.h"

namespace ctkvr::cpu {
namespace {

// Logarithms of what may be left of a cluster.
const std::array<float, kClusterBlockTokens + 1>& LogCounts() {
  static const auto table = [] {
    std::array<float, kClusterBlockTokens + 1> logs;
    for (size_t i = 0; i < logs.size(); ++i) logs[i] = std::log(static_cast<float>(i));
    return logs;
  }();
  return table;
}

class RestEstimator {
 public:
  RestEstimator(const CpuKernels& kernels, const EstimateRestItem& item)
      : kernels_(kernels),
        item_(item),
        layout_(item.layout),
        heads_(item.query.heads),
        padded_values_(PaddedFloats(item.layout.value_dim)),
        stride_(ClusterBlocks(item.begin, item.end) * item.layout.clusters),
        means_(kernels, item.layout, item.query) {
    CTKVR_CHECK(layout_.value_dim <= kDimMax);
    auto* words = reinterpret_cast<uint32_t*>(RoundUp(reinterpret_cast<uintptr_t>(item.workspace), uintptr_t{64}));
    left_ = words;
    entries_ = words + stride_;
    logits_ = reinterpret_cast<float*>(words + size_t{2} * stride_);
  }

  void Run() {
    CountLeft();
    for (uint32_t block = 0; block < ClusterBlocks(item_.begin, item_.end); ++block) WeighClusters(block);
    Finish();
    uint64_t lines = other_lines_;
    for (const LineCount* count : {&members_, &key_means_, &key_scales_, &value_means_, &value_scales_}) {
      lines += count->lines();
    }
    *item_.lines_read = lines;
  }

 private:
  // Of every cluster, the tokens that are visible and not listed.
  void CountLeft() {
    for (uint32_t block = 0; block < ClusterBlocks(item_.begin, item_.end); ++block) {
      const BlockOrder order = OrderOf(block);
      for (uint32_t c = 0; c < layout_.clusters; ++c) {
        left_[block * layout_.clusters + c] = order.ClusterEnd(c) - order.ClusterBegin(c);
      }
    }
    if (item_.mean_scores == nullptr) {
      const uint64_t lines = CeilDiv<uint64_t>(layout_.clusters * sizeof(uint16_t), kLineBytes);
      other_lines_ += lines * ClusterBlocks(item_.begin, item_.end);
    }
    const uint32_t visible_begin = std::clamp(item_.visible_begin, item_.begin, item_.end);
    const uint32_t visible_end = std::clamp(item_.visible_end, visible_begin, item_.end);
    for (uint32_t token = item_.begin; token < visible_begin; ++token) TakeOut(token, true);
    for (uint32_t n = 0; n < *item_.count; ++n) {
      const uint32_t token = item_.tokens[n];
      if (token >= visible_begin && token < visible_end) TakeOut(token, item_.mean_scores == nullptr);
    }
    for (uint32_t token = visible_end; token < item_.end; ++token) TakeOut(token, true);
  }
  BlockOrder OrderOf(uint32_t block) const {
    return BlockOrder(order_, item_.begin / kClusterBlockTokens + block, item_.blocks[block]);
  }
  void TakeOut(uint32_t token, bool counted) {
    const uint32_t block = token / kClusterBlockTokens - item_.begin / kClusterBlockTokens;
    const uint32_t offset = token % kClusterBlockTokens;
    if (block != entered_) entered_order_ = OrderOf(entered_ = block);
    --left_[block * layout_.clusters + entered_order_.ClusterOf(offset)];
    if (!counted) return;
    const uint32_t bytes = layout_.members_offset != 0 ? 1 : sizeof(uint16_t);
    Count(members_, block, layout_.members_offset != 0 ? layout_.members_offset : layout_.places_offset, offset, bytes);
  }
  // Element `index` of the array at `offset` of a block was read. Arrays begin on lines, and so do blocks.
  void Count(LineCount& count, uint32_t block, uint32_t offset, uint32_t index, uint32_t bytes) const {
    const uint64_t at = uint64_t{block} * layout_.block_bytes + offset + uint64_t{index} * bytes;
    count.Add(at, at + bytes);
  }

  // Appends the block's clusters that have tokens left, with log weights.
  void WeighClusters(uint32_t block_index) {
    const uint32_t base = block_index * layout_.clusters;
    uint32_t clusters[kClusterBlockTokens / kTokensPerClusterMin], count = 0;
    for (uint32_t c = 0; c < layout_.clusters; ++c) {
      if (left_[base + c] > 0) clusters[count++] = c;
    }
    float* logits = logits_ + entry_count_;
    if (item_.mean_scores == nullptr) ScoreMeans(block_index, {clusters, count}, logits);
    for (uint32_t n = 0; n < count; ++n) entries_[entry_count_ + n] = base + clusters[n];
    for (uint32_t r = 0; r < heads_; ++r) {
      for (uint32_t n = 0; n < count; ++n) {
        const uint32_t entry = base + clusters[n];
        float& logit = logits[r * stride_ + n];
        if (item_.mean_scores != nullptr) logit = item_.mean_scores[r * stride_ + entry];
        logit = LogitOf(logit, item_.softmax) + LogCounts()[left_[entry]];
      }
    }
    entry_count_ += count;
  }
  void ScoreMeans(uint32_t block_index, std::span<const uint32_t> clusters, float* scores) {
    means_.Score({.block = item_.blocks[block_index],
                  .clusters = clusters.data(),
                  .count = static_cast<uint32_t>(clusters.size()),
                  .scores = scores,
                  .stride = stride_});
    if (!layout_.coded) other_lines_ += CeilDiv<uint64_t>(layout_.head_dim * sizeof(float), kLineBytes);
    for (const uint32_t cluster : clusters) {
      Count(key_means_, block_index, layout_.key_means_offset, cluster, layout_.head_dim);
      Count(key_scales_, block_index, layout_.key_scales_offset, cluster, sizeof(uint16_t));
    }
  }

  void Finish() {
    if (entry_count_ == 0) {
      std::fill_n(item_.output, size_t{heads_} * layout_.value_dim, 0.0f);
      std::fill_n(item_.log_sum_exp, heads_, -std::numeric_limits<float>::infinity());
      return;
    }
    for (uint32_t r = 0; r < heads_; ++r) {
      const float* logits = logits_ + size_t{r} * stride_;
      largest_[r] = kernels_.scan->max_of(logits, entry_count_);
      sums_[r] = kernels_.scan->sum_exp(logits, entry_count_, {.scale = 1, .origin = largest_[r]}, nullptr);
      const double log_sum = largest_[r] + std::log(sums_[r]);
      item_.log_sum_exp[r] = static_cast<float>(log_sum);
      least_[r] = static_cast<float>(log_sum - std::log(65536.0 * entry_count_));
    }
    std::fill_n(outputs_, heads_ * padded_values_, 0.0f);
    uint32_t entries[kScoreBlockTokens], count = 0;
    for (uint32_t n = 0; n < entry_count_; ++n) {
      if (HasWeight(n)) entries[count++] = n;
      if (count < kScoreBlockTokens && n + 1 < entry_count_) continue;
      if (count > 0) AddValues(entries, count);
      count = 0;
    }
    for (uint32_t r = 0; r < heads_; ++r) {
      std::copy_n(outputs_ + size_t{r} * padded_values_, layout_.value_dim,
                  item_.output + size_t{r} * layout_.value_dim);
    }
  }

  bool HasWeight(uint32_t n) const {
    for (uint32_t r = 0; r < heads_; ++r) {
      if (logits_[r * stride_ + n] >= least_[r]) return true;
    }
    return false;
  }

  void AddValues(const uint32_t* entries, uint32_t count) {
    float logits[kGroupHeadsMax * kScoreBlockTokens], weights[kGroupHeadsMax * kScoreBlockTokens];
    float scales[kScoreBlockTokens];
    for (uint32_t n = 0; n < count; ++n) {
      const uint32_t block_index = entries_[entries[n]] / layout_.clusters;
      const std::byte* block = item_.blocks[block_index];
      const uint32_t cluster = entries_[entries[n]] % layout_.clusters;
      Count(value_means_, block_index, layout_.value_means_offset, cluster, layout_.value_dim);
      Count(value_scales_, block_index, layout_.value_scales_offset, cluster, sizeof(uint16_t));
      const std::byte* levels = block + layout_.value_means_offset + size_t{cluster} * layout_.value_dim;
      float* row = rows_ + size_t{n} * padded_values_;
      WidenLevels(levels, layout_.value_dim, padded_values_, row);
      scales[n] = LoadElement(block + layout_.value_scales_offset, DType::kBF16, cluster);
      for (uint32_t r = 0; r < heads_; ++r) logits[r * kScoreBlockTokens + n] = logits_[r * stride_ + entries[n]];
    }
    for (uint32_t r = 0; r < heads_; ++r) {
      float* own = weights + size_t{r} * kScoreBlockTokens;
      (void)kernels_.scan->sum_exp(logits + size_t{r} * kScoreBlockTokens, count, {.scale = 1, .origin = largest_[r]},
                                   own);
      for (uint32_t n = 0; n < count; ++n) own[n] = static_cast<float>(own[n] / sums_[r]) * scales[n];
    }
    kernels_.scan->add_weighted({.rows = rows_,
                                 .weights = weights,
                                 .weight_stride = kScoreBlockTokens,
                                 .tokens = count,
                                 .heads = heads_,
                                 .padded_dim = padded_values_,
                                 .sums = outputs_});
  }

  const CpuKernels& kernels_;
  const EstimateRestItem& item_;
  const ClusterLayout& layout_;
  const uint32_t heads_;
  const uint32_t padded_values_;
  const uint32_t stride_;  // clusters of all blocks
  MeanScores means_;
  uint32_t* left_ = nullptr;     // [stride]
  uint32_t* entries_ = nullptr;  // [stride]: clusters with tokens left, ascending
  float* logits_ = nullptr;      // [heads, stride]: log weights of the entries
  uint32_t entry_count_ = 0;
  const SketchOrder order_ = layout_.Order(nullptr, item_.begin);
  uint32_t entered_ = UINT32_MAX;  // block of the last token taken out
  BlockOrder entered_order_;
  LineCount members_, key_means_, key_scales_, value_means_, value_scales_;
  uint64_t other_lines_ = 0;
  float largest_[kGroupHeadsMax];  // log weight
  double sums_[kGroupHeadsMax];    // of weights, the largest as 1
  float least_[kGroupHeadsMax];    // log weight from which a cluster's value is read
  alignas(64) float outputs_[kGroupHeadsMax * PaddedFloats(kDimMax)];  // [heads, padded_values]
  alignas(64) float rows_[kScoreBlockTokens * PaddedFloats(kDimMax)];
};

}  // namespace

void EstimateRest(const CpuKernels& kernels, const EstimateRestItem& item) { RestEstimator(kernels, item).Run(); }

}  // namespace ctkvr::cpu
