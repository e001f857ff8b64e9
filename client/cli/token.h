// SPDX-License-Identifier: Apache-2.0
//
// Tokens for servers with access control: one is made here, the server's access file gets its digest alone.
// Thread-safe: pure functions.

#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ctkvr::cli {

struct Token {
  std::string text;  // what a client sends: "ctkvr_" and 43 characters, 256 random bits
  std::string line;  // what the access file gets: {sha256 = "..."}
};

// `expires`: a time of TOML, "2027-01-01T00:00:00Z"; empty: the token does not expire. INVALID_ARGUMENT: none of that
// form. INTERNAL: the machine gives no random bytes.
absl::StatusOr<Token> MakeToken(const std::string& expires);

// The access file's line for a token.
std::string DigestLine(const std::string& token, const std::string& expires);

// The token of `file`, or where that is empty of variable CTKVR_TOKEN, without the white space around it; empty: none.
// INVALID_ARGUMENT: the file cannot be read, or holds none.
absl::StatusOr<std::string> ReadToken(const std::string& file);

}  // namespace ctkvr::cli
