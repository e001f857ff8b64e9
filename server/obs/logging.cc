// SPDX-License-Identifier: Apache-2.0

#include "server/obs/logging.h"

#include <array>
#include <span>
#include <vector>

#include "nlohmann/json.hpp"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace ctkvr::obs {
namespace {

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

// Pure ASCII: bytes that are no UTF-8 become U+FFFD, everything beyond ASCII an escape.
std::string JsonText(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

nlohmann::ordered_json JsonValue(const LogValue& value) {
  return std::visit([](const auto& held) { return nlohmann::ordered_json(held); }, value);
}

// The part of a line behind its time and level.
std::string FormatLine(LogFormat format, const char* event, std::span<const LogField> fields) {
  if (format == LogFormat::kJson) {
    nlohmann::ordered_json line;
    line["event"] = event;
    for (const auto& [name, value] : fields) line[name] = JsonValue(value);
    return JsonText(line).substr(1);  // the opening brace stands in the pattern
  }
  std::string line = event;
  for (const auto& [name, value] : fields) {
    line += std::string(" ") + name + "=" + JsonText(JsonValue(value));
  }
  return line;
}

// The caller's name for `level` is the one that ParseLogLevel takes; spdlog's own names are the same.
const char* Pattern(LogFormat format) {
  return format == LogFormat::kJson ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v)"
                                    : "%Y-%m-%dT%H:%M:%S.%eZ %l %v";
}

}  // namespace

std::optional<LogLevel> ParseLogLevel(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  if (name == "off") return LogLevel::kOff;
  return std::nullopt;
}

const char* LogLevelName(LogLevel level) {
  constexpr std::array<const char*, 5> kNames = {"debug", "info", "warning", "error", "off"};
  return kNames[static_cast<size_t>(level)];
}

std::optional<LogFormat> ParseLogFormat(const std::string& name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return std::nullopt;
}

Log::Log(const LogOptions& options) : format_(options.format), access_(options.access), level_(options.level) {
  auto sink = options.sink ? options.sink : std::make_shared<spdlog::sinks::stderr_sink_mt>();
  audit_logger_ = std::make_unique<spdlog::logger>("ctkvr", sink);
  audit_logger_->set_level(spdlog::level::trace);
  logger_ = std::make_unique<spdlog::logger>("ctkvr", std::move(sink));
  logger_->set_level(SpdlogLevel(options.level));
  logger_->set_formatter(std::make_unique<spdlog::pattern_formatter>(Pattern(format_), spdlog::pattern_time_type::utc));
}

void Log::Write(LogLevel level, const char* event, std::initializer_list<LogField> fields) {
  const auto spdlog_level = SpdlogLevel(level);
  if (!logger_->should_log(spdlog_level)) return;
  // By value, never as a format string: a brace in a session id must stay a brace.
  logger_->log(spdlog_level, spdlog::string_view_t(FormatLine(format_, event, {fields.begin(), fields.size()})));
}

void Log::Access(const AccessRecord& record) {
  const auto level = record.server_fault ? spdlog::level::err : spdlog::level::info;
  if ((!access_ && !record.server_fault) || !logger_->should_log(level)) return;
  std::vector<LogField> fields;
  fields.reserve(12);
  fields.emplace_back("method", std::string(record.method));
  fields.emplace_back("code", std::string(record.code));
  if (!record.session_id.empty()) fields.emplace_back("session", record.session_id);
  if (record.layer.has_value()) fields.emplace_back("layer", uint64_t{*record.layer});
  if (record.items != 0) fields.emplace_back("items", record.items);
  fields.emplace_back("us", int64_t{std::chrono::duration_cast<std::chrono::microseconds>(record.duration).count()});
  fields.emplace_back("bytes_in", record.bytes_in);
  fields.emplace_back("bytes_out", record.bytes_out);
  fields.emplace_back("peer", record.peer);
  if (record.trace.has_value()) fields.emplace_back("trace_id", record.trace->TraceId());
  if (record.trace.has_value()) fields.emplace_back("span_id", record.trace->SpanId());
  if (!record.message.empty()) fields.emplace_back("message", record.message);
  logger_->log(level, spdlog::string_view_t(FormatLine(format_, "access", fields)));
}

void Log::Audit(const AuditRecord& record) {
  std::vector<LogField> fields;
  fields.reserve(9);
  fields.emplace_back("method", std::string(record.method));
  fields.emplace_back("code", std::string(record.code));
  fields.emplace_back("tenant", record.tenant);
  fields.emplace_back("peer", record.peer);
  fields.emplace_back("request", record.request);
  if (!record.result.empty()) fields.emplace_back("result", record.result);
  if (record.trace.has_value()) fields.emplace_back("trace_id", record.trace->TraceId());
  if (record.trace.has_value()) fields.emplace_back("span_id", record.trace->SpanId());
  if (!record.message.empty()) fields.emplace_back("message", record.message);
  audit_logger_->log(spdlog::level::info, spdlog::string_view_t(FormatLine(format_, "admin", fields)));
}

LogLevel Log::SetLevel(LogLevel level) {
  const LogLevel before = level_.exchange(level, std::memory_order_relaxed);
  logger_->set_level(SpdlogLevel(level));
  return before;
}

void Log::Flush() { logger_->flush(); }

}  // namespace ctkvr::obs
