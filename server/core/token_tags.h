// SPDX-License-Identifier: Apache-2.0
//
// What tokens of a layer were tagged with, by position, in host memory: a weight and a class a token. Rankings read
// them (kernels/rank_policy.h). Room for the whole token limit is set aside at open, so that an append cannot fail.
// Not thread-safe: belongs to a layer.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/core/types.h"

namespace ctkvr {

class TokenTags {
 public:
  // Of a session that was opened with tags.
  explicit TokenTags(const SessionConfig& session);
  static uint64_t Bytes(uint32_t token_limit) { return uint64_t{token_limit} * (sizeof(float) + sizeof(uint8_t)); }

  // INVALID_ARGUMENT: neither none nor one a token; a weight or class out of range.
  static absl::Status Check(const Chunk& chunk);
  // ALREADY_EXISTS (DIFFERENT_BYTES): a position that is held has other tags. REQUIRES: Check passed, positions held.
  absl::Status CheckRepeat(const Chunk& chunk) const;
  // Tags of the chunk's tokens, 0 where it has none. REQUIRES: Check passed, within the token limit.
  void Append(const Chunk& chunk);
  void Truncate(uint32_t length);

  const std::vector<float>& weights() const { return weights_; }    // [length]
  const std::vector<uint8_t>& classes() const { return classes_; }  // [length]
  // [kTokenClasses], or empty: the session has no quotas.
  const std::vector<uint32_t>& class_quotas() const { return class_quotas_; }

 private:
  std::vector<float> weights_;
  std::vector<uint8_t> classes_;
  std::vector<uint32_t> class_quotas_;
};

}  // namespace ctkvr
