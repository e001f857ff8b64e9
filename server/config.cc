// SPDX-License-Identifier: Apache-2.0

#include "server/config.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/engine_options.h"
#include "server/memory_limit.h"

namespace ctkvr {
namespace {

constexpr char kConfigFlag[] = "config";
constexpr char kConfigVariable[] = "CTKVR_CONFIG";

struct ActionFlag {
  const char* flag;
  Action action;
};
constexpr std::array<ActionFlag, 5> kActions = {{{"help", Action::kPrintHelp},
                                                 {"h", Action::kPrintHelp},
                                                 {"version", Action::kPrintVersion},
                                                 {"check_config", Action::kCheckConfig},
                                                 {"print_config", Action::kPrintConfig}}};

// A setting as the command line gives it.
struct Given {
  const Setting* setting;
  std::string text;
  std::string given_as;
};

struct CommandLine {
  Action action = Action::kServe;
  std::string config;  // empty: none
  std::vector<Given> given;
};

absl::Status Unknown(const std::string& argument, const std::string& name) {
  const std::string nearest = NearestName(name, {kConfigFlag, "help", "version", "check_config", "print_config"});
  return absl::InvalidArgumentError("\"" + argument + "\" is no flag of ctkvrd; did you mean --" + nearest +
                                    "? See --help");
}

// Reads --name=value, --name value, --name and --noname. Values are looked at later, when the file was read.
class CommandLineReader {
 public:
  explicit CommandLineReader(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  absl::StatusOr<CommandLine> Read() {
    for (; next_ < arguments_.size(); ++next_) {
      CTKVR_RETURN_IF_ERROR(ReadFlag(arguments_[next_]));
      if (line_.action == Action::kPrintHelp || line_.action == Action::kPrintVersion) break;
    }
    return std::move(line_);
  }

 private:
  absl::Status ReadFlag(const std::string& argument) {
    if (argument != "-h" && !argument.starts_with("--")) {
      return absl::InvalidArgumentError("\"" + argument + "\" is no flag; see --help");
    }
    const size_t equals = argument.find('=');
    has_value_ = equals != std::string::npos;
    std::string name = argument.substr(0, equals).substr(argument == "-h" ? 1 : 2);
    std::replace(name.begin(), name.end(), '-', '_');
    value_ = has_value_ ? argument.substr(equals + 1) : "";
    for (const ActionFlag& row : kActions) {
      if (name == row.flag && !has_value_) return TakeAction(row.action);
    }
    if (name == kConfigFlag) {
      CTKVR_RETURN_IF_ERROR(TakeValue(name));
      line_.config = value_;
      return absl::OkStatus();
    }
    return ReadSetting(argument, name);
  }

  absl::Status TakeAction(Action action) {
    line_.action = action;
    return absl::OkStatus();
  }

  absl::Status TakeValue(const std::string& name) {
    if (has_value_) return absl::OkStatus();
    if (next_ + 1 == arguments_.size()) return absl::InvalidArgumentError("--" + name + " has no value");
    value_ = arguments_[++next_];
    return absl::OkStatus();
  }

  absl::Status ReadSetting(const std::string& argument, const std::string& name) {
    const Setting* setting = FindSetting(name);
    const Setting* negated = name.starts_with("no") && !has_value_ ? FindSetting(name.substr(2)) : nullptr;
    if (setting == nullptr && negated != nullptr && negated->is_bool()) {
      line_.given.push_back({negated, "false", "--" + name});
      return absl::OkStatus();
    }
    if (setting == nullptr) return Unknown(argument, name);
    if (setting->is_bool() && !has_value_) {
      value_ = "true";
    } else {
      CTKVR_RETURN_IF_ERROR(TakeValue(name));
    }
    line_.given.push_back({setting, value_, "--" + name});
    return absl::OkStatus();
  }

  const std::vector<std::string>& arguments_;
  size_t next_ = 0;
  bool has_value_ = false;  // of the flag that is read
  std::string value_;
  CommandLine line_;
};

absl::Status CheckPlaintext(const Values& values, const std::string& name, const std::string& address) {
  if (values.allow_plaintext || IsLoopback(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(name + " is " + address +
                                    ", which other machines can reach without encryption or authentication. Listen on "
                                    "127.0.0.1, give tls_certificate and tls_key (which the page of metrics knows "
                                    "nothing of), or give --allow_plaintext where the network itself is trusted.");
}

absl::Status CheckAddress(const Values& values, const std::string& name, const std::string& address) {
  if (address.starts_with("unix:")) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(name + " is \"" + address + "\"; it must be host:port with a port of 0 to 65535");
  }
  const bool encrypted = name == "listen_address" && !values.tls_certificate.empty();
  return encrypted ? absl::OkStatus() : CheckPlaintext(values, name, address);
}

absl::Status CheckTokens(const Values& values, const std::string& name, const std::string& address) {
  const bool readable = values.tls_certificate.empty() && !IsLoopback(address);
  if (values.access_file.empty() || !readable || values.allow_plaintext_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError("access_file is \"" + values.access_file + "\" and " + name + " is " + address +
                                    ": tokens would cross the network in the clear. Give tls_certificate and tls_key, "
                                    "or give --allow_plaintext_tokens where something else encrypts connections.");
}

// What is derived where a setting is 0, for --print-config to say.
using Derived = std::map<std::string, std::string>;

absl::Status DeriveMemory(const Values& values, EngineOptions& options, Derived& derived) {
  const MemoryLimit limit = ReadMemoryLimit();
  const MemoryUse use{.lanes = options.lanes,
                      .scratch_bytes = options.scratch_bytes,
                      .record_bytes = values.record.empty() ? 0 : values.record_bytes};
  if (values.arena_bytes != 0) return CheckArenaBytes(values.arena_bytes, limit, use);
  CTKVR_ASSIGN_OR_RETURN(options.arena_bytes, DeriveArenaBytes(limit, use, FindSetting("arena_bytes")->least));
  derived["arena_bytes"] = absl::StrCat("Here 0 is ", FormatBytes(options.arena_bytes), ": ", Describe(limit), " less ",
                                        DescribeHeadroom(limit, use));
  return absl::OkStatus();
}

absl::StatusOr<Config> MakeConfig(const Values& values, Derived& derived) {
  CTKVR_RETURN_IF_ERROR(CheckAddress(values, "listen_address", values.listen_address));
  if (!values.metrics_address.empty()) {
    CTKVR_RETURN_IF_ERROR(CheckAddress(values, "metrics_address", values.metrics_address));
  }
  if (!values.admin_address.empty()) {
    CTKVR_RETURN_IF_ERROR(CheckAddress(values, "admin_address", values.admin_address));
    CTKVR_RETURN_IF_ERROR(CheckTokens(values, "admin_address", values.admin_address));
  }
  CTKVR_RETURN_IF_ERROR(CheckTokens(values, "listen_address", values.listen_address));
  Config config;
  config.listen_address = values.listen_address;
  config.metrics_address = values.metrics_address;
  config.admin_address = values.admin_address;
  config.tls_certificate = values.tls_certificate;
  config.tls_key = values.tls_key;
  config.tls_client_ca = values.tls_client_ca;
  config.access_file = values.access_file;
  config.backend = values.backend;
  config.engine = MakeEngineOptions(values);
  if (values.lanes == 0) derived["lanes"] = absl::StrCat("Here 0 is ", config.engine.lanes);
  CTKVR_RETURN_IF_ERROR(DeriveMemory(values, config.engine, derived));
  config.log.level = obs::ParseLogLevel(values.log_level).value();  // settings.h lets no other name through
  config.log.format = obs::ParseLogFormat(values.log_format).value();
  config.log.access = values.access_log;
  config.slow_call = std::chrono::milliseconds(values.slow_call_ms);
  config.drain = std::chrono::seconds(values.drain_seconds);
  config.ready_file = values.ready_file;
  config.record = {.directory = values.record, .bytes_max = values.record_bytes};
  return config;
}

}  // namespace

absl::StatusOr<ParsedArguments> ParseArguments(const std::vector<std::string>& arguments) {
  CTKVR_ASSIGN_OR_RETURN(CommandLine line, CommandLineReader(arguments).Read());
  ParsedArguments parsed{.action = line.action};
  if (line.action == Action::kPrintHelp || line.action == Action::kPrintVersion) return parsed;
  if (const char* path = std::getenv(kConfigVariable); path != nullptr && line.config.empty()) line.config = path;
  ValueTable table;
  if (!line.config.empty()) CTKVR_RETURN_IF_ERROR(table.ReadFile(line.config));
  CTKVR_RETURN_IF_ERROR(table.ReadEnvironment());
  for (const Given& given : line.given) {
    CTKVR_RETURN_IF_ERROR(table.Set(*given.setting, given.text, given.given_as));
  }
  Derived derived;
  CTKVR_ASSIGN_OR_RETURN(parsed.config, MakeConfig(table.values(), derived));
  if (line.action == Action::kPrintConfig) parsed.printed = table.Print(derived);
  return parsed;
}

std::string HelpText() {
  std::string text =
      "ctkvrd: keeps the KV caches of long conversations and answers which tokens matter to a query.\n\n"
      "Flags are --name=value or --name value; true or false also as --name and --noname; - is as good as _.\n"
      "A flag wins over its environment variable, a variable over the file, the file over the default.\n\n";
  for (const Setting& setting : Settings()) {
    const std::string limit = setting.limit();
    absl::StrAppend(&text, "  --", setting.name, "  (", setting.unit, limit.empty() ? "" : "; ", limit, "; default \"",
                    setting.default_text, "\"; ", setting.variable(), ")\n      ", setting.help, "\n");
  }
  text +=
      "  --config  (path; CTKVR_CONFIG)\n"
      "      File of TOML with any of these settings, one a line: lanes = 4\n"
      "  --check-config  Say what is wrong with the configuration, or nothing, and end.\n"
      "  --print-config  Print the configuration as such a file, with where each value came from, and end.\n"
      "  --help, --version\n\n"
      "SIGTERM or SIGINT drains: health turns NOT_SERVING, opens are refused, running calls finish; a second one ends\n"
      "the process at once. Exit codes: 0 all work finished; 1 cannot start, or work was cut off; 2 a bad flag,\n"
      "variable or file.\n";
  return text;
}

bool IsLoopback(const std::string& address) {
  if (address.starts_with("unix:")) return true;
  const std::string host = address.substr(0, address.rfind(':'));
  if (host == "localhost" || host == "[::1]") return true;
  // Four numbers, the first 127: a name such as 127.example.org is not one.
  if (!host.starts_with("127.") || host.find_first_not_of("0123456789.") != std::string::npos) return false;
  return std::count(host.begin(), host.end(), '.') == 3;
}

}  // namespace ctkvr
