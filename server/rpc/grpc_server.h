// SPDX-License-Identifier: Apache-2.0
//
// The listening server: the cache service, health (grpc.health.v1) and reflection on one address, and the way it stops.
// Thread-safe.

#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/cache_service.h"
#include "server/rpc/credentials.h"

namespace ctkvr::rpc {

// The name that health checks ask for, beside "" for the whole server.
inline constexpr char kHealthServiceName[] = "ctkvr.v1.Cache";

// Connections, milliseconds.
//
// Workers sit idle between prompts, and load balancers and NATs on the way forget idle connections within minutes, so
// clients may ping every 10 s, also without a call; the server counts pings that come faster than the first number as
// abuse and ends the connection, so that number leaves room for jitter.
inline constexpr int kClientPingIntervalMinMs = 5'000;
// The server pings a silent connection in its turn, so that streams of vanished workers are freed.
inline constexpr int kServerPingIntervalMs = 30'000;
inline constexpr int kServerPingTimeoutMs = 10'000;

// Calls at a time on one connection, streams among them; more wait at the client. A worker with a stream a layer and
// calls beside them needs a few hundred.
inline constexpr int kConnectionStreamsMax = 1024;
// Headers of a call, bytes: a token and trace context fit many times.
inline constexpr int kMetadataBytesMax = 16 << 10;
// Pings that come too often before the connection is ended.
inline constexpr int kPingStrikesMax = 2;

// A drain takes calls until so much of its time is left, or a quarter of it; from then on those that run may finish.
inline constexpr std::chrono::milliseconds kClosedTimeMax{5'000};
// Calls are cancelled so much later than it is told whether they finished, so that none that is cancelled counts.
inline constexpr std::chrono::milliseconds kVerdictTime{100};

struct GrpcServerOptions {
  std::string address;  // "host:port", port 0: a free one; "[::1]:port"; "unix:/path"
  std::string version;  // told by GetServerInfo
  TlsFiles tls;         // empty: plaintext
};

class GrpcServer {
 public:
  // Serves once it returns. All that `edge` names must outlive the server. UNAVAILABLE: cannot listen there.
  // INVALID_ARGUMENT: MakeServerCredentials.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options, const Edge& edge);
  ~GrpcServer();  // cuts off what still runs

  // As given, with the port that was taken.
  const std::string& address() const { return address_; }

  // Health turns NOT_SERVING and opens are refused at once, Decode streams end between two messages. Other calls are
  // served until none runs or `timeout` comes near (kClosedTimeMax), then no more are taken, and those that run may
  // finish until it has passed; what still runs is cancelled. Returns whether all calls that were taken finished. The
  // engine must run until this returns.
  bool Drain(std::chrono::milliseconds timeout);

 private:
  GrpcServer(const Edge& edge, const std::string& version) : edge_(edge), service_(edge, version) {}

  const Edge edge_;
  CacheService service_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;  // last: its threads call the service
};

// Service Admin on an address of its own, so that it answers while the other drains, and can be kept from workers.
// Thread-safe.
class AdminServer {
 public:
  // As GrpcServer::Start.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const GrpcServerOptions& options, const Edge& edge,
                                                            AdminOptions admin);
  ~AdminServer();  // cancels the calls that run, and waits until they know

  const std::string& address() const { return address_; }

 private:
  AdminServer(const Edge& edge, AdminOptions admin) : service_(edge, std::move(admin)) {}

  AdminService service_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;  // last: its threads call the service
};

// Sends gRPC's own messages (errors by default) to `log` instead of stderr; null: drops them. Process-wide.
// REQUIRES: `log` outlives every use of gRPC, or is replaced before it ends.
void RouteGrpcLog(obs::Log* log);

}  // namespace ctkvr::rpc
