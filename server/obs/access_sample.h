// SPDX-License-Identifier: Apache-2.0
//
// What the page of metrics tells of callers: the room obs knows no access control. Thread-safe: values.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/core/tenant_ledger.h"

namespace ctkvr::obs {

// Why a call was refused before anything looked at its message. A label value each.
enum class AccessRefusal : uint8_t { kNoToken, kUnknownToken, kExpiredToken, kUnknownCertificate, kNotAdmin };
inline constexpr size_t kAccessRefusalCount = 5;
inline constexpr std::array<const char*, kAccessRefusalCount> kAccessRefusalNames = {
    "no_token", "unknown_token", "expired_token", "unknown_certificate", "not_admin"};

// Label values of what a tenant's quota refused, as QuotaKind.
inline constexpr std::array<const char*, kQuotaKindCount> kQuotaNames = {"memory", "sessions", "queue"};

struct TenantSample {
  std::string name;  // of the access file, never a client's word
  TenantUsage usage;
  uint64_t calls = 0;
  uint64_t rate_refusals = 0;
};

struct AccessSample {
  std::array<uint64_t, kAccessRefusalCount> refusals{};
  std::vector<TenantSample> tenants;  // "default" alone while access is off
};

}  // namespace ctkvr::obs
