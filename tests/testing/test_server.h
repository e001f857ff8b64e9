// SPDX-License-Identifier: Apache-2.0
//
// A real server inside the test process: engine, service and gRPC on a free port of 127.0.0.1, with its log lines kept
// for the test to read. Thread-safe.

#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ctkvr/v1/cache.grpc.pb.h"
#include "kernels/backend.h"
#include "server/core/engine.h"
#include "server/obs/logging.h"
#include "server/obs/metrics.h"
#include "server/rpc/grpc_server.h"

namespace ctkvr::testing {

struct TestServerOptions {
  // threads = false: nothing runs until the test calls engine().RunLane.
  EngineOptions engine = {.lanes = 2, .arena_bytes = size_t{64} << 20, .scratch_bytes = size_t{32} << 20};
  std::string backend = "cpu";
  Backend* own_backend = nullptr;  // used instead; must outlive the server
  Clock* clock = nullptr;          // empty: real time; must outlive the server
  std::string version = "test";
  std::chrono::nanoseconds slow_call{0};  // 0: none is
  rpc::TlsFiles tls;                      // NewChannel is of no use then
  // Who may call: each look at it takes what is returned. Empty: access is off.
  std::function<absl::StatusOr<rpc::AccessRules>()> access;
  std::function<rpc::WallTime()> wall_time = std::chrono::system_clock::now;
};

class TestServer {
 public:
  // Ends the process when the server cannot start: nothing can be tested then.
  explicit TestServer(const TestServerOptions& options = {});
  ~TestServer();

  const std::string& address() const { return server_->address(); }
  Engine& engine() { return *engine_; }
  obs::Metrics& metrics() { return *metrics_; }
  rpc::Access& access() { return *access_; }
  obs::SlowCalls& slow_calls() { return slow_calls_; }
  // What its service borrows.
  const rpc::Edge& edge() const { return *edge_; }
  rpc::GrpcServer& server() { return *server_; }
  std::string log_text();

  // Every call makes a connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() const;
  std::unique_ptr<v1::Cache::Stub> NewStub() const { return v1::Cache::NewStub(NewChannel()); }

  // Waits until the engine has `count` calls waiting. For servers without threads.
  void AwaitQueued(int64_t count) const;
  // Waits until a counter of the metrics page is at least `value`.
  void AwaitMetric(const std::string& series, double value) const;

 private:
  std::unique_ptr<Backend> owned_backend_;
  RealClock real_clock_;
  std::shared_ptr<spdlog::sinks::sink> log_sink_;
  std::unique_ptr<obs::Log> log_;
  obs::SlowCalls slow_calls_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<obs::Metrics> metrics_;
  std::unique_ptr<rpc::Access> access_;
  std::optional<rpc::Edge> edge_;
  std::unique_ptr<rpc::GrpcServer> server_;
};

}  // namespace ctkvr::testing
