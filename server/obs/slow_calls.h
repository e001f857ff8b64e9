// SPDX-License-Identifier: Apache-2.0
//
// The last calls that took too long, for whoever asks afterwards why: for each method a ring of fixed size, so that
// slow uploads do not push out the slow retrieval. A call that is not slow costs one comparison; a slow one a short
// lock and a copy, never an allocation. Records hold no keys, values or queries. Thread-safe.

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/core/limits.h"
#include "server/core/stages.h"
#include "server/obs/metrics.h"
#include "server/obs/trace_context.h"

namespace ctkvr::obs {

// One call, or one message of a stream.
struct SlowCall {
  Method method = Method::kGetServerInfo;
  int code = 0;                                 // of gRPC
  std::chrono::system_clock::time_point ended;  // when
  std::chrono::nanoseconds duration{0};         // from arrival to the end; of a message, until its reply was ready
  std::array<std::chrono::nanoseconds, kStageCount> stages{};  // as StageTimes
  std::optional<uint32_t> layer = {};
  uint64_t items = 0;  // of a batch; 0: no batch
  uint64_t bytes_in = 0;
  uint64_t bytes_out = 0;
  std::optional<TraceContext> trace = {};

  // Empty: the call names none, or several.
  std::array<char, limits::kSessionIdBytesMax> session{};
  size_t session_bytes = 0;

  void SetSession(const std::string& id);  // cut where the array ends
  std::string SessionId() const { return {session.data(), session_bytes}; }
};

class SlowCalls {
 public:
  static constexpr size_t kKeptPerMethod = 32;

  // 0: no call is slow.
  explicit SlowCalls(std::chrono::nanoseconds threshold);

  std::chrono::nanoseconds threshold() const { return threshold_; }
  bool IsSlow(std::chrono::nanoseconds duration) const { return duration >= least_; }
  void Add(const SlowCall& call);

  // The newest first, of one method or of all; at most `limit`.
  std::vector<SlowCall> Recent(std::optional<Method> method, size_t limit) const;
  // Calls ever added.
  uint64_t count() const;

 private:
  struct Ring {
    std::array<SlowCall, kKeptPerMethod> calls;
    uint64_t added = 0;
  };

  const std::chrono::nanoseconds threshold_;
  const std::chrono::nanoseconds least_;
  mutable std::mutex mutex_;  // guards rings_
  std::array<Ring, kMethodNames.size()> rings_;
};

}  // namespace ctkvr::obs
