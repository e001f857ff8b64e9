// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/sketch_slots.h"
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
        indices_(reinterpret_cast<uint32_t*>(spare_ + item.count_max)),
        lifted_(spare_ + 2 * size_t{item.count_max}) {
    first_ = PlaceOf(item.force_below);
    last_ = std::max(first_, PlaceOf(item.force_from));
  }

  void Run() {
    const bool shares = item_.k > 0 && (item_.min_share > 0 || item_.top_p < 1 || item_.policy.has_terms());
    if (shares || (item_.heads > 1 && item_.k > 0)) FitLogShares(kernels_, group(), item_.softmax, log_share_);
    size_t taken = 0;
    if (first_ < last_ && item_.k > 0) {
      const float* ranks = GroupRanks(kernels_, group(), log_share_, item_.reduction, first_, last_, ranks_);
      if (item_.policy.has_terms()) ranks = AddTerms();
      const float* lifted = item_.policy.class_quotas != nullptr ? LiftQuotas(ranks) : ranks;
      taken = TakeTopK(kernels_, {lifted, last_ - first_}, item_.k, indices_, spare_);
      if (item_.policy.redundant_view != nullptr) taken = LeaveOutRedundant(ranks, taken);
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

  static auto Better(const float* ranks) {
    return [ranks](uint32_t a, uint32_t b) { return ranks[a] > ranks[b] || (ranks[a] == ranks[b] && a < b); };
  }

  // The ranks in ranks_ with the policy's terms.
  const float* AddTerms() {
    const RankPolicy& policy = item_.policy;
    const size_t count = last_ - first_;
    if (item_.heads == 1) {
      for (size_t i = 0; i < count; ++i) {
        ranks_[i] = static_cast<float>(LogShareOf(item_.scores[first_ + i], log_share_[0]));
      }
    }
    const bool recent = policy.recency_min != policy.recency_max;
    const double rise = recent ? (double{policy.recency_max} - policy.recency_min) / (policy.length - 1) : 0;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t token = TokenAt(first_ + i);
      double weight = recent ? policy.recency_min + rise * token : 1;
      if (policy.weights != nullptr) weight *= 1 + double{policy.weight_boost} * policy.weights[token];
      ranks_[i] += static_cast<float>(std::log(weight));
    }
    return ranks_;
  }

  // The ranks, with those that fill a quota above all others.
  const float* LiftQuotas(const float* ranks) {
    const size_t count = last_ - first_;
    std::copy_n(ranks, count, lifted_);
    size_t left = std::min<size_t>(item_.k, count);
    for (uint32_t c = 0; c < kTokenClasses && left > 0; ++c) {
      if (item_.policy.class_quotas[c] == 0) continue;
      size_t members = 0;
      for (size_t i = 0; i < count; ++i) {
        if (item_.policy.classes[TokenAt(first_ + i)] == c) indices_[members++] = static_cast<uint32_t>(i);
      }
      const size_t quota = std::min({members, left, size_t{item_.policy.class_quotas[c]}});
      std::nth_element(indices_, indices_ + quota, indices_ + members, Better(ranks));
      for (size_t i = 0; i < quota; ++i) lifted_[indices_[i]] = std::numeric_limits<float>::max();
      left -= quota;
    }
    return lifted_;
  }

  size_t LeaveOutRedundant(const float* ranks, size_t taken) {
    const HeadView& view = *item_.policy.redundant_view;
    std::sort(indices_, indices_ + taken, Better(ranks));
    SketchSlots slots(view, false);
    std::vector<const std::byte*> kept_signs;
    size_t kept = 0;
    for (size_t i = 0; i < taken; ++i) {
      const uint32_t token = TokenAt(first_ + indices_[i]);
      const std::byte* signs = FirstPlanesPlace(view, token, slots.SlotOf(token));
      const bool redundant = std::any_of(kept_signs.begin(), kept_signs.end(), [&](const std::byte* others) {
        return Differing(signs, others, view.layout.plane_bytes) <= item_.policy.redundant_bits;
      });
      if (redundant) continue;
      kept_signs.push_back(signs);
      indices_[kept++] = indices_[i];
    }
    std::sort(indices_, indices_ + kept);
    return kept;
  }

  // Bits in which two planes differ.
  static uint32_t Differing(const std::byte* a, const std::byte* b, size_t bytes) {
    int bits = 0;
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      uint64_t x = 0, y = 0;
      const size_t length = std::min(sizeof(x), bytes - at);
      std::memcpy(&x, a + at, length);
      std::memcpy(&y, b + at, length);
      bits += std::popcount(x ^ y);
    }
    return static_cast<uint32_t>(bits);
  }

  size_t KeepTopP(const float* ranks, size_t taken) {
    double reached = 0;
    for (size_t place = 0; place < first_; ++place) reached += ShareAt(place);
    for (size_t place = last_; place < count_; ++place) reached += ShareAt(place);
    std::sort(indices_, indices_ + taken, Better(ranks));
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
  float* const ranks_;           // [count_max], as are the next three
  float* const spare_;
  uint32_t* const indices_;
  float* const lifted_;
  LogShare log_share_[kGroupHeadsMax];
  uint32_t emitted_ = 0;
};

}  // namespace

void SelectTokens(const CpuKernels& kernels, const SelectTokensItem& item) {
  CTKVR_CHECK(item.heads >= 1 && item.heads <= kGroupHeadsMax && *item.count <= item.count_max);
  Selection(kernels, item).Run();
}

}  // namespace ctkvr::cpu
