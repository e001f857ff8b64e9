// SPDX-License-Identifier: Apache-2.0
//
// The table of a lane: finding, leases in the order they end, listing by id.

#include "server/core/session_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;

class SessionTableTest : public ::testing::Test {
 protected:
  SessionTableTest()
      : arena_(*Arena::Create(backend_, size_t{16} << 20)),
        stream_(*backend_.NewStream()),
        scratch_(*Scratch::Create(backend_, 4096)) {}

  void Insert(const std::string& id, seconds lease, TenantId tenant = kDefaultTenant) {
    SessionConfig config = SmallConfig(SmallLayer(), 64);
    config.lease = lease;
    auto session = Session::Create({.id = id, .epoch = 1, .config = config, .tenant = tenant}, *arena_,
                                   {.backend = backend_, .stream = *stream_, .scratch = scratch_});
    ASSERT_THAT(session, IsOk());
    table_.Insert(*std::move(session), clock_.Now());
  }
  std::vector<std::string> Expired() {
    std::vector<std::string> ids;
    for (const auto& session : table_.TakeExpired(clock_.Now())) ids.push_back(session->id());
    return ids;
  }

  FakeBackend backend_;
  FakeClock clock_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Stream> stream_;
  Scratch scratch_;
  SessionTable table_;
};

TEST_F(SessionTableTest, LeasesEndInTheirOrder) {
  Insert("long", seconds(30));
  Insert("short", seconds(10));
  Insert("middle", seconds(20));
  EXPECT_EQ(table_.next_expiry(), clock_.Now() + seconds(10));
  clock_.Advance(seconds(9));
  EXPECT_THAT(Expired(), ElementsAre());
  clock_.Advance(seconds(1));
  EXPECT_THAT(Expired(), ElementsAre("short"));
  clock_.Advance(seconds(20));
  EXPECT_THAT(Expired(), ElementsAre("middle", "long"));
  EXPECT_EQ(table_.next_expiry(), std::nullopt);
  EXPECT_EQ(arena_->reserved_bytes(), 0u);
}

TEST_F(SessionTableTest, RenewingMovesTheEnd) {
  Insert("a", seconds(10));
  Insert("b", seconds(12));
  clock_.Advance(seconds(5));
  table_.Renew(*table_.Find({.id = "a"}, clock_.Now()), clock_.Now());
  EXPECT_EQ(table_.LeaseRemainingSeconds(*table_.Find({.id = "a"}, clock_.Now()), clock_.Now()), 10u);
  clock_.Advance(seconds(7));
  EXPECT_THAT(Expired(), ElementsAre("b"));
  clock_.Advance(std::chrono::milliseconds(2001));
  EXPECT_EQ(table_.LeaseRemainingSeconds(*table_.Find({.id = "a"}, clock_.Now()), clock_.Now()), 1u) << "rounded up";
}

TEST_F(SessionTableTest, ACallThatArrivedAfterTheEndDoesNotFindIt) {
  Insert("a", seconds(10));
  const TimePoint opened = clock_.Now();
  EXPECT_NE(table_.Find({.id = "a"}, opened + seconds(10) - std::chrono::nanoseconds(1)), nullptr);
  EXPECT_EQ(table_.Find({.id = "a"}, opened + seconds(10)), nullptr);
  EXPECT_TRUE(table_.Contains({.id = "a"}));
  EXPECT_EQ(table_.Find({.id = "b"}, opened), nullptr);
}

TEST_F(SessionTableTest, ListsAreByIdAndContinue) {
  for (const char* id : {"c", "a", "d", "b"}) Insert(id, seconds(10));
  const auto ids = [&](const std::string& after, size_t limit) {
    std::vector<std::string> listed;
    for (const SessionSummary& summary : table_.List({.id = after}, limit, clock_.Now())) listed.push_back(summary.id);
    return listed;
  };
  EXPECT_THAT(ids("", 2), ElementsAre("a", "b"));
  EXPECT_THAT(ids("b", 2), ElementsAre("c", "d"));
  EXPECT_THAT(ids("d", 2), ElementsAre());
  EXPECT_THAT(ids("aa", 1), ElementsAre("b"));
  EXPECT_EQ(table_.List({}, 1, clock_.Now())[0].lease_remaining_seconds, 10u);
}

TEST_F(SessionTableTest, ListsAreOfOneTenant) {
  for (const char* id : {"a", "b"}) Insert(id, seconds(10), 1);
  for (const char* id : {"b", "c"}) Insert(id, seconds(10), 2);
  const auto ids = [&](const SessionKey& after) {
    std::vector<std::string> listed;
    for (const SessionSummary& summary : table_.List(after, 10, clock_.Now())) listed.push_back(summary.id);
    return listed;
  };
  EXPECT_THAT(ids({.tenant = 0}), ElementsAre());
  EXPECT_THAT(ids({.tenant = 1}), ElementsAre("a", "b"));
  EXPECT_THAT(ids({.tenant = 1, .id = "a"}), ElementsAre("b"));
  EXPECT_THAT(ids({.tenant = 2, .id = "a"}), ElementsAre("b", "c"));
  EXPECT_EQ(table_.Find({.tenant = 2, .id = "a"}, clock_.Now()), nullptr);
}

TEST_F(SessionTableTest, ARemovedSessionLeavesNoLease) {
  Insert("a", seconds(10));
  EXPECT_NE(table_.Remove({.id = "a"}), nullptr);
  EXPECT_EQ(table_.Remove({.id = "a"}), nullptr);
  EXPECT_EQ(table_.next_expiry(), std::nullopt);
  EXPECT_EQ(table_.size(), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
