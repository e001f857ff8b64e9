// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/stored_row.h"
#include "kernels/cpu/top_k.h"

namespace ctkvr::cpu {
namespace {

// Tokens whose weighted values add up in float32 before they join sums in float64: so the error does not grow with the
// list.
constexpr uint32_t kBlockTokens = 64;
// Tokens decoded together: 16 rows of 256 float32 are half of a 32 KiB first-level cache.
constexpr uint32_t kDecodedTokens = 16;

// One item at work. Each value is read and decoded once, for all heads.
class Attention {
 public:
  Attention(const CpuKernels& kernels, const AttendItem& item)
      : kernels_(kernels),
        item_(item),
        count_(*item.count),
        value_dim_(item.view.layout.value_dim),
        padded_(PaddedFloats(value_dim_)) {
    std::fill_n(totals_, item.heads * padded_, 0.0);
    std::fill_n(weight_sums_, item.heads, 0.0);
  }

  // REQUIRES: tokens are listed.
  void Run() {
    for (uint32_t r = 0; r < item_.heads; ++r) {
      log_share_[r] = FitOrigin(kernels_, {item_.scores + r * item_.stride, count_}, item_.softmax);
    }
    for (uint32_t n = 0; n < count_; n += kBlockTokens) AddBlock(n, std::min(kBlockTokens, count_ - n));
    for (uint32_t r = 0; r < item_.heads; ++r) {
      for (uint32_t i = 0; i < value_dim_; ++i) {
        item_.output[size_t{r} * value_dim_ + i] = static_cast<float>(totals_[r * padded_ + i] / weight_sums_[r]);
      }
      item_.log_sum_exp[r] = static_cast<float>(MaxLogit(log_share_[r]) + std::log(weight_sums_[r]));
    }
  }

 private:
  uint32_t TokenAt(uint32_t place) const { return item_.tokens != nullptr ? item_.tokens[place] : item_.begin + place; }

  void AddBlock(uint32_t first, uint32_t count) {
    for (uint32_t r = 0; r < item_.heads; ++r) {
      weight_sums_[r] += kernels_.scan->sum_exp(item_.scores + r * item_.stride + first, count, log_share_[r],
                                                weights_ + r * kBlockTokens);
    }
    std::fill_n(sums_, item_.heads * padded_, 0.0f);
    for (uint32_t n = 0; n < count; n += kDecodedTokens) {
      AddRows(first + n, std::min(kDecodedTokens, count - n), weights_ + n);
    }
    for (uint32_t i = 0; i < item_.heads * padded_; ++i) totals_[i] += sums_[i];
  }

  void AddRows(uint32_t first, uint32_t count, const float* weights) {
    const HeadView& view = item_.view;
    for (uint32_t n = 0; n < count; ++n) {
      const uint32_t ahead = first + n + kPrefetchTokens;
      if (ahead < count_) PrefetchBytes(ValueAt(view, TokenAt(ahead)), view.layout.value_row_bytes);
      DecodeValue(*kernels_.rows, view, TokenAt(first + n), rows_ + size_t{n} * padded_);
    }
    kernels_.scan->add_weighted({.rows = rows_,
                                 .weights = weights,
                                 .weight_stride = kBlockTokens,
                                 .tokens = count,
                                 .heads = item_.heads,
                                 .padded_dim = padded_,
                                 .sums = sums_});
  }

  const CpuKernels& kernels_;
  const AttendItem& item_;
  const uint32_t count_;
  const uint32_t value_dim_;
  const uint32_t padded_;
  LogShare log_share_[kGroupHeadsMax];
  float weights_[kGroupHeadsMax * kBlockTokens];                         // [heads, kBlockTokens]
  alignas(64) float rows_[kDecodedTokens * PaddedFloats(kDimMax)] = {};  // [kDecodedTokens, padded]; padding stays 0
  alignas(64) float sums_[kGroupHeadsMax * PaddedFloats(kDimMax)];       // [heads, padded]
  alignas(64) double totals_[kGroupHeadsMax * PaddedFloats(kDimMax)];    // [heads, padded]
  double weight_sums_[kGroupHeadsMax];
};

}  // namespace

void Attend(const CpuKernels& kernels, const AttendItem& item) {
  const uint32_t value_dim = item.view.layout.value_dim;
  CTKVR_CHECK(item.heads >= 1 && item.heads <= kGroupHeadsMax && value_dim <= kDimMax);
  CTKVR_CHECK(*item.count <= item.count_max);
  if (*item.count == 0) {
    std::fill_n(item.output, size_t{item.heads} * value_dim, 0.0f);
    std::fill_n(item.log_sum_exp, item.heads, -std::numeric_limits<float>::infinity());
    return;
  }
  Attention(kernels, item).Run();
}

}  // namespace ctkvr::cpu
