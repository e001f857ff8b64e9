// SPDX-License-Identifier: Apache-2.0
//
// What all calls share: when they began, when they stop being worth doing, and what is written down when they end.
//
// Thread-safe: Context and OnCancel. The notes are for one thread at a time, in the order gRPC and the engine hand the
// call on.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "server/core/clock.h"
#include "server/core/engine.h"
#include "server/obs/logging.h"
#include "server/obs/metrics.h"
#include "server/obs/slow_calls.h"
#include "server/obs/trace_context.h"
#include "server/rpc/access.h"

namespace ctkvr::rpc {

// Counts calls between their arrival and the end of their last write. Thread-safe.
class CallCounter {
 public:
  void Enter();
  void Leave();
  // Whether no call was left before `timeout` had passed.
  bool WaitIdle(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  uint64_t calls_ = 0;
};

// What the service borrows; everything outlives it.
struct Edge {
  Engine& engine;
  Clock& clock;  // the engine's
  obs::Metrics& metrics;
  obs::Log& log;
  Access& access;
  obs::SlowCalls& slow_calls;
};

// The client's deadline. gRPC counts deadlines on the system's clock, the engine on a steady one.
TimePoint EngineDeadline(const grpc::ServerContextBase& context, const Clock& clock);
// Nothing: none, none that is valid, or several.
std::optional<obs::TraceContext> TraceOf(const grpc::ServerContextBase& context);

class Call {
 public:
  Call(obs::Method method, grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  // The end of the call: counts it, writes its access line, and keeps it when it was slow and no stream.
  ~Call();

  // Whether the call may be served: UNAUTHENTICATED; RESOURCE_EXHAUSTED (RATE_QUOTA). Asked once, before all else, by
  // unary calls; streams ask for their caller once and TakeCall for each message.
  absl::Status Admit();
  const absl::StatusOr<Caller>& caller() const { return caller_; }
  absl::Status TakeCall();

  // The caller's tenant, the client's deadline in the engine's time, and whether it has gone. Valid while the call
  // lives, and `times` do: the call's own, or those of one message.
  CallContext Context() { return Context(times_); }
  CallContext Context(StageTimes& times) const;
  void OnCancel();
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  void NoteSession(const std::string& id) { session_id_ = id; }
  void NoteLayer(uint32_t layer) { layer_ = layer; }
  void NoteItems(uint64_t count) { items_ += count; }
  void NoteReceived(uint64_t bytes) { received_bytes_ += bytes; }
  void NoteSent(uint64_t bytes) { sent_bytes_ += bytes; }

  // Keeps the status for the record and returns what gRPC is to send.
  grpc::Status End(const absl::Status& status);

 protected:
  const Edge& edge() const { return edge_; }
  // Keeps a call, or a message of a stream, that was slow; what all of them have is filled in.
  void KeepSlow(obs::SlowCall slow, const StageTimes& times) const;

 private:
  const obs::Method method_;
  const Edge& edge_;
  CallCounter& counter_;
  const TimePoint start_ = std::chrono::steady_clock::now();
  TimePoint deadline_ = TimePoint::max();
  const std::string peer_;
  const std::optional<obs::TraceContext> trace_;
  StageTimes times_;
  const absl::StatusOr<Caller> caller_;
  std::atomic<bool> cancelled_{false};
  absl::Status status_ = absl::UnknownError("the call ended without a status");
  std::string session_id_;
  std::optional<uint32_t> layer_;
  uint64_t items_ = 0;
  uint64_t received_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
};

}  // namespace ctkvr::rpc
