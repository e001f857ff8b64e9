// SPDX-License-Identifier: Apache-2.0

#include "server/core/auto_planner.h"

#include <algorithm>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Seven replayed traces at 8K, every eighth step, k 64: 128 candidates find the needles that 512 find (all), with a
// recall of 0.982 for 0.988 and 9 % fewer bytes; 80 find them too, with a recall of 0.936.
constexpr uint32_t kCandidatesPerToken = 2;
// The same at k 256: half of the survivors find all needles still, with a recall of 0.940 for 0.986 and 9 % fewer
// bytes.
constexpr float kLoadedShare = 0.5f;
constexpr double kLoadMin = 0.9;  // calls wait for ten times the target

PlannedSelection PlanAuto(const Selection& asked, const PlannerFacts& facts) {
  PlannedSelection planned{.selection = asked, .reason = SelectionReason::kMiddle};
  Selection& selection = planned.selection;
  const Selection defaults;
  selection.keep_share = defaults.keep_share;
  selection.refine_planes = defaults.refine_planes;
  selection.candidate_tokens = std::min(kCandidatesPerToken * asked.k_tokens, limits::kCandidateTokensMax);
  if (facts.key_planes == 0) {
    selection.source = Source::kExact;
    planned.reason = SelectionReason::kNotCoded;
    return planned;
  }
  selection.source = Source::kSketch;
  if (facts.length >= limits::kLongTokens && facts.cluster_source.has_value()) {
    selection.source = *facts.cluster_source;
    planned.reason = SelectionReason::kLong;
  }
  if (facts.load >= kLoadMin && facts.strength == 0) {
    selection.keep_share *= kLoadedShare;
    planned.reason = SelectionReason::kLoad;
  }
  return planned;
}

uint32_t Times(uint32_t count, uint32_t factor, uint32_t most) {
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{count} * factor, most));
}

void Strengthen(const PlannerFacts& facts, Selection& selection) {
  const bool thorough = facts.strength >= 3;
  selection.candidate_tokens = Times(selection.candidate_tokens, thorough ? 4 : 2, limits::kCandidateTokensMax);
  selection.probes = Times(selection.probes, thorough ? 4 : 2, limits::kCentroidsMax);
  if (facts.strength < 2) return;
  selection.keep_share = std::min(1.0f, selection.keep_share * (thorough ? 4 : 2));
  if (facts.key_planes > 0) {
    // No second pass becomes one of the planes that the default reads.
    const uint32_t planes = selection.refine_planes == 0 ? Selection().refine_planes : selection.refine_planes + 2;
    selection.refine_planes = std::min(planes, facts.key_planes);
  }
  if (thorough && selection.source != Source::kSketch) {
    selection.source = facts.key_planes > 0 ? Source::kSketch : Source::kExact;
    selection.candidate_tokens = std::max(selection.candidate_tokens, selection.k_tokens);
  }
  if (facts.strength >= limits::kStrengthMax) selection.source = Source::kExact;
}

}  // namespace

PlannedSelection PlanSelection(const Selection& asked, const PlannerFacts& facts) {
  PlannedSelection planned{.selection = asked, .reason = SelectionReason::kAsked};
  if (asked.source == Source::kAuto) planned = PlanAuto(asked, facts);
  const Source source = planned.selection.source;
  if (facts.strength == 0 || source == Source::kDense || source == Source::kExact) return planned;
  Strengthen(facts, planned.selection);
  planned.reason = SelectionReason::kQuality;
  return planned;
}

}  // namespace ctkvr
