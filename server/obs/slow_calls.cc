// SPDX-License-Identifier: Apache-2.0

#include "server/obs/slow_calls.h"

#include <algorithm>

namespace ctkvr::obs {

void SlowCall::SetSession(const std::string& id) {
  session_bytes = std::min(id.size(), session.size());
  std::copy_n(id.begin(), session_bytes, session.begin());
}

SlowCalls::SlowCalls(std::chrono::nanoseconds threshold)
    : threshold_(threshold), least_(threshold.count() == 0 ? std::chrono::nanoseconds::max() : threshold) {}

void SlowCalls::Add(const SlowCall& call) {
  const std::lock_guard lock(mutex_);
  Ring& ring = rings_[static_cast<size_t>(call.method)];
  ring.calls[ring.added++ % kKeptPerMethod] = call;
}

std::vector<SlowCall> SlowCalls::Recent(std::optional<Method> method, size_t limit) const {
  std::vector<SlowCall> recent;
  recent.reserve(method.has_value() ? kKeptPerMethod : rings_.size() * kKeptPerMethod);
  {
    const std::lock_guard lock(mutex_);
    for (size_t m = 0; m < rings_.size(); ++m) {
      if (method.has_value() && static_cast<size_t>(*method) != m) continue;
      const size_t kept = std::min<uint64_t>(rings_[m].added, kKeptPerMethod);
      recent.insert(recent.end(), rings_[m].calls.begin(), rings_[m].calls.begin() + static_cast<std::ptrdiff_t>(kept));
    }
  }
  std::sort(recent.begin(), recent.end(), [](const SlowCall& a, const SlowCall& b) { return a.ended > b.ended; });
  if (recent.size() > limit) recent.erase(recent.begin() + static_cast<std::ptrdiff_t>(limit), recent.end());
  return recent;
}

uint64_t SlowCalls::count() const {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  for (const Ring& ring : rings_) count += ring.added;
  return count;
}

}  // namespace ctkvr::obs
