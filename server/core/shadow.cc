// SPDX-License-Identifier: Apache-2.0

#include "server/core/shadow.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/core/retrieval_set.h"
#include "server/core/session.h"

namespace ctkvr {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

double LogAdd(double a, double b) {
  const double top = std::max(a, b);
  return top == kNothing ? kNothing : top + std::log(std::exp(a - top) + std::exp(b - top));
}

// The last position's rows of an attention, as it is answered.
PartialAttention LastPosition(const PartialAttention& attention) {
  const auto last = [&](const std::string& bytes) {
    return bytes.substr(bytes.size() - bytes.size() / attention.positions);
  };
  return {.positions = 1,
          .q_heads = attention.q_heads,
          .value_dim = attention.value_dim,
          .dtype = attention.dtype,
          .output = last(attention.output),
          .log_sum_exp = last(attention.log_sum_exp)};
}

}  // namespace

// ---- Offering ------------------------------------------------------------------------------------------------------

void OfferShadow(Session& session, RetrievalItem& item, ShadowSlot& slot, Stats& stats) {
  if (slot.has_value()) return SkipShadow(&session, ShadowSkip::kBusy, stats);
  const Query& query = *item.query;
  const std::span<const std::byte> queries = query.queries.last(query.queries.size() / query.positions);
  ShadowQuery shadow{.session = session.key(),
                     .epoch = session.epoch(),
                     .truncations = session.truncations(),
                     .code_generation = item.layer->code_generation(),
                     .layer = query.layer,
                     .set_heads = item.plan.set_heads,
                     .seen = std::min(item.layer->length(), query.position + query.positions),
                     .plan = item.plan.positions.back(),
                     .used = item.plan.used,
                     .queries = {queries.begin(), queries.end()},
                     .chosen = std::move(item.last_chosen),
                     .remainder = std::nullopt};
  if (item.answer.remainder.has_value()) shadow.remainder = LastPosition(*item.answer.remainder);
  if (shadow.bytes() > limits::kShadowBytesMax) return SkipShadow(&session, ShadowSkip::kTooLarge, stats);
  slot = std::move(shadow);
}

void SkipShadow(Session* session, ShadowSkip skip, Stats& stats) {
  if (session != nullptr) session->CountSkippedShadow();
  stats.shadows_skipped[static_cast<size_t>(skip)].fetch_add(1, std::memory_order_relaxed);
}

size_t ShadowQuery::bytes() const {
  size_t bytes = queries.size() + size_t{set_heads} * seen * sizeof(float);
  for (const std::vector<uint32_t>& tokens : chosen) bytes += tokens.size() * sizeof(uint32_t);
  if (remainder.has_value()) bytes += remainder->output.size() + remainder->log_sum_exp.size();
  return bytes;
}

// ---- Running -------------------------------------------------------------------------------------------------------

void Shadow::Part::Clear(size_t heads, size_t value_dim) {
  output.assign(heads * value_dim, 0);
  lse.assign(heads, kNothing);
}

void Shadow::Part::Add(const float* part_output, const float* part_lse) {
  const size_t value_dim = output.size() / lse.size();
  for (size_t r = 0; r < lse.size(); ++r) {
    const double sum = LogAdd(lse[r], part_lse[r]);
    if (sum == kNothing) continue;
    const double held = std::exp(lse[r] - sum), added = std::exp(part_lse[r] - sum);
    double* const row = output.data() + r * value_dim;
    for (size_t i = 0; i < value_dim; ++i) row[i] = held * row[i] + added * part_output[r * value_dim + i];
    lse[r] = sum;
  }
}

Shadow::Shadow(ShadowQuery query, const Layer& layer)
    : query_(std::move(query)),
      config_(layer.config()),
      sets_(static_cast<uint32_t>(query_.chosen.size())),
      heads_(query_.set_heads),
      region_begin_(std::clamp(query_.plan.force_below, query_.plan.begin, query_.plan.end)),
      region_end_(std::clamp(query_.plan.force_from, region_begin_, query_.plan.end)) {
  sample_.source = PathSource(query_.plan.path);
  sample_.heads.resize(config_.q_heads);
  scores_ = std::make_unique_for_overwrite<float[]>(size_t{heads_} * query_.seen);
  BeginSet();
}

void Shadow::BeginSet() {
  phase_ = Phase::kScan;
  next_ = 0;
  for (Part* part : {&served_, &local_, &chosen_}) part->Clear(heads_, config_.value_dim);
  heaviest_.assign(heads_, query_.seen);
  best_.clear();
  const std::vector<uint32_t>& chosen = query_.chosen[set_];
  const auto others = std::count_if(chosen.begin(), chosen.end(), [this](uint32_t token) { return InRegion(token); });
  best_max_ = HasFilter(query_.used) ? static_cast<uint32_t>(others) : query_.used.k_tokens;
}

absl::StatusOr<bool> Shadow::Step(LaneDevice device, const Layer& layer) {
  const auto chosen_count = static_cast<uint32_t>(query_.chosen[set_].size());
  if (phase_ == Phase::kScan) {
    CTKVR_RETURN_IF_ERROR(ScanSlice(device, layer));
    if (next_ < query_.seen) return false;
    phase_ = Phase::kChosen;
    next_ = 0;
    return false;
  }
  if (phase_ == Phase::kChosen) {
    if (next_ < chosen_count) CTKVR_RETURN_IF_ERROR(ChosenSlice(device, layer));
    if (next_ < chosen_count) return false;
    total_.resize(heads_);
    for (uint32_t r = 0; r < heads_; ++r) {
      const std::vector<float>& sinks = config_.softmax.sink_logits;
      const double sink = sinks.empty() ? kNothing : sinks[set_ * heads_ + r];
      total_[r] = LogAdd(LogAdd(served_.lse[r], local_.lse[r]), sink);
    }
    phase_ = Phase::kRank;
    next_ = region_begin_;
    return false;
  }
  RankSlice();
  if (next_ < region_end_) return false;
  EndSet();
  if (++set_ == sets_) return true;
  BeginSet();
  return false;
}

// One operation's scores and their part of the attention.
absl::Status Shadow::ScanSlice(LaneDevice device, const Layer& layer) {
  // A slice lies in the worker's part or in the server's, never in both.
  uint32_t end = std::min(query_.seen, next_ + limits::kShadowSliceTokens);
  for (uint32_t border : {query_.plan.begin, query_.plan.end}) {
    if (next_ < border) end = std::min(end, border);
  }
  const uint32_t count = end - next_;
  const uint32_t first_head = set_ * heads_;
  const uint32_t kv_head = first_head / config_.group_heads();
  const size_t head_bytes = query_.queries.size() / config_.q_heads;
  BatchMemory memory(device);
  const HeadView view = memory.Stage(layer.View(kv_head), Layer::page_count(layer.length()));
  const PrepareQueriesItem prepare =
      MakePrepare(memory, layer, view, std::span(query_.queries).subspan(first_head * head_bytes, heads_ * head_bytes));
  std::vector<float> output(size_t{heads_} * config_.value_dim), lse(heads_);
  const ScoreTokensItem score{.view = view,
                              .query = prepare.out,
                              .tokens = nullptr,
                              .begin = next_,
                              .count = memory.In(&count, 1),
                              .count_max = count,
                              .scores = memory.Take<float>(size_t{heads_} * count),
                              .stride = count};
  const AttendItem attend{.view = view,
                          .heads = heads_,
                          .tokens = nullptr,
                          .begin = next_,
                          .count = score.count,
                          .count_max = count,
                          .scores = score.scores,
                          .stride = count,
                          .softmax = {.scale = config_.softmax.scale, .softcap = config_.softmax.softcap},
                          .output = memory.Out(output.data(), output.size()),
                          .log_sum_exp = memory.Out(lse.data(), lse.size())};
  if (memory.exhausted()) return memory.ExhaustedError("a slice of an exact repeat");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.PrepareQueries(device.stream, {&prepare, 1});
  if (status.ok()) status = device.backend.ScoreTokens(device.stream, {&score, 1});
  if (status.ok()) status = device.backend.Attend(device.stream, {&attend, 1});
  for (uint32_t r = 0; status.ok() && r < heads_; ++r) {
    memory.CopyOut(scores_.get() + size_t{r} * query_.seen + next_, score.scores + size_t{r} * count, count);
  }
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) {
    (void)memory.Settle();
    return status;
  }
  const bool served = next_ >= query_.plan.begin && next_ < query_.plan.end;
  (served ? served_ : local_).Add(output.data(), lse.data());
  next_ = end;
  return absl::OkStatus();
}

absl::Status Shadow::ChosenSlice(LaneDevice device, const Layer& layer) {
  const std::vector<uint32_t>& chosen = query_.chosen[set_];
  const uint32_t count = std::min(static_cast<uint32_t>(chosen.size()) - next_, limits::kShadowSliceTokens);
  const std::span<const uint32_t> tokens = std::span(chosen).subspan(next_, count);
  std::vector<float> scores, output(size_t{heads_} * config_.value_dim), lse(heads_);
  for (uint32_t r = 0; r < heads_; ++r) {
    for (uint32_t token : tokens) scores.push_back(scores_[size_t{r} * query_.seen + token]);
  }
  BatchMemory memory(device);
  const AttendItem attend{
      .view = memory.Stage(layer.View(set_ * heads_ / config_.group_heads()), Layer::page_count(layer.length())),
      .heads = heads_,
      .tokens = memory.In(tokens.data(), count),
      .begin = 0,
      .count = memory.In(&count, 1),
      .count_max = count,
      .scores = memory.In(scores.data(), scores.size()),
      .stride = count,
      .softmax = {.scale = config_.softmax.scale, .softcap = config_.softmax.softcap},
      .output = memory.Out(output.data(), output.size()),
      .log_sum_exp = memory.Out(lse.data(), lse.size())};
  if (memory.exhausted()) return memory.ExhaustedError("a slice of an exact repeat");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.Attend(device.stream, {&attend, 1});
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) {
    (void)memory.Settle();
    return status;
  }
  chosen_.Add(output.data(), lse.data());
  next_ += count;
  return absl::OkStatus();
}

double Shadow::Logit(float score) const {
  const double logit = static_cast<double>(config_.softmax.scale) * score;
  const double softcap = config_.softmax.softcap;
  return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit;
}

void Shadow::RankSlice() {
  const uint32_t end = std::min(region_end_, next_ + limits::kShadowSliceTokens);
  const bool most = query_.used.reduction == Reduction::kMaxSoftmax;
  for (uint32_t token = next_; token < end; ++token) {
    // In float64, so that shares far down are still told apart.
    double group = 0;
    for (uint32_t r = 0; r < heads_; ++r) {
      const float* const row = scores_.get() + size_t{r} * query_.seen;
      if (heaviest_[r] == query_.seen || row[token] > row[heaviest_[r]]) heaviest_[r] = token;
      const double share = std::exp(Logit(row[token]) - total_[r]);
      group = most ? std::max(group, share) : group + share;
    }
    best_.emplace_back(group, token);
  }
  next_ = std::max(next_, end);
  if (best_.size() <= best_max_) return;
  const auto better = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  std::nth_element(best_.begin(), best_.begin() + best_max_, best_.end(), better);
  best_.resize(best_max_);
}

bool Shadow::HasChosen(uint32_t token) const {
  return std::binary_search(query_.chosen[set_].begin(), query_.chosen[set_].end(), token);
}

void Shadow::EndSet() {
  sample_.best_tokens += best_.size();
  for (const auto& [share, token] : best_) sample_.best_chosen += HasChosen(token);
  for (uint32_t r = 0; r < heads_; ++r) EndHead(r);
  // What was chosen has told the mass; now the remainder joins it.
  AddRemainder();
  for (uint32_t r = 0; r < heads_; ++r) {
    double error = 0, norm = 0;
    for (size_t i = size_t{r} * config_.value_dim; i < size_t{r + 1} * config_.value_dim; ++i) {
      const double difference = chosen_.output[i] - served_.output[i];
      error += difference * difference;
      norm += served_.output[i] * served_.output[i];
    }
    sample_.heads[set_ * heads_ + r].output_error = norm > 0 ? std::sqrt(error / norm) : 0;
  }
}

void Shadow::AddRemainder() {
  if (!query_.remainder.has_value()) return;
  const PartialAttention& rest = *query_.remainder;
  const auto* const bytes = reinterpret_cast<const std::byte*>(rest.output.data());
  const size_t first = size_t{set_} * heads_ * config_.value_dim;
  std::vector<float> output(size_t{heads_} * config_.value_dim);
  for (size_t i = 0; i < output.size(); ++i) output[i] = LoadElement(bytes, rest.dtype, first + i);
  chosen_.Add(output.data(), reinterpret_cast<const float*>(rest.log_sum_exp.data()) + size_t{set_} * heads_);
}

// Needle and mass.
void Shadow::EndHead(uint32_t head) {
  HeadTruth& truth = sample_.heads[set_ * heads_ + head];
  const double tokens = LogAdd(served_.lse[head], local_.lse[head]);
  truth.mass = std::exp(LogAdd(chosen_.lse[head], local_.lse[head]) - tokens);
  const uint32_t token = heaviest_[head];
  if (token == query_.seen) return;
  const float score = scores_[size_t{head} * query_.seen + token];
  truth.needle = std::exp(Logit(score) - total_[head]) > limits::kNeedleShare;
  truth.found = truth.needle && HasChosen(token);
}

}  // namespace ctkvr
