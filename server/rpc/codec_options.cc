// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/rpc/codec.h"
#include "server/rpc/codec_checks.h"

namespace ctkvr::rpc {
namespace {

// One layer while overrides are laid over it. What is unset yet takes its default at the end.
struct LayerDraft {
  LayerConfig config;
  uint32_t value_dim = 0;  // 0: head_dim
  SelectionOverride selection;
  std::optional<float> softmax_scale;
  std::optional<uint32_t> tokens_per_cluster;
};

// UNSPECIFIED is nothing: the caller's default or what a layer has already.
absl::StatusOr<std::optional<Format>> DecodeFormat(v1::Format format, const FieldPath& field) {
  switch (format) {
    case v1::FORMAT_UNSPECIFIED:
      return std::optional<Format>();
    case v1::FORMAT_F32:
      return std::optional(Format::kF32);
    case v1::FORMAT_F16:
      return std::optional(Format::kF16);
    case v1::FORMAT_BF16:
      return std::optional(Format::kBF16);
    case v1::FORMAT_K8V8:
      return std::optional(Format::kK8V8);
    case v1::FORMAT_K8V4:
      return std::optional(Format::kK8V4);
    case v1::FORMAT_K6V4:
      return std::optional(Format::kK6V4);
    default:
      return UnknownEnum(field, format, v1::Format_MAX);
  }
}

absl::StatusOr<std::optional<Source>> DecodeSource(v1::Source source, const FieldPath& field) {
  switch (source) {
    case v1::SOURCE_UNSPECIFIED:
      return std::optional<Source>();
    case v1::SOURCE_DENSE:
      return std::optional(Source::kDense);
    case v1::SOURCE_EXACT:
      return std::optional(Source::kExact);
    case v1::SOURCE_SKETCH:
      return std::optional(Source::kSketch);
    case v1::SOURCE_QUERY_CENTROIDS:
      return std::optional(Source::kQueryCentroids);
    case v1::SOURCE_AUTO:
      return std::optional(Source::kAuto);
    case v1::SOURCE_KEY_CENTROIDS:
      return std::optional(Source::kKeyCentroids);
    case v1::SOURCE_KEY_CENTROIDS_SKETCH:
      return std::optional(Source::kKeyCentroidsSketch);
    default:
      return UnknownEnum(field, source, v1::Source_MAX);
  }
}

absl::StatusOr<std::optional<Reduction>> DecodeReduction(v1::GroupReduction reduction, const FieldPath& field) {
  switch (reduction) {
    case v1::GROUP_REDUCTION_UNSPECIFIED:
      return std::optional<Reduction>();
    case v1::GROUP_REDUCTION_SUM_SOFTMAX:
      return std::optional(Reduction::kSumSoftmax);
    case v1::GROUP_REDUCTION_MAX_SOFTMAX:
      return std::optional(Reduction::kMaxSoftmax);
    case v1::GROUP_REDUCTION_PER_HEAD:
      return std::optional(Reduction::kPerHead);
    default:
      return UnknownEnum(field, reduction, v1::GroupReduction_MAX);
  }
}

absl::Status AboveZero(float value, const FieldPath& field) {
  if (std::isfinite(value) && value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(field.Text() + " is " + std::to_string(value) + "; it must be finite and above 0");
}

// Lays `from` over `to`: what is set wins.
void MergeSelection(const SelectionOverride& from, SelectionOverride* to) {
  const auto merge = [](const auto& value, auto* target) {
    if (value.has_value()) *target = value;
  };
  merge(from.source, &to->source);
  merge(from.k_tokens, &to->k_tokens);
  merge(from.top_p, &to->top_p);
  merge(from.min_share, &to->min_share);
  merge(from.min_score, &to->min_score);
  merge(from.reduction, &to->reduction);
  merge(from.sink_tokens, &to->sink_tokens);
  merge(from.window_tokens, &to->window_tokens);
  merge(from.dense_below_tokens, &to->dense_below_tokens);
  merge(from.keep_share, &to->keep_share);
  merge(from.refine_planes, &to->refine_planes);
  merge(from.candidate_tokens, &to->candidate_tokens);
  merge(from.probes, &to->probes);
  merge(from.centroid_set, &to->centroid_set);
  merge(from.open_share, &to->open_share);
}

absl::Status MergeSoftmax(const v1::SoftmaxOptions& message, const FieldPath& where, LayerDraft* draft) {
  if (message.has_softmax_scale()) {
    CTKVR_RETURN_IF_ERROR(AboveZero(message.softmax_scale(), FieldPath(where, "softmax_scale")));
    draft->softmax_scale = message.softmax_scale();
  }
  if (message.has_logit_softcap()) {
    CTKVR_RETURN_IF_ERROR(AboveZero(message.logit_softcap(), FieldPath(where, "logit_softcap")));
    draft->config.softmax.softcap = message.logit_softcap();
  }
  // Before the copy, as it is made for every layer.
  CTKVR_RETURN_IF_ERROR(AtMost(FieldPath(where, "sink_logits count"), static_cast<uint64_t>(message.sink_logits_size()),
                               limits::kQHeadsMax));
  if (message.sink_logits_size() != 0) {
    draft->config.softmax.sink_logits.assign(message.sink_logits().begin(), message.sink_logits().end());
  }
  return absl::OkStatus();
}

using CentroidSets = google::protobuf::RepeatedPtrField<v1::QueryCentroidOptions>;

absl::StatusOr<Placement> DecodePlacement(const v1::QueryCentroidOptions& set, const FieldPath& where) {
  switch (set.placement()) {
    case v1::QueryCentroidOptions::PLACEMENT_UNSPECIFIED:
    case v1::QueryCentroidOptions::PLACEMENT_LAST:
      return Placement::kLast;
    case v1::QueryCentroidOptions::PLACEMENT_STRIDED:
      return Placement::kStrided;
    case v1::QueryCentroidOptions::PLACEMENT_CLUSTERED:
      return Placement::kClustered;
    default:
      return UnknownEnum(FieldPath(where, "placement"), set.placement(), v1::QueryCentroidOptions::Placement_MAX);
  }
}

absl::Status MergeQueryCentroids(const CentroidSets& sets, const FieldPath& where, LayerDraft* draft) {
  if (sets.empty()) return absl::OkStatus();
  if (sets.size() > 1) return NotServed(FieldPath(where, "more than one set"));
  const v1::QueryCentroidOptions& set = sets[0];
  CTKVR_ASSIGN_OR_RETURN(const Placement placement, DecodePlacement(set, where));
  CTKVR_RETURN_IF_ERROR(AtMost(FieldPath(where, "name bytes"), set.name().size(), limits::kCentroidSetNameBytesMax));
  draft->config.query_centroids = {.centroids = set.centroids(),
                                   .list_tokens = set.list_tokens(),
                                   .name = set.name(),
                                   .placement = placement,
                                   .retrieved_queries = !set.has_retrieved_queries() || set.retrieved_queries(),
                                   .adjust_tokens = set.adjust_tokens(),
                                   .centroids_max = set.centroids_max()};
  QueryCentroidConfig& config = draft->config.query_centroids;
  if (config.adjust_tokens > 0 && config.centroids_max == 0) config.centroids_max = config.centroids;
  return absl::OkStatus();
}

absl::Status CheckServed(const v1::SessionOptions& options) {
  if (!options.model_centroids().empty()) return NotServed("options.model_centroids");
  if (options.value_tier() == v1::VALUE_TIER_HOST) return NotServed("options.value_tier VALUE_TIER_HOST");
  if (!v1::ValueTier_IsValid(options.value_tier())) {
    return UnknownEnum("options.value_tier", options.value_tier(), v1::ValueTier_MAX);
  }
  if (options.admission() == v1::ADMISSION_GROW) return NotServed("options.admission ADMISSION_GROW");
  if (!v1::Admission_IsValid(options.admission())) {
    return UnknownEnum("options.admission", options.admission(), v1::Admission_MAX);
  }
  return absl::OkStatus();
}

// Numbers are left for ValidateSessionConfig to name.
absl::StatusOr<PolicyConfig> DecodePolicies(const v1::Policies& message) {
  PolicyConfig config{.load_adaptive_k = message.load_adaptive_k(),
                      .length_scaled_k = message.length_scaled_k(),
                      .ramp_tokens = message.ramp_tokens(),
                      .dedup_similarity = std::nullopt,
                      .tag_weight_boost = message.tag_weight_boost(),
                      .class_quotas = {}};
  if (message.has_dedup_similarity()) config.dedup_similarity = message.dedup_similarity();
  if (message.has_recency_weight_min()) config.recency_weight_min = message.recency_weight_min();
  if (message.has_recency_weight_max()) config.recency_weight_max = message.recency_weight_max();
  CTKVR_RETURN_IF_ERROR(AtMost("options.policies.class_quotas count",
                               static_cast<uint64_t>(message.class_quotas_size()), limits::kClassQuotasMax));
  for (const v1::ClassQuota& quota : message.class_quotas()) {
    config.class_quotas.push_back({.token_class = quota.token_class(), .tokens = quota.tokens()});
  }
  return config;
}

absl::StatusOr<LayerDraft> DecodeSessionLevel(const v1::SessionOptions& options) {
  LayerDraft draft;
  const v1::Geometry& geometry = options.geometry();
  draft.config.q_heads = geometry.q_heads();
  draft.config.kv_heads = geometry.kv_heads();
  draft.config.head_dim = geometry.head_dim();
  draft.value_dim = geometry.value_dim();
  CTKVR_ASSIGN_OR_RETURN(const auto format, DecodeFormat(options.format(), "options.format"));
  draft.config.format = format.value_or(Format::kK8V4);
  CTKVR_ASSIGN_OR_RETURN(draft.selection, DecodeSelection(options.selection(), "options.selection"));
  CTKVR_RETURN_IF_ERROR(MergeSoftmax(options.softmax(), "options.softmax", &draft));
  CTKVR_RETURN_IF_ERROR(MergeQueryCentroids(options.query_centroids(), "options.query_centroids", &draft));
  if (options.has_key_clusters()) draft.tokens_per_cluster = options.key_clusters().tokens_per_cluster();
  return draft;
}

absl::Status MergeOverride(const v1::LayerOverride& message, const FieldPath& where, LayerDraft* draft) {
  if (message.absent()) draft->config.absent = true;
  if (message.dense()) draft->config.dense = true;
  if (message.has_q_heads()) draft->config.q_heads = message.q_heads();
  if (message.has_kv_heads()) draft->config.kv_heads = message.kv_heads();
  if (message.has_head_dim()) draft->config.head_dim = message.head_dim();
  if (message.has_value_dim()) draft->value_dim = message.value_dim();
  if (message.has_key_clusters()) draft->tokens_per_cluster = message.key_clusters().tokens_per_cluster();
  CTKVR_ASSIGN_OR_RETURN(const auto format, DecodeFormat(message.format(), FieldPath(where, "format")));
  draft->config.format = format.value_or(draft->config.format);
  CTKVR_ASSIGN_OR_RETURN(const SelectionOverride selection,
                         DecodeSelection(message.selection(), FieldPath(where, "selection")));
  MergeSelection(selection, &draft->selection);
  CTKVR_RETURN_IF_ERROR(MergeSoftmax(message.softmax(), FieldPath(where, "softmax"), draft));
  return MergeQueryCentroids(message.query_centroids(), FieldPath(where, "query_centroids"), draft);
}

// Numbers out of range are left as they are for ValidateSessionConfig to name.
LayerConfig FinishLayer(LayerDraft draft) {
  LayerConfig& layer = draft.config;
  layer.value_dim = draft.value_dim == 0 ? layer.head_dim : draft.value_dim;
  layer.softmax.scale = draft.softmax_scale.value_or(
      layer.head_dim == 0 ? 1.0f : static_cast<float>(1.0 / std::sqrt(static_cast<double>(layer.head_dim))));
  Selection base;
  const bool coded = KeysAreCoded(layer.format);
  layer.tokens_per_cluster = draft.tokens_per_cluster.value_or(coded ? limits::kTokensPerClusterDefault : 0);
  const bool clustered = layer.tokens_per_cluster > 0;
  base.source = !coded ? Source::kExact : clustered ? Source::kKeyCentroidsSketch : Source::kSketch;
  layer.selection = Resolve(base, draft.selection);
  return std::move(draft.config);
}

absl::StatusOr<std::vector<LayerConfig>> DecodeLayers(const v1::SessionOptions& options) {
  const uint32_t layers = options.geometry().layers();
  if (layers == 0) return BelowLimit("options.geometry.layers", 0, 1);
  CTKVR_RETURN_IF_ERROR(AtMost("options.geometry.layers", layers, limits::kLayersMax));
  CTKVR_RETURN_IF_ERROR(AtMost("options.layer_overrides count", static_cast<uint64_t>(options.layer_overrides_size()),
                               limits::kLayersMax));
  CTKVR_ASSIGN_OR_RETURN(const LayerDraft base, DecodeSessionLevel(options));
  std::vector<LayerDraft> drafts(layers, base);
  for (int i = 0; i < options.layer_overrides_size(); ++i) {
    const v1::LayerOverride& message = options.layer_overrides(i);
    const FieldPath where("options.layer_overrides", i);
    if (message.layers_size() == 0) return Missing(FieldPath(where, "layers"));
    CTKVR_RETURN_IF_ERROR(
        AtMost(FieldPath(where, "layers count"), static_cast<uint64_t>(message.layers_size()), limits::kLayersMax));
    for (int j = 0; j < message.layers_size(); ++j) {
      CTKVR_RETURN_IF_ERROR(AtMost(FieldPath(where, "layers", j), message.layers(j), layers - 1));
      CTKVR_RETURN_IF_ERROR(MergeOverride(message, where, &drafts[message.layers(j)]));
    }
  }
  std::vector<LayerConfig> configs;
  configs.reserve(layers);
  for (LayerDraft& draft : drafts) configs.push_back(FinishLayer(std::move(draft)));
  return configs;
}

absl::StatusOr<Maintenance> DecodeMaintenance(v1::Maintenance maintenance) {
  switch (maintenance) {
    case v1::MAINTENANCE_UNSPECIFIED:
    case v1::MAINTENANCE_AUTO:
      return Maintenance::kAuto;
    case v1::MAINTENANCE_MANUAL:
      return Maintenance::kManual;
    default:
      return UnknownEnum("options.maintenance", maintenance, v1::Maintenance_MAX);
  }
}

}  // namespace

absl::StatusOr<SelectionOverride> DecodeSelection(const v1::Selection& message, const FieldPath& where) {
  SelectionOverride out;
  const FieldPath source(where, "source");
  CTKVR_ASSIGN_OR_RETURN(out.source, DecodeSource(message.source(), source));
  CTKVR_ASSIGN_OR_RETURN(out.reduction, DecodeReduction(message.reduction(), FieldPath(where, "reduction")));
  if (message.has_k_tokens()) out.k_tokens = message.k_tokens();
  if (message.has_top_p()) out.top_p = message.top_p();
  if (message.has_min_share()) out.min_share = message.min_share();
  if (message.has_min_score()) out.min_score = message.min_score();
  if (message.has_sink_tokens()) out.sink_tokens = message.sink_tokens();
  if (message.has_window_tokens()) out.window_tokens = message.window_tokens();
  if (message.has_dense_below_tokens()) out.dense_below_tokens = message.dense_below_tokens();
  if (message.has_keep_share()) out.keep_share = message.keep_share();
  if (message.has_refine_planes()) out.refine_planes = message.refine_planes();
  if (message.has_candidate_tokens()) out.candidate_tokens = message.candidate_tokens();
  if (message.has_probes()) out.probes = message.probes();
  if (message.has_centroid_set()) {
    CTKVR_RETURN_IF_ERROR(AtMost(FieldPath(where, "centroid_set bytes"), message.centroid_set().size(),
                                 limits::kCentroidSetNameBytesMax));
    out.centroid_set = message.centroid_set();
  }
  if (message.has_open_share()) out.open_share = message.open_share();
  return out;
}

absl::StatusOr<SessionConfig> DecodeSessionOptions(const v1::SessionOptions& options) {
  CTKVR_RETURN_IF_ERROR(CheckServed(options));
  if (!options.has_geometry()) return Missing("options.geometry");
  CTKVR_RETURN_IF_ERROR(
      AtMost("options.fingerprint bytes", options.fingerprint().size(), limits::kFingerprintBytesMax));
  SessionConfig config;
  CTKVR_ASSIGN_OR_RETURN(config.dtype, DecodeDType(options.geometry().dtype(), "options.geometry.dtype"));
  CTKVR_ASSIGN_OR_RETURN(config.maintenance, DecodeMaintenance(options.maintenance()));
  CTKVR_ASSIGN_OR_RETURN(config.layers, DecodeLayers(options));
  if (options.has_first_planes()) config.first_planes = options.first_planes();
  config.token_limit = options.token_limit();
  config.lease =
      std::chrono::seconds(options.lease_seconds() == 0 ? limits::kLeaseSecondsDefault : options.lease_seconds());
  config.fingerprint = options.fingerprint();
  config.rotation_seed = options.rotation_seed();
  config.cache_slots = options.cache_slots();
  CTKVR_ASSIGN_OR_RETURN(config.policies, DecodePolicies(options.policies()));
  config.tags = options.tags();
  config.record = options.record();
  if (options.policies().has_needle_share_target()) {
    config.needle_share_target = options.policies().needle_share_target();
    CTKVR_RETURN_IF_ERROR(AboveZero(config.needle_share_target, "options.policies.needle_share_target"));
  }
  return config;
}

}  // namespace ctkvr::rpc
