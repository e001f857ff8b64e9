// SPDX-License-Identifier: Apache-2.0
//
// What a selection becomes once the layer's state is known: SOURCE_AUTO picks source, candidates and shares; steps
// taken for a quality target make any selection stronger, never weaker. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <optional>

#include "server/core/explain.h"
#include "server/core/session_config.h"

namespace ctkvr {

struct PlannerFacts {
  uint32_t length = 0;      // tokens the layer holds
  uint32_t key_planes = 0;  // of its format; 0: floats
  // The source that opens key clusters, where the layer has clusters.
  std::optional<Source> cluster_source = std::nullopt;
  double load = 0;        // how late the lane serves its calls: -LoadMeter::delta (policies.h), at least 0
  uint32_t strength = 0;  // steps taken for the quality target, at most limits::kStrengthMax
};

struct PlannedSelection {
  Selection selection;  // source is never kAuto
  SelectionReason reason = SelectionReason::kAsked;
};

// SOURCE_AUTO: exact where keys have no planes; else sketch, or, from limits::kLongTokens on, the source that opens
// clusters. Candidates are twice k_tokens, whatever was asked; under load, and without steps, half the share survives
// the first planes. Dense layers, short ones and those without an index yet are the plan's (retrieval_plan.h).
//
// Steps, each beside those before it:
//   1  twice the candidates and probes
//   2  twice the share that survives the first planes, and two more planes of those
//   3  four times the candidates and that share; lists of centroids or clusters give way to the sketch
//   4  exact
PlannedSelection PlanSelection(const Selection& asked, const PlannerFacts& facts);

}  // namespace ctkvr
