// SPDX-License-Identifier: Apache-2.0
//
// One thread, one bounded queue, one stream, one scratch stack, one session table. A lane takes all that waits as one
// batch, runs it, ends sessions whose lease ran out, does one step of maintenance (or, where none is due and nothing
// waits, one slice of an exact repeat), and looks again.
//
// Thread-safe where marked; everything else runs on the lane's thread, or on that of the test that drives it.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "kernels/arena.h"
#include "server/core/clock.h"
#include "server/core/directory.h"
#include "server/core/engine.h"
#include "server/core/join.h"
#include "server/core/policies.h"
#include "server/core/session_table.h"
#include "server/core/shadow_runner.h"
#include "server/core/stats.h"
#include "server/core/step.h"

namespace ctkvr {

// ---- What waits in a queue -----------------------------------------------------------------------------------------

struct OpenTask {
  SessionSpec spec;
  uint64_t planned_bytes = 0;
  Callback<SessionInfo> done;
};
struct TruncateTask {
  SessionRef session;
  uint32_t length = 0;
  Callback<TruncateResult> done;
};
struct CloseTask {
  SessionRef session;
  Callback<CloseResult> done;
};
struct GetTask {
  SessionRef session;
  Callback<SessionInfo> done;
};
struct KeepAliveTask {
  SessionRef session;
  Callback<LeaseResult> done;
};
struct MaintainTask {
  SessionRef session;
  std::vector<uint32_t> layers;
  Callback<MaintainResult> done;
};

// Every lane contributes its first sessions; the last one merges.
struct ListCall : JoinedCall {
  SessionKey after;  // and whose
  uint32_t limit = 0;
  Callback<std::vector<SessionSummary>> done;
  std::vector<absl::StatusOr<std::vector<SessionSummary>>> lanes;  // each written by its lane

  void Complete();
};
struct ListTask {
  Part<ListCall> call;
  uint32_t lane = 0;
};

struct Task {
  CallContext context;  // unused for steps: theirs is in the call
  std::variant<OpenTask, StepPart, TruncateTask, CloseTask, GetTask, KeepAliveTask, MaintainTask, ListTask> work;

  TenantId tenant() const;
  // Answers with an error.
  void Fail(const absl::Status& status);
};

// ---- The lane ------------------------------------------------------------------------------------------------------

// What lanes share. Must outlive them.
struct LaneShared {
  Backend& backend;
  Arena& arena;
  const Clock& clock;
  Stats& stats;
  Directory& directory;
  TenantLedger& tenants;
};

class Lane {
 public:
  struct Options {
    size_t scratch_bytes = 0;
    uint32_t queue_items_max = 0;
    double truth_share = 0;  // as EngineOptions
    double truth_budget = 1;
  };
  // The backend's errors.
  static absl::StatusOr<std::unique_ptr<Lane>> Create(const Options& options, const LaneShared& shared);
  ~Lane();

  // Thread-safe. Never blocks. Takes the task when OK; RESOURCE_EXHAUSTED (QUEUE_FULL,
  // QUEUE_QUOTA) or UNAVAILABLE (stopped) leaves it to the caller.
  absl::Status Post(Task& task);
  // Thread-safe. Bytes of sessions open or on their way here, by which Open chooses a lane.
  uint64_t planned_bytes() const { return planned_bytes_.load(std::memory_order_relaxed); }
  void AddPlannedBytes(uint64_t bytes) { planned_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void SubtractPlannedBytes(uint64_t bytes) { planned_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  // Thread-safe.
  LaneState State();

  // Everything queued, then at most one maintenance step, or else one slice of an exact repeat where nothing waits;
  // whether there was anything. REQUIRES: not started.
  bool RunOnce();
  void Start();
  // Thread-safe. Whether the queue ran empty, and all that was taken from it is answered, within `timeout`.
  bool WaitIdle(std::chrono::nanoseconds timeout);
  // Thread-safe. Ends the thread, answers what is left with UNAVAILABLE, ends every session. Once only.
  void Stop();

 private:
  struct Queued {
    Task task;
    TimePoint arrived;
  };
  // A Maintain call that waits for its layers.
  struct Job {
    CallContext context;
    MaintainTask task;
    uint64_t epoch = 0;
  };

  Lane(const Options& options, const LaneShared& shared, std::unique_ptr<Stream> stream, Scratch scratch);
  LaneDevice device() { return {.backend = shared_.backend, .stream = *stream_, .scratch = scratch_}; }
  void Loop();
  void WaitForWork(std::unique_lock<std::mutex>& lock);
  void RunBatch(std::vector<Queued> batch);
  // REQUIRES: the batch is not empty.
  PolicyInputs ReadPolicyInputs(const std::vector<Queued>& batch, TimePoint now);
  void RunTask(Queued& queued);
  void Run(OpenTask& task);
  void Run(const Queued& queued, TruncateTask& task);
  void Run(const Queued& queued, CloseTask& task);
  void Run(const Queued& queued, GetTask& task);
  void Run(const Queued& queued, KeepAliveTask& task);
  void Run(Queued& queued, MaintainTask& task);
  void Run(ListTask& task);
  // Checks the reference to a session of the tenant and renews the lease.
  absl::StatusOr<Session*> Find(const SessionRef& ref, TenantId tenant, TimePoint arrived);
  void EndSession(std::unique_ptr<Session> session, SessionEnd end, const char* reason);
  // Sees to it that no scratch carries rows of an ended session to another tenant.
  void NoteTenant(TenantId tenant);
  void Sweep();
  void NoteMaintenance(const Session& session);
  bool MaintainOnce();
  bool ShadowOnce();
  // Answers jobs that are done, gone or expired.
  void CheckJobs();
  void FailJobs(const Session& session, const absl::Status& status);

  const Options options_;
  const LaneShared shared_;
  const std::unique_ptr<Stream> stream_;
  Scratch scratch_;
  std::atomic<uint64_t> planned_bytes_{0};
  std::atomic<uint64_t> sessions_{0};

  // Of the lane's thread alone.
  SessionTable table_;
  LoadMeter load_;
  std::deque<SessionKey> maintenance_queue_;  // of sessions that are due, each once
  std::set<SessionKey> in_maintenance_queue_;
  std::deque<Job> jobs_;
  ShadowRunner shadows_;
  std::optional<TenantId> first_tenant_;
  bool several_tenants_ = false;  // had sessions here since the start

  std::mutex mutex_;  // guards all below
  std::condition_variable work_cv_;
  std::condition_variable idle_cv_;
  std::vector<Queued> queue_;
  bool stopping_ = false;
  bool busy_ = false;                     // taken from the queue and not answered yet
  std::optional<TimePoint> batch_start_;  // of the batch that runs
  std::thread thread_;
};

}  // namespace ctkvr
