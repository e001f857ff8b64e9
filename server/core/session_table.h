// SPDX-License-Identifier: Apache-2.0
//
// The sessions of one lane by tenant and id, and their leases in the order they run out. Not thread-safe: belongs to
// its lane.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/core/clock.h"
#include "server/core/session.h"

namespace ctkvr {

class SessionTable {
 public:
  // REQUIRES: no session of that key.
  void Insert(std::unique_ptr<Session> session, TimePoint now);
  // Null when there is none, or when its lease had run out by `arrived`, the time the call was queued: a busy lane
  // must not end sessions whose calls wait.
  Session* Find(const SessionKey& key, TimePoint arrived) const;
  bool Contains(const SessionKey& key) const { return entries_.contains(key); }
  // The lease begins again.
  void Renew(const Session& session, TimePoint now);
  std::unique_ptr<Session> Remove(const SessionKey& key);
  // Sessions whose lease has run out by `now`.
  std::vector<std::unique_ptr<Session>> TakeExpired(TimePoint now);
  std::vector<std::unique_ptr<Session>> TakeAll();
  std::optional<TimePoint> next_expiry() const;

  // Whole seconds, rounded up. REQUIRES: the session is here.
  uint32_t LeaseRemainingSeconds(const Session& session, TimePoint now) const;
  // At most `limit` of after.tenant with id > after.id, by id.
  std::vector<SessionSummary> List(const SessionKey& after, size_t limit, TimePoint now) const;
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::unique_ptr<Session> session;
    TimePoint expiry;
  };
  std::map<SessionKey, Entry> entries_;
  std::set<std::pair<TimePoint, const Session*>> expiries_;
};

}  // namespace ctkvr
