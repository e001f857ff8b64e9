// SPDX-License-Identifier: Apache-2.0
//
// What ctkvrd is told at start: flags, their environment equivalents, and the checks that turn them into a Config.
// Every flag --name may also be given as environment variable CTKVR_NAME; the flag wins.
//
// Not thread-safe: for main, before threads start.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/core/engine.h"
#include "server/obs/logging.h"

namespace ctkvr {

inline constexpr char kVersion[] = CTKVR_VERSION;  // the project's, given by CMake

// Exit codes of ctkvrd.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // cannot start, or work was cut off at the end
inline constexpr int kExitUsage = 2;   // a bad flag or environment variable

// Most lanes that may be asked for.
inline constexpr uint32_t kLanesMax = 256;

// A size: a whole number of bytes, or a number with KiB, MiB, GiB or TiB behind it ("512MiB", "1.5 GiB").
struct ByteSize {
  uint64_t bytes = 0;
};
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
std::string AbslUnparseFlag(ByteSize size);

struct Config {
  std::string listen_address;
  std::string metrics_address;  // empty: no page
  std::string backend;
  EngineOptions engine;  // resolved: lanes and arena_bytes are never 0
  obs::LogOptions log;
  std::chrono::seconds drain{25};
  std::string ready_file;  // empty: none
};

struct ParsedArguments {
  bool help = false;
  bool version = false;
  Config config;  // unless help or version is asked for
};

// Reads the environment, then `arguments` (without the program's name). INVALID_ARGUMENT names flag, value and limit.
absl::StatusOr<ParsedArguments> ParseArguments(const std::vector<std::string>& arguments);

// What --help prints: every flag with its unit, its default and its environment variable.
std::string HelpText();
inline std::string VersionText() { return std::string("ctkvrd ") + kVersion + "\n"; }

// Whether "host:port" or "unix:..." can be reached from this machine only.
bool IsLoopback(const std::string& address);

// Memory that this process may use: the machine's, or its cgroup's limit where that is lower.
uint64_t UsableMemoryBytes();

}  // namespace ctkvr
