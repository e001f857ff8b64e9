// SPDX-License-Identifier: Apache-2.0
//
// Ids, their lanes, their limit, and how ended sessions are remembered and forgotten.

#include "server/core/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/core/error.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

std::string ReasonOf(const Directory& directory, const std::string& id) {
  return GetErrorDetail(directory.Find({.id = id}).status()).reason;
}

TEST(DirectoryTest, AnIdIsClaimedOnce) {
  Directory directory(10, 10);
  EXPECT_THAT(directory.Claim({.id = "a"}, 3), IsOk());
  EXPECT_THAT(directory.Claim({.id = "a"}, 4), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"a\"")));
  EXPECT_EQ(*directory.Find({.id = "a"}), 3u);
  directory.Remove({.id = "a"}, kReasonSessionClosed);
  EXPECT_THAT(directory.Claim({.id = "a"}, 4), IsOk());
  EXPECT_EQ(*directory.Find({.id = "a"}), 4u);
}

TEST(DirectoryTest, TenantsHaveIdsOfTheirOwn) {
  Directory directory(10, 10);
  EXPECT_THAT(directory.Claim({.tenant = 1, .id = "a"}, 3), IsOk());
  EXPECT_THAT(directory.Claim({.tenant = 2, .id = "a"}, 4), IsOk());
  EXPECT_EQ(*directory.Find({.tenant = 1, .id = "a"}), 3u);
  EXPECT_EQ(*directory.Find({.tenant = 2, .id = "a"}), 4u);
  const absl::Status before = directory.Find({.tenant = 3, .id = "a"}).status();
  directory.Remove({.tenant = 1, .id = "a"}, kReasonSessionClosed);
  EXPECT_EQ(*directory.Find({.tenant = 2, .id = "a"}), 4u);
  EXPECT_EQ(directory.Find({.tenant = 3, .id = "a"}).status(), before) << "how another's session ended is not told";
  EXPECT_EQ(GetErrorDetail(before).reason, kReasonSessionUnknown);
}

TEST(DirectoryTest, NotFoundSaysWhy) {
  Directory directory(10, 10);
  for (const char* id : {"closed", "expired", "never came to be"}) ASSERT_THAT(directory.Claim({.id = id}, 0), IsOk());
  directory.Remove({.id = "closed"}, kReasonSessionClosed);
  directory.Remove({.id = "expired"}, kReasonLeaseExpired);
  directory.Remove({.id = "never came to be"}, nullptr);
  EXPECT_THAT(directory.Find({.id = "closed"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("was closed")));
  EXPECT_EQ(ReasonOf(directory, "closed"), kReasonSessionClosed);
  EXPECT_THAT(directory.Find({.id = "expired"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("lease ran out")));
  EXPECT_EQ(ReasonOf(directory, "expired"), kReasonLeaseExpired);
  EXPECT_EQ(ReasonOf(directory, "never came to be"), kReasonSessionUnknown);
  EXPECT_THAT(directory.Find({.id = "unheard of"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("never opened")));
  EXPECT_EQ(ReasonOf(directory, "unheard of"), kReasonSessionUnknown);
}

TEST(DirectoryTest, TheSessionLimitHolds) {
  Directory directory(2, 10);
  EXPECT_THAT(directory.Claim({.id = "a"}, 0), IsOk());
  EXPECT_THAT(directory.Claim({.id = "b"}, 0), IsOk());
  const absl::Status refused = directory.Claim({.id = "c"}, 0);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("the limit is 2")));
  EXPECT_EQ(GetErrorDetail(refused).reason, kReasonSessionLimit);
  directory.Remove({.id = "a"}, kReasonSessionClosed);
  EXPECT_THAT(directory.Claim({.id = "c"}, 0), IsOk());
}

TEST(DirectoryTest, TheOldestTombstonesAreForgotten) {
  Directory directory(10, 2);
  for (const char* id : {"a", "b", "a", "c"}) {
    ASSERT_THAT(directory.Claim({.id = id}, 0), IsOk());
    directory.Remove({.id = id}, kReasonSessionClosed);
  }
  // "a" was buried a second time after "b": it is "b" that is forgotten.
  EXPECT_EQ(ReasonOf(directory, "b"), kReasonSessionUnknown);
  EXPECT_EQ(ReasonOf(directory, "a"), kReasonSessionClosed);
  EXPECT_EQ(ReasonOf(directory, "c"), kReasonSessionClosed);
}

}  // namespace
}  // namespace ctkvr::testing
