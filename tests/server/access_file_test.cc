// SPDX-License-Identifier: Apache-2.0
//
// Proves that an access file means what it says, and that every way in which it can be wrong is refused with its line,
// without a word of what stands where a digest should.

#include "server/access_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Digest(char digit) { return std::string(64, digit); }

std::string Tenant(const std::string& more) {
  return absl::StrCat("[[tenant]]\nname = \"red\"\ntokens = [{sha256 = \"", Digest('a'), "\"}]\n", more);
}

std::string Refusal(const std::string& text) {
  const auto rules = ParseAccessFile(text, "access.toml");
  EXPECT_EQ(rules.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(rules.status().message());
}

TEST(AccessFileTest, EveryKeyMeansWhatItSays) {
  const auto rules = ParseAccessFile(absl::StrCat(R"(
[[tenant]]
name = "red.team-1_x"
admin = true
tokens = [{sha256 = ")",
                                                  Digest('a'), R"("}, {sha256 = ")", Digest('B'),
                                                  R"(", expires = 2027-01-01T01:00:00+01:00}]
certificates = ["worker.red", "spiffe://red/worker"]
memory_bytes = "1.5GiB"
sessions = 7
queued_calls = 8
calls_per_second = 2.5
calls_burst = 9
[[tenant]]
name = "blue"
certificates = ["blue"]
memory_bytes = 4096
calls_per_second = 500
)"),
                                     "access.toml");
  ASSERT_TRUE(rules.ok()) << rules.status();
  ASSERT_EQ(rules->tenants.size(), 2u);
  const rpc::TenantRule& red = rules->tenants[0];
  EXPECT_EQ(red.name, "red.team-1_x");
  EXPECT_TRUE(red.admin);
  ASSERT_EQ(red.tokens.size(), 2u);
  EXPECT_EQ(red.tokens[0].digest[31], 0xaa);
  EXPECT_EQ(red.tokens[0].expires, rpc::WallTime::max());
  EXPECT_EQ(red.tokens[1].digest[0], 0xbb);
  EXPECT_EQ(red.tokens[1].expires, std::chrono::system_clock::from_time_t(1798761600)) << "midnight at Greenwich";
  EXPECT_THAT(red.certificates, ElementsAre("worker.red", "spiffe://red/worker"));
  EXPECT_EQ(red.quota.memory_bytes, 1610612736u);
  EXPECT_EQ(red.quota.sessions, 7u);
  EXPECT_EQ(red.quota.queued_calls, 8u);
  EXPECT_EQ(red.calls_per_second, 2.5);
  EXPECT_EQ(red.calls_burst, 9u);
  const rpc::TenantRule& blue = rules->tenants[1];
  EXPECT_FALSE(blue.admin);
  EXPECT_EQ(blue.quota.memory_bytes, 4096u);
  EXPECT_EQ(blue.quota.sessions, 0u);
  EXPECT_EQ(blue.calls_burst, 500u) << "one second's";
}

TEST(AccessFileTest, WhatIsWrongIsNamedWithItsLine) {
  EXPECT_THAT(Refusal("tenant = "), HasSubstr("access.toml:1 is not TOML"));
  EXPECT_THAT(Refusal(""), HasSubstr("names no tenant"));
  EXPECT_THAT(Refusal("[[tenants]]\n"), HasSubstr("tenants is no key here"));
  EXPECT_THAT(Refusal(Tenant("admins = true\n")), AllOf(HasSubstr("access.toml:4"), HasSubstr("admins is no key")));
  EXPECT_THAT(Refusal(Tenant("admin = 1\n")), HasSubstr("admin must be true or false"));
  EXPECT_THAT(Refusal("[[tenant]]\nname = \"red\"\n"), HasSubstr("neither tokens nor certificates"));
  for (const char* name : {"", "a b", "a\\\"b", "ü", "a/b"}) {
    EXPECT_THAT(Refusal(absl::StrCat("[[tenant]]\nname = \"", name, "\"\ncertificates = [\"x\"]\n")),
                HasSubstr("name must be"));
  }
  EXPECT_THAT(Refusal(absl::StrCat("[[tenant]]\nname = \"", std::string(limits::kTenantNameBytesMax + 1, 'a'), "\"\n")),
              HasSubstr("name must be"));
  EXPECT_THAT(Refusal(Tenant("") + Tenant("")), HasSubstr("\"red\" is there twice"));
  EXPECT_THAT(
      Refusal(absl::StrCat(Tenant(""), "[[tenant]]\nname = \"blue\"\ntokens = [{sha256 = \"", Digest('A'), "\"}]\n")),
      AllOf(HasSubstr("this token is there twice"), Not(HasSubstr("AAAA"))));
  EXPECT_THAT(Refusal(Tenant("certificates = [\"x\", \"x\"]\n")), HasSubstr("\"x\" is there twice"));
  EXPECT_THAT(Refusal(Tenant("memory_bytes = \"many\"\n")), HasSubstr("memory_bytes must be a size"));
  EXPECT_THAT(Refusal(Tenant("memory_bytes = 0\n")), HasSubstr("memory_bytes must be"));
  EXPECT_THAT(Refusal(Tenant("sessions = 0\n")), HasSubstr("sessions must be 1 to"));
  EXPECT_THAT(Refusal(Tenant(absl::StrCat("sessions = ", limits::kSessionsMax + 1, "\n"))), HasSubstr("sessions must"));
  EXPECT_THAT(Refusal(Tenant("queued_calls = -1\n")), HasSubstr("queued_calls must be"));
  EXPECT_THAT(Refusal(Tenant("calls_burst = 5\n")), HasSubstr("calls_burst needs calls_per_second"));
  for (const char* rate : {"0", "nan", "inf", "-1.0", "\"many\"", "1000001"}) {
    EXPECT_THAT(Refusal(Tenant(absl::StrCat("calls_per_second = ", rate, "\n"))),
                HasSubstr("calls_per_second must be"));
  }
}

TEST(AccessFileTest, ATokenWrittenByMistakeIsNotRepeated) {
  for (const char* tokens : {"[\"ctkvr_secret\"]", "[{sha256 = \"ctkvr_secret\"}]", "\"ctkvr_secret\""}) {
    EXPECT_THAT(Refusal(absl::StrCat("[[tenant]]\nname = \"red\"\ntokens = ", tokens, "\n")),
                Not(HasSubstr("ctkvr_secret")));
  }
  EXPECT_THAT(
      Refusal("[[tenant]]\nname = \"red\"\ntokens = [{sha256 = \"" + Digest('a') + "\", expires = \"soon\"}]\n"),
      HasSubstr("expires must be a time"));
}

TEST(AccessFileTest, AsManyTenantsAsTheLimitAndNoMore) {
  std::string text;
  for (size_t i = 0; i < limits::kTenantsMax; ++i) {
    absl::StrAppend(&text, "[[tenant]]\nname = \"t", i, "\"\ncertificates = [\"c", i, "\"]\n");
  }
  EXPECT_TRUE(ParseAccessFile(text, "access.toml").ok());
  EXPECT_THAT(Refusal(text + Tenant("")), HasSubstr("the limit is 256"));
}

}  // namespace
}  // namespace ctkvr
