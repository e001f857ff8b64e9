// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/top_k.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace ctkvr::cpu {
namespace {

// Below this many values a plain partition is as fast as looking at a sample first.
constexpr size_t kSampleFrom = 4096;
constexpr size_t kSampleMin = 512;
constexpr size_t kSampleMax = 4096;

// Floyd and Rivest's idea (https://doi.org/10.1145/360680.360691): bounds from a sample enclose the k-th value
// with all but certainty, and one pass then leaves few values to look at. Returns false when they do not enclose it.
bool CutBySample(const CpuKernels& kernels, std::span<const float> values, size_t k, float* workspace, TopKCut* cut) {
  float sample[kSampleMax];
  const size_t size = std::clamp(values.size() / 64, kSampleMin, kSampleMax);
  for (size_t i = 0; i < size; ++i) sample[i] = values[i * values.size() / size];
  const double place = static_cast<double>(k) / static_cast<double>(values.size()) * static_cast<double>(size);
  const double spread = 4 * std::sqrt(place * (1 - place / static_cast<double>(size))) + 4;
  const auto lower_place = static_cast<size_t>(place + spread);
  float upper = INFINITY, lower = -INFINITY;
  if (lower_place < size) {
    std::nth_element(sample, sample + lower_place, sample + size, std::greater<>());
    lower = sample[lower_place];
  }
  if (place >= spread) {
    const auto upper_place = static_cast<size_t>(place - spread);
    std::nth_element(sample, sample + upper_place, sample + std::min(lower_place, size), std::greater<>());
    upper = sample[upper_place];
  }
  size_t above = 0;
  const size_t between = kernels.scan->take_between(values, lower, upper, workspace, &above);
  if (above >= k || above + between < k) return false;
  const size_t left = k - above;
  std::nth_element(workspace, workspace + (left - 1), workspace + between, std::greater<>());
  cut->threshold = workspace[left - 1];
  // Entries before the k-th are not below it: those above it are all there.
  const auto higher = std::count_if(workspace, workspace + left, [&](float value) { return value > cut->threshold; });
  cut->ties = left - static_cast<size_t>(higher);
  return true;
}

}  // namespace

TopKCut FindTopKCut(const CpuKernels& kernels, std::span<const float> values, size_t k, float* workspace) {
  TopKCut cut;
  if (values.size() >= kSampleFrom && CutBySample(kernels, values, k, workspace, &cut)) return cut;
  std::copy(values.begin(), values.end(), workspace);
  std::nth_element(workspace, workspace + (k - 1), workspace + values.size(), std::greater<>());
  cut.threshold = workspace[k - 1];
  const auto higher = std::count_if(workspace, workspace + k, [&](float value) { return value > cut.threshold; });
  cut.ties = k - static_cast<size_t>(higher);
  return cut;
}

size_t TakeTopK(const CpuKernels& kernels, std::span<const float> values, size_t k, uint32_t* indices,
                float* workspace) {
  if (k == 0 || values.empty()) return 0;
  if (k >= values.size()) {
    for (size_t i = 0; i < values.size(); ++i) indices[i] = static_cast<uint32_t>(i);
    return values.size();
  }
  const TopKCut cut = FindTopKCut(kernels, values, k, workspace);
  return kernels.scan->take_above(values.data(), values.size(), cut.threshold, cut.ties, indices);
}

LogShare FitOrigin(const CpuKernels& kernels, std::span<const float> scores, const SoftmaxParams& softmax) {
  const float max_score = kernels.scan->max_of(scores.data(), scores.size());
  const float scale = softmax.scale, softcap = softmax.softcap;
  return {.scale = scale,
          .softcap = softcap,
          .origin = softcap > 0 ? softcap * std::tanh(scale / softcap * max_score) : max_score,
          .shift = 0};
}

double MaxLogit(const LogShare& log_share) {
  return log_share.softcap > 0 ? double{log_share.origin} : double{log_share.scale} * log_share.origin;
}

void FitLogShares(const CpuKernels& kernels, const GroupScores& group, const SoftmaxParams& softmax,
                  LogShare* log_share) {
  for (uint32_t r = 0; r < group.heads; ++r) {
    const float* scores = group.scores + r * group.stride;
    log_share[r] = FitOrigin(kernels, {scores, group.count}, softmax);
    double shift = std::log(kernels.scan->sum_exp(scores, group.count, log_share[r], nullptr));
    if (softmax.sink_logits != nullptr) {
      const double sink = double{softmax.sink_logits[r]} - MaxLogit(log_share[r]);
      shift = std::max(shift, sink) + std::log1p(std::exp(-std::abs(shift - sink)));
    }
    log_share[r].shift = static_cast<float>(shift);
  }
}

double LogShareOf(float score, const LogShare& log_share) {
  const double scale = log_share.scale, softcap = log_share.softcap;
  const double logit = softcap > 0 ? softcap * std::tanh(scale * score / softcap) - log_share.origin
                                   : scale * (double{score} - log_share.origin);
  return logit - log_share.shift;
}

const float* GroupRanks(const CpuKernels& kernels, const GroupScores& group, const LogShare* log_share,
                        GroupReduction reduction, size_t begin, size_t end, float* buffer) {
  if (group.heads == 1) return group.scores + begin;
  kernels.scan->group_ranks({.scores = group.scores + begin,
                             .stride = group.stride,
                             .heads = group.heads,
                             .count = end - begin,
                             .log_share = log_share,
                             .sum = reduction == GroupReduction::kSumSoftmax,
                             .ranks = buffer});
  return buffer;
}

}  // namespace ctkvr::cpu
