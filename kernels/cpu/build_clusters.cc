// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/half_steps.h"
#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/score_block.h"
#include "kernels/cpu/sketch_slots.h"
#include "kernels/cpu/stored_row.h"

namespace ctkvr::cpu {
namespace {

constexpr uint32_t kLanes = 16;
constexpr uint32_t kMeanLevelMax = 127;
constexpr uint32_t kClustersMax = kClusterBlockTokens / kTokensPerClusterMin;

// REQUIRES: count a multiple of kLanes, as padded rows are.
float DotOf(const float* a, const float* b, uint32_t count) {
  float lanes[kLanes] = {};
  for (uint32_t i = 0; i < count; i += kLanes) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (uint32_t width = kLanes / 2; width > 0; width /= 2) {
    for (uint32_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

void AddScaled(float* to, const float* from, float factor, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

class ClusterBuilder {
 public:
  ClusterBuilder(const CpuKernels& kernels, const BuildClustersItem& item)
      : kernels_(kernels),
        item_(item),
        layout_(item.layout),
        clusters_(CeilDiv(item.count, item.layout.tokens_per_cluster)),
        padded_(PaddedFloats(item.layout.head_dim)),
        padded_values_(PaddedFloats(item.layout.value_dim)),
        first_(item.begin % kClusterBlockTokens) {
    CTKVR_CHECK(item.count >= 1 && first_ + item.count <= kClusterBlockTokens && !item.view.raw());
    CTKVR_CHECK(layout_.head_dim <= kDimMax && layout_.value_dim <= kDimMax);
    auto* at = reinterpret_cast<float*>(RoundUp(reinterpret_cast<uintptr_t>(item.workspace), uintptr_t{64}));
    const auto take = [&at](size_t count) { return std::exchange(at, at + count); };
    keys_ = take(size_t{kClusterBlockTokens} * padded_);
    directions_ = take(size_t{layout_.clusters} * padded_);
    sums_ = take(size_t{layout_.clusters} * padded_);
    value_sums_ = take(size_t{layout_.clusters} * padded_values_);
    dots_ = take(size_t{kLanes} * layout_.clusters);
    inverse_norms_ = take(kClusterBlockTokens);
    nearest_ = take(kClusterBlockTokens);
    member_of_ = reinterpret_cast<uint32_t*>(take(kClusterBlockTokens));
  }

  void Build() {
    LoadKeys();
    Seed();
    for (uint32_t round = 0; round < kClusterRounds; ++round) {
      Assign();
      MakeDirections();
    }
    Assign();
    StoreOrder();
    StoreMeans();
  }

 private:
  float* key(uint32_t token) { return keys_ + size_t{token} * padded_; }

  // Keys less their mean, and the inverse of their norms (0 for a key that is the mean).
  void LoadKeys() {
    const HeadView& view = item_.view;
    const uint32_t dim = layout_.head_dim;
    SketchSlots slots(view, true);
    for (uint32_t t = 0; t < item_.count; ++t) {
      float* to = key(t);
      const uint32_t token = item_.begin + t;
      if (layout_.coded) {
        kernels_.scan->decode_coded(CodedKeyAt(view, token, slots.SlotOf(token)), to);
        const float scale = CodeScaleAt(view, token);
        for (uint32_t i = 0; i < dim; ++i) to[i] = scale * (to[i] + 0.5f);
      } else {
        const FloatKey from = FloatKeyAt(view, token);
        LoadRow(*kernels_.rows, from.data, from.dtype, to, dim);
      }
      std::fill(to + dim, to + padded_, 0.0f);
    }
    if (!layout_.coded) Centre();
    for (uint32_t t = 0; t < item_.count; ++t) {
      const float square = DotOf(key(t), key(t), padded_);
      inverse_norms_[t] = square > 0 ? 1.0f / std::sqrt(square) : 0.0f;
    }
  }

  void Centre() {
    float* centre = directions_;
    std::fill(centre, centre + padded_, 0.0f);
    for (uint32_t t = 0; t < item_.count; ++t)
      AddScaled(centre, key(t), 1.0f / static_cast<float>(item_.count), padded_);
    for (uint32_t t = 0; t < item_.count; ++t) AddScaled(key(t), centre, -1.0f, padded_);
    std::memcpy(item_.block + layout_.centre_offset, centre, layout_.head_dim * sizeof(float));
  }

  // Of each cluster the direction of a key that is least like those before it; ties: the first.
  void Seed() {
    std::fill(nearest_, nearest_ + item_.count, -std::numeric_limits<float>::infinity());
    uint32_t token = 0;
    for (uint32_t c = 0; c < clusters_; ++c) {
      float* direction = directions_ + size_t{c} * padded_;
      std::fill(direction, direction + padded_, 0.0f);
      AddScaled(direction, key(token), inverse_norms_[token], padded_);
      for (uint32_t begin = 0; begin < item_.count; begin += kScoreBlockTokens) {
        const uint32_t count = std::min(kScoreBlockTokens, item_.count - begin);
        FindDots(begin, count, direction, 1);
        for (uint32_t n = 0; n < count; ++n) {
          nearest_[begin + n] = std::max(nearest_[begin + n], dots_[n] * inverse_norms_[begin + n]);
        }
      }
      token = static_cast<uint32_t>(std::min_element(nearest_, nearest_ + item_.count) - nearest_);
    }
  }

  // dots_ [count directions, kScoreBlockTokens] of keys from `begin` on.
  void FindDots(uint32_t begin, uint32_t tokens, const float* directions, uint32_t count) {
    kernels_.scan->dots({.keys = key(begin),
                         .queries = directions,
                         .tokens = tokens,
                         .heads = count,
                         .padded_dim = padded_,
                         .dots = dots_,
                         .stride = kScoreBlockTokens});
  }

  // A cluster without a direction keeps the one it had.
  void MakeDirections() {
    std::fill(sums_, sums_ + size_t{clusters_} * padded_, 0.0f);
    for (uint32_t t = 0; t < item_.count; ++t) {
      AddScaled(sums_ + size_t{member_of_[t]} * padded_, key(t), inverse_norms_[t], padded_);
    }
    for (uint32_t c = 0; c < clusters_; ++c) {
      float* sum = sums_ + size_t{c} * padded_;
      const float square = DotOf(sum, sum, padded_);
      float* direction = directions_ + size_t{c} * padded_;
      if (square == 0) continue;
      const float inverse = 1.0f / std::sqrt(square);
      for (uint32_t i = 0; i < padded_; ++i) direction[i] = inverse * sum[i];
    }
  }

  // A token's norm changes no order of its cosines.
  void Assign() {
    for (uint32_t begin = 0; begin < item_.count; begin += kScoreBlockTokens) {
      const uint32_t count = std::min(kScoreBlockTokens, item_.count - begin);
      FindDots(begin, count, directions_, clusters_);
      float best[kScoreBlockTokens];
      std::copy(dots_, dots_ + count, best);
      std::fill(member_of_ + begin, member_of_ + begin + count, 0u);
      for (uint32_t c = 1; c < clusters_; ++c) {
        for (uint32_t n = 0; n < count; ++n) {
          const float dot = dots_[size_t{c} * kScoreBlockTokens + n];
          if (!(dot > best[n])) continue;
          best[n] = dot;
          member_of_[begin + n] = c;
        }
      }
    }
  }

  // Where clusters end, which token lies at each slot, and of which cluster each token is.
  void StoreOrder() {
    const std::span<uint16_t> ends(reinterpret_cast<uint16_t*>(item_.block + layout_.ends_offset), layout_.clusters);
    uint16_t places[kClusterBlockTokens];
    std::iota(places, places + kClusterBlockTokens, uint16_t{0});
    std::fill(counts_, counts_ + layout_.clusters, 0u);
    for (uint32_t t = 0; t < item_.count; ++t) ++counts_[member_of_[t]];
    uint32_t next[kClustersMax], end = first_;
    for (uint32_t c = 0; c < layout_.clusters; ++c) {
      next[c] = end;
      ends[c] = static_cast<uint16_t>(end += counts_[c]);
    }
    for (uint32_t t = 0; t < item_.count; ++t) places[next[member_of_[t]]++] = static_cast<uint16_t>(first_ + t);
    for (uint32_t t = 0; t < item_.count; ++t) {
      const uint32_t c = member_of_[t];
      if (layout_.members_offset != 0) item_.block[layout_.members_offset + first_ + t] = static_cast<std::byte>(c);
      if (layout_.members_offset == 0) places[first_ + t] |= static_cast<uint16_t>(c << kOffsetBits);
    }
    std::memcpy(item_.block + layout_.places_offset, places, sizeof(places));
  }

  void StoreMeans() {
    std::fill(sums_, sums_ + size_t{clusters_} * padded_, 0.0f);
    std::fill(value_sums_, value_sums_ + size_t{clusters_} * padded_values_, 0.0f);
    float value[kDimMax];
    for (uint32_t t = 0; t < item_.count; ++t) {
      const uint32_t c = member_of_[t];
      AddScaled(sums_ + size_t{c} * padded_, key(t), 1, padded_);
      DecodeValue(*kernels_.rows, item_.view, item_.begin + t, value);
      AddScaled(value_sums_ + size_t{c} * padded_values_, value, 1, layout_.value_dim);
    }
    for (uint32_t c = 0; c < clusters_; ++c) {
      if (counts_[c] == 0) continue;
      const float share = 1.0f / static_cast<float>(counts_[c]);
      StoreMean(sums_ + size_t{c} * padded_, share,
                {.levels = layout_.key_means_offset, .scales = layout_.key_scales_offset, .dim = layout_.head_dim}, c);
      StoreMean(value_sums_ + size_t{c} * padded_values_, share,
                {.levels = layout_.value_means_offset, .scales = layout_.value_scales_offset, .dim = layout_.value_dim},
                c);
    }
    StoreSpreads();
  }

  // sums_ are means by now.
  void StoreSpreads() {
    float* squares = dots_;
    std::fill(squares, squares + clusters_, 0.0f);
    for (uint32_t t = 0; t < item_.count; ++t) {
      const uint32_t c = member_of_[t];
      AddScaled(key(t), sums_ + size_t{c} * padded_, -1.0f, padded_);
      squares[c] += DotOf(key(t), key(t), padded_);
    }
    for (uint32_t c = 0; c < clusters_; ++c) {
      if (counts_[c] == 0) continue;
      const float spread = std::sqrt(squares[c] / static_cast<float>(counts_[c] * layout_.head_dim));
      StoreElement(item_.block + layout_.spreads_offset, DType::kF16, c, std::min(spread, kHalfMax));
    }
  }

  // Where means of one kind lie in the block.
  struct Place {
    uint32_t levels = 0;
    uint32_t scales = 0;
    uint32_t dim = 0;
  };
  void StoreMean(float* sum, float share, const Place& place, uint32_t cluster) {
    float largest = 0;
    for (uint32_t i = 0; i < place.dim; ++i) {
      sum[i] *= share;
      largest = std::max(largest, std::fabs(sum[i]));
    }
    // Rounded up, so that no level exceeds its bound.
    const uint32_t bits = std::bit_cast<uint32_t>(largest / kMeanLevelMax) + 0xffffu;
    const auto half = static_cast<uint16_t>(bits >> 16);
    const auto scale = std::bit_cast<float>(bits & 0xffff0000u);
    auto* levels = reinterpret_cast<int8_t*>(item_.block + place.levels) + size_t{cluster} * place.dim;
    for (uint32_t i = 0; i < place.dim; ++i) {
      const float level = scale > 0 ? std::nearbyint(sum[i] / scale) : 0.0f;
      levels[i] = static_cast<int8_t>(std::clamp(level, -float{kMeanLevelMax}, float{kMeanLevelMax}));
    }
    std::memcpy(item_.block + place.scales + cluster * sizeof(half), &half, sizeof(half));
  }

  const CpuKernels& kernels_;
  const BuildClustersItem& item_;
  const ClusterLayout& layout_;
  const uint32_t clusters_;
  const uint32_t padded_, padded_values_;
  const uint32_t first_;         // offset of the first token in its sketch block
  float* keys_ = nullptr;        // [tokens, padded]
  float* directions_ = nullptr;  // [clusters, padded]
  float* sums_ = nullptr;        // [clusters, padded]
  float* value_sums_ = nullptr;  // [clusters, padded_values]
  float* dots_ = nullptr;        // [clusters, kScoreBlockTokens]
  float* inverse_norms_ = nullptr;
  float* nearest_ = nullptr;  // [tokens]: the largest cosine with a direction so far
  uint32_t* member_of_ = nullptr;
  uint32_t counts_[kClustersMax];
};

}  // namespace

void BuildClusters(const CpuKernels& kernels, const BuildClustersItem& item) { ClusterBuilder(kernels, item).Build(); }

}  // namespace ctkvr::cpu
