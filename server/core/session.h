// SPDX-License-Identifier: Apache-2.0
//
// One conversation: its layers, the memory admitted for it, and the index build under way. A session is healthy until
// a device error whose outcome nobody can know; then every call but Get and Close is refused.
//
// Not thread-safe: belongs to one lane.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "server/core/batch_memory.h"
#include "server/core/host_budget.h"
#include "server/core/layer.h"
#include "server/core/quality.h"
#include "server/core/tenant_ledger.h"
#include "server/core/truth.h"
#include "server/core/types.h"

namespace ctkvr {

class SessionObserver;

// What OpenSession asks for, numbers drawn: config.rotation_seed is not 0.
struct SessionSpec {
  std::string id;
  uint64_t epoch = 0;
  SessionConfig config;
  TenantId tenant = kDefaultTenant;
  TenantLedger::Grant quota;      // of the tenant
  HostBudget::Grant host_memory;  // of slot tables and tags
  SessionObserver* observer = nullptr;
};

class Session {
 public:
  // Bytes that Create will reserve. REQUIRES: a valid config, as below.
  static uint64_t PlannedBytes(const SessionConfig& config);
  // Host memory of its slot tables.
  static uint64_t SlotTableBytes(const SessionConfig& config);
  // Host memory of its tags.
  static uint64_t TagBytes(const SessionConfig& config);
  // RESOURCE_EXHAUSTED (ARENA_FULL); the backend's errors. Nothing stays taken then.
  static absl::StatusOr<std::unique_ptr<Session>> Create(SessionSpec spec, Arena& arena, LaneDevice device);

  // FAILED_PRECONDITION: epoch, fingerprint.
  absl::Status Check(const SessionRef& ref) const;
  // FAILED_PRECONDITION (SESSION_FAILED) once Fail was called.
  absl::Status CheckHealthy() const;
  void Fail() { failed_ = true; }
  bool failed() const { return failed_; }

  const std::string& id() const { return spec_.id; }
  SessionKey key() const { return {.tenant = spec_.tenant, .id = spec_.id}; }
  uint64_t epoch() const { return spec_.epoch; }
  const SessionConfig& config() const { return spec_.config; }
  // Who is told of what it does; null: nobody.
  SessionObserver* observer() const { return spec_.config.record ? spec_.observer : nullptr; }
  // OUT_OF_RANGE: no such layer, or an absent one.
  absl::StatusOr<Layer*> FindLayer(uint32_t layer);

  // FAILED_PRECONDITION (SHORTER_LAYER) listing lengths. Nothing is changed on an error.
  absl::StatusOr<TruncateResult> Truncate(LaneDevice device, uint32_t length);

  // ---- Maintenance ----
  // Takes these layers in up to their present lengths, whatever the thresholds. `layers` empty: all.
  absl::Status RequestMaintenance(const std::vector<uint32_t>& layers);
  // Whether what was requested of these layers is still to be done.
  bool MaintenancePending(const std::vector<uint32_t>& layers) const;
  // Whether a step would do anything.
  bool MaintenanceDue() const;
  // One bounded step. After an error the build is dropped and not tried again until the layer grows or it is requested.
  absl::Status MaintenanceStep(LaneDevice device);
  std::vector<uint32_t> IndexedLengths() const;

  // ---- Online truth ----
  // Whether this retrieval belongs to the sampled share: depends on the rotation seed and the retrievals before alone.
  bool SampleRetrieval(double share);
  void CountSkippedShadow() { ++shadows_skipped_; }
  // Whether the layer takes a step towards the session's needle share.
  bool AddTruth(uint32_t layer, const TruthSample& sample);
  // Steps taken so far.
  uint32_t strength(uint32_t layer) const { return quality_[layer].strength(); }
  // Truncations so far: what saw fewer of them saw other tokens.
  uint64_t truncations() const { return truncations_; }

  void CountAppended(uint64_t tokens) { appended_tokens_ += tokens; }
  void NoteServed(uint32_t layer, Source source, SelectionReason reason) { served_[layer] = {source, reason}; }
  void CountRetrievals(uint64_t positions) { retrievals_ += positions; }

  SessionInfo Info() const;        // what only the lane knows left 0: the lease, and whether a shadow is pending
  SessionSummary Summary() const;  // the same
  MemoryInfo Memory() const;
  uint64_t tokens_held() const;  // (layer, token)
  uint32_t layers_held() const;  // that hold any token

 private:
  struct Build {
    uint32_t layer = 0;
    std::unique_ptr<IndexSet> set;
    bool joins = false;  // the live set, which stays; else it takes its place
    uint32_t kv_head = 0;
    uint32_t centroid = 0;
  };
  struct MaintenanceState {
    uint32_t wanted_length = 0;     // 0: nothing requested
    uint32_t failed_length = 0;     // the layer's length when a build failed; 0: none has
    uint32_t wanted_clustered = 0;  // the same two of the key clusters
    uint32_t failed_clustered = 0;
  };
  explicit Session(SessionSpec spec) : spec_(std::move(spec)) {}
  void MakeLayers(const std::vector<LayerRequests>& requests, const std::vector<const float*>& signs);
  bool LayerDue(uint32_t layer) const;
  bool AdjustmentDue(uint32_t layer) const;
  uint32_t BuildEnd(uint32_t layer) const;
  absl::Status StartBuild(LaneDevice device, uint32_t layer);
  absl::Status ContinueBuild(LaneDevice device);
  bool ClustersDue(uint32_t layer) const;
  // The layer that a step clusters, or layers_.size().
  uint32_t NextClusterLayer() const;
  absl::Status ClusterStep(LaneDevice device, uint32_t layer);

  const SessionSpec spec_;
  bool failed_ = false;
  // Reservations before what takes blocks from them: destroyed last.
  std::vector<Reservation> reservations_;
  std::vector<Block> sign_blocks_;
  std::vector<std::unique_ptr<Layer>> layers_;  // null where absent
  std::vector<MaintenanceState> maintenance_;   // [layers]
  std::unique_ptr<Build> build_;
  uint64_t appended_tokens_ = 0;
  uint64_t retrievals_ = 0;
  std::vector<TruthCounts> truth_;  // [layers], as all below
  std::vector<QualityControl> quality_;
  std::vector<std::pair<Source, SelectionReason>> served_;  // of the last retrieval
  uint64_t truncations_ = 0;
  uint64_t sampled_from_ = 0;  // retrievals that SampleRetrieval was asked about
  uint64_t shadows_skipped_ = 0;
};

}  // namespace ctkvr
