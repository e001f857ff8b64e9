// SPDX-License-Identifier: Apache-2.0
//
// Proves what tokens are made of, that their line is the digest that SHA-256 gives, and where a token is read from.

#include "client/cli/token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(TokenTest, TokensAreRandomAndLong) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) {
    const auto token = MakeToken("");
    ASSERT_TRUE(token.ok());
    EXPECT_THAT(token->text, MatchesRegex("ctkvr_[A-Za-z0-9_-]{43}"));
    EXPECT_EQ(token->line, DigestLine(token->text, ""));
    EXPECT_EQ(token->line.find(token->text), std::string::npos);
    tokens.insert(token->text);
  }
  EXPECT_EQ(tokens.size(), 100u);
}

// The example of FIPS 180-2.
TEST(TokenTest, TheLineIsTheSha256) {
  EXPECT_EQ(DigestLine("abc", ""), R"({sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"})");
  EXPECT_THAT(DigestLine("abc", "2027-01-01T00:00:00Z"), HasSubstr(R"(15ad", expires = 2027-01-01T00:00:00Z})"));
}

TEST(TokenTest, ATimeThatIsNoneIsRefused) {
  EXPECT_TRUE(MakeToken("2027-01-01T00:00:00+01:00").ok());
  for (const char* time : {"tomorrow", "2027-01-01", "2027-01-01T00:00:00", "2027-01-01T00:00:00Z}"}) {
    EXPECT_EQ(MakeToken(time).status().code(), absl::StatusCode::kInvalidArgument) << time;
  }
}

TEST(TokenTest, TheFileWinsOverTheVariable) {
  const std::string path = ::testing::TempDir() + "/token_test." + std::to_string(getpid());
  std::ofstream(path) << "  from-the-file\n";
  setenv("CTKVR_TOKEN", "from-the-variable\n", 1);
  EXPECT_EQ(*ReadToken(path), "from-the-file");
  EXPECT_EQ(*ReadToken(""), "from-the-variable");
  unsetenv("CTKVR_TOKEN");
  EXPECT_EQ(*ReadToken(""), "");
  std::filesystem::remove(path);
  EXPECT_EQ(ReadToken(path).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ctkvr::cli
