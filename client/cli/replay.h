// SPDX-License-Identifier: Apache-2.0
//
// Replays a trace through a server: appends the prompt, decodes what follows as a worker would, and compares what was
// chosen with exact attention computed here from the trace itself. Not thread-safe.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/metrics.h"
#include "client/cli/online.h"
#include "client/cli/output.h"
#include "client/cli/selection_flags.h"
#include "client/cli/trace.h"
#include "client/cli/verify.h"
#include "ctkvr/client/client.h"

namespace ctkvr::cli {

struct ReplayFlags {
  SelectionFlags selection;
  uint32_t steps = 0;  // decoded tokens at most; 0: all
  uint32_t every = 1;  // retrieve at every so manyth step
  // Include everything after the prompt's last window at each step, in place of a window that slides.
  bool hold_decoded = false;
  bool verify_exact = false;
  // Let the server repeat every retrieval it samples before the next, and compare its figures with those of the trace.
  bool online = false;
  bool record = false;  // ask the server to record the session
};

struct ReplayResult {
  std::string name;
  v1::Source source = v1::SOURCE_UNSPECIFIED;  // that served the last retrieval
  uint64_t appended_tokens = 0;
  uint64_t retrievals = 0;
  Metrics metrics{0};
  uint64_t bytes_read = 0;         // by the server, to choose
  uint64_t reply_bytes = 0;        // of the answers to retrievals
  double key_scan_bytes = 0;       // what scanning the keys in binary16 would have read
  std::vector<double> latency_us;  // of a retrieval, one in flight; ascending
  v1::SessionMemory memory;
  std::optional<VerifyReport> verify;
  std::optional<OnlineReport> online;
  uint32_t strength = 0;  // steps the server took for a needle share
};

// Opens a session of one layer with the trace's geometry, closes it again. Errors: the server's; FAILED_PRECONDITION
// when verify is asked of another source than exact, or of answers that do not say what was chosen. Of attention alone
// nothing is compared: metrics stay empty. Online figures need hold_decoded, so that both count the same needles, and
// an answer that says what was chosen; FAILED_PRECONDITION else, or when the server has repeated nothing.
absl::StatusOr<ReplayResult> Replay(const client::Client& client, const Trace& trace, const ReplayFlags& flags,
                                    Progress* progress);

// One row a trace, and a row of totals where there are several: needles summed, the worst head of all, means weighted
// by what they are a mean of.
std::string ReplayTable(const std::vector<ReplayResult>& results);
nlohmann::json ReplayJson(const std::vector<ReplayResult>& results);
// Of all traces together; nothing where there are no needles.
std::optional<double> TotalNeedleShare(const std::vector<ReplayResult>& results);

}  // namespace ctkvr::cli
