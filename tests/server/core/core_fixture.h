// SPDX-License-Identifier: Apache-2.0
//
// What the tests of server/core share: an engine on a fake backend and clock whose lanes a test drives, made-up tokens
// that depend on nothing but seed, layer and position, and every call as a function that returns its answer.
// Not thread-safe.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "server/core/engine.h"
#include "server/core/error.h"
#include "server/core/limits.h"
#include "tests/testing/fake_backend.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/oracle.h"

namespace ctkvr::testing {

// ---- Sessions ------------------------------------------------------------------------------------------------------

SessionRef Ref(const std::string& id, uint64_t epoch = 0, const std::string& fingerprint = "");

// Small: two KV heads of two query heads, head_dim 32, value_dim 16, no layer dense for its length, maintenance manual.
LayerConfig SmallLayer(Format format = Format::kK8V4, Source source = Source::kSketch);
SessionConfig SmallConfig(const LayerConfig& layer, uint32_t token_limit = 1024, uint32_t layers = 1);

// ---- Tokens --------------------------------------------------------------------------------------------------------

// A chunk or a query with the bytes it views.
// Move-only: a copy would view the other's bytes.
struct OwnedChunk {
  OwnedChunk() = default;
  OwnedChunk(OwnedChunk&&) = default;
  OwnedChunk& operator=(OwnedChunk&&) = default;
  std::vector<std::byte> keys, values, queries;
  Chunk chunk;
};
struct OwnedQuery {
  OwnedQuery() = default;
  OwnedQuery(OwnedQuery&&) = default;
  OwnedQuery& operator=(OwnedQuery&&) = default;
  std::vector<std::byte> bytes;
  Query query;
};

// Numbers of a conversation. `variant` tells different texts at the same positions apart.
class Tokens {
 public:
  Tokens(const LayerConfig& layer, DType dtype, uint64_t salt) : layer_(layer), dtype_(dtype), salt_(salt) {}

  // Positions [first, first + tokens), with queries of the last `query_positions`.
  OwnedChunk Append(uint32_t first, uint32_t tokens, uint32_t query_positions = 0, uint64_t variant = 0) const;
  OwnedQuery Ask(uint32_t position, uint32_t positions = 1, uint64_t variant = 0) const;
  // As the tensors carry them, [heads][dim].
  oracle::Matrix Keys(uint32_t position, uint64_t variant = 0) const;
  oracle::Matrix Values(uint32_t position, uint64_t variant = 0) const;
  oracle::Matrix Queries(uint32_t position, uint64_t variant = 0) const;

 private:
  enum class What : uint64_t { kKey, kValue, kQuery };
  void Add(std::vector<std::byte>& bytes, What what, uint32_t position, uint64_t variant) const;
  oracle::Matrix Rows(What what, uint32_t position, uint64_t variant, uint32_t dim) const;

  const LayerConfig layer_;
  const DType dtype_;
  const uint64_t salt_;
};

// ---- The engine ----------------------------------------------------------------------------------------------------

struct HarnessOptions {
  bool shares_host_memory = true;
  std::function<void(const char* name)> on_call = nullptr;  // of the backend, see FakeBackendOptions
  EngineOptions engine = {.lanes = 1,
                          .arena_bytes = size_t{48} << 20,
                          .scratch_bytes = size_t{8} << 20,
                          .queue_items_max = 64,
                          .sessions_max = 64,
                          .threads = false};
};

class Harness {
 public:
  explicit Harness(const HarnessOptions& options = {});

  Engine& engine() { return *engine_; }
  FakeBackend& backend() { return backend_; }
  FakeClock& clock() { return clock_; }

  absl::StatusOr<SessionInfo> Open(const std::string& id, const SessionConfig& config);
  absl::StatusOr<AppendResult> Append(const std::string& id, const OwnedChunk& chunk);
  absl::StatusOr<Answer> Retrieve(const std::string& id, const OwnedQuery& query, CallContext context = {});
  absl::StatusOr<TruncateResult> Truncate(const std::string& id, uint32_t length);
  absl::StatusOr<CloseResult> Close(const SessionRef& session);
  absl::StatusOr<SessionInfo> Get(const SessionRef& session);
  absl::StatusOr<LeaseResult> KeepAlive(const std::string& id);
  absl::StatusOr<MaintainResult> Maintain(const std::string& id, std::vector<uint32_t> layers = {});
  absl::StatusOr<std::vector<SessionSummary>> List(const std::string& after, uint32_t limit);
  std::vector<StepResult> Step(std::vector<StepRequest> requests, CallContext context = {});
  // Runs every lane until none has anything to do.
  void RunAll();

  // Calls `start` with a callback and runs lanes until it was called.
  template <typename T, typename Start>
  absl::StatusOr<T> Await(Start start) {
    std::optional<absl::StatusOr<T>> result;
    start([&](absl::StatusOr<T> value) { result.emplace(std::move(value)); });
    RunUntil([&] { return result.has_value(); });
    return *std::move(result);
  }

 private:
  template <typename Done>
  void RunUntil(Done done) {
    // A call that is never answered is a failure, not a hang.
    for (int round = 0; !done(); ++round) {
      CTKVR_CHECK(round < 100000);
      for (uint32_t lane = 0; lane < engine_->options().lanes; ++lane) engine_->RunLane(lane);
    }
  }

  FakeBackend backend_;
  FakeClock clock_;
  std::unique_ptr<Engine> engine_;
};

// ---- What a layer holds, as a client sees it -----------------------------------------------------------------------

// Every stored row of a layer, fetched as storage rows and decoded by the oracle.
struct StoredLayer {
  RowCodec codec;
  uint32_t tokens = 0;
  // [kv_heads][tokens]
  std::vector<oracle::Matrix> keys, values;
  std::string key_bytes, value_bytes;  // as fetched

  friend bool SameBytes(const StoredLayer& a, const StoredLayer& b) {
    return a.tokens == b.tokens && a.key_bytes == b.key_bytes && a.value_bytes == b.value_bytes;
  }
};
// Fails the test when the layer cannot be read. ReadRows leaves the decoding out.
StoredLayer ReadRows(Harness& harness, const std::string& id, const SessionConfig& config, uint32_t layer = 0);
StoredLayer ReadLayer(Harness& harness, const std::string& id, const SessionConfig& config, uint32_t layer = 0);
oracle::Codec MakeCodec(const LayerConfig& layer, DType dtype, const RowCodec& codec, uint32_t kv_head);

// ---- Answers -------------------------------------------------------------------------------------------------------

// One set of an answer: ascending ids, scores [R][ids].
struct AnswerSet {
  std::vector<uint32_t> ids;
  oracle::Matrix scores;
  size_t first_row = 0;  // where its rows begin
};
// Sets in order, [P * G]; `heads` query heads each.
std::vector<AnswerSet> SplitAnswer(const Answer& answer, uint32_t heads);

// What a part of an answer carries for one position, [q_heads]. Fails the test where its bytes are not those of its
// dims.
oracle::Attention AttentionAt(const PartialAttention& given, uint32_t position);

// What an answer is held to.
struct AnswerCheck {
  const LayerConfig* layer = nullptr;
  Selection selection;
  uint32_t position = 0;  // absolute
  uint32_t local_sinks = 0;
  std::optional<uint32_t> local_begin;
  // Tokens that were candidates, [kv_heads], ascending; empty: all visible ones.
  std::vector<std::vector<uint32_t>> candidates;
  uint32_t tail_begin = 0xffffffff;  // always included from here on
};
// Sets of one position that any source may give: visible tokens in order, the always-included among them, at most k
// others, scores within rounding of the oracle's.
::testing::AssertionResult IsSoundAnswer(const std::vector<AnswerSet>& sets, const StoredLayer& stored,
                                         const oracle::Matrix& queries, const AnswerCheck& check);
// And the others are the best k, outside a tie band.
::testing::AssertionResult IsExactAnswer(const std::vector<AnswerSet>& sets, const StoredLayer& stored,
                                         const oracle::Matrix& queries, const AnswerCheck& check);

}  // namespace ctkvr::testing
