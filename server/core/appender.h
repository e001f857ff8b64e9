// SPDX-License-Identifier: Apache-2.0
//
// Appends of one batch, for several sessions at once: checks, writes where nobody looks yet, then publishes. Any
// chunking of the same tokens leaves the same stored bytes, and an append that fails leaves its layer as it was:
//
//   1 keys and values into places past the length         (raw keys while the layer is raw)
//   2 where the layer becomes coded: the mean, then all keys again as codes, in page bytes no raw layer reads
//   3 queries into ring slots whose old entries were forgotten first
//   4 Commit: the length moves
//
// Thread-safe: no state; the device is its lane's.

#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "server/core/batch_memory.h"
#include "server/core/session.h"
#include "server/core/stats.h"
#include "server/core/types.h"

namespace ctkvr {

// One chunk. REQUIRES: elements were checked (elements.h). No two tasks of a call name one layer of one session.
struct AppendTask {
  Session* session = nullptr;
  const Chunk* chunk = nullptr;
  float key_magnitude_max = 0;
  absl::StatusOr<AppendResult>* result = nullptr;  // out
};

// Errors as Cache.Append in the proto, and the backend's. A device that cannot be waited for fails the sessions.
void RunAppends(LaneDevice device, Stats& stats, std::span<const AppendTask> tasks);

}  // namespace ctkvr
