// SPDX-License-Identifier: Apache-2.0

#include "server/settings.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "toml++/toml.h"

namespace ctkvr {
namespace {

constexpr char kSizeUnit[] = "bytes, or with KiB, MiB, GiB, TiB";
constexpr char kBoolUnit[] = "true or false";
constexpr uint64_t kMebi = uint64_t{1} << 20;

// What is served, and with what.
std::vector<Setting> EngineSettings() {
  return {
      {.name = "listen_address",
       .unit = "address",
       .default_text = "127.0.0.1:7420",
       .field = &Values::listen_address,
       .help = "Address for gRPC: host:port, [ip6]:port or unix:/path. Port 0 takes a free one."},
      {.name = "metrics_address",
       .unit = "address",
       .default_text = "127.0.0.1:9464",
       .field = &Values::metrics_address,
       .help = "Address of the /metrics page over HTTP. Port 0 takes a free one; empty switches the page off."},
      {.name = "allow_plaintext",
       .unit = kBoolUnit,
       .default_text = "false",
       .field = &Values::allow_plaintext,
       .help = "Listen without encryption or authentication on an address that other machines can reach."},
      {.name = "tls_certificate",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_certificate,
       .help = "PEM file of the server's certificate and its chain, read again when it changes. Empty: no TLS."},
      {.name = "tls_key",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_key,
       .help = "PEM file of the certificate's private key, read again when it changes."},
      {.name = "tls_client_ca",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_client_ca,
       .help = "PEM file of who signs clients' certificates: only clients with one may connect. Empty: all may."},
      {.name = "backend",
       .unit = "name",
       .default_text = "auto",
       .field = &Values::backend,
       .help = "What computes: auto, cpu, cpu:portable, cpu:avx2 or cpu:avx512."},
      {.name = "lanes",
       .unit = "threads",
       .default_text = "0",
       .field = &Values::lanes,
       .zero_is_auto = true,
       .least = 1,
       .most = kLanesMax,
       .help = "Threads that own sessions and work on them. 0: one for each processor."},
      {.name = "arena_bytes",
       .unit = kSizeUnit,
       .default_text = "0",
       .field = &Values::arena_bytes,
       .is_size = true,
       .zero_is_auto = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help = "Memory for all sessions, admitted when they open. 0: half of the memory this process may use."},
      {.name = "scratch_bytes",
       .unit = kSizeUnit,
       .default_text = "256MiB",
       .field = &Values::scratch_bytes,
       .is_size = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help = "Memory of each lane for the intermediate results of a batch."},
  };
}

// How much is taken, told and waited for.
std::vector<Setting> ProcessSettings() {
  return {
      {.name = "queue_items_max",
       .unit = "calls a lane",
       .default_text = "1024",
       .field = &Values::queue_items_max,
       .least = 1,
       .most = 1u << 20,
       .help = "Calls that may wait for a lane; more are refused with RESOURCE_EXHAUSTED."},
      {.name = "sessions_max",
       .unit = "sessions",
       .default_text = "100000",
       .field = &Values::sessions_max,
       .least = 1,
       .most = limits::kSessionsMax,
       .help = "Sessions that may be open at a time."},
      {.name = "log_level",
       .unit = "name",
       .default_text = "info",
       .field = &Values::log_level,
       .names = {"debug", "info", "warning", "error", "off"},
       .help = "Least level that is logged."},
      {.name = "log_format",
       .unit = "name",
       .default_text = "text",
       .field = &Values::log_format,
       .names = {"text", "json"},
       .help = "Form of log lines on stderr."},
      {.name = "access_log",
       .unit = kBoolUnit,
       .default_text = "true",
       .field = &Values::access_log,
       .help = "Log one line for each call."},
      {.name = "drain_seconds",
       .unit = "seconds",
       .default_text = "25",
       .field = &Values::drain_seconds,
       .least = 0,
       .most = 3600,
       .help = "Time that running calls have to finish after SIGTERM or SIGINT."},
      {.name = "ready_file",
       .unit = "path",
       .default_text = "",
       .field = &Values::ready_file,
       .help = "File that receives the addresses taken, as JSON, once the server serves. Empty: none."},
  };
}

// What the server finds out about itself.
std::vector<Setting> TruthSettings() {
  return {
      {.name = "truth_share",
       .unit = "share",
       .default_text = "0.01",
       .field = &Values::truth_share,
       .help =
           "Share of the retrievals that is repeated exactly in idle time, to know recall and needle share; 0: none."},
      {.name = "truth_budget",
       .unit = "share",
       .default_text = "0.02",
       .field = &Values::truth_budget,
       .help = "Share of a lane's time that those repeats may take; above 0."},
      {.name = "record",
       .unit = "path",
       .default_text = "",
       .field = &Values::record,
       .help = "Directory for records of the sessions that ask to be recorded: their keys, values and queries in the "
               "clear. Empty: such sessions are refused."},
      {.name = "record_bytes",
       .unit = kSizeUnit,
       .default_text = "1GiB",
       .field = &Values::record_bytes,
       .is_size = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help = "Memory that records may take until their sessions end; what is over it is left out."},
  };
}

const std::vector<Setting>& Table() {
  static const auto* const table = [] {
    auto* rows = new std::vector<Setting>(EngineSettings());
    for (const std::vector<Setting>& more : {ProcessSettings(), TruthSettings()}) {
      rows->insert(rows->end(), more.begin(), more.end());
    }
    return rows;
  }();
  return *table;
}

size_t IndexOf(const Setting& setting) { return static_cast<size_t>(&setting - Table().data()); }

// The shortest text that is read back to the same number.
std::string Share(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

std::string Number(const Setting& setting, uint64_t value) {
  return setting.is_size ? FormatBytes(value) : std::to_string(value);
}

absl::Status Refuse(const std::string& given_as, const std::string& text, const std::string& must) {
  return absl::InvalidArgumentError(absl::StrCat(given_as, " is \"", text, "\"; it must be ", must));
}

absl::Status SetText(const Setting& setting, const std::string& text, const std::string& given_as, std::string& field) {
  const auto& names = setting.names;
  if (!names.empty() && std::find(names.begin(), names.end(), text) == names.end()) {
    return Refuse(given_as, text, setting.limit());
  }
  field = text;
  return absl::OkStatus();
}

absl::Status SetBool(const std::string& text, const std::string& given_as, bool& field) {
  bool value = false;
  if (!absl::SimpleAtob(text, &value)) return Refuse(given_as, text, kBoolUnit);
  field = value;
  return absl::OkStatus();
}

absl::Status SetNumber(const Setting& setting, const std::string& text, const std::string& given_as, uint64_t& field) {
  uint64_t value = 0;
  if (setting.is_size) {
    const auto bytes = ParseBytes(text);
    if (!bytes.ok()) return Refuse(given_as, text, std::string(bytes.status().message()));
    value = *bytes;
  } else if (!absl::SimpleAtoi(text, &value)) {
    return Refuse(given_as, text, "a whole number, " + setting.limit());
  }
  const uint64_t most = setting.most == Setting::kUsableMemory ? UsableMemoryBytes() : setting.most;
  const bool is_auto = setting.zero_is_auto && value == 0;
  if (!is_auto && (value < setting.least || value > most)) {
    const std::string usable = most == setting.most ? "" : absl::StrCat(", ", FormatBytes(most));
    return Refuse(given_as, text, setting.limit() + usable);
  }
  field = value;
  return absl::OkStatus();
}

absl::Status SetShare(const Setting& setting, const std::string& text, const std::string& given_as, double& field) {
  double value = 0;
  // Written so that NaN is outside.
  if (!absl::SimpleAtod(text, &value) || !(value >= 0 && value <= 1)) return Refuse(given_as, text, setting.limit());
  field = value;
  return absl::OkStatus();
}

// Letters to insert, delete or replace to make `b` of `a`.
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string Underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// What a value of the file says as a flag would. False: of a type that this setting does not take.
bool TextOf(const Setting& setting, const toml::node& node, std::string* text) {
  if (const auto* value = node.as_string()) {
    *text = value->get();
    return std::holds_alternative<std::string Values::*>(setting.field) || setting.is_size;
  }
  if (const auto* value = node.as_integer()) {
    *text = std::to_string(value->get());
    return std::holds_alternative<uint64_t Values::*>(setting.field) || setting.is_share();
  }
  if (const auto* value = node.as_floating_point()) {
    *text = Share(value->get());
    return setting.is_share();
  }
  if (const auto* value = node.as_boolean()) {
    *text = value->get() ? "true" : "false";
    return setting.is_bool();
  }
  return false;
}

const char* FileType(const Setting& setting) {
  if (setting.is_bool()) return kBoolUnit;
  if (setting.is_share()) return "a number";
  if (setting.is_size) return "a whole number or a string such as \"512MiB\"";
  return std::holds_alternative<uint64_t Values::*>(setting.field) ? "a whole number" : "a string";
}

// 0: none, or none that can be read.
uint64_t ReadLimitFile(const char* path) {
  uint64_t bytes = 0;
  std::ifstream file(path);
  return file >> bytes ? bytes : 0;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(const std::string& text) {
  constexpr char kWhatItIs[] = "a size: a whole number of bytes, or a number with KiB, MiB, GiB or TiB behind it";
  const std::string trimmed(absl::StripAsciiWhitespace(text));
  const size_t digits = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string suffix(absl::StripAsciiWhitespace(trimmed.substr(digits)));
  constexpr std::array<const char*, 5> kSuffixes = {"B", "KiB", "MiB", "GiB", "TiB"};
  const auto found = std::find(kSuffixes.begin(), kSuffixes.end(), suffix.empty() ? "B" : suffix);
  if (found == kSuffixes.end()) return absl::InvalidArgumentError(kWhatItIs);
  const uint64_t unit = uint64_t{1} << (10 * (found - kSuffixes.begin()));
  uint64_t whole = 0;
  const bool is_whole = absl::SimpleAtoi(trimmed.substr(0, digits), &whole);
  if (unit == 1 && is_whole) return whole;
  double number = 0;
  if (unit == 1 || !absl::SimpleAtod(trimmed.substr(0, digits), &number)) {
    return absl::InvalidArgumentError(kWhatItIs);
  }
  const double bytes = number * static_cast<double>(unit);
  if (bytes >= 0x1p63) return absl::InvalidArgumentError("a size below 2^63 bytes");
  return is_whole ? whole * unit : static_cast<uint64_t>(std::llround(bytes));
}

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array<const char*, 4> kSuffixes = {"KiB", "MiB", "GiB", "TiB"};
  const char* suffix = "";
  for (const char* next : kSuffixes) {
    if (bytes == 0 || bytes % 1024 != 0) break;
    bytes /= 1024;
    suffix = next;
  }
  return std::to_string(bytes) + suffix;
}

uint64_t UsableMemoryBytes() {
  const auto pages = static_cast<uint64_t>(std::max(1L, sysconf(_SC_PHYS_PAGES)));
  uint64_t bytes = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (const uint64_t limit = ReadLimitFile(path); limit != 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

std::string Setting::variable() const { return "CTKVR_" + absl::AsciiStrToUpper(name); }

std::string Setting::limit() const {
  if (!names.empty()) {
    return absl::StrCat(absl::StrJoin(names.begin(), names.end() - 1, ", "), " or ", names.back());
  }
  if (is_share()) return "0 to 1";
  if (!std::holds_alternative<uint64_t Values::*>(field)) return "";
  const std::string top = most == kUsableMemory ? "the memory this process may use" : Number(*this, most);
  return absl::StrCat(zero_is_auto ? "0 or " : "", Number(*this, least), " to ", top);
}

std::span<const Setting> Settings() { return Table(); }

const Setting* FindSetting(const std::string& name) {
  for (const Setting& setting : Table()) {
    if (name == setting.name) return &setting;
  }
  return nullptr;
}

std::string NearestName(const std::string& name, const std::vector<std::string>& more) {
  std::vector<std::string> names = more;
  for (const Setting& setting : Table()) names.emplace_back(setting.name);
  const std::string sought = Underscored(name);
  return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return Distance(sought, Underscored(a)) < Distance(sought, Underscored(b));
  });
}

ValueTable::ValueTable() : origins_(Table().size()) {
  for (const Setting& setting : Table()) CTKVR_CHECK(Set(setting, setting.default_text, "default").ok());
}

absl::Status ValueTable::Set(const Setting& setting, const std::string& text, const std::string& given_as) {
  struct Visitor {
    const Setting& setting;
    const std::string& text;
    const std::string& given_as;
    Values& values;
    absl::Status operator()(std::string Values::*field) { return SetText(setting, text, given_as, values.*field); }
    absl::Status operator()(bool Values::*field) { return SetBool(text, given_as, values.*field); }
    absl::Status operator()(uint64_t Values::*field) { return SetNumber(setting, text, given_as, values.*field); }
    absl::Status operator()(double Values::*field) { return SetShare(setting, text, given_as, values.*field); }
  };
  CTKVR_RETURN_IF_ERROR(std::visit(Visitor{setting, text, given_as, values_}, setting.field));
  origins_[IndexOf(setting)] = given_as;
  return absl::OkStatus();
}

absl::Status ValueTable::ReadEnvironment() {
  for (const Setting& setting : Table()) {
    const std::string name = setting.variable();
    if (const char* value = std::getenv(name.c_str())) CTKVR_RETURN_IF_ERROR(Set(setting, value, name));
  }
  return absl::OkStatus();
}

absl::Status ValueTable::ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::InvalidArgumentError("config is \"" + path + "\"; that file cannot be read, or is empty");
  }
  const toml::parse_result parsed = toml::parse(text.str(), path);
  const auto at = [&](const toml::source_region& source) { return absl::StrCat(path, ":", source.begin.line); };
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat(at(parsed.error().source()), " is not TOML: ", std::string(parsed.error().description())));
  }
  for (const auto& [key, node] : parsed.table()) {
    const std::string name(key.str());
    const std::string given_as = absl::StrCat(name, " of ", at(key.source()));
    const Setting* setting = FindSetting(name);
    if (setting == nullptr) {
      return absl::InvalidArgumentError(given_as + " is no setting; did you mean " + NearestName(name) + "?");
    }
    std::string value;
    if (!TextOf(*setting, node, &value)) {
      return absl::InvalidArgumentError(given_as + " must be " + FileType(*setting));
    }
    CTKVR_RETURN_IF_ERROR(Set(*setting, value, given_as));
  }
  return absl::OkStatus();
}

std::string ValueTable::Text(const Setting& setting) const {
  struct Visitor {
    const Setting& setting;
    const Values& values;
    std::string operator()(std::string Values::*field) const {
      std::ostringstream out;
      const toml::value<std::string> value(values.*field);
      out << toml::toml_formatter(value, toml::format_flags::none);  // in double quotes, escaped
      return out.str();
    }
    std::string operator()(bool Values::*field) const { return values.*field ? "true" : "false"; }
    std::string operator()(uint64_t Values::*field) const {
      const std::string number = Number(setting, values.*field);
      return setting.is_size ? absl::StrCat("\"", number, "\"") : number;
    }
    std::string operator()(double Values::*field) const { return Share(values.*field); }
  };
  return std::visit(Visitor{setting, values_}, setting.field);
}

std::string ValueTable::Print() const {
  std::string page;
  for (const Setting& setting : Table()) {
    const std::string limit = setting.limit();
    absl::StrAppend(&page, page.empty() ? "" : "\n", "# ", setting.help, "\n# ", setting.unit,
                    limit.empty() ? "" : "; ", limit, "; from: ", origins_[IndexOf(setting)], "\n", setting.name, " = ",
                    Text(setting), "\n");
  }
  return page;
}

}  // namespace ctkvr
