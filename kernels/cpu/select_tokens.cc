// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/top_k.h"

namespace ctkvr::cpu {
namespace {

// One item at work. Forced tokens are a prefix and a suffix of the ascending list, so the others are one range.
class Selection {
 public:
  Selection(const CpuKernels& kernels, const SelectTokensItem& item)
      : kernels_(kernels),
        item_(item),
        count_(*item.count),
        ranks_(static_cast<float*>(item.workspace)),
        spare_(ranks_ + item.count_max),
        indices_(reinterpret_cast<uint32_t*>(spare_ + item.count_max)) {
    first_ = PlaceOf(item.force_below);
    last_ = std::max(first_, PlaceOf(item.force_from));
  }

  void Run() {
    const bool shares = item_.k > 0 && (item_.min_share > 0 || item_.top_p < 1);
    if (shares || (item_.heads > 1 && item_.k > 0)) FitLogShares(kernels_, group(), item_.softmax, log_share_);
    size_t taken = 0;
    if (first_ < last_ && item_.k > 0) {
      const float* ranks = GroupRanks(kernels_, group(), log_share_, item_.reduction, first_, last_, ranks_);
      taken = TakeTopK(kernels_, {ranks, last_ - first_}, item_.k, indices_, spare_);
      if (item_.min_score > -std::numeric_limits<float>::infinity()) taken = LeaveOutLowScores(taken);
      if (item_.min_share > 0) taken = LeaveOutLowShares(taken);
      if (item_.top_p < 1) taken = KeepTopP(ranks, taken);
    }
    Emit(taken);
  }

 private:
  GroupScores group() const {
    return {.scores = item_.scores, .stride = item_.stride, .heads = item_.heads, .count = count_};
  }
  uint32_t TokenAt(size_t place) const {
    return item_.tokens != nullptr ? item_.tokens[place] : item_.begin + static_cast<uint32_t>(place);
  }

  // The first place of the list whose token is not below `position`.
  size_t PlaceOf(uint32_t position) const {
    if (item_.tokens != nullptr) return std::lower_bound(item_.tokens, item_.tokens + count_, position) - item_.tokens;
    return position <= item_.begin ? 0 : std::min<size_t>(position - item_.begin, count_);
  }

  // Mean over the heads of the token's share of the attention.
  double ShareAt(size_t place) const {
    double share = 0;
    for (uint32_t r = 0; r < item_.heads; ++r) {
      share += std::exp(LogShareOf(item_.scores[r * item_.stride + place], log_share_[r]));
    }
    return share / item_.heads;
  }

  template <typename Keep>
  size_t KeepIf(size_t taken, Keep keep) {
    return std::remove_if(indices_, indices_ + taken, [&](uint32_t i) { return !keep(first_ + i); }) - indices_;
  }
  size_t LeaveOutLowScores(size_t taken) {
    return KeepIf(taken, [this](size_t place) {
      for (uint32_t r = 0; r < item_.heads; ++r) {
        if (item_.scores[r * item_.stride + place] >= item_.min_score) return true;
      }
      return false;
    });
  }
  size_t LeaveOutLowShares(size_t taken) {
    return KeepIf(taken, [this](size_t place) { return ShareAt(place) >= item_.min_share; });
  }

  size_t KeepTopP(const float* ranks, size_t taken) {
    double reached = 0;
    for (size_t place = 0; place < first_; ++place) reached += ShareAt(place);
    for (size_t place = last_; place < count_; ++place) reached += ShareAt(place);
    std::sort(indices_, indices_ + taken,
              [&](uint32_t a, uint32_t b) { return ranks[a] > ranks[b] || (ranks[a] == ranks[b] && a < b); });
    size_t kept = 0;
    while (kept < taken && reached < item_.top_p) reached += ShareAt(first_ + indices_[kept++]);
    std::sort(indices_, indices_ + kept);
    return kept;
  }

  void EmitPlace(size_t place) {
    for (uint32_t r = 0; item_.chosen_scores != nullptr && r < item_.heads; ++r) {
      item_.chosen_scores[r * item_.chosen_stride + emitted_] = item_.scores[r * item_.stride + place];
    }
    item_.chosen[emitted_++] = TokenAt(place);
  }
  void Emit(size_t taken) {
    for (size_t place = 0; place < first_; ++place) EmitPlace(place);
    for (size_t i = 0; i < taken; ++i) EmitPlace(first_ + indices_[i]);
    for (size_t place = last_; place < count_; ++place) EmitPlace(place);
    *item_.chosen_count = emitted_;
  }

  const CpuKernels& kernels_;
  const SelectTokensItem& item_;
  const size_t count_;
  size_t first_ = 0, last_ = 0;  // places that are not forced
  float* const ranks_;           // [count_max], as are the next two
  float* const spare_;
  uint32_t* const indices_;
  LogShare log_share_[kGroupHeadsMax];
  uint32_t emitted_ = 0;
};

}  // namespace

void SelectTokens(const CpuKernels& kernels, const SelectTokensItem& item) {
  CTKVR_CHECK(item.heads >= 1 && item.heads <= kGroupHeadsMax && *item.count <= item.count_max);
  Selection(kernels, item).Run();
}

}  // namespace ctkvr::cpu
