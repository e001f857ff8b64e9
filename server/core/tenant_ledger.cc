// SPDX-License-Identifier: Apache-2.0

#include "server/core/tenant_ledger.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/core/error.h"

namespace ctkvr {
namespace {

bool Exceeds(uint64_t held, uint64_t more, uint64_t limit) {
  return limit != 0 && (held > limit || more > limit - held);
}

absl::Status Refuse(TenantUsage& usage, QuotaKind kind, const std::string& message, const char* reason) {
  ++usage.refusals[static_cast<size_t>(kind)];
  return MakeError(absl::StatusCode::kResourceExhausted, message, reason);
}

}  // namespace

void TenantLedger::SetQuotas(const std::map<TenantId, TenantQuota>& quotas) {
  const std::lock_guard lock(mutex_);
  for (auto it = accounts_.begin(); it != accounts_.end();) {
    const auto account = it++;
    account->second.named = quotas.contains(account->first);
    if (!account->second.named) account->second.quota = {};
    ForgetIfIdle(account);
  }
  for (const auto& [tenant, quota] : quotas) {
    Account& account = accounts_[tenant];
    account.quota = quota;
    account.named = true;
  }
}

absl::StatusOr<TenantLedger::Grant> TenantLedger::Admit(TenantId tenant, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto account = accounts_.try_emplace(tenant).first;
  const TenantQuota& quota = account->second.quota;
  TenantUsage& usage = account->second.usage;
  if (Exceeds(usage.sessions, 1, quota.sessions)) {
    return Refuse(usage, QuotaKind::kSessions,
                  absl::StrCat("sessions of the tenant is ", usage.sessions, "; its limit is ", quota.sessions),
                  kReasonSessionQuota);
  }
  if (Exceeds(usage.memory_bytes, bytes, quota.memory_bytes)) {
    return Refuse(usage, QuotaKind::kMemory,
                  absl::StrCat("the session reserves ", bytes, " bytes; the tenant holds ", usage.memory_bytes,
                               ", and its limit is ", quota.memory_bytes),
                  kReasonMemoryQuota);
  }
  ++usage.sessions;
  usage.memory_bytes += bytes;
  Grant grant;
  grant.ledger_ = this;
  grant.tenant_ = tenant;
  grant.bytes_ = bytes;
  return grant;
}

void TenantLedger::Release(TenantId tenant, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto account = accounts_.find(tenant);
  CTKVR_CHECK(account != accounts_.end() && account->second.usage.sessions > 0);
  --account->second.usage.sessions;
  account->second.usage.memory_bytes -= bytes;
  ForgetIfIdle(account);
}

absl::Status TenantLedger::Enqueue(TenantId tenant) {
  const std::lock_guard lock(mutex_);
  const auto account = accounts_.try_emplace(tenant).first;
  TenantUsage& usage = account->second.usage;
  const uint64_t limit = account->second.quota.queued_calls;
  if (Exceeds(usage.queued_calls, 1, limit)) {
    return Refuse(usage, QuotaKind::kQueue,
                  absl::StrCat("calls waiting of the tenant is ", usage.queued_calls, "; its limit is ", limit),
                  kReasonQueueQuota);
  }
  ++usage.queued_calls;
  return absl::OkStatus();
}

void TenantLedger::Dequeue(TenantId tenant) {
  const std::lock_guard lock(mutex_);
  const auto account = accounts_.find(tenant);
  CTKVR_CHECK(account != accounts_.end() && account->second.usage.queued_calls > 0);
  --account->second.usage.queued_calls;
  ForgetIfIdle(account);
}

std::map<TenantId, TenantUsage> TenantLedger::Usage() const {
  const std::lock_guard lock(mutex_);
  std::map<TenantId, TenantUsage> usage;
  for (const auto& [tenant, account] : accounts_) usage.emplace(tenant, account.usage);
  return usage;
}

// Without access control there is one account, which comes and goes with every call otherwise.
void TenantLedger::ForgetIfIdle(std::map<TenantId, Account>::iterator account) {
  const auto& [tenant, state] = *account;
  if (tenant == kDefaultTenant || state.named || state.usage.sessions > 0 || state.usage.queued_calls > 0) return;
  accounts_.erase(account);
}

}  // namespace ctkvr
