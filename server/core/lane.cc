// SPDX-License-Identifier: Apache-2.0

#include "server/core/lane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/core/context.h"
#include "server/core/error.h"
#include "server/core/observer.h"

namespace ctkvr {
namespace {

// A lane with leases wakes at least so often, so that a clock that does not run like ours is looked at now and then.
constexpr std::chrono::nanoseconds kSweepIntervalMax = std::chrono::seconds(1);

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};

SessionKey KeyOf(const SessionSpec& spec) { return {.tenant = spec.tenant, .id = spec.id}; }

absl::Status StoppedError() {
  return MakeError(absl::StatusCode::kUnavailable, "the server is draining", kReasonDraining);
}

}  // namespace

void ListCall::Complete() {
  std::vector<SessionSummary> merged;
  for (auto& lane : lanes) {
    if (!lane.ok()) {
      done(lane.status());
      return;
    }
    std::move(lane->begin(), lane->end(), std::back_inserter(merged));
  }
  std::sort(merged.begin(), merged.end(), [](const SessionSummary& a, const SessionSummary& b) { return a.id < b.id; });
  if (merged.size() > limit) merged.resize(limit);
  done(std::move(merged));
}

TenantId Task::tenant() const {
  const auto* part = std::get_if<StepPart>(&work);
  return part != nullptr ? part->call->context.tenant : context.tenant;
}

void Task::Fail(const absl::Status& status) {
  std::visit(Overloaded{[&](StepPart& part) {
                          part.Fail(status);
                          StepPart ended = std::move(part);  // completes the call
                        },
                        [&](ListTask& list) {
                          list.call->lanes[list.lane] = status;
                          ListTask ended = std::move(list);
                        },
                        [&](auto& task) { task.done(status); }},
             work);
}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(const Options& options, const LaneShared& shared) {
  CTKVR_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, shared.backend.NewStream());
  CTKVR_ASSIGN_OR_RETURN(Scratch scratch, Scratch::Create(shared.backend, options.scratch_bytes));
  return std::unique_ptr<Lane>(new Lane(options, shared, std::move(stream), std::move(scratch)));
}

Lane::Lane(const Options& options, const LaneShared& shared, std::unique_ptr<Stream> stream, Scratch scratch)
    : options_(options),
      shared_(shared),
      stream_(std::move(stream)),
      scratch_(std::move(scratch)),
      shadows_(options.truth_share, options.truth_budget, shared.clock, shared.stats) {}

Lane::~Lane() { CTKVR_CHECK(!thread_.joinable() && table_.size() == 0); }

absl::Status Lane::Post(Task& task) {
  const TimePoint now = shared_.clock.Now();
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return StoppedError();
    if (queue_.size() >= options_.queue_items_max) {
      shared_.stats.queue_rejections.fetch_add(1, std::memory_order_relaxed);
      return MakeError(absl::StatusCode::kResourceExhausted,
                       absl::StrCat("calls waiting in the lane's queue is ", queue_.size(), "; the limit is ",
                                    options_.queue_items_max),
                       kReasonQueueFull);
    }
    if (absl::Status status = shared_.tenants.Enqueue(task.tenant()); !status.ok()) return status;
    queue_.push_back({.task = std::move(task), .arrived = now});
    shared_.stats.queued_items.fetch_add(1, std::memory_order_relaxed);
  }
  work_cv_.notify_one();
  return absl::OkStatus();
}

LaneState Lane::State() {
  const TimePoint now = shared_.clock.Now();
  LaneState state{.sessions = sessions_.load(std::memory_order_relaxed), .planned_bytes = planned_bytes()};
  const std::lock_guard lock(mutex_);
  state.queued_items = queue_.size();
  if (!queue_.empty()) state.oldest_wait = now - queue_.front().arrived;
  if (batch_start_.has_value()) state.working_for = now - *batch_start_;
  return state;
}

// ---- Running -------------------------------------------------------------------------------------------------------

bool Lane::RunOnce() {
  std::vector<Queued> batch;
  {
    const std::lock_guard lock(mutex_);
    batch.swap(queue_);
    busy_ = true;
    if (!batch.empty()) batch_start_ = shared_.clock.Now();
  }
  const bool any = !batch.empty();
  if (any) RunBatch(std::move(batch));
  Sweep();
  const bool maintained = MaintainOnce();
  CheckJobs();
  const bool shadowed = !maintained && ShadowOnce();
  {
    const std::lock_guard lock(mutex_);
    busy_ = !jobs_.empty();
    batch_start_.reset();
  }
  idle_cv_.notify_all();
  return any || maintained || shadowed;
}

void Lane::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Lane::Loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    // The maintenance queue is this thread's own.
    // So are its exact repeats, whose turn a wait may end.
    if (queue_.empty() && maintenance_queue_.empty()) WaitForWork(lock);
    if (stopping_) return;
    lock.unlock();
    RunOnce();
    lock.lock();
  }
}

void Lane::WaitForWork(std::unique_lock<std::mutex>& lock) {
  const auto has_work = [this] { return stopping_ || !queue_.empty(); };
  std::optional<TimePoint> next = table_.next_expiry();
  if (shadows_.pending()) next = std::min(next.value_or(TimePoint::max()), shadows_.ReadyAt());
  if (!next.has_value()) {
    work_cv_.wait(lock, has_work);
    return;
  }
  const std::chrono::nanoseconds remaining = *next - shared_.clock.Now();
  work_cv_.wait_for(lock, std::clamp(remaining, std::chrono::nanoseconds(0), kSweepIntervalMax), has_work);
}

bool Lane::WaitIdle(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return idle_cv_.wait_for(lock, timeout, [this] { return queue_.empty() && !busy_; });
}

void Lane::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_cv_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::vector<Queued> left;
  {
    const std::lock_guard lock(mutex_);
    left.swap(queue_);
  }
  shared_.stats.queued_items.fetch_sub(static_cast<int64_t>(left.size()), std::memory_order_relaxed);
  for (Queued& queued : left) {
    shared_.tenants.Dequeue(queued.task.tenant());
    if (const auto* open = std::get_if<OpenTask>(&queued.task.work))
      shared_.directory.Remove(KeyOf(open->spec), nullptr);
    queued.task.Fail(StoppedError());
  }
  for (Job& job : jobs_) job.task.done(StoppedError());
  jobs_.clear();
  for (auto& session : table_.TakeAll()) EndSession(std::move(session), SessionEnd::kDrained, kReasonSessionClosed);
}

void Lane::RunBatch(std::vector<Queued> batch) {
  Stats& stats = shared_.stats;
  stats.queued_items.fetch_sub(static_cast<int64_t>(batch.size()), std::memory_order_relaxed);
  stats.batches.fetch_add(1, std::memory_order_relaxed);
  stats.batch_items.fetch_add(batch.size(), std::memory_order_relaxed);
  StepRunner steps(
      device(), shared_.clock, stats,
      {.find = [this](const SessionRef& ref, TenantId tenant, TimePoint arrived) { return Find(ref, tenant, arrived); },
       .appended = [this](Session& session) { NoteMaintenance(session); },
       .sample = [this](Session& session) { return shadows_.Sample(session); }});
  const TimePoint now = shared_.clock.Now();
  steps.SetPolicyInputs(ReadPolicyInputs(batch, now));
  for (Queued& queued : batch) {
    shared_.tenants.Dequeue(queued.task.tenant());
    auto* part = std::get_if<StepPart>(&queued.task.work);
    const CallContext& context = part != nullptr ? part->call->context : queued.task.context;
    stats.stages[static_cast<size_t>(Stage::kWait)].Observe(now - queued.arrived);
    context.Spent(Stage::kWait, now - queued.arrived);
    // Clocks and cancellation are looked at when a task's turn comes, not when the batch was taken.
    const absl::Status expired = CheckContext(context, shared_.clock.Now(), "work");
    if (!expired.ok()) {
      stats.expired_in_queue.fetch_add(1, std::memory_order_relaxed);
      if (auto* open = std::get_if<OpenTask>(&queued.task.work)) {
        SubtractPlannedBytes(open->planned_bytes);
        shared_.directory.Remove(KeyOf(open->spec), nullptr);
      }
      queued.task.Fail(expired);
    } else if (part != nullptr) {
      steps.Add(std::move(*part), queued.arrived);
    } else {
      steps.Flush();
      RunTask(queued);
    }
  }
  steps.Flush();
}

PolicyInputs Lane::ReadPolicyInputs(const std::vector<Queued>& batch, TimePoint now) {
  std::chrono::nanoseconds waited{0};
  for (const Queued& queued : batch) waited += now - queued.arrived;
  load_.Observe(waited / batch.size());
  const auto layers = static_cast<double>(shared_.stats.layers_held.load(std::memory_order_relaxed));
  const auto tokens = static_cast<double>(shared_.stats.tokens_held.load(std::memory_order_relaxed));
  return {.load_delta = load_.delta(), .mean_length = layers > 0 ? tokens / layers : 0};
}

void Lane::RunTask(Queued& queued) {
  std::visit(Overloaded{[](StepPart&) { CTKVR_CHECK(false && "steps run in groups"); },
                        [this](OpenTask& task) { Run(task); },  //
                        [this](ListTask& task) { Run(task); },  //
                        [&](auto& task) { Run(queued, task); }},
             queued.task.work);
}

absl::StatusOr<Session*> Lane::Find(const SessionRef& ref, TenantId tenant, TimePoint arrived) {
  const SessionKey key{.tenant = tenant, .id = ref.id};
  Session* session = table_.Find(key, arrived);
  if (session == nullptr) {
    // Sessions end between batches only, for steps point at them.
    return table_.Contains(key) ? Directory::EndedError(ref.id, kReasonLeaseExpired)
                                : shared_.directory.NotFoundError(key);
  }
  CTKVR_RETURN_IF_ERROR(session->Check(ref));
  table_.Renew(*session, shared_.clock.Now());
  return session;
}

void Lane::Run(OpenTask& task) {
  const SessionKey key = KeyOf(task.spec);
  NoteTenant(key.tenant);
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Create(std::move(task.spec), shared_.arena, device());
  if (!session.ok()) {
    NoteDeviceError(shared_.stats, session.status());
    SubtractPlannedBytes(task.planned_bytes);
    shared_.directory.Remove(key, nullptr);
    task.done(session.status());
    return;
  }
  const TimePoint now = shared_.clock.Now();
  const Session& opened = **session;
  if (opened.observer() != nullptr) opened.observer()->Opened(key.id, opened.epoch(), opened.config());
  table_.Insert(*std::move(session), now);
  shared_.stats.sessions_opened.fetch_add(1, std::memory_order_relaxed);
  shared_.stats.sessions.fetch_add(1, std::memory_order_relaxed);
  sessions_.fetch_add(1, std::memory_order_relaxed);
  SessionInfo info = opened.Info();
  info.lease_remaining_seconds = table_.LeaseRemainingSeconds(opened, now);
  task.done(std::move(info));
}

void Lane::Run(const Queued& queued, TruncateTask& task) {
  const absl::StatusOr<Session*> session = Find(task.session, queued.task.context.tenant, queued.arrived);
  if (!session.ok()) return task.done(session.status());
  if (absl::Status status = (*session)->CheckHealthy(); !status.ok()) return task.done(status);
  const int64_t layers_before = (*session)->layers_held();
  absl::StatusOr<TruncateResult> result = (*session)->Truncate(device(), task.length);
  NoteDeviceError(shared_.stats, result.status());
  SessionObserver* const observer = (*session)->observer();
  if (result.ok() && observer != nullptr) observer->Truncated((*session)->epoch(), task.length);
  if (result.ok()) {
    int64_t removed = 0;
    for (uint32_t tokens : result->removed_tokens) removed += tokens;
    shared_.stats.tokens_held.fetch_sub(removed, std::memory_order_relaxed);
    shared_.stats.layers_held.fetch_sub(layers_before - (*session)->layers_held(), std::memory_order_relaxed);
  }
  task.done(std::move(result));
}

void Lane::Run(const Queued& queued, CloseTask& task) {
  const absl::StatusOr<Session*> session = Find(task.session, queued.task.context.tenant, queued.arrived);
  if (!session.ok()) return task.done(session.status());
  const CloseResult result{.epoch = (*session)->epoch(), .freed_bytes = (*session)->Memory().reserved_bytes};
  EndSession(table_.Remove((*session)->key()), SessionEnd::kClosed, kReasonSessionClosed);
  task.done(result);
}

void Lane::Run(const Queued& queued, GetTask& task) {
  const absl::StatusOr<Session*> session = Find(task.session, queued.task.context.tenant, queued.arrived);
  if (!session.ok()) return task.done(session.status());
  SessionInfo info = (*session)->Info();
  info.lease_remaining_seconds = table_.LeaseRemainingSeconds(**session, shared_.clock.Now());
  info.shadow_pending = shadows_.PendingOf(info.epoch);
  task.done(std::move(info));
}

void Lane::Run(const Queued& queued, KeepAliveTask& task) {
  const absl::StatusOr<Session*> session = Find(task.session, queued.task.context.tenant, queued.arrived);
  if (!session.ok()) return task.done(session.status());
  task.done(LeaseResult{.epoch = (*session)->epoch(),
                        .lease_remaining_seconds = table_.LeaseRemainingSeconds(**session, shared_.clock.Now())});
}

void Lane::Run(Queued& queued, MaintainTask& task) {
  const absl::StatusOr<Session*> session = Find(task.session, queued.task.context.tenant, queued.arrived);
  if (!session.ok()) return task.done(session.status());
  absl::Status status = (*session)->CheckHealthy();
  if (status.ok()) status = (*session)->RequestMaintenance(task.layers);
  if (!status.ok()) return task.done(status);
  NoteMaintenance(**session);
  jobs_.push_back({.context = queued.task.context, .task = std::move(task), .epoch = (*session)->epoch()});
}

void Lane::Run(ListTask& task) {
  task.call->lanes[task.lane] = table_.List(task.call->after, task.call->limit, shared_.clock.Now());
  ListTask ended = std::move(task);
}

void Lane::EndSession(std::unique_ptr<Session> session, SessionEnd end, const char* reason) {
  const SessionKey key = session->key();
  const uint64_t planned_bytes = Session::PlannedBytes(session->config());
  const auto tokens = static_cast<int64_t>(session->tokens_held());
  const auto layers = static_cast<int64_t>(session->layers_held());
  if (session->observer() != nullptr) session->observer()->Ended(session->epoch());
  session.reset();  // memory first: who hears or counts that the session is gone may open another
  if (several_tenants_) scratch_.Clear(shared_.backend, *stream_);
  SubtractPlannedBytes(planned_bytes);
  Stats& stats = shared_.stats;
  stats.tokens_held.fetch_sub(tokens, std::memory_order_relaxed);
  stats.layers_held.fetch_sub(layers, std::memory_order_relaxed);
  stats.sessions.fetch_sub(1, std::memory_order_relaxed);
  sessions_.fetch_sub(1, std::memory_order_relaxed);
  stats.sessions_ended[static_cast<size_t>(end)].fetch_add(1, std::memory_order_release);
  shared_.directory.Remove(key, reason);
}

void Lane::NoteTenant(TenantId tenant) {
  if (!first_tenant_.has_value()) first_tenant_ = tenant;
  if (several_tenants_ || *first_tenant_ == tenant) return;
  several_tenants_ = true;
  scratch_.Clear(shared_.backend, *stream_);
}

void Lane::Sweep() {
  for (auto& session : table_.TakeExpired(shared_.clock.Now())) {
    EndSession(std::move(session), SessionEnd::kExpired, kReasonLeaseExpired);
  }
}

// ---- Maintenance ---------------------------------------------------------------------------------------------------

void Lane::NoteMaintenance(const Session& session) {
  if (!session.MaintenanceDue() || !in_maintenance_queue_.insert(session.key()).second) return;
  maintenance_queue_.push_back(session.key());
}

bool Lane::MaintainOnce() {
  if (maintenance_queue_.empty()) return false;
  const SessionKey key = std::move(maintenance_queue_.front());
  maintenance_queue_.pop_front();
  in_maintenance_queue_.erase(key);
  const TimePoint start = shared_.clock.Now();
  Session* session = table_.Find(key, start);
  if (session == nullptr || !session->MaintenanceDue()) return true;
  const absl::Status status = session->MaintenanceStep(device());
  shared_.stats.maintenance_steps.fetch_add(1, std::memory_order_relaxed);
  shared_.stats.stages[static_cast<size_t>(Stage::kMaintenance)].Observe(shared_.clock.Now() - start);
  if (!status.ok()) {
    NoteDeviceError(shared_.stats, status);
    FailJobs(*session, status);
  }
  NoteMaintenance(*session);
  return true;
}

// What waits goes first. What arrives during a slice waits for that one alone.
bool Lane::ShadowOnce() {
  if (!shadows_.pending()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (!queue_.empty() || stopping_) return false;
  }
  return shadows_.RunSlice(device(), table_);
}

void Lane::CheckJobs() {
  const TimePoint now = shared_.clock.Now();
  std::deque<Job> waiting;
  for (Job& job : std::exchange(jobs_, {})) {
    const SessionKey key{.tenant = job.context.tenant, .id = job.task.session.id};
    Session* session = table_.Find(key, now);
    if (session == nullptr || session->epoch() != job.epoch) {
      job.task.done(shared_.directory.NotFoundError(key));
    } else if (absl::Status expired = CheckContext(job.context, now, "the index was built"); !expired.ok()) {
      job.task.done(expired);
    } else if (absl::Status healthy = session->CheckHealthy(); !healthy.ok()) {
      job.task.done(healthy);
    } else if (!session->MaintenancePending(job.task.layers)) {
      job.task.done(MaintainResult{.epoch = job.epoch, .indexed_length = session->IndexedLengths()});
    } else {
      // A caller waits, so the session is in use.
      table_.Renew(*session, now);
      waiting.push_back(std::move(job));
    }
  }
  for (Job& job : waiting) jobs_.push_back(std::move(job));
}

void Lane::FailJobs(const Session& session, const absl::Status& status) {
  std::deque<Job> waiting;
  for (Job& job : std::exchange(jobs_, {})) {
    if (job.epoch == session.epoch()) {
      job.task.done(status);
    } else {
      waiting.push_back(std::move(job));
    }
  }
  for (Job& job : waiting) jobs_.push_back(std::move(job));
}

}  // namespace ctkvr
