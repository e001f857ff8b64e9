// SPDX-License-Identifier: Apache-2.0

#include "server/obs/trace_context.h"

#include <algorithm>

namespace ctkvr::obs {
namespace {

// version "-" trace-id "-" parent-id "-" trace-flags
constexpr size_t kTraceIdAt = 3;
constexpr size_t kSpanIdAt = 36;
constexpr size_t kFlagsAt = 53;
constexpr size_t kVersion0Length = 55;

bool IsHex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }
bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

std::optional<TraceContext> ParseTraceparent(std::string_view text) {
  if (text.size() < kVersion0Length || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  const std::string_view version = text.substr(0, 2);
  const std::string_view trace_id = text.substr(kTraceIdAt, 32);
  const std::string_view span_id = text.substr(kSpanIdAt, 16);
  if (!IsHex(version) || version == "ff" || !IsHex(text.substr(kFlagsAt, 2))) return std::nullopt;
  // A later version may be longer, after another dash.
  const bool longer = text.size() > kVersion0Length;
  if (longer && (version == "00" || text[kVersion0Length] != '-')) return std::nullopt;
  if (!IsHex(trace_id) || IsZero(trace_id) || !IsHex(span_id) || IsZero(span_id)) return std::nullopt;
  TraceContext context;
  std::copy(trace_id.begin(), trace_id.end(), context.trace_id.begin());
  std::copy(span_id.begin(), span_id.end(), context.span_id.begin());
  return context;
}

}  // namespace ctkvr::obs
