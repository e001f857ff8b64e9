// SPDX-License-Identifier: Apache-2.0
//
// Whether a chunk whose positions are held already is the one that was appended: it is encoded again, beside the
// stored tokens, and the bytes are compared. Changes nothing but scratch. Thread-safe: stateless.

#pragma once

#include "absl/status/status.h"
#include "server/core/batch_memory.h"
#include "server/core/layer.h"
#include "server/core/types.h"

namespace ctkvr {

// OK: the same. ALREADY_EXISTS (DIFFERENT_BYTES) with the first position that differs in the first KV head that does.
// INVALID_ARGUMENT: an element the storage type cannot hold. RESOURCE_EXHAUSTED: scratch. The backend's errors.
// REQUIRES: the chunk's sizes fit the layer and its positions are visible.
absl::Status CheckRepeat(LaneDevice device, const Layer& layer, const Chunk& chunk);

}  // namespace ctkvr
