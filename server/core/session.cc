// SPDX-License-Identifier: Apache-2.0

#include "server/core/session.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/rotation.h"
#include "server/core/error.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

struct SessionPlan {
  MemoryPlan memory;
  std::vector<LayerRequests> layers;  // [layers]
  std::map<uint32_t, size_t> signs;   // head_dim -> request
};

SessionPlan PlanSession(const SessionConfig& config) {
  SessionPlan plan;
  std::set<IndexShape> index_spares;
  std::set<ClusterShape> cluster_spares;
  for (const LayerConfig& layer : config.layers) {
    LayerRequests& requests = plan.layers.emplace_back();
    if (layer.absent) continue;
    LayerSpares spares;
    spares.index =
        layer.query_centroids.centroids > 0 && index_spares.insert(MakeIndexShape(layer, config.token_limit)).second;
    spares.clusters = layer.tokens_per_cluster > 0 &&
                      cluster_spares.insert(MakeClusterShape(layer, config.token_limit, config.first_planes)).second;
    requests = PlanLayer(layer, config, spares, plan.memory);
    if (KeysAreCoded(layer.format) && !plan.signs.contains(layer.head_dim)) {
      const size_t bytes = sizeof(float) * RotationRounds(layer.head_dim) * layer.head_dim;
      plan.signs[layer.head_dim] = plan.memory.Add(bytes, 1);
    }
  }
  return plan;
}

Reservation* At(std::vector<Reservation>& reservations, size_t request) {
  return request == MemoryPlan::kNone ? nullptr : &reservations[request];
}

}  // namespace

uint64_t Session::PlannedBytes(const SessionConfig& config) { return PlanSession(config).memory.bytes(); }

uint64_t Session::SlotTableBytes(const SessionConfig& config) {
  uint64_t bytes = 0;
  for (const LayerConfig& layer : config.layers) {
    if (!layer.absent) bytes += Layer::SlotTablesBytes(layer, config.cache_slots);
  }
  return bytes;
}

uint64_t Session::TagBytes(const SessionConfig& config) {
  if (!config.tags) return 0;
  const auto present = [](const LayerConfig& layer) { return !layer.absent; };
  return std::count_if(config.layers.begin(), config.layers.end(), present) * TokenTags::Bytes(config.token_limit);
}

absl::StatusOr<std::unique_ptr<Session>> Session::Create(SessionSpec spec, Arena& arena, LaneDevice device) {
  SessionPlan plan = PlanSession(spec.config);
  absl::StatusOr<std::vector<Reservation>> reservations =
      arena.Reserve(plan.memory.requests(), Arena::Holder{.owner = spec.tenant, .stream = &device.stream});
  if (!reservations.ok()) {
    return MakeError(absl::StatusCode::kResourceExhausted, std::string(reservations.status().message()),
                     kReasonArenaFull);
  }
  std::unique_ptr<Session> session(new Session(std::move(spec)));
  session->reservations_ = *std::move(reservations);
  const SessionConfig& config = session->config();
  std::map<uint32_t, const float*> signs_on_device;
  std::vector<std::vector<float>> signs_on_host;
  absl::Status status;
  for (const auto& [head_dim, request] : plan.signs) {
    const std::vector<float>& signs = signs_on_host.emplace_back(RotationSigns(head_dim, config.rotation_seed));
    Block& block = session->sign_blocks_.emplace_back(session->reservations_[request].Take());
    signs_on_device[head_dim] = reinterpret_cast<const float*>(block.data());
    if (status.ok()) status = device.backend.CopyIn(device.stream, block.data(), std::as_bytes(std::span(signs)));
  }
  // Also after an error: the device must be done with the blocks before they are given back.
  const absl::Status synchronized = device.backend.Synchronize(device.stream);
  if (status.ok()) status = synchronized;
  CTKVR_RETURN_IF_ERROR(status);
  std::vector<const float*> signs;
  for (const LayerConfig& layer : config.layers) {
    signs.push_back(layer.absent || !KeysAreCoded(layer.format) ? nullptr : signs_on_device[layer.head_dim]);
  }
  session->MakeLayers(plan.layers, signs);
  return session;
}

void Session::MakeLayers(const std::vector<LayerRequests>& requests, const std::vector<const float*>& signs) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const LayerRequests& request = requests[i];
    std::unique_ptr<Layer>& layer = layers_.emplace_back();
    if (config().layers[i].absent) continue;
    layer = std::make_unique<Layer>(config().layers[i], config(),
                                    Layer::Memory{.pages = At(reservations_, request.pages),
                                                  .sketches = At(reservations_, request.sketches),
                                                  .raw_pages = At(reservations_, request.raw_pages),
                                                  .mean = At(reservations_, request.mean),
                                                  .index = {.centroids = At(reservations_, request.index.centroids),
                                                            .lists = At(reservations_, request.index.lists),
                                                            .norms = At(reservations_, request.index.norms)},
                                                  .clusters = At(reservations_, request.clusters),
                                                  .signs = signs[i],
                                                  // Layers' versions lie far apart, and sessions' by their epochs.
                                                  .first_cache_version = epoch() + (uint64_t{i} << 40)});
  }
  maintenance_.resize(requests.size());
  truth_.resize(requests.size());
  quality_.resize(requests.size());
  served_.assign(requests.size(), {Source::kDense, SelectionReason::kNothingVisible});
}

absl::Status Session::Check(const SessionRef& ref) const {
  if (ref.epoch != 0 && ref.epoch != spec_.epoch) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("epoch is ", ref.epoch, "; session \"", spec_.id, "\" has epoch ", spec_.epoch),
                     kReasonEpochMismatch, {{"epoch", absl::StrCat(spec_.epoch)}});
  }
  if (!ref.fingerprint.empty() && ref.fingerprint != spec_.config.fingerprint) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("fingerprint differs from that of session \"", spec_.id, "\""),
                     kReasonFingerprintMismatch);
  }
  return absl::OkStatus();
}

absl::Status Session::CheckHealthy() const {
  if (!failed_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("session \"", spec_.id, "\" failed: a device error left its state unknown; close it"),
                   kReasonSessionFailed);
}

absl::StatusOr<Layer*> Session::FindLayer(uint32_t layer) {
  if (layer >= layers_.size()) {
    return absl::OutOfRangeError(absl::StrCat("layer is ", layer, "; the session has ", layers_.size(), " layers"));
  }
  if (layers_[layer] == nullptr)
    return absl::OutOfRangeError(absl::StrCat("layer is ", layer, "; that layer is absent"));
  return layers_[layer].get();
}

absl::StatusOr<TruncateResult> Session::Truncate(LaneDevice device, uint32_t length) {
  std::vector<uint32_t> lengths;
  bool all_reach = true;
  for (const auto& layer : layers_) {
    lengths.push_back(layer == nullptr ? 0 : layer->length());
    all_reach = all_reach && (layer == nullptr || layer->length() >= length);
  }
  if (!all_reach) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("length is ", length, "; the layers hold ", absl::StrJoin(lengths, ", "), " tokens"),
                     kReasonShorterLayer);
  }
  std::vector<QueryIndex::ListCounts> counts(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i] == nullptr || layers_[i]->index() == nullptr) continue;
    CTKVR_ASSIGN_OR_RETURN(counts[i], layers_[i]->index()->PlanTruncate(device, length));
  }
  ++truncations_;
  TruncateResult result{.epoch = spec_.epoch, .removed_tokens = {}};
  for (size_t i = 0; i < layers_.size(); ++i) {
    result.removed_tokens.push_back(layers_[i] == nullptr ? 0 : lengths[i] - length);
    // Queries may be known of a position that no token holds yet.
    if (layers_[i] != nullptr && layers_[i]->index() != nullptr) {
      QueryIndex& index = *layers_[i]->index();
      const uint32_t queries = index.ring_count();
      index.Truncate(length, counts[i]);
      if (index.ring_count() != queries && build_ != nullptr && build_->layer == i) build_.reset();
    }
    if (result.removed_tokens.back() == 0) continue;
    if (layers_[i]->clusters() != nullptr) layers_[i]->clusters()->Truncate(length);
    layers_[i]->Commit(length);
    if (layers_[i]->slot_table() != nullptr) layers_[i]->slot_table()->Truncate(length);
    maintenance_[i].wanted_length = std::min(maintenance_[i].wanted_length, length);
    maintenance_[i].failed_length = 0;
    maintenance_[i].wanted_clustered = std::min(maintenance_[i].wanted_clustered, length);
    maintenance_[i].failed_clustered = 0;
    if (build_ != nullptr && build_->layer == i) build_.reset();
  }
  return result;
}

bool Session::SampleRetrieval(double share) {
  uint64_t x = spec_.config.rotation_seed + 0x9e3779b97f4a7c15u * ++sampled_from_;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53 < share;
}

bool Session::AddTruth(uint32_t layer, const TruthSample& sample) {
  truth_[layer].Add(sample);
  if (config().needle_share_target == 0) return false;
  uint64_t needles = 0, found = 0;
  for (const HeadTruth& head : sample.heads) {
    needles += head.needle;
    found += head.found;
  }
  return quality_[layer].Add(needles, found, config().needle_share_target);
}

absl::Status Session::RequestMaintenance(const std::vector<uint32_t>& layers) {
  for (uint32_t layer : layers) CTKVR_RETURN_IF_ERROR(FindLayer(layer).status());
  for (uint32_t i = 0; i < layers_.size(); ++i) {
    const bool named = layers.empty() || std::find(layers.begin(), layers.end(), i) != layers.end();
    if (!named || layers_[i] == nullptr) continue;
    maintenance_[i].wanted_length = layers_[i]->length();
    // Nothing to do now must not become something to do when queries come.
    if (!LayerDue(i)) maintenance_[i].wanted_length = 0;
    maintenance_[i].wanted_clustered = layers_[i]->length();
    if (!ClustersDue(i)) maintenance_[i].wanted_clustered = 0;
  }
  return absl::OkStatus();
}

bool Session::MaintenancePending(const std::vector<uint32_t>& layers) const {
  for (uint32_t i = 0; i < layers_.size(); ++i) {
    const bool named = layers.empty() || std::find(layers.begin(), layers.end(), i) != layers.end();
    if (named && maintenance_[i].wanted_length > 0 && LayerDue(i)) return true;
    if (named && maintenance_[i].wanted_clustered > 0 && ClustersDue(i)) return true;
  }
  return false;
}

// Where a build of the layer would end: what was asked for, or, of its own accord, short of the positions that a
// client may still query as drafts, because a query may not lie before the indexed length.
uint32_t Session::BuildEnd(uint32_t layer) const {
  const uint32_t length = layers_[layer]->length();
  if (maintenance_[layer].wanted_length > layers_[layer]->index()->indexed_length()) return length;
  return length - std::min(length, limits::kQueryPositionsMax);
}

bool Session::LayerDue(uint32_t layer) const {
  const Layer* const held = layers_[layer].get();
  if (held == nullptr || held->index() == nullptr || held->index()->ring_count() == 0) return false;
  const QueryIndex& index = *held->index();
  const uint32_t sinks = held->config().selection.sink_tokens;
  if (maintenance_[layer].wanted_length > std::max(index.indexed_length(), sinks)) return true;
  if (config().maintenance == Maintenance::kManual || held->length() <= maintenance_[layer].failed_length) return false;
  if (held->length() <= sinks + limits::kQueryPositionsMax) return false;
  if (index.live() == nullptr) return held->length() >= held->config().selection.dense_below_tokens;
  return held->length() - index.indexed_length() >= limits::kTailTokens;
}

bool Session::AdjustmentDue(uint32_t layer) const {
  const Layer* const held = layers_[layer].get();
  return held != nullptr && held->index() != nullptr && config().maintenance == Maintenance::kAuto &&
         held->length() > maintenance_[layer].failed_length && held->index()->adjustment_due();
}

bool Session::MaintenanceDue() const {
  if (failed_) return false;
  if (build_ != nullptr) return true;
  for (uint32_t i = 0; i < layers_.size(); ++i) {
    if (LayerDue(i) || AdjustmentDue(i)) return true;
  }
  return NextClusterLayer() < layers_.size();
}

bool Session::ClustersDue(uint32_t layer) const {
  const Layer* const held = layers_[layer].get();
  if (held == nullptr || held->clusters() == nullptr || held->raw()) return false;
  const KeyClusters& clusters = *held->clusters();
  const MaintenanceState& state = maintenance_[layer];
  if (state.wanted_clustered > std::max(clusters.clustered_length(), clusters.begin())) return true;
  if (config().maintenance == Maintenance::kManual || held->length() <= state.failed_clustered) return false;
  if (held->length() <= clusters.begin() + limits::kQueryPositionsMax) return false;
  if (clusters.clustered_length() == 0) return held->length() >= held->config().selection.dense_below_tokens;
  return held->length() - clusters.clustered_length() >= limits::kClusterTailTokens;
}

uint32_t Session::NextClusterLayer() const {
  uint32_t next = static_cast<uint32_t>(layers_.size());
  for (uint32_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i] == nullptr || layers_[i]->clusters() == nullptr) continue;
    // Layers share the spare blocks: what was begun is ended first.
    if (layers_[i]->clusters()->building()) return i;
    if (next == layers_.size() && ClustersDue(i)) next = i;
  }
  return next;
}

absl::Status Session::ClusterStep(LaneDevice device, uint32_t layer) {
  Layer& held = *layers_[layer];
  KeyClusters& clusters = *held.clusters();
  MaintenanceState& state = maintenance_[layer];
  // As BuildEnd: of its own accord, short of the positions that a client may still query.
  const bool wanted = state.wanted_clustered > std::max(clusters.clustered_length(), clusters.begin());
  const uint32_t end = held.length() - (wanted ? 0 : std::min(held.length(), limits::kQueryPositionsMax));
  const absl::Status status = held.ClusterStep(device, end);
  if (!status.ok()) {
    state.wanted_clustered = 0;
    state.failed_clustered = held.length();
  } else if (!clusters.building()) {
    if (clusters.clustered_length() >= state.wanted_clustered) state.wanted_clustered = 0;
    state.failed_clustered = 0;
  }
  return status;
}

absl::Status Session::MaintenanceStep(LaneDevice device) {
  uint32_t layer = build_ == nullptr ? NextClusterLayer() : 0;
  if (build_ == nullptr && layer < layers_.size()) return ClusterStep(device, layer);
  layer = 0;
  absl::Status status;
  if (build_ != nullptr) {
    layer = build_->layer;
    status = ContinueBuild(device);
  } else {
    while (layer < layers_.size() && !LayerDue(layer) && !AdjustmentDue(layer)) ++layer;
    if (layer == layers_.size()) return absl::OkStatus();
    status = StartBuild(device, layer);
  }
  if (!status.ok()) {
    build_.reset();
    maintenance_[layer].wanted_length = 0;
    maintenance_[layer].failed_length = layers_[layer]->length();
  }
  return status;
}

absl::Status Session::StartBuild(LaneDevice device, uint32_t layer) {
  const QueryIndex& index = *layers_[layer]->index();
  auto build = std::make_unique<Build>();
  build->layer = layer;
  // A build adjusts as well.
  build->joins = !LayerDue(layer);
  if (build->joins) {
    CTKVR_ASSIGN_OR_RETURN(build->set, index.StartAdjustment(device));
  } else {
    CTKVR_ASSIGN_OR_RETURN(build->set,
                           index.StartSet(device, layers_[layer]->config().selection.sink_tokens, BuildEnd(layer)));
  }
  build_ = std::move(build);
  return absl::OkStatus();
}

absl::Status Session::ContinueBuild(LaneDevice device) {
  Layer& layer = *layers_[build_->layer];
  if (build_->set->clustering.has_value()) {
    const absl::Status status = layer.index()->ClusterStep(device, *build_->set);
    if (status.code() != absl::StatusCode::kAborted) return status;
    build_.reset();  // the next step begins anew, from what the ring has now
    return absl::OkStatus();
  }
  const auto centroids = static_cast<uint32_t>(build_->set->heads[build_->kv_head].centroids.size());
  const QueryIndex::ListRange range{.kv_head = build_->kv_head,
                                    .first = build_->centroid,
                                    .count = std::min(limits::kMaintenanceCentroids, centroids - build_->centroid)};
  if (range.count > 0) {
    const HeadView view = layer.View(range.kv_head);
    CTKVR_RETURN_IF_ERROR(layer.index()->BuildLists(device, layer.config(), view, *build_->set, range));
  }
  build_->centroid += range.count;
  if (build_->centroid < centroids) return absl::OkStatus();
  build_->centroid = 0;
  if (++build_->kv_head < layer.config().kv_heads) return absl::OkStatus();
  // All heads at once: a half-built set is never searched.
  if (build_->joins) {
    layer.index()->Join(std::move(build_->set));
  } else {
    layer.index()->Publish(std::move(build_->set));
  }
  MaintenanceState& state = maintenance_[build_->layer];
  if (layer.index()->indexed_length() >= state.wanted_length) state.wanted_length = 0;
  state.failed_length = 0;
  build_.reset();
  return absl::OkStatus();
}

std::vector<uint32_t> Session::IndexedLengths() const {
  std::vector<uint32_t> lengths;
  for (const auto& layer : layers_) {
    lengths.push_back(layer == nullptr || layer->index() == nullptr ? 0 : layer->index()->indexed_length());
  }
  return lengths;
}

MemoryInfo Session::Memory() const {
  MemoryInfo memory;
  for (const Reservation& reservation : reservations_) memory.reserved_bytes += reservation.bytes();
  for (const Block& block : sign_blocks_) memory.state_bytes += block.bytes();
  for (const auto& layer : layers_) {
    if (layer != nullptr) layer->AddTo(memory);
  }
  if (build_ != nullptr) memory.index_bytes += build_->set->held_bytes();
  return memory;
}

uint64_t Session::tokens_held() const {
  uint64_t tokens = 0;
  for (const auto& layer : layers_) tokens += layer == nullptr ? 0 : layer->length();
  return tokens;
}

uint32_t Session::layers_held() const {
  const auto holds = [](const auto& layer) { return layer != nullptr && layer->length() > 0; };
  return static_cast<uint32_t>(std::count_if(layers_.begin(), layers_.end(), holds));
}

SessionInfo Session::Info() const {
  SessionInfo info{.id = spec_.id,
                   .epoch = spec_.epoch,
                   .config = spec_.config,
                   .layers = {},
                   .memory = Memory(),
                   .lease_remaining_seconds = 0,
                   .appended_tokens = appended_tokens_,
                   .retrievals = retrievals_,
                   .truth = {},
                   .shadows_skipped = shadows_skipped_,
                   .shadow_pending = false};
  for (const auto& layer : layers_) {
    LayerInfo& layer_info = info.layers.emplace_back();
    if (layer == nullptr) continue;
    const size_t index = info.layers.size() - 1;
    layer_info.truth = truth_[index].Info();
    layer_info.strength = quality_[index].strength();
    std::tie(layer_info.served, layer_info.reason) = served_[index];
    layer_info.length = layer->length();
    layer_info.codec = layer->Codec(spec_.config.rotation_seed);
    if (layer->clusters() != nullptr) layer_info.clustered_length = layer->clusters()->clustered_length();
    if (layer->index() == nullptr) continue;
    layer_info.indexed_length = layer->index()->indexed_length();
    layer_info.query_centroids = layer->index()->centroid_count();
  }
  std::vector<TruthInfo> truth;
  for (const LayerInfo& layer_info : info.layers) truth.push_back(layer_info.truth);
  info.truth = SumTruth(truth);
  return info;
}

SessionSummary Session::Summary() const {
  const MemoryInfo memory = Memory();
  SessionSummary summary{.id = spec_.id,
                         .epoch = spec_.epoch,
                         .held_bytes = memory.held_bytes(),
                         .reserved_bytes = memory.reserved_bytes,
                         .length_max = 0,
                         .token_limit = spec_.config.token_limit,
                         .lease_remaining_seconds = 0};
  for (const auto& layer : layers_) {
    if (layer != nullptr) summary.length_max = std::max(summary.length_max, layer->length());
  }
  return summary;
}

}  // namespace ctkvr
