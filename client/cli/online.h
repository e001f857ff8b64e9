// SPDX-License-Identifier: Apache-2.0
//
// The server's own figures of a replay (online truth, v1::Truth) beside those computed here from the trace.
// Not thread-safe.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/metrics.h"
#include "ctkvr/client/client.h"

namespace ctkvr::cli {

// What shares may differ by: the server's are of keys as it stores them, those computed here of keys as they came.
inline constexpr double kOnlineTolerance = 0.01;

// Waits until the server has repeated the retrieval that it sampled last. DEADLINE_EXCEEDED: it has not within a
// minute; the client's errors.
absl::StatusOr<v1::SessionInfo> AwaitTruth(const client::Session& session);

// One share, by both.
struct OnlineShare {
  std::optional<double> online;
  std::optional<double> offline;
  // Where both are known, or neither is.
  bool agrees() const;
};

struct OnlineReport {
  uint64_t samples = 0;
  uint64_t skipped = 0;
  OnlineShare recall, needle_share, mass;
  double output_error = 0;
  bool agrees() const { return recall.agrees() && needle_share.agrees() && mass.agrees(); }
};
OnlineReport CompareOnline(const v1::SessionInfo& info, const Metrics& metrics);

nlohmann::json OnlineJson(const OnlineReport& report);
std::string OnlineText(const std::string& trace, const OnlineReport& report);  // one line

}  // namespace ctkvr::cli
