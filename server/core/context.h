// SPDX-License-Identifier: Apache-2.0
//
// Whether a call is still worth doing. Thread-safe: pure function.

#pragma once

#include "absl/status/status.h"
#include "server/core/types.h"

namespace ctkvr {

// DEADLINE_EXCEEDED from the deadline on; CANCELLED once the caller has gone. `when` says in the message what had not
// begun: "work", "gathering".
inline absl::Status CheckContext(const CallContext& context, TimePoint now, const char* when) {
  if (now >= context.deadline) return absl::DeadlineExceededError(std::string("the deadline passed before ") + when);
  if (context.cancelled && context.cancelled()) {
    return absl::CancelledError(std::string("the caller went away before ") + when);
  }
  return absl::OkStatus();
}

}  // namespace ctkvr
