// SPDX-License-Identifier: Apache-2.0
//
// Log lines, as text or as JSON, one a line on stderr: events of the server and one access line a call.
//
// Text:  2026-01-31T12:00:00.000Z info access method="Retrieve" code="OK" session="chat-1" layer=3 us=412 ...
// JSON:  {"ts":"2026-01-31T12:00:00.000Z","level":"info","event":"access","method":"Retrieve",...}
//
// Every value that a client chose (ids, messages) is written as a JSON string in both forms: quotes, control
// characters and bytes that are no UTF-8 cannot break a line or forge a second one. Lines never carry keys, values or
// queries. Thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/obs/trace_context.h"
#include "spdlog/logger.h"
#include "spdlog/sinks/sink.h"

namespace ctkvr::obs {

enum class LogFormat : uint8_t { kText, kJson };

// In growing order; a log writes its own level and everything above.
enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError, kOff };

// "debug", "info", "warning", "error", "off"; nothing for another name.
std::optional<LogLevel> ParseLogLevel(const std::string& name);
const char* LogLevelName(LogLevel level);
std::optional<LogFormat> ParseLogFormat(const std::string& name);  // "text", "json"

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  bool access = true;                              // access lines of calls that went well, or failed by the caller
  std::shared_ptr<spdlog::sinks::sink> sink = {};  // empty: stderr
};

// A name (ours, lower case, no blank) and its value.
using LogValue = std::variant<int64_t, uint64_t, bool, std::string>;
using LogField = std::pair<const char*, LogValue>;

// One call, as its access line tells it.
struct AccessRecord {
  const char* method = "";
  const char* code = "OK";      // name of the gRPC code
  bool server_fault = false;    // INTERNAL, UNKNOWN, DATA_LOSS of ours: logged as an error
  std::string message = {};     // of the error; empty when OK
  std::string session_id = {};  // empty: the call names none, or several
  std::optional<uint32_t> layer = {};
  uint64_t items = 0;  // items or messages of batches and streams; 0: not such a call
  std::chrono::nanoseconds duration{0};
  uint64_t bytes_in = 0;  // of messages, before framing
  uint64_t bytes_out = 0;
  std::string peer = {};
  std::optional<TraceContext> trace = {};
};

// One call of service Admin.
struct AuditRecord {
  const char* method = "";
  const char* code = "OK";
  std::string message = {};  // of the error
  std::string tenant = {};   // who: as access control knows the caller
  std::string peer = {};
  std::string request = {};  // what was asked for, in JSON
  std::string result = {};   // what came of it, in words
  std::optional<TraceContext> trace = {};
};

class Log {
 public:
  explicit Log(const LogOptions& options);

  // `event` is a name of ours: lower case, words joined by underscores.
  void Write(LogLevel level, const char* event, std::initializer_list<LogField> fields);
  void Info(const char* event, std::initializer_list<LogField> fields) { Write(LogLevel::kInfo, event, fields); }
  void Warning(const char* event, std::initializer_list<LogField> fields) { Write(LogLevel::kWarning, event, fields); }
  void Error(const char* event, std::initializer_list<LogField> fields) { Write(LogLevel::kError, event, fields); }

  // Written at info, or at error for a fault of the server (also when access lines are off).
  void Access(const AccessRecord& record);
  // A call of service Admin: who did what. Written at any level, `off` too.
  void Audit(const AuditRecord& record);
  void Flush();

  LogLevel level() const { return level_.load(std::memory_order_relaxed); }
  // Returns the one before.
  LogLevel SetLevel(LogLevel level);

 private:
  LogFormat format_;
  bool access_;
  std::atomic<LogLevel> level_;
  std::unique_ptr<spdlog::logger> logger_;
  std::unique_ptr<spdlog::logger> audit_logger_;  // of the same sink
};

}  // namespace ctkvr::obs
