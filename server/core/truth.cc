// SPDX-License-Identifier: Apache-2.0

#include "server/core/truth.h"

#include "server/core/limits.h"

namespace ctkvr {

void TruthCounts::Add(const TruthSample& sample) {
  needles_.resize(sample.heads.size());
  found_.resize(sample.heads.size());
  for (size_t head = 0; head < sample.heads.size(); ++head) {
    needles_[head] += sample.heads[head].needle;
    found_[head] += sample.heads[head].found;
    sums_.needles += sample.heads[head].needle;
    sums_.needles_found += sample.heads[head].found;
    sums_.mass_sum += sample.heads[head].mass;
    sums_.output_error_sum += sample.heads[head].output_error;
  }
  ++sums_.samples;
  sums_.heads += sample.heads.size();
  sums_.best_tokens += sample.best_tokens;
  sums_.best_chosen += sample.best_chosen;
}

TruthInfo TruthCounts::Info() const {
  TruthInfo info = sums_;
  for (size_t head = 0; head < needles_.size(); ++head) {
    if (needles_[head] < limits::kWorstHeadNeedles) continue;
    const double share = static_cast<double>(found_[head]) / static_cast<double>(needles_[head]);
    if (info.worst_head.has_value() && share >= info.worst_head_share) continue;
    info.worst_head = static_cast<uint32_t>(head);
    info.worst_head_share = share;
  }
  return info;
}

void CountTruth(const TruthSample& sample, Stats& stats) {
  TruthStats& sums = stats.truth[static_cast<size_t>(sample.source)];
  const auto add = [](auto& sum, auto value) { sum.fetch_add(value, std::memory_order_relaxed); };
  for (const HeadTruth& head : sample.heads) {
    add(sums.needles, uint64_t{head.needle});
    add(sums.needles_found, uint64_t{head.found});
    add(sums.mass, head.mass);
    add(sums.output_error, head.output_error);
  }
  add(sums.samples, uint64_t{1});
  add(sums.heads, uint64_t{sample.heads.size()});
  add(sums.best_tokens, sample.best_tokens);
  add(sums.best_chosen, sample.best_chosen);
}

TruthInfo SumTruth(const std::vector<TruthInfo>& layers) {
  TruthInfo sum;
  for (const TruthInfo& layer : layers) {
    sum.samples += layer.samples;
    sum.needles += layer.needles;
    sum.needles_found += layer.needles_found;
    sum.best_tokens += layer.best_tokens;
    sum.best_chosen += layer.best_chosen;
    sum.heads += layer.heads;
    sum.mass_sum += layer.mass_sum;
    sum.output_error_sum += layer.output_error_sum;
    if (!layer.worst_head.has_value()) continue;
    if (sum.worst_head.has_value() && layer.worst_head_share >= sum.worst_head_share) continue;
    sum.worst_head = layer.worst_head;
    sum.worst_head_share = layer.worst_head_share;
  }
  return sum;
}

}  // namespace ctkvr
