// SPDX-License-Identifier: Apache-2.0
//
// Whom sessions belong to. The core compares numbers; names and how a caller proves itself are the edge's.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace ctkvr {

using TenantId = uint32_t;

// The one tenant where nobody tells callers apart: embedded, and servers without access control.
inline constexpr TenantId kDefaultTenant = 0;

// What names a session inside the server: two tenants may each have one of the same id.
struct SessionKey {
  TenantId tenant = kDefaultTenant;
  std::string id;

  auto operator<=>(const SessionKey&) const = default;
};

struct SessionKeyHash {
  size_t operator()(const SessionKey& key) const {
    return std::hash<std::string>()(key.id) ^ (size_t{key.tenant} * 0x9e3779b97f4a7c15u);
  }
};

}  // namespace ctkvr
