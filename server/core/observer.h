// SPDX-License-Identifier: Apache-2.0
//
// What the engine tells somebody outside of the sessions that asked to be recorded. Called on lanes' threads, for one
// session in the order of its calls: implementations copy what they want and return; they must not wait for anything
// but a lock that is held for such a copy. What is passed is valid during the call.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/core/types.h"

namespace ctkvr {

class SessionObserver {
 public:
  virtual ~SessionObserver() = default;

  virtual void Opened(const std::string& id, uint64_t epoch, const SessionConfig& config) = 0;
  // Tokens that became visible; not those of a repeated append.
  virtual void Appended(uint64_t epoch, const Chunk& chunk) = 0;
  virtual void Truncated(uint64_t epoch, uint32_t length) = 0;
  // answer.explanation is there; chosen [sets]: tokens of the query's last position, ascending.
  virtual void Answered(uint64_t epoch, const Query& query, const Answer& answer,
                        const std::vector<std::vector<uint32_t>>& chosen) = 0;
  virtual void Ended(uint64_t epoch) = 0;
};

}  // namespace ctkvr
