// SPDX-License-Identifier: Apache-2.0

#include "server/core/types.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/core/policies.h"

namespace ctkvr {
namespace {

absl::Status InRange(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low) return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; the least is ", low));
  if (value > high) return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; the limit is ", high));
  return absl::OkStatus();
}

// Written so that NaN is outside every range.
absl::Status FloatError(const char* field, double value, const char* range) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", range));
}

absl::Status ValidateShares(const Selection& selection) {
  if (!(selection.top_p > 0 && selection.top_p <= 1))
    return FloatError("top_p", selection.top_p, "above 0 and at most 1");
  if (!(selection.min_share >= 0 && selection.min_share <= 1)) {
    return FloatError("min_share", selection.min_share, "between 0 and 1");
  }
  if (selection.min_score.has_value() && !std::isfinite(*selection.min_score)) {
    return FloatError("min_score", *selection.min_score, "finite");
  }
  if (!(selection.keep_share > 0 && selection.keep_share <= 1)) {
    return FloatError("keep_share", selection.keep_share, "above 0 and at most 1");
  }
  if (!(selection.open_share > 0 && selection.open_share <= 1)) {
    return FloatError("open_share", selection.open_share, "above 0 and at most 1");
  }
  return absl::OkStatus();
}

absl::Status ValidateCandidates(const Selection& selection) {
  if (selection.candidate_tokens < selection.k_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("candidate_tokens is ", selection.candidate_tokens,
                                                   "; the least is k_tokens, ", selection.k_tokens));
  }
  return absl::OkStatus();
}

absl::Status ValidateSketch(const Selection& selection, const LayerConfig& layer, uint32_t first_planes) {
  const uint32_t planes = KeyPlanes(layer.format);
  if (planes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("source is ", SourceName(selection.source), "; format ",
                                                   FormatName(layer.format), " has no bit planes"));
  }
  if (selection.refine_planes != 0 && (selection.refine_planes < first_planes || selection.refine_planes > planes)) {
    return absl::InvalidArgumentError(absl::StrCat("refine_planes is ", selection.refine_planes,
                                                   "; it must be 0 or from ", first_planes, " to ", planes));
  }
  return ValidateCandidates(selection);
}

absl::Status ValidateGeometry(const LayerConfig& layer) {
  CTKVR_RETURN_IF_ERROR(InRange("q_heads", layer.q_heads, 1, limits::kQHeadsMax));
  CTKVR_RETURN_IF_ERROR(InRange("kv_heads", layer.kv_heads, 1, limits::kKvHeadsMax));
  if (layer.q_heads % layer.kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("q_heads is ", layer.q_heads, "; it must be a multiple of kv_heads, ", layer.kv_heads));
  }
  CTKVR_RETURN_IF_ERROR(InRange("q_heads / kv_heads", layer.group_heads(), 1, limits::kGroupHeadsMax));
  CTKVR_RETURN_IF_ERROR(InRange("head_dim", layer.head_dim, limits::kHeadDimMin, limits::kHeadDimMax));
  CTKVR_RETURN_IF_ERROR(InRange("value_dim", layer.value_dim, limits::kHeadDimMin, limits::kHeadDimMax));
  for (const auto& [field, dim] : {std::pair{"head_dim", layer.head_dim}, std::pair{"value_dim", layer.value_dim}}) {
    if (dim % limits::kHeadDimMultiple != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " is ", dim, "; it must be a multiple of ", limits::kHeadDimMultiple));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateSoftmax(const LayerConfig& layer) {
  const SoftmaxConfig& softmax = layer.softmax;
  if (!(softmax.scale > 0 && softmax.scale <= limits::kSoftmaxScaleMax)) {
    return FloatError("softmax_scale", softmax.scale,
                      absl::StrCat("above 0 and at most ", limits::kSoftmaxScaleMax).c_str());
  }
  if (!(softmax.softcap >= 0 && std::isfinite(softmax.softcap))) {
    return FloatError("logit_softcap", softmax.softcap, "above 0 and finite");
  }
  if (!softmax.sink_logits.empty() && softmax.sink_logits.size() != layer.q_heads) {
    return absl::InvalidArgumentError(absl::StrCat("sink_logits has ", softmax.sink_logits.size(),
                                                   " elements; it must have none or q_heads, ", layer.q_heads));
  }
  for (size_t i = 0; i < softmax.sink_logits.size(); ++i) {
    if (!(std::fabs(softmax.sink_logits[i]) <= limits::kSinkLogitMax)) {
      return FloatError(absl::StrCat("sink_logits[", i, "]").c_str(), softmax.sink_logits[i],
                        absl::StrCat("within +-", limits::kSinkLogitMax).c_str());
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateAdjustment(const QueryCentroidConfig& config) {
  if (config.adjust_tokens == 0) return InRange("query_centroids.centroids_max", config.centroids_max, 0, 0);
  CTKVR_RETURN_IF_ERROR(
      InRange("query_centroids.adjust_tokens", config.adjust_tokens, limits::kAdjustTokensMin, limits::kTokenLimitMax));
  CTKVR_RETURN_IF_ERROR(
      InRange("query_centroids.centroids_max", config.centroids_max, config.centroids, limits::kCentroidsMax));
  if (config.retrieved_queries) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("query_centroids.adjust_tokens is ", config.adjust_tokens,
                                                 "; it must be 0 where retrieved_queries is false"));
}

absl::Status ValidateLayer(const LayerConfig& layer, uint32_t first_planes) {
  CTKVR_RETURN_IF_ERROR(ValidateGeometry(layer));
  CTKVR_RETURN_IF_ERROR(ValidateSoftmax(layer));
  const QueryCentroidConfig& centroids = layer.query_centroids;
  CTKVR_RETURN_IF_ERROR(InRange("query_centroids.centroids", centroids.centroids, 0, limits::kCentroidsMax));
  CTKVR_RETURN_IF_ERROR(InRange("query_centroids.list_tokens", centroids.list_tokens, centroids.centroids == 0 ? 0 : 1,
                                limits::kListTokensMax));
  CTKVR_RETURN_IF_ERROR(
      InRange("bytes of query_centroids.name", centroids.name.size(), 0, limits::kCentroidSetNameBytesMax));
  CTKVR_RETURN_IF_ERROR(ValidateAdjustment(centroids));
  if (layer.tokens_per_cluster != 0) {
    CTKVR_RETURN_IF_ERROR(InRange("key_clusters.tokens_per_cluster", layer.tokens_per_cluster,
                                  limits::kTokensPerClusterMin, limits::kTokensPerClusterMax));
  }
  return ValidateSelection(layer.selection, layer, first_planes);
}

absl::Status ValidateSource(const Selection& selection, const LayerConfig& layer, uint32_t first_planes) {
  const bool of_clusters = selection.source == Source::kKeyCentroids || selection.source == Source::kKeyCentroidsSketch;
  if (of_clusters && layer.tokens_per_cluster == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("source is ", SourceName(selection.source), "; the layer keeps no key clusters"));
  }
  if (selection.source == Source::kKeyCentroids) return ValidateCandidates(selection);
  if (selection.source == Source::kSketch || selection.source == Source::kKeyCentroidsSketch) {
    return ValidateSketch(selection, layer, first_planes);
  }
  if (selection.source == Source::kQueryCentroids && layer.query_centroids.centroids == 0) {
    return absl::InvalidArgumentError("source is query_centroids; the layer keeps no query centroids");
  }
  return absl::OkStatus();
}

}  // namespace

const char* SourceName(Source source) {
  switch (source) {
    case Source::kDense:
      return "dense";
    case Source::kExact:
      return "exact";
    case Source::kSketch:
      return "sketch";
    case Source::kQueryCentroids:
      return "query_centroids";
    case Source::kKeyCentroids:
      return "key_centroids";
    case Source::kKeyCentroidsSketch:
      return "key_centroids_sketch";
    case Source::kAuto:
      return "auto";
  }
  return "?";
}

absl::Status ValidateSelection(const Selection& selection, const LayerConfig& layer, uint32_t first_planes) {
  CTKVR_RETURN_IF_ERROR(InRange("k_tokens", selection.k_tokens, 1, limits::kTokensMax));
  CTKVR_RETURN_IF_ERROR(ValidateShares(selection));
  CTKVR_RETURN_IF_ERROR(InRange("sink_tokens", selection.sink_tokens, 0, limits::kTokensMax));
  CTKVR_RETURN_IF_ERROR(InRange("window_tokens", selection.window_tokens, 0, limits::kTokensMax));
  CTKVR_RETURN_IF_ERROR(InRange("dense_below_tokens", selection.dense_below_tokens, 0, limits::kTokenLimitMax));
  CTKVR_RETURN_IF_ERROR(InRange("candidate_tokens", selection.candidate_tokens, 1, limits::kCandidateTokensMax));
  CTKVR_RETURN_IF_ERROR(InRange("probes", selection.probes, 1, limits::kCentroidsMax));
  if (!selection.centroid_set.empty() &&
      (layer.query_centroids.centroids == 0 || selection.centroid_set != layer.query_centroids.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("centroid_set is \"", selection.centroid_set, "\"; the layer has no set of that name"));
  }
  return ValidateSource(selection, layer, first_planes);
}

absl::Status ValidateSessionConfig(const SessionConfig& config) {
  CTKVR_RETURN_IF_ERROR(InRange("layers", config.layers.size(), 1, limits::kLayersMax));
  CTKVR_RETURN_IF_ERROR(InRange("token_limit", config.token_limit, 1, limits::kTokenLimitMax));
  CTKVR_RETURN_IF_ERROR(InRange("first_planes", config.first_planes, 1, 2));
  CTKVR_RETURN_IF_ERROR(InRange("lease_seconds", static_cast<uint64_t>(config.lease.count()), limits::kLeaseSecondsMin,
                                limits::kLeaseSecondsMax));
  CTKVR_RETURN_IF_ERROR(InRange("cache_slots", config.cache_slots, 0, limits::kCacheSlotsMax));
  CTKVR_RETURN_IF_ERROR(InRange("bytes of fingerprint", config.fingerprint.size(), 0, limits::kFingerprintBytesMax));
  if (!(config.needle_share_target >= 0 && config.needle_share_target <= 1)) {
    return FloatError("needle_share_target", config.needle_share_target, "above 0 and at most 1");
  }
  bool any_present = false;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (config.layers[i].absent) continue;
    any_present = true;
    const absl::Status status = ValidateLayer(config.layers[i], config.first_planes);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", i, ": ", status.message()));
    }
  }
  if (!any_present) return absl::InvalidArgumentError("layers: every layer is absent");
  return ValidatePolicies(config);
}

Selection Resolve(const Selection& base, const SelectionOverride& override) {
  Selection resolved = base;
  if (override.source.has_value()) resolved.source = *override.source;
  if (override.k_tokens.has_value()) resolved.k_tokens = *override.k_tokens;
  if (override.top_p.has_value()) resolved.top_p = *override.top_p;
  if (override.min_share.has_value()) resolved.min_share = *override.min_share;
  if (override.min_score.has_value()) resolved.min_score = override.min_score;
  if (override.reduction.has_value()) resolved.reduction = *override.reduction;
  if (override.sink_tokens.has_value()) resolved.sink_tokens = *override.sink_tokens;
  if (override.window_tokens.has_value()) resolved.window_tokens = *override.window_tokens;
  if (override.dense_below_tokens.has_value()) resolved.dense_below_tokens = *override.dense_below_tokens;
  if (override.keep_share.has_value()) resolved.keep_share = *override.keep_share;
  if (override.refine_planes.has_value()) resolved.refine_planes = *override.refine_planes;
  if (override.candidate_tokens.has_value()) resolved.candidate_tokens = *override.candidate_tokens;
  if (override.probes.has_value()) resolved.probes = *override.probes;
  if (override.centroid_set.has_value()) resolved.centroid_set = *override.centroid_set;
  if (override.open_share.has_value()) resolved.open_share = *override.open_share;
  return resolved;
}

}  // namespace ctkvr
