// SPDX-License-Identifier: Apache-2.0
//
// W3C trace context: which trace a call belongs to, as its `traceparent` metadata says
// (https://www.w3.org/TR/trace-context/, section 3.2). The server makes no spans of its own; it writes the caller's ids
// down, so that a trace leads to log lines and back. Thread-safe: values.

#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace ctkvr::obs {

// The name of the metadata.
inline constexpr char kTraceparent[] = "traceparent";

// Lower-case hexadecimal digits.
struct TraceContext {
  std::array<char, 32> trace_id{};
  std::array<char, 16> span_id{};  // the caller's: what the call is done for

  std::string TraceId() const { return {trace_id.begin(), trace_id.end()}; }
  std::string SpanId() const { return {span_id.begin(), span_id.end()}; }
  bool operator==(const TraceContext&) const = default;
};

// Nothing for a text that the standard calls invalid: such a one is as good as none.
std::optional<TraceContext> ParseTraceparent(std::string_view text);

}  // namespace ctkvr::obs
