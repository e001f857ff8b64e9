// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/mean_scores.h"
#include "kernels/cpu/top_k.h"

namespace ctkvr::cpu {
namespace {

class ClusterSelector {
 public:
  ClusterSelector(const CpuKernels& kernels, const SelectClustersItem& item)
      : kernels_(kernels),
        item_(item),
        layout_(item.layout),
        heads_(item.query.heads),
        blocks_(ClusterBlocks(item.begin, item.end)),
        stride_(blocks_ * item.layout.clusters),
        means_(kernels, item.layout, item.query) {
    auto* words = reinterpret_cast<uint32_t*>(RoundUp(reinterpret_cast<uintptr_t>(item.workspace), uintptr_t{64}));
    entries_ = words;
    order_ = words + stride_;
    counts_ = words + size_t{2} * stride_;
    ranks_ = reinterpret_cast<float*>(words + size_t{3} * stride_);
    expected_ = ranks_ + stride_;
  }

  void Run() {
    FindNorms();
    for (uint32_t block = 0; block < blocks_; ++block) ScoreBlock(block);
    *item_.opened_count = 0;
    if (entry_count_ == 0) return;
    Rank();
    Open();
  }

 private:
  // Deviation of a logit a head, for spread 1.
  void FindNorms() {
    for (uint32_t r = 0; r < heads_; ++r) {
      const float* query = item_.query.plain + size_t{r} * layout_.head_dim;
      double square = 0;
      for (uint32_t i = 0; i < layout_.head_dim; ++i) square += double{query[i]} * query[i];
      deviations_[r] = item_.softmax.scale * static_cast<float>(std::sqrt(square));
    }
  }

  // Appends the block's clusters that hold tokens.
  void ScoreBlock(uint32_t block_index) {
    const std::byte* block = item_.blocks[block_index];
    const uint32_t base = block_index * layout_.clusters;
    uint32_t clusters[kClusterBlockTokens / kTokensPerClusterMin], count = 0;
    float spreads[kClusterBlockTokens / kTokensPerClusterMin];
    const BlockOrder order(order_of_blocks_, item_.begin / kClusterBlockTokens + block_index, block);
    for (uint32_t c = 0; c < layout_.clusters; ++c) {
      counts_[entry_count_ + count] = order.ClusterEnd(c) - order.ClusterBegin(c);
      if (counts_[entry_count_ + count] == 0) continue;
      spreads[count] = LoadElement(block + layout_.spreads_offset, DType::kF16, c);
      entries_[entry_count_ + count] = base + c;
      clusters[count++] = c;
    }
    float* expected = expected_ + entry_count_;
    means_.Score({.block = block, .clusters = clusters, .count = count, .scores = expected, .stride = stride_});
    for (uint32_t r = 0; r < heads_; ++r) {
      float* row = expected + size_t{r} * stride_;
      float* scores = item_.scores + size_t{r} * stride_ + base;
      for (uint32_t n = 0; n < count; ++n) {
        scores[clusters[n]] = row[n];
        row[n] = LogitOf(row[n], item_.softmax);
        row[n] += Gain(row[n], deviations_[r] * spreads[n]);
      }
    }
    entry_count_ += count;
  }

  // What the spread of its keys adds to a cluster's logit.
  float Gain(float logit, float deviation) const {
    const float softcap = item_.softmax.softcap;
    if (softcap > 0) deviation *= 1 - (logit / softcap) * (logit / softcap);
    return deviation < end_ ? deviation * deviation / 2 : end_ * deviation - end_ * end_ / 2;
  }

  // Log of the sum of exp() over all tokens, as expected, and the forced ones.
  float LogSumExp(uint32_t r) {
    const float* expected = expected_ + size_t{r} * stride_;
    float largest = kernels_.scan->max_of(expected, entry_count_);
    const uint32_t forced = *item_.forced_count;
    const float* scores = item_.forced_scores + r * item_.forced_stride;
    for (uint32_t n = 0; n < forced; ++n) largest = std::max(largest, LogitOf(scores[n], item_.softmax));
    (void)kernels_.scan->sum_exp(expected, entry_count_, {.scale = 1, .origin = largest}, ranks_);
    double sum = 0;
    for (uint32_t n = 0; n < entry_count_; ++n) sum += double{ranks_[n]} * counts_[n];
    for (uint32_t n = 0; n < forced; ++n) sum += std::exp(double{LogitOf(scores[n], item_.softmax)} - largest);
    return static_cast<float>(largest + std::log(sum));
  }

  void Rank() {
    if (heads_ == 1) {
      std::copy_n(expected_, entry_count_, ranks_);
      return;
    }
    LogShare log_share[kGroupHeadsMax];
    for (uint32_t r = 0; r < heads_; ++r) log_share[r] = {.scale = 1, .origin = LogSumExp(r)};
    kernels_.scan->group_ranks({.scores = expected_,
                                .stride = stride_,
                                .heads = heads_,
                                .count = entry_count_,
                                .log_share = log_share,
                                .sum = item_.reduction == GroupReduction::kSumSoftmax,
                                .ranks = ranks_});
  }

  // Halves what is undecided, until the fewest of the best that hold open_tokens are in front.
  void Open() {
    const auto better = [this](uint32_t a, uint32_t b) {
      return ranks_[a] != ranks_[b] ? ranks_[a] > ranks_[b] : a < b;
    };
    std::iota(order_, order_ + entry_count_, 0u);
    uint32_t taken = 0, undecided = entry_count_;
    uint64_t tokens = 0;
    while (tokens < item_.open_tokens && taken < undecided) {
      const uint32_t middle = taken + (undecided - taken + 1) / 2;
      if (middle < undecided) std::nth_element(order_ + taken, order_ + middle, order_ + undecided, better);
      uint64_t more = 0;
      for (uint32_t n = taken; n < middle; ++n) more += counts_[order_[n]];
      if (tokens + more < item_.open_tokens || middle == taken + 1) {
        tokens += more;
        taken = middle;
      } else {
        undecided = middle;
      }
    }
    std::sort(order_, order_ + taken);
    for (uint32_t n = 0; n < taken; ++n) item_.opened[n] = entries_[order_[n]];
    *item_.opened_count = taken;
  }

  const CpuKernels& kernels_;
  const SelectClustersItem& item_;
  const ClusterLayout& layout_;
  const uint32_t heads_;
  const uint32_t blocks_;
  const uint32_t stride_;  // clusters of all blocks
  const float end_ = std::sqrt(2 * std::log(static_cast<float>(item_.layout.tokens_per_cluster)));
  const SketchOrder order_of_blocks_ = layout_.Order(nullptr, item_.begin);
  MeanScores means_;
  uint32_t* entries_ = nullptr;  // [stride]: clusters that hold tokens, ascending
  uint32_t* order_ = nullptr;    // [stride]
  uint32_t* counts_ = nullptr;   // [stride]: tokens of the entries
  float* ranks_ = nullptr;       // [stride]
  float* expected_ = nullptr;    // [heads, stride], of the entries
  uint32_t entry_count_ = 0;
  float deviations_[kGroupHeadsMax];
};

}  // namespace

void SelectClusters(const CpuKernels& kernels, const SelectClustersItem& item) { ClusterSelector(kernels, item).Run(); }

}  // namespace ctkvr::cpu
