// SPDX-License-Identifier: Apache-2.0
//
// A file that tells scripts and tests which addresses a server took, once it serves. Thread-safe: no shared state.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ctkvr::obs {

struct ReadyFacts {
  std::string listen_address;
  std::string metrics_address;  // empty: no page
  uint64_t boot_id = 0;
};

// Writes JSON {"listen_address", "metrics_address", "boot_id" (decimal, as text), "pid"} to `path`; the file appears
// complete or not at all, and replaces one that is there. Does nothing when `path` is empty. UNAVAILABLE: cannot write.
absl::Status WriteReadyFile(const std::string& path, const ReadyFacts& facts);

}  // namespace ctkvr::obs
