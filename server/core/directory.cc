// SPDX-License-Identifier: Apache-2.0

#include "server/core/directory.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/core/error.h"

namespace ctkvr {

absl::Status Directory::Claim(const SessionKey& key, uint32_t lane) {
  const std::lock_guard lock(mutex_);
  if (lanes_.contains(key)) return absl::AlreadyExistsError(absl::StrCat("session \"", key.id, "\" is open already"));
  if (lanes_.size() >= sessions_max_) {
    return MakeError(absl::StatusCode::kResourceExhausted,
                     absl::StrCat("sessions open is ", lanes_.size(), "; the limit is ", sessions_max_),
                     kReasonSessionLimit);
  }
  lanes_[key] = lane;
  tombstones_.erase(key);
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Directory::Find(const SessionKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = lanes_.find(key);
  if (found == lanes_.end()) return NotFoundErrorLocked(key);
  return found->second;
}

void Directory::Remove(const SessionKey& key, const char* reason) {
  const std::lock_guard lock(mutex_);
  lanes_.erase(key);
  if (reason == nullptr) return;
  tombstones_[key] = {.reason = reason, .sequence = next_sequence_};
  burials_.emplace_back(key, next_sequence_++);
  while (burials_.size() > tombstones_max_) {
    const auto found = tombstones_.find(burials_.front().first);
    if (found != tombstones_.end() && found->second.sequence == burials_.front().second) tombstones_.erase(found);
    burials_.pop_front();
  }
}

absl::Status Directory::NotFoundError(const SessionKey& key) const {
  const std::lock_guard lock(mutex_);
  return NotFoundErrorLocked(key);
}

absl::Status Directory::NotFoundErrorLocked(const SessionKey& key) const {
  const auto found = tombstones_.find(key);
  return EndedError(key.id, found == tombstones_.end() ? kReasonSessionUnknown : found->second.reason);
}

absl::Status Directory::EndedError(const std::string& id, const char* reason) {
  const char* text = " was never opened here, or ended long ago";
  if (std::strcmp(reason, kReasonSessionClosed) == 0) text = " was closed";
  if (std::strcmp(reason, kReasonLeaseExpired) == 0) text = " ended: its lease ran out";
  return MakeError(absl::StatusCode::kNotFound, absl::StrCat("session \"", id, "\"", text), reason);
}

}  // namespace ctkvr
