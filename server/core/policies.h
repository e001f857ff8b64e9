// SPDX-License-Identifier: Apache-2.0
//
// Policies: their checks, and those that move K away from the plain setting: with the length of a session, with the
// load of its lane, and on the way from answering with everything to answering with K. Those that move the ranking are
// in kernels/rank_policy.h. Source: CTkvr.
// Thread-safe: values and pure functions; a LoadMeter belongs to one lane.

#pragma once

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "server/core/session_config.h"

namespace ctkvr {

// INVALID_ARGUMENT (field, value, limit) unless the policies are within limits.h and go with layers and tags.
absl::Status ValidatePolicies(const SessionConfig& config);

// Bits in which sign planes of head_dim bits may differ so that a token is redundant: a similarity of
// 1 - differing / head_dim is at least dedup_similarity. At 0.93: 4 of 64, 8 of 128.
uint32_t RedundantBits(float dedup_similarity, uint32_t head_dim);

// What K depends on beside session and query. Taken once a batch, so that an answer is the same whoever shares it.
struct PolicyInputs {
  double load_delta = 0;   // LoadMeter::delta
  double mean_length = 0;  // tokens a layer, over the layers of all open sessions that hold any; 0: there are none
};

// How far a lane serves its calls ahead of time: delta = (throughput - target) / target, within [-1, 1]. Throughput is
// what one place in the queue serves, the inverse of the time that calls wait; target the inverse of
// limits::kLoadTargetWait. So delta is 1 for a lane that lets nobody wait for more than half of it, 0 at the target,
// and nears -1 the longer calls wait.
// A longer wait lowers K, by less than the wait grew: that settles without swinging.
class LoadMeter {
 public:
  // The mean time that the calls of a batch had waited when it began; batches count equally, older ones less.
  void Observe(std::chrono::nanoseconds mean_wait);
  double delta() const;

 private:
  double wait_seconds_ = 0;
};

// Moves `selection` to what a query that sees `visible` tokens is answered with:
//   length_scaled_k   K = round(K * sqrt(visible / mean_length))
//   load_adaptive_k   K = round(K * (1 + 0.5 * load_delta))
//   ramp_tokens       K is at least the point `visible` of the line from (dense_below, dense_below) down to
//                     (dense_below + ramp_tokens, K), rounded
// in this order, the first two within the bounds of limits.h, which never move K themselves. Where K grows,
// candidate_tokens grows with it in proportion, rounded up.
void ApplyPolicies(const PolicyConfig& policies, const PolicyInputs& inputs, uint32_t visible, Selection& selection);

}  // namespace ctkvr
