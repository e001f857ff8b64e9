// SPDX-License-Identifier: Apache-2.0

#include "server/core/policies.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/rank_policy.h"
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

// Written so that NaN is outside every range.
template <typename Number>
absl::Status Within(const char* field, Number value, Number low, Number high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be from ", low, " to ", high));
}

absl::Status ValidateDedup(const SessionConfig& config) {
  if (!config.policies.dedup_similarity.has_value()) return absl::OkStatus();
  CTKVR_RETURN_IF_ERROR(
      Within<double>("dedup_similarity", *config.policies.dedup_similarity, limits::kDedupSimilarityMin, 1));
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (layer.absent || KeysAreCoded(layer.format)) continue;
    return absl::InvalidArgumentError(absl::StrCat("layer ", i, ": dedup_similarity is set; format ",
                                                   FormatName(layer.format), " has no sign plane"));
  }
  return absl::OkStatus();
}

absl::Status ValidateQuotas(const PolicyConfig& policies) {
  CTKVR_RETURN_IF_ERROR(
      Within<uint64_t>("class_quotas count", policies.class_quotas.size(), 0, limits::kClassQuotasMax));
  std::set<uint32_t> classes;
  for (const ClassQuota& quota : policies.class_quotas) {
    CTKVR_RETURN_IF_ERROR(Within<uint64_t>("class_quotas.token_class", quota.token_class, 0, kTokenClasses - 1));
    CTKVR_RETURN_IF_ERROR(Within<uint64_t>("class_quotas.tokens", quota.tokens, 1, limits::kTokensMax));
    if (classes.insert(quota.token_class).second) continue;
    return absl::InvalidArgumentError(absl::StrCat("class_quotas has class ", quota.token_class, " twice"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidatePolicies(const SessionConfig& config) {
  const PolicyConfig& policies = config.policies;
  CTKVR_RETURN_IF_ERROR(Within<uint64_t>("ramp_tokens", policies.ramp_tokens, 0, limits::kTokenLimitMax));
  CTKVR_RETURN_IF_ERROR(ValidateDedup(config));
  CTKVR_RETURN_IF_ERROR(Within<double>("recency_weight_min", policies.recency_weight_min, limits::kRecencyWeightMin,
                                       limits::kRecencyWeightMax));
  CTKVR_RETURN_IF_ERROR(Within<double>("recency_weight_max", policies.recency_weight_max, policies.recency_weight_min,
                                       limits::kRecencyWeightMax));
  CTKVR_RETURN_IF_ERROR(Within<double>("tag_weight_boost", policies.tag_weight_boost, 0, limits::kTagWeightBoostMax));
  CTKVR_RETURN_IF_ERROR(ValidateQuotas(policies));
  if (config.tags || (policies.tag_weight_boost == 0 && policies.class_quotas.empty())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(policies.class_quotas.empty() ? "tag_weight_boost" : "class_quotas",
                                                 " is set; the session takes no tags"));
}

uint32_t RedundantBits(float dedup_similarity, uint32_t head_dim) {
  // So that 0.875 of 64, which is 8 bits exactly, is not 7 by rounding.
  return static_cast<uint32_t>(std::floor((1 - double{dedup_similarity}) * head_dim + 1e-4));
}

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
