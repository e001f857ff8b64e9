// SPDX-License-Identifier: Apache-2.0
//
// A call whose parts run on several lanes: every part is held by one handle, and the handle that goes last completes
// the call. Thread-safe in that handles of one call may be destroyed on different threads; each writes only what its
// part owns.

#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

namespace ctkvr {

// Base of such a call. Derived classes have Complete(), which runs once, on the thread of the last handle.
struct JoinedCall {
  std::atomic<size_t> parts{0};
};

template <typename Call>
class Part {
 public:
  Part() = default;
  // REQUIRES: `call` came from new; while it is being split up, the splitter holds a handle of its own.
  explicit Part(Call* call) : call_(call) { call_->parts.fetch_add(1, std::memory_order_relaxed); }
  Part(Part&& other) noexcept : call_(std::exchange(other.call_, nullptr)) {}
  Part& operator=(Part&& other) noexcept {
    std::swap(call_, other.call_);
    return *this;
  }
  ~Part() {
    if (call_ == nullptr || call_->parts.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    call_->Complete();
    delete call_;
  }
  Call* operator->() const { return call_; }

 private:
  Call* call_ = nullptr;
};

}  // namespace ctkvr
