// SPDX-License-Identifier: Apache-2.0
//
// Whom sessions belong to. The core compares numbers; names and how a caller proves itself are the edge's.

#pragma once

#include <cstdint>

namespace ctkvr {

using TenantId = uint32_t;

// The one tenant where nobody tells callers apart: embedded, and servers without access control.
inline constexpr TenantId kDefaultTenant = 0;

}  // namespace ctkvr
