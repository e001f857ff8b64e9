// SPDX-License-Identifier: Apache-2.0
//
// How long retrievals take over the wire: one layer of synthetic keys and values, one retrieval in flight, then
// several. Not thread-safe.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/output.h"
#include "client/cli/selection_flags.h"
#include "ctkvr/client/client.h"

namespace ctkvr::cli {

struct BenchFlags {
  SelectionFlags selection;
  uint32_t q_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t value_dim = 0;  // 0: head_dim
  uint32_t tokens = 32768;
  uint32_t retrievals = 200;  // of each run
  uint32_t in_flight = 4;     // of the second run
};

struct BenchRun {
  uint32_t in_flight = 0;
  std::vector<double> latency_us{};  // ascending; from Send to the reply, waiting in flight included
  double seconds = 0;                // the whole run
  double request_bytes = 0;          // mean a retrieval, protobuf bytes
  double reply_bytes = 0;
  double bytes_read = 0;  // mean a retrieval, by the server, to choose
};

struct BenchResult {
  double append_seconds = 0;
  uint64_t append_bytes = 0;
  v1::SessionMemory memory;
  std::vector<BenchRun> runs;  // one in flight, then BenchFlags.in_flight where that is more
};

// Rows of binary16 that look like keys: points around `clusters` centres, the same for the same seed.
class SyntheticRows {
 public:
  SyntheticRows(uint32_t dim, uint32_t clusters, uint64_t seed);
  // out [n, dim]: the next n rows, each of a centre drawn at random.
  void Fill(std::span<uint16_t> out);

 private:
  double Normal();

  uint32_t dim_;
  uint64_t state_;
  std::vector<float> centres_;  // [clusters, dim]
};

absl::StatusOr<BenchResult> Bench(const client::Client& client, const BenchFlags& flags, Progress* progress);

std::string BenchTable(const BenchResult& result);
nlohmann::json BenchJson(const BenchResult& result);

}  // namespace ctkvr::cli
