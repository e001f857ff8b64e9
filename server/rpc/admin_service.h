// SPDX-License-Identifier: Apache-2.0
//
// The calls of proto/ctkvr/v1/admin.proto: what those who run a server may do to it. Each: who calls, may they, do it,
// write down who did what. Rare and not urgent, so they wait where Cache's calls never would: for lanes, on gRPC's
// synchronous threads. Thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ctkvr/v1/admin.grpc.pb.h"
#include "server/core/tenant.h"
#include "server/core/types.h"
#include "server/rpc/call.h"

namespace ctkvr::rpc {

struct AdminOptions {
  std::string version;                // told by DumpState
  std::chrono::seconds drain{0};      // that running calls have, told by StartDrain
  std::function<void()> start_drain;  // asks for what a signal would start; returns at once
};

class AdminService final : public v1::Admin::Service {
 public:
  // All that `edge` names must outlive the service.
  AdminService(const Edge& edge, AdminOptions options) : edge_(edge), options_(std::move(options)) {}

  using Context = grpc::ServerContext;

  grpc::Status ListTenantSessions(Context* context, const v1::ListTenantSessionsRequest* request,
                                  v1::ListTenantSessionsReply* reply) override;
  grpc::Status CloseSessions(Context* context, const v1::CloseSessionsRequest* request,
                             v1::CloseSessionsReply* reply) override;
  grpc::Status StartDrain(Context* context, const v1::StartDrainRequest* request, v1::StartDrainReply* reply) override;
  grpc::Status SetLogLevel(Context* context, const v1::SetLogLevelRequest* request,
                           v1::SetLogLevelReply* reply) override;
  grpc::Status DumpState(Context* context, const v1::DumpStateRequest* request, v1::DumpStateReply* reply) override;
  grpc::Status ListSlowCalls(Context* context, const v1::ListSlowCallsRequest* request,
                             v1::ListSlowCallsReply* reply) override;

 private:
  // What a call came to, for its line in the log, or why not.
  using Work = absl::FunctionRef<absl::StatusOr<std::string>()>;
  grpc::Status Serve(obs::AdminMethod method, const Context& context, const google::protobuf::Message& request,
                     Work work);
  absl::Status CloseById(const v1::CloseSessionsRequest& request, const std::vector<Tenant>& tenants,
                         const CallContext& context, v1::CloseSessionsReply* reply);
  absl::Status CloseByTenant(const Tenant& tenant, CallContext context, v1::CloseSessionsReply* reply);
  absl::Status CloseOne(const SessionRef& session, const std::vector<Tenant>& tenants, CallContext context,
                        v1::CloseSessionsReply* reply);
  // That one; empty: all. INVALID_ARGUMENT: there is none of that name.
  absl::StatusOr<std::vector<Tenant>> TenantsOf(const std::string& name) const;
  void Header(v1::ReplyHeader* header) const;

  const Edge edge_;
  const AdminOptions options_;
  const std::chrono::system_clock::time_point start_ = std::chrono::system_clock::now();
  std::atomic<bool> drain_asked_{false};
};

}  // namespace ctkvr::rpc
