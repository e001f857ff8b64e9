// SPDX-License-Identifier: Apache-2.0
//
// The façade, and the API for embedding: sessions of keys and values behind asynchronous calls. Knows no gRPC, writes
// no log, reads no flag.
//
//   Engine ── owns ── Arena
//     │
//     └─ owns ── Lane[n] ── owns ── thread, queue, Stream, Scratch, SessionTable ── owns ── Session ── owns ── Layer
//
// Thread-safe. Every call answers through its callback, exactly once: on a lane's thread, or at once on the caller's
// when the queue is full, the engine drains or the session is unknown. Callbacks must not block. A session's calls
// take effect in the order they were made.
//
// A call names and lists the sessions of CallContext.tenant alone; another tenant's answer as if they had never been.
//
// Errors common to the calls that name a session: NOT_FOUND (never opened, closed, expired: see error.h),
// FAILED_PRECONDITION (epoch, fingerprint, failed session), RESOURCE_EXHAUSTED (queue, the tenant's share of it),
// DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE (draining is refused for Open only; after Drain everything is).

#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/core/clock.h"
#include "server/core/stats.h"
#include "server/core/tenant_ledger.h"
#include "server/core/types.h"

namespace ctkvr {

class SessionObserver;  // observer.h

struct EngineOptions {
  uint32_t lanes = 1;                        // threads that own sessions
  size_t arena_bytes = size_t{1} << 30;      // for all sessions
  size_t scratch_bytes = size_t{256} << 20;  // a lane, for one batch's intermediate results
  uint32_t queue_items_max = 1024;           // waiting calls a lane
  uint32_t sessions_max = 100000;
  // Share of the retrievals that is repeated exactly while a lane has nothing else to do (online truth), and the share
  // of a lane's time that this may take. One at a time a lane; what comes meanwhile is left out and counted.
  double truth_share = 0;
  double truth_budget = 0.02;
  // Told of the sessions that ask for it (SessionConfig.record); null: such sessions are refused. Must outlive the
  // engine.
  SessionObserver* observer = nullptr;
  bool threads = true;  // false: tests drive lanes by RunLane
};

struct EngineMemory {
  uint64_t arena_bytes = 0;
  uint64_t arena_free_bytes = 0;
  uint64_t arena_reserved_bytes = 0;
  uint64_t arena_held_bytes = 0;
  uint64_t arena_cleared_bytes = 0;  // where owners changed; only grows
  uint64_t slot_table_bytes = 0;     // host memory beside the arena
};

// A lane as it is now.
struct LaneState {
  uint64_t sessions = 0;
  uint64_t planned_bytes = 0;               // of its sessions, open or on their way
  uint64_t queued_items = 0;                // calls that wait
  std::chrono::nanoseconds oldest_wait{0};  // of these
  std::chrono::nanoseconds working_for{0};  // on the batch it has taken; 0: on none
};

class Engine {
 public:
  // `backend` and `clock` must outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, Backend& backend, Clock& clock);
  ~Engine();  // drains at once

  // `id` empty: the engine names it. FAILED_PRECONDITION: it wants to be recorded, and there is no observer.
  // ALREADY_EXISTS; RESOURCE_EXHAUSTED (ARENA_FULL, HOST_MEMORY_FULL, SESSION_LIMIT, MEMORY_QUOTA, SESSION_QUOTA);
  // INVALID_ARGUMENT.
  void Open(std::string id, SessionConfig config, CallContext context, Callback<SessionInfo> done);

  // The steps of a batch: each session's append, then its retrieval; results in the order of the requests. Requests
  // view the caller's bytes until `done` has run. One lane's steps share operations.
  void Step(std::vector<StepRequest> requests, CallContext context,
            absl::AnyInvocable<void(std::vector<StepResult>)> done);

  void Truncate(SessionRef session, uint32_t length, CallContext context, Callback<TruncateResult> done);
  void Close(SessionRef session, CallContext context, Callback<CloseResult> done);
  void Get(SessionRef session, CallContext context, Callback<SessionInfo> done);
  void KeepAlive(SessionRef session, CallContext context, Callback<LeaseResult> done);
  // `layers` empty: all. Runs maintenance to its end.
  void Maintain(SessionRef session, std::vector<uint32_t> layers, CallContext context, Callback<MaintainResult> done);
  // At most `limit` sessions with id > `after`, by id.
  void List(std::string after, uint32_t limit, CallContext context, Callback<std::vector<SessionSummary>> done);

  // What each tenant may hold, in place of what was set before; nothing is ended. See TenantLedger.
  void SetTenantQuotas(const std::map<TenantId, TenantQuota>& quotas);
  std::map<TenantId, TenantUsage> tenant_usage() const;

  // From now on Open answers UNAVAILABLE (DRAINING).
  void StartDraining();
  // StartDraining, waits until queues are empty or `timeout` has passed, answers what is left with UNAVAILABLE, ends
  // every session, stops the lanes. Later calls answer UNAVAILABLE. Returns whether all work was finished.
  bool Drain(std::chrono::milliseconds timeout);

  uint64_t boot_id() const;
  bool draining() const;
  // False once the device is lost, which is for good: every call that needs it then answers UNAVAILABLE.
  bool healthy() const;
  const Stats& stats() const;
  EngineMemory memory() const;
  std::vector<LaneState> lanes() const;  // waits for no lane
  const EngineOptions& options() const;
  BackendInfo backend_info() const;

  // Runs all that is queued on a lane, then one maintenance step or one slice of an exact repeat; returns whether there
  // was anything.
  // REQUIRES: options().threads is false.
  bool RunLane(uint32_t lane);

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ctkvr
