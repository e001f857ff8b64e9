// SPDX-License-Identifier: Apache-2.0

#include "server/core/retriever.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include "server/core/bytes_read.h"
#include "server/core/context.h"
#include "server/core/observer.h"
#include "server/core/partial_attention.h"
#include "server/core/query_feed.h"
#include "server/core/retrieval_plan.h"
#include "server/core/retrieval_set.h"

namespace ctkvr {
namespace {

// Where bytes of a string begin, as elements of T.
template <typename T>
T* At(std::string& bytes, size_t element) {
  return reinterpret_cast<T*>(bytes.data() + element * sizeof(T));
}

// At an item's first set, once the answers before it have placed theirs.
void BeginCache(RetrievalItem& item) {
  if (item.placing) return;
  SlotTable& table = *item.layer->slot_table();
  table.Begin({.sets = item.plan.sets,
               .row_format = item.options().row_format,
               .code_generation = item.layer->code_generation()},
              item.query->cache_version);
  item.answer.cache_version = table.version();
  item.placing = true;
}

// Runs sets in rounds as large as scratch allows.
class Rounds {
 public:
  Rounds(LaneDevice device, const Clock& clock, Stats& stats)
      : device_(device), clock_(clock), stats_(stats), memory_(device) {}

  void Add(RetrievalItem& item) {
    for (uint32_t p = 0; p < item.plan.positions.size(); ++p) {
      if (item.plan.positions[p].path == Path::kEmpty) continue;
      for (uint32_t s = 0; s < item.plan.sets && item.status.ok(); ++s) AddSet(item, p, s);
    }
  }

  // Runs the sets that wait.
  void Flush() {
    if (sets_.empty()) return;
    absl::Status status = Choose();
    if (status.ok()) {
      DropExpired();
      status = Answer();
    }
    if (!status.ok()) {
      (void)memory_.Settle();
      NoteDeviceError(stats_, status);
      for (const auto& set : sets_) {
        if (set->item->status.ok()) set->item->status = status;
      }
    }
    sets_.clear();
    memory_.ResetTo(start_);
  }

 private:
  void AddSet(RetrievalItem& item, uint32_t position, uint32_t set_index) {
    for (bool again : {false, true}) {
      const BatchMemory::Mark mark = memory_.mark();
      auto set = std::make_unique<RetrievalSet>();
      set->item = &item;
      set->plan = &item.plan.positions[position];
      set->position = position;
      set->set = set_index;
      BuildSet(memory_, *set);
      if (!memory_.exhausted()) {
        sets_.push_back(std::move(set));
        return;
      }
      const absl::Status error = memory_.ExhaustedError("one set of the retrieval");
      memory_.ResetTo(mark);
      if (again || sets_.empty()) {
        item.status = error;
        (void)memory_.Settle();  // copies into the set's arrays may still be under way
        return;
      }
      Flush();
      if (!item.status.ok()) return;  // failed with the sets before
    }
  }

  // One operation for all sets that take part.
  template <typename Operand>
  absl::Status Operate(absl::Status (Backend::*operation)(Stream&, std::span<const Operand>),
                       Operand RetrievalSet::*operand, bool (*takes_part)(const RetrievalSet&)) {
    std::vector<Operand> operands;
    for (const auto& set : sets_) {
      if (takes_part(*set)) operands.push_back((*set).*operand);
    }
    if (operands.empty()) return absl::OkStatus();
    return (device_.backend.*operation)(device_.stream, operands);
  }

  absl::Status PrepareAll() {
    std::vector<PrepareQueriesItem> items;
    for (const auto& set : sets_) items.insert(items.end(), set->prepare.begin(), set->prepare.end());
    return items.empty() ? absl::OkStatus() : device_.backend.PrepareQueries(device_.stream, items);
  }

  // Up to the chosen tokens and their scores in scratch, counts and the remainder on the host.
  absl::Status Choose() {
    using Set = RetrievalSet;
    const auto sketches = [](const Set& set) { return set.is(Path::kSketch); };
    const auto opens = [](const Set& set) { return set.opens_clusters(); };
    const auto estimated = [](const Set& set) { return set.scans_sketch(); };
    const auto refines = [](const Set& set) { return set.is(Path::kSketch) && set.plan->survivors > 0; };
    const auto probes = [](const Set& set) { return set.is(Path::kCentroids); };
    const auto scores = [](const Set& set) { return set.scores(); };
    const auto selects = [](const Set& set) { return set.selects(); };
    const auto estimates = [](const Set& set) { return set.estimates(); };
    const TimePoint start = clock_.Now();
    CTKVR_RETURN_IF_ERROR(memory_.status());
    CTKVR_RETURN_IF_ERROR(PrepareAll());
    const TimePoint prepared = clock_.Now();
    CTKVR_RETURN_IF_ERROR(Operate<ScanPlanesItem>(&Backend::ScanPlanes, &Set::scan, sketches));
    CTKVR_RETURN_IF_ERROR(Operate<SelectTokensItem>(&Backend::SelectTokens, &Set::select_survivors, refines));
    CTKVR_RETURN_IF_ERROR(Operate<RefinePlanesItem>(&Backend::RefinePlanes, &Set::refine, refines));
    CTKVR_RETURN_IF_ERROR(Operate<MergeCandidatesItem>(&Backend::MergeCandidates, &Set::list_forced, opens));
    CTKVR_RETURN_IF_ERROR(Operate<ScoreTokensItem>(&Backend::ScoreTokens, &Set::score_forced, opens));
    CTKVR_RETURN_IF_ERROR(Operate<SelectClustersItem>(&Backend::SelectClusters, &Set::select_clusters, opens));
    CTKVR_RETURN_IF_ERROR(Operate<ScanClustersItem>(&Backend::ScanClusters, &Set::scan_clusters, opens));
    CTKVR_RETURN_IF_ERROR(Operate<SelectTokensItem>(&Backend::SelectTokens, &Set::select_candidates, estimated));
    CTKVR_RETURN_IF_ERROR(Operate<SelectListsItem>(&Backend::SelectLists, &Set::select_lists, probes));
    CTKVR_RETURN_IF_ERROR(Operate<MergeCandidatesItem>(&Backend::MergeCandidates, &Set::merge, probes));
    const TimePoint found = clock_.Now();
    CTKVR_RETURN_IF_ERROR(Operate<ScoreTokensItem>(&Backend::ScoreTokens, &Set::score, scores));
    CTKVR_RETURN_IF_ERROR(Operate<SelectTokensItem>(&Backend::SelectTokens, &Set::select, selects));
    CTKVR_RETURN_IF_ERROR(Operate<EstimateRestItem>(&Backend::EstimateRest, &Set::rest, estimates));
    CTKVR_RETURN_IF_ERROR(memory_.Finish());
    Observe(Stage::kPrepare, prepared - start);
    Observe(Stage::kCandidates, found - prepared);
    Observe(Stage::kSelect, clock_.Now() - found);
    return absl::OkStatus();
  }

  void Observe(Stage stage, std::chrono::nanoseconds duration) {
    stats_.stages[static_cast<size_t>(stage)].Observe(duration);
    const CallContext* told = nullptr;  // the sets of a call stand together
    for (const auto& set : sets_) {
      if (set->item->context != told) set->item->context->Spent(stage, duration);
      told = set->item->context;
    }
  }

  void DropExpired() {
    const TimePoint now = clock_.Now();
    for (const auto& set : sets_) {
      RetrievalItem& item = *set->item;
      if (!item.status.ok()) continue;
      item.status = CheckContext(*item.context, now, "gathering");
      if (!item.status.ok()) stats_.expired_in_flight.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Ids, scores, rows and attention into the answers.
  absl::Status Answer() {
    const TimePoint start = clock_.Now();
    for (const auto& set : sets_) {
      if (!set->selects()) set->chosen = set->plan->visible();
    }
    CTKVR_RETURN_IF_ERROR(PlaceNewRows());
    MakeRoom();
    std::vector<GatherRowsItem> gathers;
    std::vector<std::pair<std::byte*, std::byte*>> rows;  // where each gather's keys and values end
    std::vector<AttendItem> attends;
    for (const auto& set : sets_) {
      if (!set->item->status.ok() || set->listed() == 0) continue;
      Fill(*set, gathers, rows);
      if (set->item->wants_attention()) attends.push_back(set->attend);
    }
    CTKVR_RETURN_IF_ERROR(memory_.status());
    if (!gathers.empty()) CTKVR_RETURN_IF_ERROR(device_.backend.GatherRows(device_.stream, gathers));
    if (!attends.empty()) CTKVR_RETURN_IF_ERROR(device_.backend.Attend(device_.stream, attends));
    if (!memory_.shares_host_memory()) CopyRows(gathers, rows);
    if (!memory_.shares_host_memory()) CopyAttention();
    for (const auto& set : sets_) KeepChosen(*set);
    CTKVR_RETURN_IF_ERROR(memory_.Finish());
    for (const auto& set : sets_) Conclude(*set);
    Observe(Stage::kGather, clock_.Now() - start);
    return absl::OkStatus();
  }

  // Gives the chosen tokens their slots, in the order of the answers; host_tokens are then those the worker lacks.
  absl::Status PlaceNewRows() {
    std::vector<RetrievalSet*> placed;
    for (const auto& set : sets_) {
      if (!set->item->status.ok() || !set->item->wants_new_rows()) continue;
      set->host_tokens.resize(set->chosen);
      if (set->selects()) {
        memory_.CopyOut(set->host_tokens.data(), set->select.chosen, set->chosen);
      } else {
        std::iota(set->host_tokens.begin(), set->host_tokens.end(), set->plan->begin);
      }
      placed.push_back(set.get());
    }
    if (placed.empty()) return absl::OkStatus();
    CTKVR_RETURN_IF_ERROR(memory_.Finish());
    for (RetrievalSet* set : placed) {
      if (set->item->status.ok()) PlaceSet(*set);
    }
    return absl::OkStatus();
  }

  void PlaceSet(RetrievalSet& set) {
    RetrievalItem& item = *set.item;
    struct Answer& answer = item.answer;
    BeginCache(item);
    const size_t before = answer.slots.size() / sizeof(uint16_t);
    answer.slots.resize((before + set.chosen) * sizeof(uint16_t));
    auto* const slots = At<uint16_t>(answer.slots, before);
    SlotTable& table = *item.layer->slot_table();
    if (!table.Place(set.set, set.host_tokens, set.plan->force_from, slots, missing_)) {
      item.status = CacheTooSmallError(table.slots(), table.slots() + 1);
      return;
    }
    set.missing = static_cast<uint32_t>(missing_.size());
    answer.new_counts[size_t{set.position} * item.plan.sets + set.set] = set.missing;
    const size_t new_before = answer.new_slots.size() / sizeof(uint16_t);
    answer.new_slots.resize((new_before + set.missing) * sizeof(uint16_t));
    for (uint32_t i = 0; i < set.missing; ++i) {
      At<uint16_t>(answer.new_slots, new_before)[i] = slots[missing_[i]];
      set.host_tokens[i] = set.host_tokens[missing_[i]];
    }
  }

  // Answers must not move while copies into them are under way, so they grow once a round.
  void MakeRoom() {
    for (const auto& set : sets_) {
      RetrievalItem& item = *set->item;
      if (!item.status.ok()) continue;
      item.answer.counts[size_t{set->position} * item.plan.sets + set->set] = set->chosen;
      item.new_tokens += set->listed();
      item.new_scores += size_t{set->chosen} * item.plan.set_heads;
    }
    for (const auto& set : sets_) {
      RetrievalItem& item = *set->item;
      const RowBytes row = AnswerRowBytes(*item.layer, item.options());
      const size_t tokens = item.filled_tokens + item.new_tokens;
      if (item.wants_ids()) item.answer.ids.resize(tokens * sizeof(uint32_t));
      if (item.wants_scores()) item.answer.scores.resize((item.filled_scores + item.new_scores) * sizeof(float));
      if (item.wants_rows()) item.answer.keys.resize(tokens * row.key);
      if (item.wants_rows()) item.answer.values.resize(tokens * row.value);
    }
  }

  void Fill(RetrievalSet& set, std::vector<GatherRowsItem>& gathers,
            std::vector<std::pair<std::byte*, std::byte*>>& rows) {
    RetrievalItem& item = *set.item;
    struct Answer& answer = item.answer;
    const uint32_t count = set.listed();
    const uint32_t heads = item.plan.set_heads;
    if (item.wants_ids()) {
      auto* ids = At<uint32_t>(answer.ids, item.filled_tokens);
      if (item.wants_new_rows()) {
        std::copy_n(set.host_tokens.data(), count, ids);
      } else if (set.selects()) {
        memory_.CopyOut(ids, set.select.chosen, count);
      } else {
        std::iota(ids, ids + count, set.plan->begin);
      }
    }
    if (item.wants_scores()) {
      const float* from = set.selects() ? set.select.chosen_scores : set.score.scores;
      const size_t stride = set.selects() ? set.select.chosen_stride : set.score.stride;
      for (uint32_t r = 0; r < heads; ++r) {
        memory_.CopyOut(At<float>(answer.scores, item.filled_scores + size_t{r} * count), from + r * stride, count);
      }
    }
    if (item.wants_rows()) {
      const RowBytes row = AnswerRowBytes(*item.layer, item.options());
      rows.emplace_back(At<std::byte>(answer.keys, item.filled_tokens * row.key),
                        At<std::byte>(answer.values, item.filled_tokens * row.value));
      GatherRowsItem& gather = gathers.emplace_back(set.gather);
      gather.count_max = count;
      if (item.wants_new_rows()) {
        gather.tokens = memory_.In(set.host_tokens.data(), count);
        gather.count = memory_.In(&set.missing, 1);
      }
      if (memory_.shares_host_memory()) gather.keys = rows.back().first;
      if (memory_.shares_host_memory()) gather.values = rows.back().second;
    }
    item.filled_tokens += count;
    item.filled_scores += size_t{count} * heads;
  }

  void CopyRows(const std::vector<GatherRowsItem>& gathers,
                const std::vector<std::pair<std::byte*, std::byte*>>& rows) {
    size_t next = 0;
    for (const auto& set : sets_) {
      const RetrievalItem& item = *set->item;
      if (!item.status.ok() || set->listed() == 0 || !item.wants_rows()) continue;
      const RowBytes row = AnswerRowBytes(*item.layer, item.options());
      memory_.CopyOut(rows[next].first, gathers[next].keys, size_t{row.key} * set->listed());
      memory_.CopyOut(rows[next].second, gathers[next].values, size_t{row.value} * set->listed());
      memory_.CopyOut(&set->overflow, gathers[next].overflow, 1);
      ++next;
    }
  }

  void CopyAttention() {
    for (const auto& set : sets_) {
      RetrievalItem& item = *set->item;
      if (!item.status.ok() || set->chosen == 0 || !item.wants_attention()) continue;
      PartialAttention& attention = *item.answer.attention;
      const size_t heads = item.plan.set_heads;
      memory_.CopyOut(OutputPlace(attention, *set), set->attend.output, heads * item.layer->config().value_dim);
      memory_.CopyOut(LogSumExpPlace(attention, *set), set->attend.log_sum_exp, heads);
    }
  }

  void KeepChosen(RetrievalSet& set) {
    if (!set.item->status.ok() || !set.keeps_chosen()) return;
    std::vector<uint32_t>& chosen = set.item->last_chosen[set.set];
    chosen.resize(set.chosen);
    if (set.selects()) {
      memory_.CopyOut(chosen.data(), set.select.chosen, set.chosen);
    } else {
      std::iota(chosen.begin(), chosen.end(), set.plan->begin);
    }
  }

  void Conclude(const RetrievalSet& set) {
    RetrievalItem& item = *set.item;
    item.new_tokens = item.new_scores = 0;
    if (!item.status.ok()) return;
    item.answer.bytes_read += BytesRead(set);
    const bool last = set.position + 1 == item.plan.positions.size();
    if (last && item.answer.explanation.has_value()) AddStages(set, *item.answer.explanation);
    // Under per_head every query head of a group takes the same lists.
    if (set.is(Path::kCentroids) && set.first_q_head % item.layer->config().group_heads() == 0) {
      item.layer->index()->CountUses(set.kv_head, set.selected_lists, item.query->position + set.position);
    }
    if (set.overflow == 0) return;
    item.status = RowOverflowError(item.options().row_format, set.overflow, "chosen rows");
  }

  const LaneDevice device_;
  const Clock& clock_;
  Stats& stats_;
  BatchMemory memory_;
  const BatchMemory::Mark start_ = memory_.mark();
  std::vector<std::unique_ptr<RetrievalSet>> sets_;
  std::vector<uint32_t> missing_;
};

absl::Status Begin(const RetrievalTask& task, RetrievalItem& item) {
  item.query = task.query;
  item.context = task.context;
  Session& session = *task.session;
  item.policies = &session.config().policies;
  CTKVR_RETURN_IF_ERROR(session.CheckHealthy());
  CTKVR_ASSIGN_OR_RETURN(item.layer, session.FindLayer(task.query->layer));
  const PlanState state{.policies = task.policy_inputs, .strength = session.strength(task.query->layer)};
  CTKVR_ASSIGN_OR_RETURN(item.plan, PlanQuery(*item.layer, session.config(), *task.query, state));
  if (item.options().explain || session.observer() != nullptr)
    item.answer.explanation = Explanation{.reason = item.plan.reason};
  item.answer.counts.assign(item.plan.positions.size() * item.plan.sets, 0);
  item.shadows = task.shadow != nullptr && WorthShadowing(item.plan.positions.back());
  item.observer = session.observer();
  if (item.shadows || item.observer != nullptr) item.last_chosen.resize(item.plan.sets);
  if (item.wants_attention()) item.answer.attention = EmptyAttention(item.layer->config(), task.query->positions);
  if (item.wants_new_rows()) item.answer.new_counts = item.answer.counts;
  if (item.options().remainder) item.answer.remainder = EmptyAttention(item.layer->config(), task.query->positions);
  return absl::OkStatus();
}

// Queries that were answered, into the rings of their layers.
void Feed(LaneDevice device, Stats& stats, const std::vector<const RetrievalTask*>& tasks,
          std::deque<RetrievalItem>& items) {
  std::vector<FedQuery> fed;
  for (size_t i = 0; i < tasks.size(); ++i) {
    RetrievalItem& item = items[i];
    if (!item.status.ok()) continue;
    fed.push_back({.session = tasks[i]->session, .layer = item.layer, .query = item.query, .status = &item.status});
  }
  FeedQueries(device, stats, fed);
}

void Conclude(const RetrievalTask& task, RetrievalItem& item, Stats& stats) {
  const RowFormat format = item.options().row_format;
  if (item.status.ok() && item.wants_attention()) {
    item.status = ConvertOutput(RowElement(format), format, "attention", *item.answer.attention);
  }
  if (item.status.ok() && item.options().remainder) {
    item.status = ConvertOutput(item.options().remainder_dtype, format, "remainder", *item.answer.remainder);
  }
  if (!item.status.ok()) {
    if (item.placing) item.layer->slot_table()->Reset();
    *task.result = item.status;
    return;
  }
  if (item.wants_new_rows()) BeginCache(item);  // none of its sets sees a token
  const Layer& layer = *item.layer;
  Answer& answer = item.answer;
  const AnswerOptions& options = item.options();
  answer.epoch = task.session->epoch();
  answer.row_format = options.row_format;
  answer.code_generation = layer.code_generation();
  // A client that has none is told even of generation 0.
  const bool knows = options.known_code_generation != 0 && options.known_code_generation == layer.code_generation();
  if (item.wants_rows() && options.row_format == RowFormat::kStorage && !knows) {
    answer.codec = layer.Codec(task.session->config().rotation_seed);
  }
  answer.source = PathSource(item.plan.positions.back().path);
  answer.length = layer.length();
  answer.indexed_length = layer.index() == nullptr ? 0 : layer.index()->indexed_length();
  answer.always_tokens = item.plan.positions.back().always;
  for (const PositionPlan& position : item.plan.positions) {
    stats.retrievals[static_cast<size_t>(PathSource(position.path))].fetch_add(1, std::memory_order_relaxed);
  }
  stats.chosen_tokens.fetch_add(std::accumulate(answer.counts.begin(), answer.counts.end(), uint64_t{0}),
                                std::memory_order_relaxed);
  stats.bytes_read.fetch_add(answer.bytes_read, std::memory_order_relaxed);
  stats.row_bytes.fetch_add(answer.keys.size() + answer.values.size(), std::memory_order_relaxed);
  task.session->CountRetrievals(item.plan.positions.size());
  task.session->NoteServed(task.query->layer, answer.source, item.plan.reason);
  answer.used = item.plan.used;
  if (item.observer != nullptr) {
    item.observer->Answered(answer.epoch, *item.query, answer, item.last_chosen);
    if (!options.explain) answer.explanation.reset();
  }
  if (item.shadows) OfferShadow(*task.session, item, *task.shadow, stats);
  *task.result = std::move(answer);
}

}  // namespace

void RunRetrievals(LaneDevice device, const Clock& clock, Stats& stats, std::span<const RetrievalTask> tasks) {
  std::deque<RetrievalItem> items;  // sets point at them
  std::vector<const RetrievalTask*> begun;
  Rounds rounds(device, clock, stats);
  for (const RetrievalTask& task : tasks) {
    RetrievalItem& item = items.emplace_back();
    item.status = Begin(task, item);
    begun.push_back(&task);
    if (item.status.ok()) rounds.Add(item);
  }
  rounds.Flush();
  Feed(device, stats, begun, items);
  for (size_t i = 0; i < begun.size(); ++i) Conclude(*begun[i], items[i], stats);
}

}  // namespace ctkvr
