// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/codec.h"

namespace ctkvr::rpc {
namespace {

v1::GroupReduction EncodeReduction(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSumSoftmax:
      return v1::GROUP_REDUCTION_SUM_SOFTMAX;
    case Reduction::kMaxSoftmax:
      return v1::GROUP_REDUCTION_MAX_SOFTMAX;
    case Reduction::kPerHead:
      return v1::GROUP_REDUCTION_PER_HEAD;
  }
  return v1::GROUP_REDUCTION_UNSPECIFIED;
}

void EncodePolicies(const PolicyConfig& config, v1::Policies* message) {
  message->set_load_adaptive_k(config.load_adaptive_k);
  message->set_length_scaled_k(config.length_scaled_k);
  message->set_ramp_tokens(config.ramp_tokens);
  if (config.dedup_similarity.has_value()) message->set_dedup_similarity(*config.dedup_similarity);
  message->set_recency_weight_min(config.recency_weight_min);
  message->set_recency_weight_max(config.recency_weight_max);
  message->set_tag_weight_boost(config.tag_weight_boost);
  for (const ClassQuota& quota : config.class_quotas) {
    v1::ClassQuota* out = message->add_class_quotas();
    out->set_token_class(quota.token_class);
    out->set_tokens(quota.tokens);
  }
}

v1::QueryCentroidOptions::Placement EncodePlacement(Placement placement) {
  switch (placement) {
    case Placement::kLast:
      return v1::QueryCentroidOptions::PLACEMENT_LAST;
    case Placement::kStrided:
      return v1::QueryCentroidOptions::PLACEMENT_STRIDED;
    case Placement::kClustered:
      return v1::QueryCentroidOptions::PLACEMENT_CLUSTERED;
  }
  return v1::QueryCentroidOptions::PLACEMENT_UNSPECIFIED;
}

void EncodeQueryCentroids(const QueryCentroidConfig& config, v1::QueryCentroidOptions* message) {
  message->set_centroids(config.centroids);
  message->set_list_tokens(config.list_tokens);
  message->set_placement(EncodePlacement(config.placement));
  message->set_name(config.name);
  message->set_retrieved_queries(config.retrieved_queries);
  message->set_adjust_tokens(config.adjust_tokens);
  message->set_centroids_max(config.centroids_max);
}

bool SameSoftmax(const SoftmaxConfig& a, const SoftmaxConfig& b) {
  return a.scale == b.scale && a.softcap == b.softcap && a.sink_logits == b.sink_logits;
}

bool SameLayer(const LayerConfig& a, const LayerConfig& b) {
  return a.absent == b.absent && a.dense == b.dense && a.q_heads == b.q_heads && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.value_dim == b.value_dim && a.format == b.format && a.selection == b.selection &&
         SameSoftmax(a.softmax, b.softmax) && a.query_centroids == b.query_centroids &&
         a.tokens_per_cluster == b.tokens_per_cluster;
}

// What all layers have in common, as far as an override can say the rest: an override can set a softcap, sink logits
// or a lowest score, but it cannot take one away.
LayerConfig CommonLayer(const std::vector<LayerConfig>& layers) {
  LayerConfig common = layers.front();
  common.absent = false;
  common.dense = false;
  for (const LayerConfig& layer : layers) {
    if (layer.softmax.softcap == 0) common.softmax.softcap = 0;
    if (layer.softmax.sink_logits.empty()) common.softmax.sink_logits.clear();
    if (!layer.selection.min_score.has_value()) common.selection.min_score.reset();
  }
  return common;
}

void EncodeOverride(uint32_t index, const LayerConfig& layer, v1::LayerOverride* message) {
  message->add_layers(index);
  message->set_absent(layer.absent);
  message->set_dense(layer.dense);
  message->set_q_heads(layer.q_heads);
  message->set_kv_heads(layer.kv_heads);
  message->set_head_dim(layer.head_dim);
  message->set_value_dim(layer.value_dim);
  message->set_format(EncodeFormat(layer.format));
  EncodeSelection(layer.selection, message->mutable_selection());
  EncodeSoftmax(layer.softmax, message->mutable_softmax());
  EncodeQueryCentroids(layer.query_centroids, message->add_query_centroids());
  message->mutable_key_clusters()->set_tokens_per_cluster(layer.tokens_per_cluster);
}

}  // namespace

v1::Format EncodeFormat(Format format) {
  switch (format) {
    case Format::kF32:
      return v1::FORMAT_F32;
    case Format::kF16:
      return v1::FORMAT_F16;
    case Format::kBF16:
      return v1::FORMAT_BF16;
    case Format::kK8V8:
      return v1::FORMAT_K8V8;
    case Format::kK8V4:
      return v1::FORMAT_K8V4;
    case Format::kK6V4:
      return v1::FORMAT_K6V4;
  }
  return v1::FORMAT_UNSPECIFIED;
}

v1::Source EncodeSource(Source source) {
  switch (source) {
    case Source::kDense:
      return v1::SOURCE_DENSE;
    case Source::kExact:
      return v1::SOURCE_EXACT;
    case Source::kSketch:
      return v1::SOURCE_SKETCH;
    case Source::kQueryCentroids:
      return v1::SOURCE_QUERY_CENTROIDS;
    case Source::kKeyCentroids:
      return v1::SOURCE_KEY_CENTROIDS;
    case Source::kKeyCentroidsSketch:
      return v1::SOURCE_KEY_CENTROIDS_SKETCH;
    case Source::kAuto:
      return v1::SOURCE_AUTO;
  }
  return v1::SOURCE_UNSPECIFIED;
}

v1::DType EncodeDType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::RowFormat EncodeRowFormat(RowFormat format) {
  switch (format) {
    case RowFormat::kF32:
      return v1::ROW_FORMAT_F32;
    case RowFormat::kF16:
      return v1::ROW_FORMAT_F16;
    case RowFormat::kBF16:
      return v1::ROW_FORMAT_BF16;
    case RowFormat::kStorage:
      return v1::ROW_FORMAT_STORAGE;
  }
  return v1::ROW_FORMAT_UNSPECIFIED;
}

void EncodeSelection(const Selection& selection, v1::Selection* message) {
  message->set_source(EncodeSource(selection.source));
  message->set_k_tokens(selection.k_tokens);
  message->set_top_p(selection.top_p);
  message->set_min_share(selection.min_share);
  if (selection.min_score.has_value()) message->set_min_score(*selection.min_score);
  message->set_reduction(EncodeReduction(selection.reduction));
  message->set_sink_tokens(selection.sink_tokens);
  message->set_window_tokens(selection.window_tokens);
  message->set_dense_below_tokens(selection.dense_below_tokens);
  message->set_keep_share(selection.keep_share);
  message->set_refine_planes(selection.refine_planes);
  message->set_candidate_tokens(selection.candidate_tokens);
  message->set_probes(selection.probes);
  message->set_centroid_set(selection.centroid_set);
  message->set_open_share(selection.open_share);
}

void EncodeSoftmax(const SoftmaxConfig& softmax, v1::SoftmaxOptions* message) {
  message->set_softmax_scale(softmax.scale);
  if (softmax.softcap != 0) message->set_logit_softcap(softmax.softcap);
  message->mutable_sink_logits()->Assign(softmax.sink_logits.begin(), softmax.sink_logits.end());
}

void EncodeSessionOptions(const SessionConfig& config, v1::SessionOptions* options) {
  const LayerConfig common = CommonLayer(config.layers);
  v1::Geometry* geometry = options->mutable_geometry();
  geometry->set_layers(static_cast<uint32_t>(config.layers.size()));
  geometry->set_q_heads(common.q_heads);
  geometry->set_kv_heads(common.kv_heads);
  geometry->set_head_dim(common.head_dim);
  geometry->set_value_dim(common.value_dim);
  geometry->set_dtype(EncodeDType(config.dtype));
  options->set_format(EncodeFormat(common.format));
  EncodeSelection(common.selection, options->mutable_selection());
  EncodeSoftmax(common.softmax, options->mutable_softmax());
  EncodeQueryCentroids(common.query_centroids, options->add_query_centroids());
  options->mutable_key_clusters()->set_tokens_per_cluster(common.tokens_per_cluster);
  for (uint32_t i = 0; i < config.layers.size(); ++i) {
    if (!SameLayer(config.layers[i], common)) EncodeOverride(i, config.layers[i], options->add_layer_overrides());
  }
  options->set_first_planes(config.first_planes);
  options->set_token_limit(config.token_limit);
  options->set_lease_seconds(static_cast<uint32_t>(config.lease.count()));
  options->set_maintenance(config.maintenance == Maintenance::kAuto ? v1::MAINTENANCE_AUTO : v1::MAINTENANCE_MANUAL);
  options->set_fingerprint(config.fingerprint);
  options->set_rotation_seed(config.rotation_seed);
  options->set_cache_slots(config.cache_slots);
  EncodePolicies(config.policies, options->mutable_policies());
  options->set_tags(config.tags);
  options->set_record(config.record);
  if (config.needle_share_target > 0) {
    options->mutable_policies()->set_needle_share_target(config.needle_share_target);
  }
  options->set_value_tier(v1::VALUE_TIER_DEVICE);
  options->set_admission(v1::ADMISSION_AT_OPEN);
}

}  // namespace ctkvr::rpc
