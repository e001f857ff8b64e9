// SPDX-License-Identifier: Apache-2.0
//
// Who may call, as the access file says it (server/access_file.h reads it). Thread-safe: values.

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/core/tenant_ledger.h"

namespace ctkvr::rpc {

using WallTime = std::chrono::system_clock::time_point;

// SHA-256 of a token: the server knows no more of it.
using TokenDigest = std::array<unsigned char, 32>;

struct TokenRule {
  TokenDigest digest{};
  WallTime expires = WallTime::max();  // from then on it is nobody's
};

struct TenantRule {
  std::string name;
  bool admin = false;
  std::vector<TokenRule> tokens;
  std::vector<std::string> certificates;  // subject alternative names or common names of clients' certificates
  TenantQuota quota;
  double calls_per_second = 0;  // 0: no limit
  uint64_t calls_burst = 0;     // at once, beside that; 0: one second's calls
};

// Names, digests and certificates' names are each there once.
struct AccessRules {
  std::vector<TenantRule> tenants;
};

}  // namespace ctkvr::rpc
