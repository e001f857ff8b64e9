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
  return GetErrorDetail(directory.Find(id).status()).reason;
}

TEST(DirectoryTest, AnIdIsClaimedOnce) {
  Directory directory(10, 10);
  EXPECT_THAT(directory.Claim("a", 3), IsOk());
  EXPECT_THAT(directory.Claim("a", 4), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"a\"")));
  EXPECT_EQ(*directory.Find("a"), 3u);
  directory.Remove("a", kReasonSessionClosed);
  EXPECT_THAT(directory.Claim("a", 4), IsOk());
  EXPECT_EQ(*directory.Find("a"), 4u);
}

TEST(DirectoryTest, NotFoundSaysWhy) {
  Directory directory(10, 10);
  for (const char* id : {"closed", "expired", "never came to be"}) ASSERT_THAT(directory.Claim(id, 0), IsOk());
  directory.Remove("closed", kReasonSessionClosed);
  directory.Remove("expired", kReasonLeaseExpired);
  directory.Remove("never came to be", nullptr);
  EXPECT_THAT(directory.Find("closed"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("was closed")));
  EXPECT_EQ(ReasonOf(directory, "closed"), kReasonSessionClosed);
  EXPECT_THAT(directory.Find("expired"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("lease ran out")));
  EXPECT_EQ(ReasonOf(directory, "expired"), kReasonLeaseExpired);
  EXPECT_EQ(ReasonOf(directory, "never came to be"), kReasonSessionUnknown);
  EXPECT_THAT(directory.Find("unheard of"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("never opened")));
  EXPECT_EQ(ReasonOf(directory, "unheard of"), kReasonSessionUnknown);
}

TEST(DirectoryTest, TheSessionLimitHolds) {
  Directory directory(2, 10);
  EXPECT_THAT(directory.Claim("a", 0), IsOk());
  EXPECT_THAT(directory.Claim("b", 0), IsOk());
  const absl::Status refused = directory.Claim("c", 0);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("the limit is 2")));
  EXPECT_EQ(GetErrorDetail(refused).reason, kReasonSessionLimit);
  directory.Remove("a", kReasonSessionClosed);
  EXPECT_THAT(directory.Claim("c", 0), IsOk());
}

TEST(DirectoryTest, TheOldestTombstonesAreForgotten) {
  Directory directory(10, 2);
  for (const char* id : {"a", "b", "a", "c"}) {
    ASSERT_THAT(directory.Claim(id, 0), IsOk());
    directory.Remove(id, kReasonSessionClosed);
  }
  // "a" was buried a second time after "b": it is "b" that is forgotten.
  EXPECT_EQ(ReasonOf(directory, "b"), kReasonSessionUnknown);
  EXPECT_EQ(ReasonOf(directory, "a"), kReasonSessionClosed);
  EXPECT_EQ(ReasonOf(directory, "c"), kReasonSessionClosed);
}

}  // namespace
}  // namespace ctkvr::testing
