// SPDX-License-Identifier: Apache-2.0
//
// Starts loading rows that are read soon. Chosen tokens jump about, so the hardware does not foresee them.
// Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/lines.h"

namespace ctkvr::cpu {

// Rows are asked for this many tokens ahead.
inline constexpr uint32_t kPrefetchTokens = 6;

inline void PrefetchBytes(const std::byte* data, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(data + at);
  __builtin_prefetch(data + bytes - 1);
}

}  // namespace ctkvr::cpu
