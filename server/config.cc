// SPDX-License-Identifier: Apache-2.0

#include "server/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"

ABSL_FLAG(std::string, listen_address, "127.0.0.1:7420",
          "Address for gRPC: host:port, [ip6]:port or unix:/path. Port 0 takes a free one.");
ABSL_FLAG(std::string, metrics_address, "127.0.0.1:9464",
          "Address of the /metrics page over HTTP. Port 0 takes a free one; empty switches the page off.");
ABSL_FLAG(bool, allow_plaintext, false,
          "Listen without encryption or authentication on an address that other machines can reach.");
ABSL_FLAG(std::string, backend, "auto", "What computes: auto, cpu, cpu:portable, cpu:avx2 or cpu:avx512.");
ABSL_FLAG(uint32_t, lanes, 0, "Threads that own sessions and work on them. 0: one for each processor.");
ABSL_FLAG(ctkvr::ByteSize, arena_bytes, ctkvr::ByteSize{0},
          "Memory for all sessions, admitted when they open. 0: half of the memory this process may use.");
ABSL_FLAG(ctkvr::ByteSize, scratch_bytes, ctkvr::ByteSize{uint64_t{256} << 20},
          "Memory of each lane for the intermediate results of a batch.");
ABSL_FLAG(uint32_t, queue_items_max, ctkvr::limits::kQueueItemsDefault,
          "Calls that may wait for a lane; more are refused with RESOURCE_EXHAUSTED.");
ABSL_FLAG(uint32_t, sessions_max, ctkvr::limits::kSessionsMax, "Sessions that may be open at a time.");
ABSL_FLAG(std::string, log_level, "info", "Least level that is logged: debug, info, warning, error or off.");
ABSL_FLAG(std::string, log_format, "text", "Form of log lines on stderr: text or json.");
ABSL_FLAG(bool, access_log, true, "Log one line for each call.");
ABSL_FLAG(uint32_t, drain_seconds, 25, "Time that running calls have to finish after SIGTERM or SIGINT.");
ABSL_FLAG(std::string, ready_file, "",
          "File that receives the addresses taken, as JSON, once the server serves. Empty: none.");

namespace ctkvr {
namespace {

constexpr uint64_t kKibi = 1024;
constexpr uint64_t kScratchBytesMin = uint64_t{1} << 20;
constexpr uint64_t kArenaBytesMin = uint64_t{1} << 20;
constexpr uint32_t kDrainSecondsMax = 3600;
constexpr uint32_t kQueueItemsMax = 1u << 20;

// The one table of names and units. Defaults and texts stand with the flags above.
struct FlagRow {
  const char* name;
  const char* unit;
};
constexpr std::array<FlagRow, 14> kFlags = {{{"listen_address", "address"},
                                             {"metrics_address", "address"},
                                             {"allow_plaintext", "true or false"},
                                             {"backend", "name"},
                                             {"lanes", "threads"},
                                             {"arena_bytes", "bytes, or with KiB, MiB, GiB, TiB"},
                                             {"scratch_bytes", "bytes, or with KiB, MiB, GiB, TiB"},
                                             {"queue_items_max", "calls a lane"},
                                             {"sessions_max", "sessions"},
                                             {"log_level", "name"},
                                             {"log_format", "name"},
                                             {"access_log", "true or false"},
                                             {"drain_seconds", "seconds"},
                                             {"ready_file", "path"}}};

std::string EnvironmentName(const std::string& flag) { return "CTKVR_" + absl::AsciiStrToUpper(flag); }

absl::CommandLineFlag* FindFlag(const std::string& name) {
  const bool known = std::any_of(kFlags.begin(), kFlags.end(), [&](const FlagRow& row) { return name == row.name; });
  return known ? absl::FindCommandLineFlag(name) : nullptr;
}

// `given_as` is how the user wrote it, for the text.
absl::Status SetFlag(absl::CommandLineFlag& flag, const std::string& value, const std::string& given_as) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(given_as + " is \"" + value + "\"; that cannot be read" +
                                    (error.empty() ? "" : ": " + error));
}

absl::Status ReadEnvironment() {
  for (const FlagRow& row : kFlags) {
    const std::string name = EnvironmentName(row.name);
    if (const char* value = std::getenv(name.c_str())) CTKVR_RETURN_IF_ERROR(SetFlag(*FindFlag(row.name), value, name));
  }
  return absl::OkStatus();
}

// Abseil's own parser ends the process with 1 on --help and on errors and would print flags of libraries too; this
// one reads --name=value, --name value, --name and --noname, and leaves the values to Abseil.
absl::Status ReadFlags(const std::vector<std::string>& arguments, ParsedArguments* parsed) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--help" || argument == "-h") parsed->help = true;
    if (argument == "--version") parsed->version = true;
    if (parsed->help || parsed->version) return absl::OkStatus();
    if (!argument.starts_with("--")) return absl::InvalidArgumentError("\"" + argument + "\" is no flag; see --help");
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    absl::CommandLineFlag* flag = FindFlag(name);
    absl::CommandLineFlag* negated = name.starts_with("no") ? FindFlag(name.substr(2)) : nullptr;
    if (flag != nullptr && equals != std::string::npos) {
      CTKVR_RETURN_IF_ERROR(SetFlag(*flag, argument.substr(equals + 1), "--" + name));
    } else if (flag != nullptr && flag->IsOfType<bool>()) {
      CTKVR_RETURN_IF_ERROR(SetFlag(*flag, "true", "--" + name));
    } else if (flag != nullptr && i + 1 < arguments.size()) {
      CTKVR_RETURN_IF_ERROR(SetFlag(*flag, arguments[++i], "--" + name));
    } else if (flag != nullptr) {
      return absl::InvalidArgumentError("--" + name + " has no value");
    } else if (negated != nullptr && negated->IsOfType<bool>() && equals == std::string::npos) {
      CTKVR_RETURN_IF_ERROR(SetFlag(*negated, "false", "--" + name));
    } else {
      return absl::InvalidArgumentError("\"" + argument + "\" is no flag of ctkvrd; see --help");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const std::string& flag, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(flag + " is " + std::to_string(value) + "; it must be " + std::to_string(least) +
                                    " to " + std::to_string(most));
}

absl::Status CheckPlaintext(const std::string& flag, const std::string& address) {
  if (absl::GetFlag(FLAGS_allow_plaintext) || IsLoopback(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      flag + " is " + address +
      ", which other machines can reach, and this version neither encrypts nor authenticates connections. Listen on "
      "127.0.0.1, or give --allow_plaintext where the network itself is trusted.");
}

absl::Status CheckAddress(const std::string& flag, const std::string& address) {
  if (address.starts_with("unix:")) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(flag + " is \"" + address + "\"; it must be host:port with a port of 0 to 65535");
  }
  return CheckPlaintext(flag, address);
}

absl::Status ReadLogOptions(obs::LogOptions* log) {
  const std::string level = absl::GetFlag(FLAGS_log_level);
  const std::string format = absl::GetFlag(FLAGS_log_format);
  const auto parsed_level = obs::ParseLogLevel(level);
  const auto parsed_format = obs::ParseLogFormat(format);
  if (!parsed_level) {
    return absl::InvalidArgumentError("log_level is \"" + level + "\"; it must be debug, info, warning, error or off");
  }
  if (!parsed_format) return absl::InvalidArgumentError("log_format is \"" + format + "\"; it must be text or json");
  log->level = *parsed_level;
  log->format = *parsed_format;
  log->access = absl::GetFlag(FLAGS_access_log);
  return absl::OkStatus();
}

absl::Status ReadEngineOptions(EngineOptions* options) {
  const uint64_t memory = UsableMemoryBytes();
  const uint32_t processors = std::max(1u, std::thread::hardware_concurrency());
  const uint32_t lanes = absl::GetFlag(FLAGS_lanes);
  const uint64_t arena = absl::GetFlag(FLAGS_arena_bytes).bytes;
  options->lanes = lanes == 0 ? std::min(processors, kLanesMax) : lanes;
  options->arena_bytes = arena == 0 ? std::max(memory / 2, kArenaBytesMin) : arena;
  options->scratch_bytes = absl::GetFlag(FLAGS_scratch_bytes).bytes;
  options->queue_items_max = absl::GetFlag(FLAGS_queue_items_max);
  options->sessions_max = absl::GetFlag(FLAGS_sessions_max);
  CTKVR_RETURN_IF_ERROR(CheckRange("lanes", options->lanes, 1, kLanesMax));
  CTKVR_RETURN_IF_ERROR(CheckRange("arena_bytes", options->arena_bytes, kArenaBytesMin, memory));
  CTKVR_RETURN_IF_ERROR(CheckRange("scratch_bytes", options->scratch_bytes, kScratchBytesMin, memory));
  CTKVR_RETURN_IF_ERROR(CheckRange("queue_items_max", options->queue_items_max, 1, kQueueItemsMax));
  return CheckRange("sessions_max", options->sessions_max, 1, limits::kSessionsMax);
}

absl::Status ReadConfig(Config* config) {
  config->listen_address = absl::GetFlag(FLAGS_listen_address);
  config->metrics_address = absl::GetFlag(FLAGS_metrics_address);
  config->backend = absl::GetFlag(FLAGS_backend);
  config->drain = std::chrono::seconds(absl::GetFlag(FLAGS_drain_seconds));
  config->ready_file = absl::GetFlag(FLAGS_ready_file);
  CTKVR_RETURN_IF_ERROR(CheckAddress("listen_address", config->listen_address));
  if (!config->metrics_address.empty()) {
    CTKVR_RETURN_IF_ERROR(CheckAddress("metrics_address", config->metrics_address));
  }
  CTKVR_RETURN_IF_ERROR(CheckRange("drain_seconds", static_cast<uint64_t>(config->drain.count()), 0, kDrainSecondsMax));
  CTKVR_RETURN_IF_ERROR(ReadLogOptions(&config->log));
  return ReadEngineOptions(&config->engine);
}

// 0: none, or none that can be read.
uint64_t ReadLimitFile(const char* path) {
  uint64_t bytes = 0;
  std::ifstream file(path);
  return file >> bytes ? bytes : 0;
}

}  // namespace

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const std::string trimmed(absl::StripAsciiWhitespace(text));
  const size_t digits = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string suffix(absl::StripAsciiWhitespace(trimmed.substr(digits)));
  uint64_t unit = 0;
  if (suffix.empty() || suffix == "B") unit = 1;
  if (suffix == "KiB") unit = kKibi;
  if (suffix == "MiB") unit = kKibi * kKibi;
  if (suffix == "GiB") unit = kKibi * kKibi * kKibi;
  if (suffix == "TiB") unit = kKibi * kKibi * kKibi * kKibi;
  double number = 0;
  const bool whole = absl::SimpleAtoi(trimmed.substr(0, digits), &size->bytes);
  if (unit == 1 && whole) return true;
  if (unit <= 1 || !absl::SimpleAtod(trimmed.substr(0, digits), &number)) {
    *error = "a size is a whole number of bytes, or a number with KiB, MiB, GiB or TiB behind it";
    return false;
  }
  if (number * static_cast<double>(unit) >= 0x1p63) {
    *error = "a size is below 2^63 bytes";
    return false;
  }
  size->bytes = whole ? size->bytes * unit : static_cast<uint64_t>(std::llround(number * static_cast<double>(unit)));
  return true;
}

std::string AbslUnparseFlag(ByteSize size) {
  constexpr std::array<const char*, 4> kSuffixes = {"KiB", "MiB", "GiB", "TiB"};
  uint64_t number = size.bytes;
  const char* suffix = "";
  for (const char* next : kSuffixes) {
    if (number == 0 || number % kKibi != 0) break;
    number /= kKibi;
    suffix = next;
  }
  return std::to_string(number) + suffix;
}

absl::StatusOr<ParsedArguments> ParseArguments(const std::vector<std::string>& arguments) {
  ParsedArguments parsed;
  CTKVR_RETURN_IF_ERROR(ReadEnvironment());
  CTKVR_RETURN_IF_ERROR(ReadFlags(arguments, &parsed));
  if (!parsed.help && !parsed.version) CTKVR_RETURN_IF_ERROR(ReadConfig(&parsed.config));
  return parsed;
}

std::string HelpText() {
  std::string text =
      "ctkvrd: keeps the KV caches of long conversations and answers which tokens matter to a query.\n\n"
      "Flags are --name=value or --name value; true or false also as --name and --noname.\n\n";
  for (const FlagRow& row : kFlags) {
    const absl::CommandLineFlag& flag = *FindFlag(row.name);
    text += std::string("  --") + row.name + "  (" + row.unit + "; default \"" + flag.DefaultValue() + "\"; " +
            EnvironmentName(row.name) + ")\n      " + flag.Help() + "\n";
  }
  text +=
      "  --help, --version\n\n"
      "SIGTERM or SIGINT drains: health turns NOT_SERVING, opens are refused, running calls finish; a second one ends\n"
      "the process at once. Exit codes: 0 all work finished; 1 cannot start, or work was cut off; 2 a bad flag.\n";
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

uint64_t UsableMemoryBytes() {
  const auto pages = static_cast<uint64_t>(std::max(1L, sysconf(_SC_PHYS_PAGES)));
  uint64_t bytes = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (const uint64_t limit = ReadLimitFile(path); limit != 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

}  // namespace ctkvr
