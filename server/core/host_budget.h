// SPDX-License-Identifier: Apache-2.0
//
// Host memory beside the arena that sessions are promised at open: their slot tables and tags. Thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/core/error.h"

namespace ctkvr {

class HostBudget {
 public:
  // A share of the budget, given back when destroyed. The budget must outlive it.
  class Grant {
   public:
    Grant() = default;
    Grant(Grant&& other) noexcept : used_(std::exchange(other.used_, nullptr)), bytes_(other.bytes_) {}
    Grant& operator=(Grant&& other) noexcept {
      std::swap(used_, other.used_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Grant() {
      if (used_ != nullptr) used_->fetch_sub(bytes_, std::memory_order_relaxed);
    }

   private:
    friend class HostBudget;
    Grant(std::atomic<uint64_t>* used, uint64_t bytes) : used_(used), bytes_(bytes) {}
    std::atomic<uint64_t>* used_ = nullptr;
    uint64_t bytes_ = 0;
  };

  explicit HostBudget(uint64_t limit) : limit_(limit) {}

  // RESOURCE_EXHAUSTED (HOST_MEMORY_FULL) naming the bytes asked for, used and allowed.
  absl::StatusOr<Grant> Take(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit_ - used) {
        return MakeError(absl::StatusCode::kResourceExhausted,
                         absl::StrCat("slot tables and tags of the session take ", bytes, " bytes; ", used, " of ",
                                      limit_, " bytes are in use"),
                         kReasonHostMemoryFull);
      }
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return Grant(&used_, bytes);
  }

  uint64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace ctkvr
