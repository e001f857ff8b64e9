// SPDX-License-Identifier: Apache-2.0
//
// Who calls: the tenant whose sessions a call may see, and whether it may administer the server.
// Thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"
#include "server/core/tenant.h"

namespace ctkvr::rpc {

enum class Role : uint8_t {
  kData,  // its own tenant's sessions
  kAdmin  // these, and service ctkvr.v1.Admin
};

struct Tenant {
  TenantId id = kDefaultTenant;
  std::string name = "default";
};

struct Caller {
  Tenant tenant;
  Role role = Role::kAdmin;
};

// Access is off: every caller is the tenant "default" and may administer.
class Access {
 public:
  // Asked once a call, before its message is looked at. UNAUTHENTICATED, with the same text whatever is wrong.
  absl::StatusOr<Caller> Authenticate(const grpc::ServerContextBase& context) const;
  // PERMISSION_DENIED unless the caller may administer.
  absl::Status AuthoriseAdmin(const Caller& caller) const;

  // Those that may call now, by name.
  std::vector<Tenant> Tenants() const;
  std::optional<TenantId> FindTenant(const std::string& name) const;
};

}  // namespace ctkvr::rpc
