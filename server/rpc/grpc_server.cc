// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/grpc_server.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/core/limits.h"

namespace ctkvr::rpc {
namespace {

// What protobuf adds around the bytes that kReplyBytesMax counts.
constexpr int kReplyFramingBytes = 1 << 20;

std::atomic<obs::Log*> grpc_log{nullptr};

void WriteGrpcLog(gpr_log_func_args* args) {
  obs::Log* log = grpc_log.load();
  if (log == nullptr) return;
  const auto level = args->severity == GPR_LOG_SEVERITY_ERROR  ? obs::LogLevel::kError
                     : args->severity == GPR_LOG_SEVERITY_INFO ? obs::LogLevel::kInfo
                                                               : obs::LogLevel::kDebug;
  log->Write(level, "grpc", {{"file", std::string(args->file)}, {"message", std::string(args->message)}});
}

std::string BoundAddress(const std::string& address, int port) {
  if (address.starts_with("unix:")) return address;
  return address.substr(0, address.rfind(':')) + ":" + std::to_string(port);
}

absl::Status CannotListen(const char* setting, const std::string& address) {
  return absl::UnavailableError(std::string(setting) + " is " + address +
                                "; cannot listen there: the port may be in use, or the address is not this machine's");
}

void SetConnectionArguments(grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kClientPingIntervalMinMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, kPingStrikesMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kConnectionStreamsMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMetadataBytesMax);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kServerPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kServerPingTimeoutMs);
  // Else a second server on the same port starts without a word and takes half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace

void RouteGrpcLog(obs::Log* log) {
  grpc_log.store(log);
  gpr_set_log_function(WriteGrpcLog);
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options, const Edge& edge) {
  auto credentials = MakeServerCredentials(options.tls, edge.access);
  if (!credentials.ok()) return credentials.status();
  std::unique_ptr<GrpcServer> self(new GrpcServer(edge, options.version));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.address, *credentials, &port);
  builder.RegisterService(&self->service_);
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMessageBytesMax));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kReplyBytesMax) + kReplyFramingBytes);
  SetConnectionArguments(builder);
  self->server_ = builder.BuildAndStart();
  if (self->server_ == nullptr || port == 0) {
    return CannotListen("listen_address", options.address);
  }
  self->address_ = BoundAddress(options.address, port);
  self->server_->GetHealthCheckService()->SetServingStatus(kHealthServiceName, true);
  return self;
}

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const GrpcServerOptions& options, const Edge& edge,
                                                                AdminOptions admin) {
  auto credentials = MakeServerCredentials(options.tls, edge.access);
  if (!credentials.ok()) return credentials.status();
  std::unique_ptr<AdminServer> self(new AdminServer(edge, std::move(admin)));
  grpc::EnableDefaultHealthCheckService(false);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.address, *credentials, &port);
  builder.RegisterService(&self->service_);
  SetConnectionArguments(builder);
  self->server_ = builder.BuildAndStart();
  if (self->server_ == nullptr || port == 0) return CannotListen("admin_address", options.address);
  self->address_ = BoundAddress(options.address, port);
  return self;
}

// Without a deadline it would wait, for 20 s, until idle clients have taken notice.
AdminServer::~AdminServer() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

GrpcServer::~GrpcServer() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

bool GrpcServer::Drain(std::chrono::milliseconds timeout) {
  server_->GetHealthCheckService()->Shutdown();  // NOT_SERVING, for good
  edge_.engine.StartDraining();
  // First the door stays open: who comes is served, or told DRAINING. Load that does not end must not last until the
  // end, so then nobody gets in, which clients may try elsewhere, and what got in has the rest of the time.
  const auto closed = std::min(timeout / 4, kClosedTimeMax);
  service_.Drain(timeout - closed);
  std::thread shutdown([&] { server_->Shutdown(std::chrono::system_clock::now() + closed + kVerdictTime); });
  const bool idle = service_.Drain(closed);
  shutdown.join();
  return idle;
}

}  // namespace ctkvr::rpc
