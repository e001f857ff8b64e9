// SPDX-License-Identifier: Apache-2.0
#include "client/cli/token.h"

#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "openssl/rand.h"
#include "openssl/sha.h"

namespace ctkvr::cli {
namespace {

constexpr size_t kRandomBytes = 32;

}  // namespace

std::string DigestLine(const std::string& token, const std::string& expires) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  const std::string bytes(digest.begin(), digest.end());
  return absl::StrCat("{sha256 = \"", absl::BytesToHexString(bytes), "\"",
                      expires.empty() ? "" : ", expires = ", expires, "}");
}

absl::StatusOr<Token> MakeToken(const std::string& expires) {
  static const std::regex time(R"(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(Z|[+-]\d{2}:\d{2}))");
  if (!expires.empty() && !std::regex_match(expires, time)) {
    return absl::InvalidArgumentError("--expires is \"" + expires + "\"; it must be a time as 2027-01-01T00:00:00Z");
  }
  std::array<unsigned char, kRandomBytes> random{};
  if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) {
    return absl::InternalError("the machine gives no random bytes");
  }
  const std::string bytes(random.begin(), random.end());
  Token token{.text = absl::StrCat("ctkvr_", absl::WebSafeBase64Escape(bytes)), .line = {}};
  token.line = DigestLine(token.text, expires);
  return token;
}

absl::StatusOr<std::string> ReadToken(const std::string& file) {
  if (file.empty()) {
    const char* variable = std::getenv("CTKVR_TOKEN");
    return std::string(absl::StripAsciiWhitespace(variable == nullptr ? "" : variable));
  }
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  std::string token(absl::StripAsciiWhitespace(text));
  if (token.empty()) {
    return absl::InvalidArgumentError("--token-file is \"" + file + "\"; that file cannot be read, or is empty");
  }
  return token;
}

}  // namespace ctkvr::cli
