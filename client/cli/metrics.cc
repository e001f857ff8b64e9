// SPDX-License-Identifier: Apache-2.0
#include "client/cli/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ctkvr::cli {
namespace {

std::optional<double> Share(double part, uint64_t whole) {
  if (whole == 0) return std::nullopt;
  return part / static_cast<double>(whole);
}

// Full attention of each head, [heads, tokens]. In binary64, so that ranks far down are still told apart.
std::vector<double> Attention(const SetObservation& set) {
  std::vector<double> weights(size_t{set.heads} * set.tokens);
  for (uint32_t head = 0; head < set.heads; ++head) {
    const float* scores = set.scores.data() + head * set.stride;
    double* row = weights.data() + size_t{head} * set.tokens;
    const float top = *std::max_element(scores, scores + set.tokens);
    for (uint32_t t = 0; t < set.tokens; ++t) {
      row[t] = std::exp(static_cast<double>(set.softmax_scale) * (static_cast<double>(scores[t]) - top));
    }
    const double factor = 1 / std::accumulate(row, row + set.tokens, 0.0);
    for (uint32_t t = 0; t < set.tokens; ++t) row[t] *= factor;
  }
  return weights;
}

bool Contains(std::span<const uint32_t> ascending, uint32_t id) {
  return std::binary_search(ascending.begin(), ascending.end(), id);
}

}  // namespace

void Metrics::Add(const SetObservation& set) {
  if (set.tokens == 0) return;
  const std::vector<double> weights = Attention(set);
  AddNeedles(set, weights);
  AddRecall(set, weights);
  for (uint32_t head = 0; head < set.heads; ++head) {
    double mass = 0;
    for (const uint32_t id : set.chosen) {
      if (id < set.tokens) mass += weights[size_t{head} * set.tokens + id];
    }
    mass_ += mass;
  }
  head_steps_ += set.heads;
  chosen_ += set.chosen.size();
  ++sets_;
}

void Metrics::AddNeedles(const SetObservation& set, std::span<const double> weights) {
  const uint32_t end = std::min(set.needle_end, set.tokens);
  if (set.needle_begin >= end) return;
  for (uint32_t head = 0; head < set.heads; ++head) {
    const double* row = weights.data() + size_t{head} * set.tokens;
    const double* heaviest = std::max_element(row + set.needle_begin, row + end);
    if (!(*heaviest > kNeedleShare)) continue;
    ++needles_[set.first_head + head];
    if (Contains(set.chosen, static_cast<uint32_t>(heaviest - row))) ++found_[set.first_head + head];
  }
}

void Metrics::AddRecall(const SetObservation& set, std::span<const double> weights) {
  const uint32_t end = std::min(set.force_from, set.tokens);
  if (set.force_below >= end) return;
  std::vector<double> group(end - set.force_below, 0.0);
  for (uint32_t head = 0; head < set.heads; ++head) {
    const double* row = weights.data() + size_t{head} * set.tokens + set.force_below;
    for (size_t i = 0; i < group.size(); ++i) {
      group[i] = set.reduction == v1::GROUP_REDUCTION_MAX_SOFTMAX ? std::max(group[i], row[i]) : group[i] + row[i];
    }
  }
  std::vector<uint32_t> order(group.size());
  std::iota(order.begin(), order.end(), 0u);
  const size_t best = std::min<size_t>(set.k_tokens, order.size());
  const auto better = [&group](uint32_t a, uint32_t b) { return group[a] != group[b] ? group[a] > group[b] : a < b; };
  if (best < order.size()) {
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(best), order.end(), better);
  }
  for (size_t i = 0; i < best; ++i) best_chosen_ += Contains(set.chosen, set.force_below + order[i]) ? 1 : 0;
  best_tokens_ += best;
}

void Metrics::Merge(const Metrics& other) {
  for (size_t head = 0; head < needles_.size(); ++head) {
    needles_[head] += other.needles_[head];
    found_[head] += other.found_[head];
  }
  best_tokens_ += other.best_tokens_;
  best_chosen_ += other.best_chosen_;
  mass_ += other.mass_;
  head_steps_ += other.head_steps_;
  chosen_ += other.chosen_;
  sets_ += other.sets_;
}

uint64_t Metrics::needles() const { return std::accumulate(needles_.begin(), needles_.end(), uint64_t{0}); }
uint64_t Metrics::needles_found() const { return std::accumulate(found_.begin(), found_.end(), uint64_t{0}); }

std::optional<double> Metrics::needle_share() const { return Share(static_cast<double>(needles_found()), needles()); }

std::optional<double> Metrics::worst_head() const {
  std::optional<double> worst;
  for (size_t head = 0; head < needles_.size(); ++head) {
    if (needles_[head] < kWorstHeadNeedles) continue;
    worst = std::min(worst.value_or(1), *Share(static_cast<double>(found_[head]), needles_[head]));
  }
  return worst;
}

std::optional<double> Metrics::recall() const { return Share(static_cast<double>(best_chosen_), best_tokens_); }
std::optional<double> Metrics::mass() const { return Share(mass_, head_steps_); }
std::optional<double> Metrics::tokens_chosen() const { return Share(static_cast<double>(chosen_), sets_); }

}  // namespace ctkvr::cli
