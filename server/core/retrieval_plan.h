// SPDX-License-Identifier: Apache-2.0
//
// What a query will do, decided on the host before any work: which positions are visible, which are always included,
// which source serves, and how much is kept after each pass. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/layer.h"
#include "server/core/policies.h"
#include "server/core/types.h"

namespace ctkvr {

// How one position is served.
enum class Path : uint8_t {
  kEmpty,          // nothing visible
  kDense,          // everything
  kExact,          // every visible key is scored
  kSketch,         // planes of every visible key, coarse to fine, then the candidates
  kCentroids,      // lists of the nearest query centroids
  kClusters,       // every key of the best key clusters
  kClusterSketch,  // planes of the keys of the best key clusters, then the candidates
};

// One position: the same for all its sets (KV heads; query heads under per_head).
struct PositionPlan {
  Path path = Path::kEmpty;
  uint32_t begin = 0;  // visible: [begin, end)
  uint32_t end = 0;
  uint32_t force_below = 0;  // always included: visible positions < force_below or >= force_from
  uint32_t force_from = 0;
  uint32_t always = 0;       // how many those are
  uint32_t k_tokens = 0;     // chosen beside them at most, where not everything is
  uint32_t survivors = 0;    // kSketch: kept beside the always-included after the first pass; 0: one pass only
  uint32_t candidates = 0;   // kSketch, kClusterSketch: kept before scoring
  uint32_t open_tokens = 0;  // kClusters, kClusterSketch: clusters are opened until they hold so many
  uint32_t scanned_max = 0;  // the same: tokens listed by them at most
  uint32_t scored_max = 0;   // tokens scored at most
  uint32_t chosen_max = 0;   // tokens answered at most

  uint32_t visible() const { return end - begin; }
  bool opens_clusters() const { return path == Path::kClusters || path == Path::kClusterSketch; }
};

// What a plan depends on beside its layer; PlannerFacts says of what strength.
struct PlanState {
  PolicyInputs policies;
  uint32_t strength = 0;
};

struct QueryPlan {
  Selection used;
  SelectionReason reason = SelectionReason::kAsked;  // of the last position
  std::vector<PositionPlan> positions;               // [P]
  uint32_t sets = 0;                                 // G: sets a position
  uint32_t set_heads = 0;                            // R: query heads a set
};

// INVALID_ARGUMENT: shapes, settings. OUT_OF_RANGE (BEFORE_INDEX): see Cache.Retrieve. FAILED_PRECONDITION: new rows
// without slot tables, or with too few slots (CACHE_TOO_SMALL). RESOURCE_EXHAUSTED: the answer might be larger than
// limits::kReplyBytesMax. REQUIRES: elements were checked.
// Policies that would make an answer too large for its slots or its reply give way to the plain settings.
absl::StatusOr<QueryPlan> PlanQuery(const Layer& layer, const SessionConfig& session, const Query& query,
                                    const PlanState& state = {});

absl::Status CacheTooSmallError(uint32_t cache_slots, uint64_t needed);

// Whether tokens may be left out even where k does not bind.
bool HasFilter(const Selection& selection);

// Bytes of one row as answered.
struct RowBytes {
  uint32_t key = 0;
  uint32_t value = 0;
};
RowBytes AnswerRowBytes(const Layer& layer, const AnswerOptions& answer);

// The element type of rows that are not in storage form. REQUIRES: format is not kStorage.
DType RowElement(RowFormat format);

// What served, as answers report it.
Source PathSource(Path path);

}  // namespace ctkvr
