// SPDX-License-Identifier: Apache-2.0
//
// The /metrics page: what calls did (counted here) and what the engine counted (read from its Stats when the page is
// asked for). Every series exists from the start and their number never changes, save that a tenant's come and go with
// its name in the access file: no label carries what a client chose. Reading the page takes
// no lock of a lane. Thread-safe.
//
// Names start with ctkvr_; counters end in _total, times are in seconds (_seconds), sizes in bytes (_bytes).

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "server/core/stats.h"
#include "server/obs/access_sample.h"

namespace prometheus {
class Exposer;
}

namespace ctkvr::obs {

// The calls of service ctkvr.v1.Cache. A label value each.
enum class Method : uint8_t {
  kGetServerInfo,
  kOpenSession,
  kCloseSession,
  kTruncateSession,
  kForkSession,
  kGetSession,
  kListSessions,
  kKeepAlive,
  kMaintainSession,
  kAppend,
  kAppendStream,
  kRetrieve,
  kDecode,
  kSnapshotSession,
  kRestoreSession
};
inline constexpr std::array<const char*, 15> kMethodNames = {
    "GetServerInfo", "OpenSession",  "CloseSession", "TruncateSession", "ForkSession",
    "GetSession",    "ListSessions", "KeepAlive",    "MaintainSession", "Append",
    "AppendStream",  "Retrieve",     "Decode",       "SnapshotSession", "RestoreSession"};
inline const char* MethodName(Method method) { return kMethodNames[static_cast<size_t>(method)]; }

// Whose calls are many messages.
inline bool IsStream(Method method) { return method == Method::kAppendStream || method == Method::kDecode; }

// The calls of service ctkvr.v1.Admin. A label value each, of a family of its own: objectives are about Cache.
enum class AdminMethod : uint8_t {
  kListTenantSessions,
  kCloseSessions,
  kStartDrain,
  kSetLogLevel,
  kDumpState,
  kListSlowCalls
};
inline constexpr std::array<const char*, 6> kAdminMethodNames = {
    "ListTenantSessions", "CloseSessions", "StartDrain", "SetLogLevel", "DumpState", "ListSlowCalls"};

// Names of the gRPC status codes 0 to 16, as the code label and access lines have them.
inline constexpr std::array<const char*, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
// UNKNOWN for a number outside.
const char* CodeName(int code);

// What is read at scrape time beside Stats.
struct ServerSample {
  uint64_t arena_bytes = 0;
  uint64_t arena_free_bytes = 0;
  uint64_t arena_reserved_bytes = 0;
  uint64_t arena_held_bytes = 0;
  uint64_t arena_cleared_bytes = 0;
  uint64_t slot_table_bytes = 0;
  bool draining = false;
  AccessSample access;
};

// What never changes while the process lives.
struct ServerFacts {
  std::string version;
  std::string backend;
  std::string device;
  uint32_t lanes = 0;
  uint64_t queue_items_max = 0;  // of all lanes
  uint64_t sessions_max = 0;
};

// The engine's counters as metric families; made anew at each scrape.
class EngineCollector final : public prometheus::Collectable {
 public:
  // `stats` must outlive the collector. `sample` is called at each scrape, on the thread of the page; it must not wait
  // for a lane.
  EngineCollector(const Stats& stats, std::function<ServerSample()> sample, ServerFacts facts);
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const Stats& stats_;
  const std::function<ServerSample()> sample_;
  const ServerFacts facts_;
  const double start_time_seconds_;
};

// Owns all series.
class Metrics {
 public:
  Metrics(const Stats& stats, std::function<ServerSample()> sample, ServerFacts facts);
  ~Metrics();

  void CallStarted(Method method);
  // Once for each CallStarted. Streams count once, when they end.
  void CallDone(Method method, int code, std::chrono::nanoseconds duration);
  void CallCancelled(Method method);                            // client gone, or deadline passed while it ran
  void Bytes(Method method, uint64_t received, uint64_t sent);  // of messages, before framing
  // A message of a stream: from when it was read until its reply was ready. REQUIRES: kAppendStream or kDecode.
  void MessageDone(Method method, std::chrono::nanoseconds duration);
  // Items of batches have codes of their own. REQUIRES: kRetrieve or kDecode.
  void ItemDone(Method method, int code);

  void AdminCallDone(AdminMethod method, int code);

  // Serves the page over HTTP at "host:port"; port 0 takes a free one. Returns "host:port" with the port that was
  // taken; an empty address serves none and returns an empty string. UNAVAILABLE: cannot listen there. REQUIRES: called
  // once.
  absl::StatusOr<std::string> Expose(const std::string& address);
  std::string Text() const;  // the page

 private:
  struct MethodSeries {
    std::array<prometheus::Counter*, kCodeNames.size()> calls{};
    std::array<prometheus::Counter*, kCodeNames.size()> items{};  // null where a method has no items
    prometheus::Histogram* seconds = nullptr;
    prometheus::Histogram* message_seconds = nullptr;  // null where a method is no stream
    prometheus::Gauge* in_flight = nullptr;
    prometheus::Counter* cancelled = nullptr;
    prometheus::Counter* received_bytes = nullptr;
    prometheus::Counter* sent_bytes = nullptr;
  };
  void MakeSeries();
  void MakeAdminSeries();
  MethodSeries& series(Method method) { return series_[static_cast<size_t>(method)]; }

  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<EngineCollector> engine_;
  std::array<MethodSeries, kMethodNames.size()> series_;
  std::array<std::array<prometheus::Counter*, kCodeNames.size()>, kAdminMethodNames.size()> admin_calls_{};
  std::unique_ptr<prometheus::Exposer> exposer_;  // last: its threads read the others
};

}  // namespace ctkvr::obs
