// SPDX-License-Identifier: Apache-2.0
//
// What each tenant holds, against what it may hold. Thread-safe: one short mutex.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/tenant.h"

namespace ctkvr {

// What a tenant may hold at a time; 0: no limit but the server's.
struct TenantQuota {
  uint64_t memory_bytes = 0;  // of the arena, reserved
  uint64_t sessions = 0;      // open
  uint64_t queued_calls = 0;  // waiting for lanes; a batch waits once a lane
};

enum class QuotaKind : uint8_t { kMemory, kSessions, kQueue };
inline constexpr size_t kQuotaKindCount = 3;

struct TenantUsage {
  uint64_t memory_bytes = 0;
  uint64_t sessions = 0;
  uint64_t queued_calls = 0;
  std::array<uint64_t, kQuotaKindCount> refusals{};  // by QuotaKind; only grow
};

class TenantLedger {
 public:
  // A session's share, given back when destroyed. The ledger must outlive it.
  class Grant {
   public:
    Grant() = default;
    Grant(Grant&& other) noexcept { *this = std::move(other); }
    Grant& operator=(Grant&& other) noexcept {
      std::swap(ledger_, other.ledger_);
      std::swap(tenant_, other.tenant_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Grant() {
      if (ledger_ != nullptr) ledger_->Release(tenant_, bytes_);
    }

   private:
    friend class TenantLedger;
    TenantLedger* ledger_ = nullptr;
    TenantId tenant_ = kDefaultTenant;
    uint64_t bytes_ = 0;
  };

  // In place of all quotas so far. What is held stays; who is not named has none, and is forgotten once it holds
  // nothing.
  void SetQuotas(const std::map<TenantId, TenantQuota>& quotas);

  // One session of so many bytes. RESOURCE_EXHAUSTED (MEMORY_QUOTA, SESSION_QUOTA) names what is held and the limit.
  absl::StatusOr<Grant> Admit(TenantId tenant, uint64_t bytes);
  // One call into a queue, until Dequeue. RESOURCE_EXHAUSTED (QUEUE_QUOTA).
  absl::Status Enqueue(TenantId tenant);
  void Dequeue(TenantId tenant);

  // Of those with a quota and those that hold anything.
  std::map<TenantId, TenantUsage> Usage() const;

 private:
  struct Account {
    TenantQuota quota;
    TenantUsage usage;
    bool named = false;  // in the last SetQuotas
  };
  void Release(TenantId tenant, uint64_t bytes);
  void ForgetIfIdle(std::map<TenantId, Account>::iterator account);

  mutable std::mutex mutex_;  // guards all below
  std::map<TenantId, Account> accounts_;
};

}  // namespace ctkvr
