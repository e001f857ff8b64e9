// SPDX-License-Identifier: Apache-2.0

#include "server/core/retrieval_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "server/core/auto_planner.h"
#include "server/core/error.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

struct Policing {
  PolicyConfig policies;
  PolicyInputs inputs;
};

absl::Status CheckShapes(const Layer& layer, const Query& query) {
  const LayerConfig& config = layer.config();
  if (query.dtype != layer.dtype()) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", DTypeName(query.dtype), "; the session has ", DTypeName(layer.dtype())));
  }
  if (query.positions == 0 || query.positions > limits::kQueryPositionsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("queries has ", query.positions, " positions; it must have 1 to ", limits::kQueryPositionsMax));
  }
  if (query.position > std::numeric_limits<uint32_t>::max() - query.positions) {
    return absl::InvalidArgumentError(
        absl::StrCat("position is ", query.position, "; its ", query.positions, " positions overflow 32 bits"));
  }
  if (query.q_heads != config.q_heads || query.head_dim != config.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("queries has q_heads ", query.q_heads, " and head_dim ",
                                                   query.head_dim, "; the layer has ", config.q_heads, " and ",
                                                   config.head_dim));
  }
  const std::optional<uint64_t> bytes =
      CheckedProduct({query.positions, config.q_heads, config.head_dim, DTypeBytes(query.dtype)});
  if (!bytes.has_value() || *bytes != query.queries.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("queries has ", query.queries.size(), " bytes; its dims need ", bytes.value_or(0)));
  }
  return absl::OkStatus();
}

// Tokens of [begin, end) that are below `below` or at or after `from`.
uint32_t CountForced(uint32_t begin, uint32_t end, uint32_t below, uint32_t from) {
  const uint32_t head_end = std::clamp(below, begin, end);
  const uint32_t tail_begin = std::clamp(std::max(from, head_end), begin, end);
  return (head_end - begin) + (end - tail_begin);
}

bool NamesClusters(Source source) { return source == Source::kKeyCentroids || source == Source::kKeyCentroidsSketch; }

uint32_t ClusteredLength(const Layer& layer) {
  return layer.clusters() == nullptr ? 0 : layer.clusters()->clustered_length();
}

// What opens the layer's clusters with the fewest bytes.
std::optional<Source> ClusterSource(const Layer& layer) {
  if (layer.clusters() == nullptr || !layer.coded()) return std::nullopt;
  return Source::kKeyCentroidsSketch;
}

// The tail that clusters may leave, all of which is answered: while they are built it would be most of a layer, which
// planes of all keys serve better.
constexpr uint32_t kSearchedTailTokens = 2 * limits::kClusterTailTokens;

// Whether a query that sees the first `seen` tokens may be served by clusters: they hold no later ones, and the tail
// behind them is short and fits the slots of a row cache.
bool SeesClusters(const Layer& layer, const Selection& selection, const Query& query, uint32_t seen) {
  const uint32_t clustered = ClusteredLength(layer);
  if (!NamesClusters(selection.source) || clustered == 0 || seen < clustered) return false;
  const uint64_t tail = seen - clustered;
  if (query.answer.mode == AnswerMode::kNewRows && layer.slot_table() != nullptr) {
    const uint64_t others = uint64_t{selection.k_tokens} + selection.sink_tokens + selection.window_tokens;
    if (others + tail > layer.slot_table()->slots()) return false;
  }
  return tail <= kSearchedTailTokens;
}

// Tokens of the clusters that are opened. A needle in a longer context stands out by more: it outweighs more tokens.
uint32_t OpenTokens(const Selection& selection, uint32_t visible) {
  if (selection.source == Source::kKeyCentroids) return selection.candidate_tokens;
  const double share = double{selection.open_share} * std::sqrt(double{limits::kOpenShareTokens} * visible);
  return std::max(static_cast<uint32_t>(std::ceil(share)), selection.candidate_tokens);
}

// The source that serves, once length and state are known.
Path ChoosePath(const Layer& layer, const Selection& selection, const PositionPlan& plan, bool clusters) {
  const uint32_t visible = plan.visible();
  if (visible == 0) return Path::kEmpty;
  if (layer.config().dense || selection.source == Source::kDense || visible <= selection.dense_below_tokens) {
    return Path::kDense;
  }
  if (!HasFilter(selection) && uint64_t{selection.k_tokens} + plan.always >= visible) return Path::kDense;
  // Raw keys have no planes; candidates that are everything need no estimate.
  const bool all_are_candidates = uint64_t{selection.candidate_tokens} + plan.always >= visible;
  if (clusters && uint64_t{OpenTokens(selection, visible)} + plan.always < visible) {
    return selection.source == Source::kKeyCentroids ? Path::kClusters : Path::kClusterSketch;
  }
  const bool by_planes = selection.source == Source::kSketch || selection.source == Source::kKeyCentroidsSketch;
  if (by_planes && !layer.raw() && !all_are_candidates) return Path::kSketch;
  if (selection.source == Source::kQueryCentroids && layer.index()->live() != nullptr) return Path::kCentroids;
  return Path::kExact;
}

void PlanSketch(const Selection& selection, PositionPlan& plan) {
  plan.candidates = selection.candidate_tokens;
  if (plan.path == Path::kSketch && selection.refine_planes > 0) {
    const float share = std::ceil(selection.keep_share * static_cast<float>(plan.visible()));
    plan.survivors = std::max(static_cast<uint32_t>(share), selection.candidate_tokens);
  }
  plan.scored_max = std::min(plan.visible(), plan.candidates + plan.always);
}

void PlanClusters(const Selection& selection, PositionPlan& plan) {
  plan.open_tokens = OpenTokens(selection, plan.visible());
  plan.scanned_max =
      static_cast<uint32_t>(std::min<uint64_t>(plan.visible(), OpenedTokensMax(plan.open_tokens) + plan.always));
  plan.scored_max = plan.scanned_max;
  if (plan.path == Path::kClusterSketch) PlanSketch(selection, plan);
}

// `selection` is moved to what the policies make of it.
PositionPlan PlanPosition(const Layer& layer, const Policing& policing, const Query& query, uint32_t position,
                          Selection& selection) {
  PositionPlan plan;
  // A query sees its own position, where the layer holds it.
  const uint32_t seen = std::min(layer.length(), position + 1);
  plan.end = std::min(seen, query.local_begin.value_or(seen));
  plan.begin = std::min(query.local_sinks, plan.end);
  ApplyPolicies(policing.policies, policing.inputs, plan.visible(), selection);
  plan.k_tokens = selection.k_tokens;
  plan.force_below = selection.sink_tokens;
  plan.force_from = seen - std::min(seen, selection.window_tokens);
  const bool has_tail = selection.source == Source::kQueryCentroids && layer.index()->live() != nullptr;
  if (has_tail) plan.force_from = std::min(plan.force_from, layer.index()->indexed_length());
  const bool clusters = SeesClusters(layer, selection, query, seen);
  if (query.answer.remainder || clusters) {
    plan.force_below = std::max(plan.force_below, layer.clusters()->begin());
    plan.force_from = std::min(plan.force_from, layer.clusters()->clustered_length());
  }
  plan.always = CountForced(plan.begin, plan.end, plan.force_below, plan.force_from);
  plan.path = ChoosePath(layer, selection, plan, clusters);
  plan.scored_max = plan.visible();
  plan.chosen_max = std::min<uint64_t>(plan.visible(), uint64_t{selection.k_tokens} + plan.always);
  if (plan.path == Path::kDense) plan.chosen_max = plan.visible();
  if (plan.path == Path::kSketch) PlanSketch(selection, plan);
  if (plan.opens_clusters()) PlanClusters(selection, plan);
  if (plan.path == Path::kCentroids) {
    const uint64_t listed = uint64_t{selection.probes} * layer.config().query_centroids.list_tokens;
    plan.scored_max = static_cast<uint32_t>(std::min<uint64_t>(plan.visible(), listed + plan.always));
    plan.chosen_max = std::min(plan.chosen_max, plan.scored_max);
  }
  return plan;
}

absl::Status CheckAnswerForm(const Query& query) {
  if (query.answer.mode != AnswerMode::kAttention || query.answer.row_format != RowFormat::kStorage) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("row_format is storage; a partial attention comes as f32, f16 or bf16");
}

// Means of clusters hold tokens that an earlier query must not see.
absl::Status CheckRemainder(const Layer& layer, const Query& query) {
  if (!query.answer.remainder) return absl::OkStatus();
  if (layer.clusters() == nullptr) {
    return absl::InvalidArgumentError("remainder is asked for; the layer keeps no key clusters");
  }
  const uint32_t clustered = layer.clusters()->clustered_length();
  if (query.position + 1 >= clustered) return absl::OkStatus();
  return MakeError(absl::StatusCode::kOutOfRange,
                   absl::StrCat("position is ", query.position, "; the key clusters of the layer reach to ", clustered,
                                ", and no remainder is estimated for a query before it"),
                   kReasonBeforeIndex, {{"clustered_length", absl::StrCat(clustered)}});
}

// A partial attention has no limit to meet: at most 2^6 positions of 2^8 heads of 2^10 bytes, however many tokens.
absl::Status CheckAnswerBytes(const Layer& layer, const Query& query, const QueryPlan& plan) {
  if (query.answer.mode == AnswerMode::kAttention) return absl::OkStatus();
  const RowBytes row = AnswerRowBytes(layer, query.answer);
  uint64_t token_bytes = sizeof(uint32_t);
  if (WantsScores(query.answer.mode)) token_bytes += sizeof(float) * plan.set_heads;
  if (WantsRows(query.answer.mode)) token_bytes += row.key + row.value;
  if (query.answer.mode == AnswerMode::kNewRows) token_bytes += 2 * sizeof(uint16_t);
  uint64_t tokens = 0;
  for (const PositionPlan& position : plan.positions) tokens += uint64_t{position.chosen_max} * plan.sets;
  // At most 2^6 positions of 2^8 sets of 2^22 tokens of 2^12 bytes: no overflow.
  const uint64_t bytes = tokens * token_bytes;
  if (bytes <= limits::kReplyBytesMax) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the answer may take ", bytes, " bytes for ", tokens,
                                                   " tokens; the limit is ", limits::kReplyBytesMax));
}

// Whether the slot tables can take any answer of one set. An answer of several positions may still need more.
absl::Status CheckSlotTable(const Layer& layer, const Query& query, const QueryPlan& plan) {
  if (query.answer.mode != AnswerMode::kNewRows) return absl::OkStatus();
  const SlotTable* table = layer.slot_table();
  if (table == nullptr) {
    return absl::FailedPreconditionError("answer.mode is new_rows; the session was opened with cache_slots 0");
  }
  if (plan.sets > table->sets()) {
    return absl::InvalidArgumentError(
        "answer.mode is new_rows and reduction is per_head; the layer has slot tables for KV heads: open the session "
        "with per_head");
  }
  for (const PositionPlan& position : plan.positions) {
    if (position.chosen_max <= table->slots()) continue;
    return CacheTooSmallError(table->slots(), position.chosen_max);
  }
  return absl::OkStatus();
}

absl::Status BeforeIndexError(uint32_t position, uint32_t indexed, const char* what, Source source) {
  return MakeError(absl::StatusCode::kOutOfRange,
                   absl::StrCat("position is ", position, "; the ", what, " to ", indexed, ", and source ",
                                SourceName(source), " serves no query before it"),
                   kReasonBeforeIndex, {{"indexed_length", absl::StrCat(indexed)}});
}

absl::Status CheckAfterIndex(const Layer& layer, const Query& query, const QueryPlan& plan) {
  for (uint32_t p = 0; p < plan.positions.size(); ++p) {
    const uint32_t position = query.position + p;
    const Path path = plan.positions[p].path;
    if (path == Path::kCentroids && position + 1 < layer.index()->indexed_length()) {
      return BeforeIndexError(position, layer.index()->indexed_length(), "index of the layer reaches",
                              plan.used.source);
    }
    if (plan.used.source == Source::kKeyCentroids && path == Path::kExact && position + 1 < ClusteredLength(layer)) {
      return BeforeIndexError(position, ClusteredLength(layer), "key clusters of the layer reach", plan.used.source);
    }
  }
  return absl::OkStatus();
}

// Why the path differs from what was planned, or `planned`.
SelectionReason ReasonOf(const Layer& layer, const Selection& selection, const PositionPlan& plan,
                         SelectionReason planned) {
  switch (plan.path) {
    case Path::kEmpty:
      return SelectionReason::kNothingVisible;
    case Path::kDense:
      if (layer.config().dense || selection.source == Source::kDense) return SelectionReason::kDense;
      return plan.visible() <= selection.dense_below_tokens ? SelectionReason::kShort
                                                            : SelectionReason::kEverythingFits;
    case Path::kExact:
      if (selection.source == Source::kExact) return planned;
      if (selection.source == Source::kQueryCentroids || selection.source == Source::kKeyCentroids) {
        return SelectionReason::kNoIndex;
      }
      return layer.raw() ? SelectionReason::kNotCoded : SelectionReason::kAllAreCandidates;
    default:
      return planned;
  }
}

// The positions of a plan whose settings stand, and the checks of what they may answer.
absl::Status PlanPositions(const Layer& layer, const Policing& policing, const Query& query, QueryPlan& plan) {
  Selection used;
  for (uint32_t p = 0; p < query.positions; ++p) {
    used = plan.used;
    plan.positions.push_back(PlanPosition(layer, policing, query, query.position + p, used));
  }
  plan.used = std::move(used);
  const PositionPlan& last = plan.positions.back();
  plan.reason = ReasonOf(layer, plan.used, last, plan.reason);
  if (last.path == Path::kSketch || last.path == Path::kClusterSketch) {
    plan.used.candidate_tokens = std::min(plan.used.candidate_tokens, last.visible());
  }
  CTKVR_RETURN_IF_ERROR(CheckAfterIndex(layer, query, plan));
  CTKVR_RETURN_IF_ERROR(CheckSlotTable(layer, query, plan));
  return CheckAnswerBytes(layer, query, plan);
}

}  // namespace

absl::StatusOr<QueryPlan> PlanQuery(const Layer& layer, const SessionConfig& session, const Query& query,
                                    const PlanState& state) {
  CTKVR_RETURN_IF_ERROR(CheckShapes(layer, query));
  CTKVR_RETURN_IF_ERROR(CheckAnswerForm(query));
  CTKVR_RETURN_IF_ERROR(CheckRemainder(layer, query));
  const LayerConfig& config = layer.config();
  QueryPlan plan;
  plan.used = Resolve(config.selection, query.selection);
  CTKVR_RETURN_IF_ERROR(ValidateSelection(plan.used, config, session.first_planes));
  PlannedSelection planned = PlanSelection(plan.used, {.length = layer.length(),
                                                       .key_planes = KeyPlanes(config.format),
                                                       .cluster_source = ClusterSource(layer),
                                                       .load = std::max(0.0, -state.policies.load_delta),
                                                       .strength = state.strength});
  plan.used = std::move(planned.selection);
  plan.reason = planned.reason;
  const bool per_head = plan.used.reduction == Reduction::kPerHead;
  plan.sets = per_head ? config.q_heads : config.kv_heads;
  plan.set_heads = per_head ? 1 : config.group_heads();
  const bool has_live = layer.index() != nullptr && layer.index()->live() != nullptr;
  if (has_live) plan.used.probes = std::min(plan.used.probes, layer.index()->centroid_count());
  const QueryPlan draft = plan;
  PolicyInputs inputs = state.policies;
  // What a quality target was found to need is the least: load only adds to it.
  if (session.needle_share_target > 0) inputs.load_delta = std::max(0.0, inputs.load_delta);
  const absl::Status status = PlanPositions(layer, {session.policies, inputs}, query, plan);
  if (status.ok()) return plan;
  if (!session.policies.moves_k()) return status;
  plan = draft;
  CTKVR_RETURN_IF_ERROR(PlanPositions(layer, {}, query, plan));
  return plan;
}

absl::Status CacheTooSmallError(uint32_t cache_slots, uint64_t needed) {
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("cache_slots is ", cache_slots, "; a set of the answer may need ", needed, " slots"),
                   kReasonCacheTooSmall, {{"cache_slots", absl::StrCat(cache_slots)}});
}

bool HasFilter(const Selection& selection) {
  return selection.min_score.has_value() || selection.min_share > 0 || selection.top_p < 1;
}

RowBytes AnswerRowBytes(const Layer& layer, const AnswerOptions& answer) {
  if (answer.row_format == RowFormat::kStorage) {
    return {.key = layer.storage_key_bytes(), .value = layer.storage_value_bytes()};
  }
  const auto element = static_cast<uint32_t>(DTypeBytes(RowElement(answer.row_format)));
  return {.key = layer.config().head_dim * element, .value = layer.config().value_dim * element};
}

DType RowElement(RowFormat format) {
  return format == RowFormat::kF32 ? DType::kF32 : format == RowFormat::kF16 ? DType::kF16 : DType::kBF16;
}

Source PathSource(Path path) {
  switch (path) {
    case Path::kEmpty:
    case Path::kDense:
      return Source::kDense;
    case Path::kExact:
      return Source::kExact;
    case Path::kSketch:
      return Source::kSketch;
    case Path::kCentroids:
      return Source::kQueryCentroids;
    case Path::kClusters:
      return Source::kKeyCentroids;
    case Path::kClusterSketch:
      return Source::kKeyCentroidsSketch;
  }
  return Source::kDense;
}

}  // namespace ctkvr
