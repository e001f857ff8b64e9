// SPDX-License-Identifier: Apache-2.0
//
// Proves that a tenant gets what its quota allows to the last byte and no more, that what it gave back it can have
// again, that others are not touched, and that tenants that are gone leave nothing behind.

#include "server/core/tenant_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "server/core/error.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string ReasonOf(const absl::Status& status) { return GetErrorDetail(status).reason; }

TEST(TenantLedgerTest, MemoryIsHadToTheLastByte) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {.memory_bytes = 100}}});
  auto first = ledger.Admit(1, 60);
  ASSERT_THAT(first, IsOk());
  const auto refused = ledger.Admit(1, 41);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                AllOf(HasSubstr("41 bytes"), HasSubstr("holds 60"), HasSubstr("limit is 100"))));
  EXPECT_EQ(ReasonOf(refused.status()), kReasonMemoryQuota);
  EXPECT_THAT(ledger.Admit(1, UINT64_MAX), StatusIs(absl::StatusCode::kResourceExhausted)) << "sums do not wrap";
  EXPECT_THAT(ledger.Admit(2, 1000), IsOk()) << "another tenant";
  {
    const auto second = ledger.Admit(1, 40);
    ASSERT_THAT(second, IsOk());
    EXPECT_EQ(ledger.Usage().at(1).memory_bytes, 100u);
    EXPECT_THAT(ledger.Admit(1, 1), StatusIs(absl::StatusCode::kResourceExhausted));
  }
  EXPECT_THAT(ledger.Admit(1, 40), IsOk()) << "given back";
  EXPECT_EQ(ledger.Usage().at(1).refusals[static_cast<size_t>(QuotaKind::kMemory)], 3u);
}

TEST(TenantLedgerTest, SessionsAreCounted) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {.sessions = 2}}});
  auto first = ledger.Admit(1, 5);
  auto second = ledger.Admit(1, 5);
  ASSERT_THAT(second, IsOk());
  const auto refused = ledger.Admit(1, 5);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("sessions of the tenant is 2")));
  EXPECT_EQ(ReasonOf(refused.status()), kReasonSessionQuota);
  *first = TenantLedger::Grant();
  EXPECT_THAT(ledger.Admit(1, 5), IsOk());
}

TEST(TenantLedgerTest, WaitingCallsAreCounted) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {.queued_calls = 2}}});
  EXPECT_THAT(ledger.Enqueue(1), IsOk());
  EXPECT_THAT(ledger.Enqueue(1), IsOk());
  const absl::Status refused = ledger.Enqueue(1);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("its limit is 2")));
  EXPECT_EQ(ReasonOf(refused), kReasonQueueQuota);
  EXPECT_THAT(ledger.Enqueue(2), IsOk());
  ledger.Dequeue(1);
  EXPECT_THAT(ledger.Enqueue(1), IsOk());
}

TEST(TenantLedgerTest, ASmallerQuotaEndsNothing) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {.memory_bytes = 100}}});
  auto held = ledger.Admit(1, 100);
  ledger.SetQuotas({{1, {.memory_bytes = 50}}});
  EXPECT_EQ(ledger.Usage().at(1).memory_bytes, 100u);
  EXPECT_THAT(ledger.Admit(1, 1), StatusIs(absl::StatusCode::kResourceExhausted));
  *held = TenantLedger::Grant();
  EXPECT_THAT(ledger.Admit(1, 50), IsOk());
}

TEST(TenantLedgerTest, WhoIsGoneAndHoldsNothingIsForgotten) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {}}, {2, {}}});
  auto held = ledger.Admit(2, 7);
  ledger.SetQuotas({});
  EXPECT_THAT(ledger.Usage(), SizeIs(1)) << "2 still has its session";
  *held = TenantLedger::Grant();
  EXPECT_THAT(ledger.Usage(), IsEmpty());
  EXPECT_THAT(ledger.Enqueue(3), IsOk());
  EXPECT_THAT(ledger.Usage(), SizeIs(1));
  ledger.Dequeue(3);
  EXPECT_THAT(ledger.Usage(), IsEmpty());
}

TEST(TenantLedgerTest, ThreadsNeverGetMoreThanTheQuotaTogether) {
  TenantLedger ledger;
  ledger.SetQuotas({{1, {.memory_bytes = 10, .sessions = 10}}});
  std::atomic<int> held{0};
  std::atomic<int> worst{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        auto grant = ledger.Admit(1, 3);
        if (!grant.ok()) continue;
        const int now = held.fetch_add(3) + 3;
        for (int seen = worst.load(); now > seen && !worst.compare_exchange_weak(seen, now);) {
        }
        held.fetch_sub(3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(worst.load(), 9);
  EXPECT_EQ(ledger.Usage().at(1).memory_bytes, 0u);
}

}  // namespace
}  // namespace ctkvr::testing
