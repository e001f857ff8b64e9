// SPDX-License-Identifier: Apache-2.0

#include "server/core/session_table.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace ctkvr {

void SessionTable::Insert(std::unique_ptr<Session> session, TimePoint now) {
  const TimePoint expiry = now + session->config().lease;
  expiries_.emplace(expiry, session.get());
  SessionKey key = session->key();
  const bool fresh = entries_.emplace(std::move(key), Entry{.session = std::move(session), .expiry = expiry}).second;
  CTKVR_CHECK(fresh);
}

Session* SessionTable::Find(const SessionKey& key, TimePoint arrived) const {
  const auto found = entries_.find(key);
  if (found == entries_.end() || arrived >= found->second.expiry) return nullptr;
  return found->second.session.get();
}

void SessionTable::Renew(const Session& session, TimePoint now) {
  Entry& entry = entries_.at(session.key());
  const TimePoint expiry = std::max(entry.expiry, now + session.config().lease);
  expiries_.erase({entry.expiry, &session});
  expiries_.emplace(expiry, &session);
  entry.expiry = expiry;
}

std::unique_ptr<Session> SessionTable::Remove(const SessionKey& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  std::unique_ptr<Session> session = std::move(found->second.session);
  expiries_.erase({found->second.expiry, session.get()});
  entries_.erase(found);
  return session;
}

std::vector<std::unique_ptr<Session>> SessionTable::TakeExpired(TimePoint now) {
  std::vector<std::unique_ptr<Session>> expired;
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    expired.push_back(Remove(expiries_.begin()->second->key()));
  }
  return expired;
}

std::vector<std::unique_ptr<Session>> SessionTable::TakeAll() {
  std::vector<std::unique_ptr<Session>> sessions;
  for (auto& [key, entry] : entries_) sessions.push_back(std::move(entry.session));
  entries_.clear();
  expiries_.clear();
  return sessions;
}

std::optional<TimePoint> SessionTable::next_expiry() const {
  if (expiries_.empty()) return std::nullopt;
  return expiries_.begin()->first;
}

uint32_t SessionTable::LeaseRemainingSeconds(const Session& session, TimePoint now) const {
  const auto remaining = entries_.at(session.key()).expiry - now;
  return static_cast<uint32_t>(std::max<int64_t>(0, std::chrono::ceil<std::chrono::seconds>(remaining).count()));
}

std::vector<SessionSummary> SessionTable::List(const SessionKey& after, size_t limit, TimePoint now) const {
  std::vector<SessionSummary> summaries;
  for (auto it = entries_.upper_bound(after); it != entries_.end() && summaries.size() < limit; ++it) {
    if (it->first.tenant != after.tenant) break;
    summaries.push_back(it->second.session->Summary());
    summaries.back().lease_remaining_seconds = LeaseRemainingSeconds(*it->second.session, now);
  }
  return summaries;
}

}  // namespace ctkvr
