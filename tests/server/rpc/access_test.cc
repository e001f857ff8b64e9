// SPDX-License-Identifier: Apache-2.0
//
// Who calls, and what it may do.

#include "server/rpc/access.h"

#include <gtest/gtest.h>

namespace ctkvr::rpc {
namespace {

TEST(AccessTest, EverybodyIsTheDefaultTenantAndMayAdministerWhileAccessIsOff) {
  const Access access;
  grpc::CallbackServerContext context;
  const auto caller = access.Authenticate(context);
  ASSERT_TRUE(caller.ok());
  EXPECT_EQ(caller->tenant.id, kDefaultTenant);
  EXPECT_EQ(caller->tenant.name, "default");
  EXPECT_TRUE(access.AuthoriseAdmin(*caller).ok());
}

TEST(AccessTest, DataRoleMayNotAdminister) {
  const Access access;
  EXPECT_EQ(access.AuthoriseAdmin({.role = Role::kData}).code(), absl::StatusCode::kPermissionDenied);
}

TEST(AccessTest, TenantsAreFoundByName) {
  const Access access;
  ASSERT_EQ(access.Tenants().size(), 1u);
  EXPECT_EQ(access.FindTenant(access.Tenants()[0].name), access.Tenants()[0].id);
  EXPECT_FALSE(access.FindTenant("somebody").has_value());
}

}  // namespace
}  // namespace ctkvr::rpc
