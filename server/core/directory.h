// SPDX-License-Identifier: Apache-2.0
//
// Which lane owns which session, and how sessions of the past ended. Thread-safe: one short mutex.

#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "server/core/tenant.h"

namespace ctkvr {

class Directory {
 public:
  // tombstones_max: ended sessions remembered, the oldest forgotten first.
  Directory(size_t sessions_max, size_t tombstones_max)
      : sessions_max_(sessions_max), tombstones_max_(tombstones_max) {}

  // ALREADY_EXISTS; RESOURCE_EXHAUSTED (SESSION_LIMIT).
  absl::Status Claim(const SessionKey& key, uint32_t lane);
  // The lane. NOT_FOUND as below.
  absl::StatusOr<uint32_t> Find(const SessionKey& key) const;
  // `reason`: why later calls do not find it, kReasonSessionClosed or kReasonLeaseExpired; null for a session that
  // never came to be.
  void Remove(const SessionKey& key, const char* reason);
  // NOT_FOUND with the reason and a text that says which.
  absl::Status NotFoundError(const SessionKey& key) const;
  static absl::Status EndedError(const std::string& id, const char* reason);

 private:
  struct Tombstone {
    const char* reason;
    uint64_t sequence;
  };
  absl::Status NotFoundErrorLocked(const SessionKey& key) const;

  const size_t sessions_max_;
  const size_t tombstones_max_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<SessionKey, uint32_t, SessionKeyHash> lanes_;
  std::unordered_map<SessionKey, Tombstone, SessionKeyHash> tombstones_;
  std::deque<std::pair<SessionKey, uint64_t>> burials_;  // oldest first; stale where the sequence differs
  uint64_t next_sequence_ = 0;
};

}  // namespace ctkvr
