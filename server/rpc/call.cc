// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call.h"

#include <iterator>

#include "server/rpc/status.h"

namespace ctkvr::rpc {
namespace {

// Faults that an operator must see, whoever called.
bool IsServerFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown;
}

}  // namespace

TimePoint EngineDeadline(const grpc::ServerContextBase& context, const Clock& clock) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return TimePoint::max();
  const TimePoint now = clock.Now();
  const auto left = deadline - std::chrono::system_clock::now();
  return left > TimePoint::max() - now ? TimePoint::max() : now + left;
}

// Of two, neither can be trusted.
std::optional<obs::TraceContext> TraceOf(const grpc::ServerContextBase& context) {
  const auto [first, last] = context.client_metadata().equal_range(obs::kTraceparent);
  if (first == last || std::next(first) != last) return std::nullopt;
  return obs::ParseTraceparent({first->second.data(), first->second.size()});
}

void CallCounter::Enter() {
  std::lock_guard lock(mutex_);
  ++calls_;
}

void CallCounter::Leave() {
  std::lock_guard lock(mutex_);
  if (--calls_ == 0) idle_.notify_all();
}

bool CallCounter::WaitIdle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, timeout, [this] { return calls_ == 0; });
}

Call::Call(obs::Method method, grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter)
    : method_(method),
      edge_(edge),
      counter_(counter),
      deadline_(EngineDeadline(context, edge.clock)),
      peer_(context.peer()),
      trace_(TraceOf(context)),
      caller_(edge.access.Authenticate(context)) {
  counter_.Enter();
  edge_.metrics.CallStarted(method_);
}

Call::~Call() {
  const auto duration = std::chrono::steady_clock::now() - start_;
  const int code = static_cast<int>(status_.code());
  edge_.metrics.CallDone(method_, code, duration);
  edge_.metrics.Bytes(method_, received_bytes_, sent_bytes_);
  if (!obs::IsStream(method_) && edge_.slow_calls.IsSlow(duration)) {
    obs::SlowCall slow{.code = code,
                       .duration = duration,
                       .layer = layer_,
                       .items = items_,
                       .bytes_in = received_bytes_,
                       .bytes_out = sent_bytes_};
    slow.SetSession(session_id_);
    KeepSlow(slow, times_);
  }
  edge_.log.Access({.method = obs::MethodName(method_),
                    .code = obs::CodeName(code),
                    .server_fault = IsServerFault(status_.code()),
                    .message = CapMessage(std::string(status_.message().data(), status_.message().size())),
                    .session_id = std::move(session_id_),
                    .layer = layer_,
                    .items = items_,
                    .duration = duration,
                    .bytes_in = received_bytes_,
                    .bytes_out = sent_bytes_,
                    .peer = peer_,
                    .trace = trace_});
  counter_.Leave();  // last: what it lends may go once the counter is idle
}

absl::Status Call::TakeCall() { return edge_.access.TakeCall(*caller_, edge_.clock.Now()); }

absl::Status Call::Admit() { return caller_.ok() ? TakeCall() : caller_.status(); }

// REQUIRES: the caller is known.
CallContext Call::Context(StageTimes& times) const {
  return {.tenant = caller_->tenant.id,
          .deadline = deadline_,
          .cancelled = [this] { return cancelled(); },
          .times = &times};
}

void Call::KeepSlow(obs::SlowCall slow, const StageTimes& times) const {
  slow.method = method_;
  slow.ended = std::chrono::system_clock::now();
  for (size_t i = 0; i < kStageCount; ++i) slow.stages[i] = times.Of(static_cast<Stage>(i));
  slow.trace = trace_;
  edge_.slow_calls.Add(slow);
}

void Call::OnCancel() {
  if (!cancelled_.exchange(true)) edge_.metrics.CallCancelled(method_);
}

grpc::Status Call::End(const absl::Status& status) {
  status_ = status;
  return ToGrpcStatus(status);
}

}  // namespace ctkvr::rpc
