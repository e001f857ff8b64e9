// SPDX-License-Identifier: Apache-2.0

#include "server/core/token_tags.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/rank_policy.h"
#include "server/core/error.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

absl::Status CheckCount(const char* field, size_t count, uint32_t tokens) {
  if (count == 0 || count == tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", count, " elements; it must have none or one for each of ", tokens, " tokens"));
}

float WeightAt(const Chunk& chunk, size_t i) { return chunk.weights.empty() ? 0 : chunk.weights[i]; }
uint32_t ClassAt(const Chunk& chunk, size_t i) { return chunk.classes.empty() ? 0 : chunk.classes[i]; }

}  // namespace

TokenTags::TokenTags(const SessionConfig& session) {
  weights_.reserve(session.token_limit);
  classes_.reserve(session.token_limit);
  if (session.policies.class_quotas.empty()) return;
  class_quotas_.resize(kTokenClasses);
  for (const ClassQuota& quota : session.policies.class_quotas) class_quotas_[quota.token_class] = quota.tokens;
}

absl::Status TokenTags::Check(const Chunk& chunk) {
  CTKVR_RETURN_IF_ERROR(CheckCount("weights", chunk.weights.size(), chunk.tokens));
  CTKVR_RETURN_IF_ERROR(CheckCount("classes", chunk.classes.size(), chunk.tokens));
  for (size_t i = 0; i < chunk.weights.size(); ++i) {
    if (chunk.weights[i] >= 0 && chunk.weights[i] <= limits::kTokenWeightMax) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("weights[", i, "] is ", chunk.weights[i], "; it must be from 0 to ", limits::kTokenWeightMax));
  }
  for (size_t i = 0; i < chunk.classes.size(); ++i) {
    if (chunk.classes[i] < kTokenClasses) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("classes[", i, "] is ", chunk.classes[i], "; the limit is ", kTokenClasses - 1));
  }
  return absl::OkStatus();
}

absl::Status TokenTags::CheckRepeat(const Chunk& chunk) const {
  CTKVR_CHECK(uint64_t{chunk.first_position} + chunk.tokens <= weights_.size());
  for (uint32_t i = 0; i < chunk.tokens; ++i) {
    const uint32_t position = chunk.first_position + i;
    const bool same_weight = weights_[position] == WeightAt(chunk, i);
    if (same_weight && classes_[position] == ClassAt(chunk, i)) continue;
    return MakeError(
        absl::StatusCode::kAlreadyExists,
        absl::StrCat("position ", position, " is held already with another ", same_weight ? "class" : "weight"),
        kReasonDifferentBytes);
  }
  return absl::OkStatus();
}

void TokenTags::Append(const Chunk& chunk) {
  for (uint32_t i = 0; i < chunk.tokens; ++i) {
    weights_.push_back(WeightAt(chunk, i));
    classes_.push_back(static_cast<uint8_t>(ClassAt(chunk, i)));
  }
}

void TokenTags::Truncate(uint32_t length) {
  if (length >= weights_.size()) return;
  weights_.resize(length);
  classes_.resize(length);
}

}  // namespace ctkvr
