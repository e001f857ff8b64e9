// SPDX-License-Identifier: Apache-2.0

#include "server/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/memory_limit.h"
#include "toml++/toml.h"

namespace ctkvr {
namespace {

size_t IndexOf(const Setting& setting) { return static_cast<size_t>(&setting - Settings().data()); }

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
  if (!absl::SimpleAtob(text, &value)) return Refuse(given_as, text, Setting::kBoolUnit);
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
  const uint64_t most = setting.most == Setting::kUsableMemory ? ReadMemoryLimit().bytes : setting.most;
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
  if (setting.is_bool()) return Setting::kBoolUnit;
  if (setting.is_share()) return "a number";
  if (setting.is_size) return "a whole number or a string such as \"512MiB\"";
  return std::holds_alternative<uint64_t Values::*>(setting.field) ? "a whole number" : "a string";
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

ValueTable::ValueTable() : origins_(Settings().size()) {
  for (const Setting& setting : Settings()) CTKVR_CHECK(Set(setting, setting.default_text, "default").ok());
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
  for (const Setting& setting : Settings()) {
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

std::string ValueTable::Print(const std::map<std::string, std::string>& derived) const {
  std::string page;
  for (const Setting& setting : Settings()) {
    const std::string limit = setting.limit();
    absl::StrAppend(&page, page.empty() ? "" : "\n", "# ", setting.help, "\n# ", setting.unit,
                    limit.empty() ? "" : "; ", limit, "; from: ", origins_[IndexOf(setting)], "\n");
    if (const auto found = derived.find(setting.name); found != derived.end()) {
      absl::StrAppend(&page, "# ", found->second, "\n");
    }
    absl::StrAppend(&page, setting.name, " = ", Text(setting), "\n");
  }
  return page;
}

}  // namespace ctkvr
