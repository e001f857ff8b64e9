// SPDX-License-Identifier: Apache-2.0

#include "server/core/engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/arena.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/core/directory.h"
#include "server/core/elements.h"
#include "server/core/error.h"
#include "server/core/host_budget.h"
#include "server/core/lane.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

uint64_t RandomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Numbers that no other call of this boot and, but for chance, no other boot gets. A bijection of a counter, so that
// within a boot none comes twice; 0 is left out.
class UniqueNumbers {
 public:
  uint64_t Next() {
    for (;;) {
      uint64_t x = base_ + 0x9e3779b97f4a7c15u * next_.fetch_add(1, std::memory_order_relaxed);
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      x ^= x >> 31;
      if (x != 0) return x;
    }
  }

 private:
  const uint64_t base_ = RandomNumber();
  std::atomic<uint64_t> next_{0};
};

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, "the server is draining", kReasonDraining);
}

absl::Status CheckOptions(const EngineOptions& options) {
  if (options.lanes == 0) return absl::InvalidArgumentError("lanes is 0; the least is 1");
  if (options.queue_items_max == 0) return absl::InvalidArgumentError("queue_items_max is 0; the least is 1");
  if (options.sessions_max == 0) return absl::InvalidArgumentError("sessions_max is 0; the least is 1");
  // Written so that NaN is outside.
  if (!(options.truth_share >= 0 && options.truth_share <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("truth_share is ", options.truth_share, "; it must be 0 to 1"));
  }
  if (!(options.truth_budget > 0 && options.truth_budget <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("truth_budget is ", options.truth_budget, "; it must be above 0 and at most 1"));
  }
  if (options.sessions_max > limits::kSessionsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("sessions_max is ", options.sessions_max, "; the limit is ", limits::kSessionsMax));
  }
  return absl::OkStatus();
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& engine_options, Backend& engine_backend, const Clock& engine_clock,
       std::unique_ptr<Arena> engine_arena)
      : options(engine_options),
        backend(engine_backend),
        clock(engine_clock),
        arena(std::move(engine_arena)),
        directory(options.sessions_max, limits::kTombstonesMax * options.lanes) {}

  absl::Status MakeLanes() {
    const LaneShared shared{.backend = backend,
                            .arena = *arena,
                            .clock = clock,
                            .stats = stats,
                            .directory = directory,
                            .tenants = tenants};
    for (uint32_t i = 0; i < options.lanes; ++i) {
      const Lane::Options lane_options{.scratch_bytes = options.scratch_bytes,
                                       .queue_items_max = options.queue_items_max,
                                       .truth_share = options.truth_share,
                                       .truth_budget = options.truth_budget};
      CTKVR_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(lane_options, shared));
      lanes.push_back(std::move(lane));
    }
    if (options.threads) {
      for (const auto& lane : lanes) lane->Start();
    }
    return absl::OkStatus();
  }

  // Claims the id, which may be empty, for the lane.
  absl::Status Claim(SessionKey& key, uint32_t lane) {
    if (!key.id.empty()) return directory.Claim(key, lane);
    for (;;) {
      key.id = absl::StrCat("session-", absl::Hex(numbers.Next(), absl::kZeroPad16));
      const absl::Status status = directory.Claim(key, lane);
      if (status.code() != absl::StatusCode::kAlreadyExists) return status;
    }
  }

  // A session that a drain has just ended is not called closed: `drained` is set before the first of them ends.
  absl::StatusOr<uint32_t> FindLane(const SessionKey& key) const {
    absl::StatusOr<uint32_t> lane = directory.Find(key);
    if (drained) return DrainingError();
    return lane;
  }

  // Sends work to the lane of the session, or answers at once.
  template <typename Work>
  void PostToSession(Work work, CallContext context) {
    absl::StatusOr<uint32_t> lane = FindLane({.tenant = context.tenant, .id = work.session.id});
    if (!lane.ok()) return work.done(lane.status());
    Task task{.context = std::move(context), .work = std::move(work)};
    if (const absl::Status status = lanes[*lane]->Post(task); !status.ok()) task.Fail(status);
  }

  // What can be said of an item without its session. Returns its lane. Bad queries beside a chunk are answered, and
  // taken out of the request: the append goes its way.
  absl::StatusOr<uint32_t> CheckItem(StepCall& call, uint32_t item) {
    StepRequest& request = call.requests[item];
    CTKVR_ASSIGN_OR_RETURN(const uint32_t lane, FindLane({.tenant = call.context.tenant, .id = request.session.id}));
    if (request.query.has_value()) {
      const absl::Status status = CheckElements("queries", request.query->queries, request.query->dtype).status();
      if (!status.ok() && !request.chunk.has_value()) return status;
      if (!status.ok()) call.results[item].answer = status;
      if (!status.ok()) request.query.reset();
    }
    if (!request.chunk.has_value()) return lane;
    const Chunk& chunk = *request.chunk;
    CTKVR_ASSIGN_OR_RETURN(call.key_magnitudes[item], CheckElements("keys", chunk.keys, chunk.dtype));
    CTKVR_RETURN_IF_ERROR(CheckElements("values", chunk.values, chunk.dtype).status());
    CTKVR_RETURN_IF_ERROR(CheckElements("queries", chunk.queries, chunk.dtype).status());
    return lane;
  }

  const EngineOptions options;
  Backend& backend;
  const Clock& clock;
  UniqueNumbers numbers;
  const uint64_t boot_id = numbers.Next();
  Stats stats;
  HostBudget slot_table_budget{limits::kSlotTableBytesMax};
  const std::unique_ptr<Arena> arena;
  Directory directory;
  TenantLedger tenants;
  std::vector<std::unique_ptr<Lane>> lanes;  // last: gone before what they share
  std::atomic<bool> draining{false};
  std::atomic<bool> drained{false};
  std::mutex drain_mutex;  // one Drain at a time
};

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, Backend& backend, Clock& clock) {
  CTKVR_RETURN_IF_ERROR(CheckOptions(options));
  CTKVR_ASSIGN_OR_RETURN(std::unique_ptr<Arena> arena, Arena::Create(backend, options.arena_bytes));
  auto impl = std::make_unique<Impl>(options, backend, clock, std::move(arena));
  CTKVR_RETURN_IF_ERROR(impl->MakeLanes());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() { Drain(std::chrono::milliseconds(0)); }

void Engine::Open(std::string id, SessionConfig config, CallContext context, Callback<SessionInfo> done) {
  if (impl_->draining) return done(DrainingError());
  if (id.size() > limits::kSessionIdBytesMax) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("bytes of session_id is ", id.size(), "; the limit is ", limits::kSessionIdBytesMax)));
  }
  if (const absl::Status status = ValidateSessionConfig(config); !status.ok()) return done(status);
  if (config.needle_share_target > 0 && impl_->options.truth_share == 0) {
    return done(absl::InvalidArgumentError(absl::StrCat("needle_share_target is ", config.needle_share_target,
                                                        "; it needs online truth, and truth_share is 0")));
  }
  if (config.record && impl_->options.observer == nullptr) {
    return done(absl::FailedPreconditionError("record is set; the server was started without --record"));
  }
  if (config.rotation_seed == 0) config.rotation_seed = impl_->numbers.Next();
  const uint64_t planned_bytes = Session::PlannedBytes(config);
  absl::StatusOr<HostBudget::Grant> host_memory =
      impl_->slot_table_budget.Take(Session::SlotTableBytes(config) + Session::TagBytes(config));
  if (!host_memory.ok()) return done(host_memory.status());
  absl::StatusOr<TenantLedger::Grant> quota = impl_->tenants.Admit(context.tenant, planned_bytes);
  if (!quota.ok()) return done(quota.status());
  uint32_t lane = 0;
  for (uint32_t i = 1; i < impl_->lanes.size(); ++i) {
    if (impl_->lanes[i]->planned_bytes() < impl_->lanes[lane]->planned_bytes()) lane = i;
  }
  SessionKey key{.tenant = context.tenant, .id = std::move(id)};
  if (const absl::Status status = impl_->Claim(key, lane); !status.ok()) return done(status);
  impl_->lanes[lane]->AddPlannedBytes(planned_bytes);
  Task task{.context = std::move(context),
            .work = OpenTask{.spec = {.id = key.id,
                                      .epoch = impl_->numbers.Next(),
                                      .config = std::move(config),
                                      .tenant = key.tenant,
                                      .quota = *std::move(quota),
                                      .host_memory = *std::move(host_memory),
                                      .observer = impl_->options.observer},
                             .planned_bytes = planned_bytes,
                             .done = std::move(done)}};
  if (const absl::Status status = impl_->lanes[lane]->Post(task); !status.ok()) {
    impl_->lanes[lane]->SubtractPlannedBytes(planned_bytes);
    impl_->directory.Remove(key, nullptr);
    task.Fail(status);
  }
}

void Engine::Step(std::vector<StepRequest> requests, CallContext context,
                  absl::AnyInvocable<void(std::vector<StepResult>)> done) {
  auto* const call = new StepCall;  // owned by its parts
  const Part<StepCall> whole(call);
  const auto items = static_cast<uint32_t>(requests.size());
  call->requests = std::move(requests);
  call->key_magnitudes.resize(items);
  call->context = std::move(context);
  call->done = std::move(done);
  for (uint32_t i = 0; i < items; ++i)
    call->results.push_back({absl::StatusOr<AppendResult>(), absl::StatusOr<Answer>()});
  absl::Status refusal;
  if (items > limits::kItemsMax) {
    refusal = absl::InvalidArgumentError(absl::StrCat("items is ", items, "; the limit is ", limits::kItemsMax));
  }
  std::map<uint32_t, std::vector<uint32_t>> by_lane;
  for (uint32_t i = 0; i < items; ++i) {
    const absl::StatusOr<uint32_t> lane = refusal.ok() ? impl_->CheckItem(*call, i) : refusal;
    if (!lane.ok()) {
      call->Fail(i, lane.status());
      continue;
    }
    by_lane[*lane].push_back(i);
  }
  for (auto& [lane, lane_items] : by_lane) {
    Task task{.context = {}, .work = StepPart{.call = Part<StepCall>(call), .items = std::move(lane_items)}};
    if (const absl::Status status = impl_->lanes[lane]->Post(task); !status.ok()) task.Fail(status);
  }
}

void Engine::Truncate(SessionRef session, uint32_t length, CallContext context, Callback<TruncateResult> done) {
  impl_->PostToSession(TruncateTask{.session = std::move(session), .length = length, .done = std::move(done)},
                       std::move(context));
}

void Engine::Close(SessionRef session, CallContext context, Callback<CloseResult> done) {
  impl_->PostToSession(CloseTask{.session = std::move(session), .done = std::move(done)}, std::move(context));
}

void Engine::Get(SessionRef session, CallContext context, Callback<SessionInfo> done) {
  impl_->PostToSession(GetTask{.session = std::move(session), .done = std::move(done)}, std::move(context));
}

void Engine::KeepAlive(SessionRef session, CallContext context, Callback<LeaseResult> done) {
  impl_->PostToSession(KeepAliveTask{.session = std::move(session), .done = std::move(done)}, std::move(context));
}

void Engine::Maintain(SessionRef session, std::vector<uint32_t> layers, CallContext context,
                      Callback<MaintainResult> done) {
  impl_->PostToSession(
      MaintainTask{.session = std::move(session), .layers = std::move(layers), .done = std::move(done)},
      std::move(context));
}

void Engine::List(std::string after, uint32_t limit, CallContext context, Callback<std::vector<SessionSummary>> done) {
  if (impl_->drained) return done(DrainingError());
  if (limit == 0 || limit > limits::kListSessionsPageMax) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("page_size is ", limit, "; it must be 1 to ", limits::kListSessionsPageMax)));
  }
  auto* const call = new ListCall;  // owned by its parts
  const Part<ListCall> whole(call);
  call->after = {.tenant = context.tenant, .id = std::move(after)};
  call->limit = limit;
  call->done = std::move(done);
  call->lanes.resize(impl_->lanes.size());
  for (uint32_t lane = 0; lane < impl_->lanes.size(); ++lane) {
    Task task{.context = context, .work = ListTask{.call = Part<ListCall>(call), .lane = lane}};
    if (const absl::Status status = impl_->lanes[lane]->Post(task); !status.ok()) task.Fail(status);
  }
}

void Engine::StartDraining() { impl_->draining = true; }

bool Engine::Drain(std::chrono::milliseconds timeout) {
  StartDraining();
  const std::lock_guard lock(impl_->drain_mutex);
  if (impl_->drained) return true;
  const TimePoint deadline = impl_->clock.Now() + timeout;
  bool finished = true;
  for (uint32_t lane = 0; lane < impl_->lanes.size(); ++lane) {
    if (impl_->options.threads) {
      const std::chrono::nanoseconds left = deadline - impl_->clock.Now();
      finished = impl_->lanes[lane]->WaitIdle(std::max(left, std::chrono::nanoseconds(0))) && finished;
    } else {
      while (timeout.count() > 0 && !impl_->lanes[lane]->WaitIdle(std::chrono::nanoseconds(0))) RunLane(lane);
      finished = impl_->lanes[lane]->WaitIdle(std::chrono::nanoseconds(0)) && finished;
    }
  }
  impl_->drained = true;
  for (const auto& lane : impl_->lanes) lane->Stop();
  return finished;
}

uint64_t Engine::boot_id() const { return impl_->boot_id; }
bool Engine::draining() const { return impl_->draining; }
bool Engine::healthy() const { return !impl_->stats.device_lost.load(std::memory_order_relaxed); }
const Stats& Engine::stats() const { return impl_->stats; }
const EngineOptions& Engine::options() const { return impl_->options; }
BackendInfo Engine::backend_info() const { return impl_->backend.Info(); }

EngineMemory Engine::memory() const {
  const Arena& arena = *impl_->arena;
  return {.arena_bytes = arena.capacity_bytes(),
          .arena_free_bytes = arena.free_bytes(),
          .arena_reserved_bytes = arena.reserved_bytes(),
          .arena_held_bytes = arena.held_bytes(),
          .arena_cleared_bytes = arena.cleared_bytes(),
          .slot_table_bytes = impl_->slot_table_budget.used()};
}

std::vector<LaneState> Engine::lanes() const {
  std::vector<LaneState> states;
  for (const auto& lane : impl_->lanes) states.push_back(lane->State());
  return states;
}

void Engine::SetTenantQuotas(const std::map<TenantId, TenantQuota>& quotas) { impl_->tenants.SetQuotas(quotas); }

std::map<TenantId, TenantUsage> Engine::tenant_usage() const { return impl_->tenants.Usage(); }

bool Engine::RunLane(uint32_t lane) {
  CTKVR_CHECK(!impl_->options.threads && lane < impl_->lanes.size());
  return impl_->lanes[lane]->RunOnce();
}

}  // namespace ctkvr
