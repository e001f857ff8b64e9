// SPDX-License-Identifier: Apache-2.0
//
// Queries of retrievals become material for query centroids, as those of appends do: what the next build of a layer's
// index is made of are then the queries of the text as it goes on. What it brings stands in server/README.md.
// Thread-safe: no state; sessions and the device are their lane's.

#pragma once

#include <span>

#include "absl/status/status.h"
#include "server/core/batch_memory.h"
#include "server/core/session.h"
#include "server/core/stats.h"
#include "server/core/types.h"

namespace ctkvr {

// A retrieval that went well.
struct FedQuery {
  Session* session = nullptr;
  Layer* layer = nullptr;
  const Query* query = nullptr;
  absl::Status* status = nullptr;  // out: an error of the backend; the query was not taken then
};

// Takes queries in, in their order, where the layer wants them: of positions after all that its ring knows, and not
// past the layer's end, so that a position is known by its first query until truncation forgets it.
void FeedQueries(LaneDevice device, Stats& stats, std::span<const FedQuery> queries);

}  // namespace ctkvr
