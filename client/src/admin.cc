// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/admin.h"

#include <chrono>
#include <utility>

#include "client/src/core.h"
#include "client/src/status.h"
#include "ctkvr/v1/admin.grpc.pb.h"

namespace ctkvr::client {

struct Admin::State {
  ConnectOptions options;
  std::unique_ptr<v1::Admin::Stub> stub;

  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                             const Request& request, const CallOptions& call) const {
    grpc::ClientContext context;
    context.set_deadline(Core::DeadlineOf(call, options.timeout));
    AddTraceparent(options, context);
    if (absl::Status status = CheckToken(options); !status.ok()) return status;
    AddToken(options, context);
    Reply reply;
    const absl::Status status = FromGrpc(((*stub).*method)(&context, request, &reply));
    if (!status.ok()) return status;
    return reply;
  }
};

std::unique_ptr<Admin> Admin::Connect(const ConnectOptions& options) {
  auto state = std::make_unique<State>();
  state->options = options;
  state->stub = v1::Admin::NewStub(MakeChannel(options));
  return std::unique_ptr<Admin>(new Admin(std::move(state)));
}

Admin::Admin(std::unique_ptr<State> state) : state_(std::move(state)) {}
Admin::~Admin() = default;

absl::StatusOr<v1::ListTenantSessionsReply> Admin::ListSessions(const std::string& tenant,
                                                                const CallOptions& call) const {
  v1::ListTenantSessionsRequest request;
  request.set_tenant(tenant);
  v1::ListTenantSessionsReply all;
  do {
    auto page = state_->Call(&v1::Admin::Stub::ListTenantSessions, request, call);
    if (!page.ok()) return page.status();
    if (page->next_page_token() == request.page_token() && !page->next_page_token().empty()) {
      return absl::InternalError("the server gave the same page token twice");
    }
    request.set_page_token(page->next_page_token());
    page->clear_next_page_token();
    all.MergeFrom(*page);
  } while (!request.page_token().empty());
  return all;
}

absl::StatusOr<v1::CloseSessionsReply> Admin::CloseSessions(const v1::CloseSessionsRequest& request,
                                                            const CallOptions& call) const {
  return state_->Call(&v1::Admin::Stub::CloseSessions, request, call);
}

absl::StatusOr<v1::StartDrainReply> Admin::StartDrain(const CallOptions& call) const {
  return state_->Call(&v1::Admin::Stub::StartDrain, v1::StartDrainRequest(), call);
}

absl::StatusOr<v1::LogLevel> Admin::SetLogLevel(v1::LogLevel level, const CallOptions& call) const {
  v1::SetLogLevelRequest request;
  request.set_level(level);
  const auto reply = state_->Call(&v1::Admin::Stub::SetLogLevel, request, call);
  if (!reply.ok()) return reply.status();
  return reply->previous();
}

absl::StatusOr<v1::DumpStateReply> Admin::DumpState(const CallOptions& call) const {
  return state_->Call(&v1::Admin::Stub::DumpState, v1::DumpStateRequest(), call);
}

absl::StatusOr<v1::ListSlowCallsReply> Admin::ListSlowCalls(const std::string& method, uint32_t limit,
                                                            const CallOptions& call) const {
  v1::ListSlowCallsRequest request;
  request.set_method(method);
  request.set_limit(limit);
  return state_->Call(&v1::Admin::Stub::ListSlowCalls, request, call);
}

}  // namespace ctkvr::client
