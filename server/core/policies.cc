// SPDX-License-Identifier: Apache-2.0

#include "server/core/policies.h"

#include <algorithm>
#include <cmath>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Of a batch in the mean: without older ones, calls that arrive at random move K by half of itself.
constexpr double kNewsWeight = 0.25;

uint32_t Scaled(uint32_t tokens, double factor, uint32_t low, uint32_t high) {
  const double scaled = std::round(tokens * factor);
  const double least = std::min(tokens, low), most = std::max(tokens, high);
  return static_cast<uint32_t>(std::clamp(scaled, least, most));
}

uint32_t RampTokens(uint32_t k, uint32_t dense_below, uint32_t ramp, uint32_t visible) {
  if (k >= dense_below || visible <= dense_below || visible - dense_below >= ramp) return k;
  const double share = static_cast<double>(visible - dense_below) / ramp;
  return static_cast<uint32_t>(std::round(dense_below - share * (dense_below - k)));
}

}  // namespace

void LoadMeter::Observe(std::chrono::nanoseconds mean_wait) {
  const double seconds = std::max(0.0, std::chrono::duration<double>(mean_wait).count());
  wait_seconds_ += kNewsWeight * (seconds - wait_seconds_);
}

double LoadMeter::delta() const {
  const double target_seconds = std::chrono::duration<double>(limits::kLoadTargetWait).count();
  if (wait_seconds_ * 2 <= target_seconds) return 1;
  return target_seconds / wait_seconds_ - 1;
}

void ApplyPolicies(const PolicyConfig& policies, const PolicyInputs& inputs, uint32_t visible, Selection& selection) {
  const uint32_t before = selection.k_tokens;
  uint32_t k = before;
  if (policies.length_scaled_k && inputs.mean_length > 0) {
    k = Scaled(k, std::sqrt(visible / inputs.mean_length), limits::kLengthScaledTokensMin,
               limits::kLengthScaledTokensMax);
  }
  if (policies.load_adaptive_k) {
    k = Scaled(k, 1 + 0.5 * inputs.load_delta, limits::kLoadAdaptiveTokensMin, limits::kLoadAdaptiveTokensMax);
  }
  if (policies.ramp_tokens > 0) k = RampTokens(k, selection.dense_below_tokens, policies.ramp_tokens, visible);
  selection.k_tokens = k;
  if (k <= before) return;
  const uint64_t candidates = (uint64_t{selection.candidate_tokens} * k + before - 1) / before;
  selection.candidate_tokens = static_cast<uint32_t>(std::min<uint64_t>(candidates, limits::kTokenLimitMax));
}

}  // namespace ctkvr
