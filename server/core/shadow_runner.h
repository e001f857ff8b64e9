// SPDX-License-Identifier: Apache-2.0
//
// A lane's exact repeats: which retrievals are sampled, the one that is pending, and the lane time it may take. Over
// any stretch of time T, slices take at most budget * (T + limits::kShadowSavingSeconds) and one slice more.
//
// Not thread-safe: belongs to one lane.

#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "server/core/clock.h"
#include "server/core/session_table.h"
#include "server/core/shadow.h"

namespace ctkvr {

class ShadowRunner {
 public:
  // Shares of the retrievals and of the lane's time: EngineOptions. `clock` and `stats` must outlive it.
  ShadowRunner(double share, double budget, const Clock& clock, Stats& stats);

  // Where a retrieval of the session leaves what its repeat needs. Null: not sampled, or one is pending already, which
  // is counted. One slot is given for a batch, and its first retrieval that has something to prove takes it.
  ShadowSlot* Sample(Session& session);

  bool pending() const { return slot_.has_value() || shadow_ != nullptr; }
  bool PendingOf(uint64_t epoch) const;
  // When the budget allows the next slice. REQUIRES: pending().
  TimePoint ReadyAt();
  // One slice of what is pending, where the budget allows it; whether there was anything to do.
  bool RunSlice(LaneDevice device, const SessionTable& sessions);

 private:
  const ShadowQuery& query() const { return slot_.has_value() ? *slot_ : shadow_->query(); }
  void Refill(TimePoint now);
  void Skip(Session* session, ShadowSkip skip);

  const double share_;
  const double budget_;
  const Clock& clock_;
  Stats& stats_;
  ShadowSlot slot_;  // filled, and no slice run yet
  std::unique_ptr<Shadow> shadow_;
  double saved_;  // nanoseconds; below 0: owed
  TimePoint refilled_;
};

}  // namespace ctkvr
