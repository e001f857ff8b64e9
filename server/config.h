// SPDX-License-Identifier: Apache-2.0
//
// What ctkvrd is told at start: the command line over the environment over a file (settings.h), and the checks that
// turn them into a Config.
//
// Not thread-safe: for main, before threads start.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/engine.h"
#include "server/obs/logging.h"
#include "server/obs/recorder.h"
#include "server/settings.h"

namespace ctkvr {

inline constexpr char kVersion[] = CTKVR_VERSION;  // the project's, given by CMake

// Exit codes of ctkvrd.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // cannot start, or work was cut off at the end
inline constexpr int kExitUsage = 2;   // a bad flag, variable or file

struct Config {
  std::string listen_address;
  std::string metrics_address;  // empty: no page
  std::string admin_address;    // empty: no Admin service
  std::string tls_certificate;  // paths; empty: no TLS
  std::string tls_key;
  std::string tls_client_ca;
  std::string access_file;  // empty: access is off
  std::string backend;
  EngineOptions engine;  // resolved: lanes and arena_bytes are never 0
  obs::LogOptions log;
  std::chrono::milliseconds slow_call{50};  // 0: none is
  std::chrono::seconds drain{25};
  std::string ready_file;         // empty: none
  obs::Recorder::Options record;  // directory empty: nothing is recorded
};

// What the command line asks for.
enum class Action : uint8_t { kServe, kPrintHelp, kPrintVersion, kCheckConfig, kPrintConfig };

struct ParsedArguments {
  Action action = Action::kServe;
  Config config;        // unless help or version is asked for
  std::string printed;  // the settings as a file, for kPrintConfig
};

// Reads the file that --config or CTKVR_CONFIG names, then the environment, then `arguments` (without the program's
// name). INVALID_ARGUMENT names where it stands, the value and the limit.
absl::StatusOr<ParsedArguments> ParseArguments(const std::vector<std::string>& arguments);

// What --help prints: every setting with its unit, its default, its limit and its environment variable.
std::string HelpText();
inline std::string VersionText() { return std::string("ctkvrd ") + kVersion + "\n"; }

// Whether "host:port" or "unix:..." can be reached from this machine only.
bool IsLoopback(const std::string& address);

}  // namespace ctkvr
