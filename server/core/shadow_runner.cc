// SPDX-License-Identifier: Apache-2.0

#include "server/core/shadow_runner.h"

#include <algorithm>
#include <cmath>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

constexpr double kSavingNanoseconds = 1e9 * limits::kShadowSavingSeconds;

}  // namespace

ShadowRunner::ShadowRunner(double share, double budget, const Clock& clock, Stats& stats)
    : share_(share),
      budget_(budget),
      clock_(clock),
      stats_(stats),
      saved_(budget * kSavingNanoseconds),
      refilled_(clock.Now()) {}

ShadowSlot* ShadowRunner::Sample(Session& session) {
  if (share_ == 0 || !session.SampleRetrieval(share_)) return nullptr;
  if (!pending()) return &slot_;
  SkipShadow(&session, ShadowSkip::kBusy, stats_);
  return nullptr;
}

bool ShadowRunner::PendingOf(uint64_t epoch) const { return pending() && query().epoch == epoch; }

void ShadowRunner::Refill(TimePoint now) {
  const double passed = static_cast<double>((now - refilled_).count());
  saved_ = std::min(saved_ + std::max(passed, 0.0) * budget_, budget_ * kSavingNanoseconds);
  refilled_ = now;
}

TimePoint ShadowRunner::ReadyAt() {
  Refill(clock_.Now());
  const double wait = saved_ > 0 ? 0 : std::floor(-saved_ / budget_) + 1;
  return refilled_ + std::chrono::nanoseconds(static_cast<int64_t>(wait));
}

void ShadowRunner::Skip(Session* session, ShadowSkip skip) {
  SkipShadow(session, skip, stats_);
  slot_.reset();
  shadow_.reset();
}

bool ShadowRunner::RunSlice(LaneDevice device, const SessionTable& sessions) {
  const TimePoint start = clock_.Now();
  if (!pending()) return false;
  Refill(start);
  if (saved_ <= 0) return false;
  Session* const session = sessions.Find(query().session, start);
  if (session == nullptr || session->epoch() != query().epoch) {
    Skip(nullptr, ShadowSkip::kClosed);
    return true;
  }
  const absl::StatusOr<Layer*> layer = session->FindLayer(query().layer);
  if (session->failed() || session->truncations() != query().truncations || !layer.ok() ||
      (*layer)->code_generation() != query().code_generation) {
    Skip(session, ShadowSkip::kChanged);
    return true;
  }
  if (slot_.has_value()) shadow_ = std::make_unique<Shadow>(*std::exchange(slot_, std::nullopt), **layer);
  const absl::StatusOr<bool> last = shadow_->Step(device, **layer);
  if (!last.ok()) {
    NoteDeviceError(stats_, last.status());
    Skip(session, ShadowSkip::kError);
  } else if (*last) {
    CountTruth(shadow_->sample(), stats_);
    const uint32_t index = shadow_->query().layer;
    if (session->AddTruth(index, shadow_->sample())) {
      stats_.quality_steps[session->strength(index) - 1].fetch_add(1, std::memory_order_relaxed);
    }
    shadow_.reset();
  }
  const TimePoint end = clock_.Now();
  Refill(end);
  saved_ -= static_cast<double>((end - start).count());
  stats_.stages[static_cast<size_t>(Stage::kShadow)].Observe(end - start);
  return true;
}

}  // namespace ctkvr
