// SPDX-License-Identifier: Apache-2.0
#include "client/cli/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "client/cli/scores.h"
#include "ctkvr/client/tensor.h"

namespace ctkvr::cli {
namespace {

constexpr double kUnit = 1.0 / (1 << 24);  // half a unit in the last place of 1.0f

double Norm(std::span<const float> x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

// What brute force says of one set.
struct Truth {
  std::vector<double> scores;  // [heads, stride]
  size_t stride = 0;
  std::vector<double> rank{};    // [tokens], in the log domain
  std::vector<double> bounds{};  // [heads]: allowed error of a score
  double tie_band = 0;
};

Truth MakeTruth(const KeyBlocks<double>& keys, double key_norm_max, std::span<const float> queries, uint32_t head_dim,
                uint32_t tokens, const VerifySettings& settings) {
  const auto heads = static_cast<uint32_t>(queries.size() / head_dim);
  Truth truth{.scores = std::vector<double>(heads * keys.stride()), .stride = keys.stride()};
  keys.Score(queries, tokens, truth.scores);
  const bool max = settings.reduction == v1::GROUP_REDUCTION_MAX_SOFTMAX;
  truth.rank.assign(tokens, max ? -INFINITY : 0.0);
  for (uint32_t head = 0; head < heads; ++head) {
    const double* row = truth.scores.data() + head * truth.stride;
    const double top = *std::max_element(row, row + tokens);
    double sum = 0;
    for (uint32_t t = 0; t < tokens; ++t) sum += std::exp(settings.softmax_scale * (row[t] - top));
    const double lse = settings.softmax_scale * top + std::log(sum);
    for (uint32_t t = 0; t < tokens; ++t) {
      const double share = settings.softmax_scale * row[t] - lse;
      truth.rank[t] = max ? std::max(truth.rank[t], share) : truth.rank[t] + std::exp(share);
    }
    truth.bounds.push_back(4 * std::sqrt(head_dim) * kUnit * Norm(queries.subspan(head * head_dim, head_dim)) *
                           key_norm_max);
  }
  if (!max) {
    for (double& value : truth.rank) value = std::log(value);
  }
  truth.tie_band = 2 * settings.softmax_scale * *std::max_element(truth.bounds.begin(), truth.bounds.end()) + 1e-6;
  return truth;
}

struct Set {
  std::span<const uint32_t> ids;
  std::span<const float> scores{};  // [heads, ids], or empty
  uint32_t tokens = 0;
  uint32_t force_below = 0;
  uint32_t force_from = 0;
};

// Empty when the ids are what brute force gives, ties aside.
std::string CheckIds(const Set& set, const Truth& truth, uint32_t k, uint64_t* tied) {
  std::vector<bool> chosen(set.tokens);
  for (size_t i = 0; i < set.ids.size(); ++i) {
    if (set.ids[i] >= set.tokens) return fmt::format("token {} is not visible", set.ids[i]);
    if (i > 0 && set.ids[i] <= set.ids[i - 1]) return fmt::format("ids do not ascend at {}", set.ids[i]);
    chosen[set.ids[i]] = true;
  }
  std::vector<uint32_t> order;
  for (uint32_t t = 0; t < set.tokens; ++t) {
    if (t >= set.force_below && t < set.force_from) {
      order.push_back(t);
    } else if (!chosen[t]) {
      return fmt::format("token {} must always be included", t);
    }
  }
  const size_t always = set.tokens - order.size();
  const size_t best = std::min<size_t>(k, order.size());
  if (set.ids.size() != always + best) {
    return fmt::format("{} tokens were chosen; {} are expected", set.ids.size(), always + best);
  }
  if (best == 0) return "";
  const auto& rank = truth.rank;
  const auto last = order.begin() + static_cast<std::ptrdiff_t>(best) - 1;
  std::nth_element(order.begin(), last, order.end(),
                   [&rank](uint32_t a, uint32_t b) { return rank[a] != rank[b] ? rank[a] > rank[b] : a < b; });
  const double border = rank[*last];
  for (size_t i = 0; i < order.size(); ++i) {
    if (chosen[order[i]] == (i < best)) continue;
    ++*tied;
    if (std::abs(rank[order[i]] - border) > truth.tie_band) {
      return fmt::format("token {} was {} and ranks {:.3e} {} the last one to choose", order[i],
                         chosen[order[i]] ? "chosen" : "left out", std::abs(rank[order[i]] - border),
                         rank[order[i]] > border ? "above" : "below");
    }
  }
  return "";
}

void CheckScores(const Set& set, const Truth& truth, const std::string& where, VerifyReport* report) {
  for (size_t head = 0; head < truth.bounds.size(); ++head) {
    for (size_t i = 0; i < set.ids.size() && !set.scores.empty(); ++i) {
      const double exact = truth.scores[head * truth.stride + set.ids[i]];
      const double error = std::abs(set.scores[head * set.ids.size() + i] - exact);
      const double bound = truth.bounds[head];
      report->score_error_max = std::max(report->score_error_max, bound > 0 ? error / bound : 0);
      if (error <= bound) continue;
      ++report->wrong_scores;
      if (report->first.empty()) {
        report->first =
            fmt::format("{}: score of token {} is off by {:.3e}; {:.3e} is allowed", where, set.ids[i], error, bound);
      }
    }
  }
}

}  // namespace

void VerifyReport::Merge(const VerifyReport& other) {
  sets += other.sets;
  wrong_sets += other.wrong_sets;
  tied_tokens += other.tied_tokens;
  wrong_scores += other.wrong_scores;
  score_error_max = std::max(score_error_max, other.score_error_max);
  if (first.empty()) first = other.first;
}

VerifyReport VerifySteps(const Trace& trace, const VerifySettings& settings,
                         const std::vector<std::vector<float>>& keys, const std::vector<StepRecord>& steps) {
  const bool per_head = settings.reduction == v1::GROUP_REDUCTION_PER_HEAD;
  const uint32_t set_heads = per_head ? 1 : trace.group_heads();
  const uint32_t sets = trace.q_heads / set_heads;
  const uint32_t dim = trace.head_dim;
  VerifyReport report;
  std::vector<float> queries(size_t{trace.q_heads} * dim);
  std::vector<uint64_t> begins(steps.size(), 0);  // of the ids of the head in work
  for (uint32_t set_index = 0; set_index < sets; ++set_index) {
    const std::vector<float>& head_keys = keys[set_index * set_heads / trace.group_heads()];
    const KeyBlocks<double> blocks(head_keys, dim);
    double key_norm_max = 0;
    for (size_t t = 0; t < blocks.tokens(); ++t) {
      key_norm_max = std::max(key_norm_max, Norm(std::span(head_keys).subspan(t * dim, dim)));
    }
    for (size_t s = 0; s < steps.size(); ++s) {
      const StepRecord& step = steps[s];
      const uint32_t tokens = step.position + 1;
      static_cast<void>(client::ToFloat(v1::DTYPE_F16, std::as_bytes(trace.queries_of(step.position, 1)), queries));
      const Truth truth = MakeTruth(blocks, key_norm_max,
                                    std::span(queries).subspan(size_t{set_index} * set_heads * dim, set_heads * dim),
                                    dim, tokens, settings);
      const uint32_t count = step.counts[set_index];
      Set set{.ids = std::span(step.ids).subspan(begins[s], count), .tokens = tokens};
      if (!step.scores.empty()) {
        set.scores = std::span(step.scores).subspan(begins[s] * set_heads, size_t{count} * set_heads);
      }
      begins[s] += count;
      set.force_below = std::min(settings.sink_tokens, tokens);
      set.force_from = tokens - (step.always_tokens - std::min(set.force_below, step.always_tokens));
      const std::string where = fmt::format("{}, position {}, set {}", trace.name, step.position, set_index);
      const std::string wrong = CheckIds(set, truth, settings.k_tokens, &report.tied_tokens);
      ++report.sets;
      if (!wrong.empty()) {
        ++report.wrong_sets;
        if (report.first.empty()) report.first = where + ": " + wrong;
        continue;
      }
      CheckScores(set, truth, where, &report);
    }
  }
  return report;
}

}  // namespace ctkvr::cli
