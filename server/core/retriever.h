// SPDX-License-Identifier: Apache-2.0
//
// Retrievals of one batch, for several sessions at once. The only place that knows the order of the operations:
//
//   prepare ─▶ scan planes ─▶ select ─▶ refine ─▶ select ─┐
//           ─▶ score forced ─▶ open clusters ─▶ scan ─▶ select ┤
//           ─▶ select lists ─▶ merge ────────────────────┼─▶ score ─▶ select ─▶ wait ─▶ ids, scores, rows ─▶ wait
//           ─▶ (every visible token) ────────────────────┘
//
// In place of ids, scores and rows an answer may carry the attention over the chosen tokens; beside anything, the
// remainder, estimated as soon as the chosen are known.
//
// The unit of work is a set: one KV head (or query head under per_head) at one position. Sets share operations as far
// as the lane's scratch reaches; the rest follow in further rounds. Of a session nothing is changed but its slot tables
// and the queries that wait to become centroids (query_feed.h).
// Thread-safe: no state; the device is its lane's.

#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "server/core/batch_memory.h"
#include "server/core/clock.h"
#include "server/core/policies.h"
#include "server/core/session.h"
#include "server/core/shadow.h"
#include "server/core/stats.h"
#include "server/core/types.h"

namespace ctkvr {

struct RetrievalTask {
  Session* session = nullptr;
  const Query* query = nullptr;
  const CallContext* context = nullptr;
  PolicyInputs policy_inputs;
  absl::StatusOr<Answer>* result = nullptr;  // out
  ShadowSlot* shadow = nullptr;              // out, unless it is filled already: what an exact repeat needs
};

// Errors as Cache.Retrieve in the proto, and the backend's. REQUIRES: elements were checked (elements.h).
void RunRetrievals(LaneDevice device, const Clock& clock, Stats& stats, std::span<const RetrievalTask> tasks);

}  // namespace ctkvr
