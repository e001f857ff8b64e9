// SPDX-License-Identifier: Apache-2.0

#include "server/access_file.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/settings.h"
#include "toml++/toml.h"

namespace ctkvr {
namespace {

constexpr std::array<const char*, 9> kTenantKeys = {"name",         "admin",    "tokens",       "certificates",
                                                    "memory_bytes", "sessions", "queued_calls", "calls_per_second",
                                                    "calls_burst"};
constexpr std::array<const char*, 2> kTokenKeys = {"sha256", "expires"};

// Seconds since 1970, at UTC.
rpc::WallTime ToWallTime(const toml::date_time& value) {
  const std::chrono::year_month_day day{std::chrono::year(value.date.year), std::chrono::month(value.date.month),
                                        std::chrono::day(value.date.day)};
  const auto offset = std::chrono::minutes(value.offset.has_value() ? value.offset->minutes : 0);
  return std::chrono::sys_days(day) + std::chrono::hours(value.time.hour) + std::chrono::minutes(value.time.minute) +
         std::chrono::seconds(value.time.second) - offset;
}

// Reads one file; what was seen before decides what may still come.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  absl::StatusOr<rpc::AccessRules> Read(const toml::table& file) {
    CTKVR_RETURN_IF_ERROR(CheckKeys(file, std::array<const char*, 1>{"tenant"}));
    const toml::node* node = file.get("tenant");
    const toml::array* tenants = node == nullptr ? nullptr : node->as_array();
    if (tenants == nullptr || tenants->empty()) return Error(file, "names no tenant; it must have a [[tenant]]");
    if (tenants->size() > limits::kTenantsMax) {
      return Error(*node, absl::StrCat("names ", tenants->size(), " tenants; the limit is ", limits::kTenantsMax));
    }
    rpc::AccessRules rules;
    for (const toml::node& element : *tenants) {
      const toml::table* table = element.as_table();
      if (table == nullptr) return Error(element, "tenant must be a table: [[tenant]]");
      CTKVR_ASSIGN_OR_RETURN(rpc::TenantRule rule, ReadTenant(*table));
      rules.tenants.push_back(std::move(rule));
    }
    return rules;
  }

 private:
  absl::Status Error(const toml::node& node, const std::string& message) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", node.source().begin.line, ": ", message));
  }

  template <size_t kCount>
  absl::Status CheckKeys(const toml::table& table, const std::array<const char*, kCount>& known) const {
    for (const auto& [key, node] : table) {
      const std::string name(key.str());
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        return Error(node, absl::StrCat(name, " is no key here; there are ", absl::StrJoin(known, ", ")));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<rpc::TenantRule> ReadTenant(const toml::table& table) {
    CTKVR_RETURN_IF_ERROR(CheckKeys(table, kTenantKeys));
    rpc::TenantRule rule;
    CTKVR_RETURN_IF_ERROR(ReadName(table, rule.name));
    if (const toml::node* node = table.get("admin")) {
      const auto* value = node->as_boolean();
      if (value == nullptr) return Error(*node, "admin must be true or false");
      rule.admin = value->get();
    }
    CTKVR_RETURN_IF_ERROR(ReadTokens(table, rule.tokens));
    CTKVR_RETURN_IF_ERROR(ReadCertificates(table, rule.certificates));
    if (rule.tokens.empty() && rule.certificates.empty()) {
      return Error(table, absl::StrCat("tenant \"", rule.name, "\" has neither tokens nor certificates"));
    }
    CTKVR_RETURN_IF_ERROR(ReadSize(table, "memory_bytes", rule.quota.memory_bytes));
    CTKVR_RETURN_IF_ERROR(ReadCount(table, "sessions", limits::kSessionsMax, rule.quota.sessions));
    CTKVR_RETURN_IF_ERROR(ReadCount(table, "queued_calls", kQueuedCallsMax, rule.quota.queued_calls));
    CTKVR_RETURN_IF_ERROR(ReadRate(table, rule));
    return rule;
  }

  absl::Status ReadName(const toml::table& table, std::string& name) {
    const toml::node* node = table.get("name");
    if (node == nullptr || !node->is_string()) return Error(table, "name must be a string");
    name = node->as_string()->get();
    const bool known = std::all_of(name.begin(), name.end(), [](unsigned char c) {
      return absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.';
    });
    if (name.empty() || name.size() > limits::kTenantNameBytesMax || !known) {
      return Error(*node, absl::StrCat("name must be 1 to ", limits::kTenantNameBytesMax,
                                       " letters, digits, \"_\", \"-\" or \".\""));
    }
    if (!names_.insert(name).second) return Error(*node, absl::StrCat("name \"", name, "\" is there twice"));
    return absl::OkStatus();
  }

  // Never says what stands there: somebody may have written the token itself.
  absl::Status ReadDigest(const toml::table& table, rpc::TokenDigest& digest) {
    const toml::node* node = table.get("sha256");
    const std::string hex = node != nullptr && node->is_string() ? node->as_string()->get() : "";
    const bool is_hex = std::all_of(hex.begin(), hex.end(), [](unsigned char c) { return absl::ascii_isxdigit(c); });
    if (hex.size() != 2 * digest.size() || !is_hex) {
      return Error(table, "sha256 of a token must be 64 hexadecimal digits; ctkvr-cli token prints them");
    }
    const std::string bytes = absl::HexStringToBytes(hex);
    std::copy(bytes.begin(), bytes.end(), digest.begin());
    if (!digests_.insert(digest).second) return Error(*node, "this token is there twice");
    return absl::OkStatus();
  }

  absl::Status ReadTokens(const toml::table& table, std::vector<rpc::TokenRule>& tokens) {
    const toml::node* node = table.get("tokens");
    if (node == nullptr) return absl::OkStatus();
    const toml::array* array = node->as_array();
    if (array == nullptr || array->size() > limits::kTenantTokensMax) {
      return Error(*node, absl::StrCat("tokens must be at most ", limits::kTenantTokensMax, " of {sha256 = \"...\"}"));
    }
    for (const toml::node& element : *array) {
      const toml::table* token = element.as_table();
      if (token == nullptr) return Error(element, "a token must be {sha256 = \"...\"}, never the token itself");
      CTKVR_RETURN_IF_ERROR(CheckKeys(*token, kTokenKeys));
      rpc::TokenRule& rule = tokens.emplace_back();
      CTKVR_RETURN_IF_ERROR(ReadDigest(*token, rule.digest));
      const toml::node* expires = token->get("expires");
      if (expires == nullptr) continue;
      if (!expires->is_date_time()) return Error(*expires, "expires must be a time such as 2027-01-01T00:00:00Z");
      rule.expires = ToWallTime(expires->as_date_time()->get());
    }
    return absl::OkStatus();
  }

  absl::Status ReadCertificates(const toml::table& table, std::vector<std::string>& certificates) {
    const toml::node* node = table.get("certificates");
    if (node == nullptr) return absl::OkStatus();
    const toml::array* array = node->as_array();
    if (array == nullptr || array->size() > limits::kTenantCertificatesMax) {
      return Error(*node, absl::StrCat("certificates must be at most ", limits::kTenantCertificatesMax, " names"));
    }
    for (const toml::node& element : *array) {
      const std::string name = element.is_string() ? element.as_string()->get() : "";
      if (name.empty()) return Error(element, "a certificate's name must be a string");
      if (!certificates_.insert(name).second) return Error(element, absl::StrCat("\"", name, "\" is there twice"));
      certificates.push_back(name);
    }
    return absl::OkStatus();
  }

  absl::Status ReadCount(const toml::table& table, const char* key, uint64_t most, uint64_t& value) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return absl::OkStatus();
    const auto* number = node->as_integer();
    if (number == nullptr || number->get() < 1 || static_cast<uint64_t>(number->get()) > most) {
      return Error(*node, absl::StrCat(key, " must be 1 to ", most));
    }
    value = static_cast<uint64_t>(number->get());
    return absl::OkStatus();
  }

  absl::Status ReadSize(const toml::table& table, const char* key, uint64_t& value) const {
    const toml::node* node = table.get(key);
    if (node == nullptr || node->is_integer()) return ReadCount(table, key, INT64_MAX, value);
    const auto bytes = ParseBytes(node->is_string() ? node->as_string()->get() : "");
    if (!bytes.ok() || *bytes == 0) return Error(*node, absl::StrCat(key, " must be a size such as \"16GiB\""));
    value = *bytes;
    return absl::OkStatus();
  }

  absl::Status ReadRate(const toml::table& table, rpc::TenantRule& rule) const {
    const toml::node* node = table.get("calls_per_second");
    CTKVR_RETURN_IF_ERROR(ReadCount(table, "calls_burst", limits::kCallsPerSecondMax, rule.calls_burst));
    if (node == nullptr) {
      if (rule.calls_burst == 0) return absl::OkStatus();
      return Error(*table.get("calls_burst"), "calls_burst needs calls_per_second");
    }
    rule.calls_per_second = node->value<double>().value_or(0);
    // Written so that NaN is outside.
    if (!(rule.calls_per_second >= 0.001 && rule.calls_per_second <= limits::kCallsPerSecondMax)) {
      return Error(*node, absl::StrCat("calls_per_second must be 0.001 to ", limits::kCallsPerSecondMax));
    }
    if (rule.calls_burst == 0) rule.calls_burst = std::max<uint64_t>(1, static_cast<uint64_t>(rule.calls_per_second));
    return absl::OkStatus();
  }

  static constexpr uint64_t kQueuedCallsMax = uint64_t{1} << 30;

  const std::string& path_;
  std::set<std::string> names_;
  std::set<rpc::TokenDigest> digests_;
  std::set<std::string> certificates_;
};

}  // namespace

absl::StatusOr<rpc::AccessRules> ParseAccessFile(const std::string& text, const std::string& path) {
  const toml::parse_result parsed = toml::parse(text, path);
  if (!parsed) {
    return absl::InvalidArgumentError(absl::StrCat(path, ":", parsed.error().source().begin.line,
                                                   " is not TOML: ", std::string(parsed.error().description())));
  }
  return Reader(path).Read(parsed.table());
}

}  // namespace ctkvr
