// SPDX-License-Identifier: Apache-2.0
//
// Every setting of ctkvrd: one table of names, units, defaults and limits, from which flags, environment variables,
// the configuration file, --help and --print-config all follow. A setting NAME is flag --NAME (or --NA-ME), variable
// CTKVR_NAME and key NAME of the file; a flag wins over a variable, a variable over the file, the file over the
// default.
//
// Not thread-safe: for main, before threads start.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ctkvr {

// Most lanes that may be asked for.
inline constexpr uint32_t kLanesMax = 256;

// A size: a whole number of bytes, or a number with KiB, MiB, GiB or TiB behind it ("512MiB", "1.5 GiB").
// INVALID_ARGUMENT says what a size is.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text);
std::string FormatBytes(uint64_t bytes);  // the shortest text that ParseBytes reads back

// What is set, as it was given; config.h resolves it. Defaults stand in the table.
struct Values {
  std::string listen_address;
  std::string metrics_address;
  std::string admin_address;
  bool allow_plaintext = false;
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_client_ca;
  std::string access_file;
  bool allow_plaintext_tokens = false;
  std::string backend;
  uint64_t lanes = 0;
  uint64_t arena_bytes = 0;
  uint64_t scratch_bytes = 0;
  uint64_t queue_items_max = 0;
  uint64_t sessions_max = 0;
  double truth_share = 0;
  double truth_budget = 0;
  std::string record;
  uint64_t record_bytes = 0;
  std::string log_level;
  std::string log_format;
  bool access_log = false;
  uint64_t slow_call_ms = 0;
  uint64_t drain_seconds = 0;
  std::string ready_file;
};

// A row of the table.
struct Setting {
  // A double is a share, 0 to 1.
  using Field = std::variant<std::string Values::*, bool Values::*, uint64_t Values::*, double Values::*>;

  // `most` of a size whose limit is ReadMemoryLimit() (memory_limit.h).
  static constexpr uint64_t kUsableMemory = UINT64_MAX;
  static constexpr char kBoolUnit[] = "true or false";

  const char* name;
  const char* unit;
  const char* default_text;
  Field field;
  bool is_size = false;                 // a number that ParseBytes reads
  bool zero_is_auto = false;            // 0 is taken beside least to most
  uint64_t least = 0;                   // of numbers
  uint64_t most = 0;                    // of numbers
  std::vector<const char*> names = {};  // texts that are taken; empty: any
  const char* help;

  bool is_bool() const { return std::holds_alternative<bool Values::*>(field); }
  bool is_share() const { return std::holds_alternative<double Values::*>(field); }
  std::string variable() const;  // "CTKVR_LANES"
  std::string limit() const;     // "1 to 256", "text or json"; "" where there is none; the same on every machine
};

std::span<const Setting> Settings();
// Null when there is none of that name.
const Setting* FindSetting(const std::string& name);
// The name that `name` was most likely meant to be: fewest letters changed, - as good as _, of the table and `more`.
std::string NearestName(const std::string& name, const std::vector<std::string>& more = {});

// Values and where each came from.
class ValueTable {
 public:
  ValueTable();  // the defaults

  // `given_as` is how the user wrote the name; it stands in errors. INVALID_ARGUMENT names it, the value and the limit.
  absl::Status Set(const Setting& setting, const std::string& text, const std::string& given_as);
  // Variables of the environment that name a setting. Others are left alone, whatever they begin with: Kubernetes
  // makes CTKVR_SERVICE_HOST for a service called ctkvr.
  absl::Status ReadEnvironment();
  // A file of TOML: NAME = value, one a line. INVALID_ARGUMENT: cannot be read or parsed, an unknown key (the nearest
  // known one is named), a value of another type or outside its limit; with the line.
  absl::Status ReadFile(const std::string& path);

  const Values& values() const { return values_; }
  // A file that ReadFile reads back to the same values; each line with its limit and where the value came from.
  // `derived` says of a setting that is 0 for "as fits" what that came to.
  std::string Print(const std::map<std::string, std::string>& derived = {}) const;

 private:
  std::string Text(const Setting& setting) const;  // as TOML

  Values values_;
  std::vector<std::string> origins_;  // of each setting
};

}  // namespace ctkvr
