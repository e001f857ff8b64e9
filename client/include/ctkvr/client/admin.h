// SPDX-License-Identifier: Apache-2.0
//
// Administration of one server (proto/ctkvr/v1/admin.proto), for those who run it: its address is that of
// ctkvrd --admin_address. Calls are not tried again: what they do is seen, and may be asked for once more.
//
// Errors of all calls: UNAVAILABLE (nobody listens there), UNAUTHENTICATED, PERMISSION_DENIED, DEADLINE_EXCEEDED, and
// those of each call in the proto. Thread-safe.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ctkvr/client/options.h"
#include "ctkvr/v1/admin.pb.h"

namespace ctkvr::client {

class Admin {
 public:
  // Contacts nobody yet. `retry` is of no use here.
  static std::unique_ptr<Admin> Connect(const ConnectOptions& options);
  ~Admin();

  // Every session of a tenant, or of all where it is empty, read page by page: sessions opened or closed meanwhile may
  // be missing or gone.
  absl::StatusOr<v1::ListTenantSessionsReply> ListSessions(const std::string& tenant = "",
                                                           const CallOptions& call = {}) const;
  absl::StatusOr<v1::CloseSessionsReply> CloseSessions(const v1::CloseSessionsRequest& request,
                                                       const CallOptions& call = {}) const;
  absl::StatusOr<v1::StartDrainReply> StartDrain(const CallOptions& call = {}) const;
  // The level before.
  absl::StatusOr<v1::LogLevel> SetLogLevel(v1::LogLevel level, const CallOptions& call = {}) const;
  absl::StatusOr<v1::DumpStateReply> DumpState(const CallOptions& call = {}) const;
  // The newest `limit` of a method of Cache, or of all where it is empty; 0: as many as are kept.
  absl::StatusOr<v1::ListSlowCallsReply> ListSlowCalls(const std::string& method = "", uint32_t limit = 0,
                                                       const CallOptions& call = {}) const;

 private:
  struct State;
  explicit Admin(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace ctkvr::client
