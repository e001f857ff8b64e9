// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/access.h"

namespace ctkvr::rpc {

absl::StatusOr<Caller> Access::Authenticate(const grpc::ServerContextBase&) const { return Caller(); }

absl::Status Access::AuthoriseAdmin(const Caller& caller) const {
  if (caller.role == Role::kAdmin) return absl::OkStatus();
  return absl::PermissionDeniedError("the caller may not administer this server");
}

std::vector<Tenant> Access::Tenants() const { return {Tenant()}; }

std::optional<TenantId> Access::FindTenant(const std::string& name) const {
  if (name == Tenant().name) return kDefaultTenant;
  return std::nullopt;
}

}  // namespace ctkvr::rpc
