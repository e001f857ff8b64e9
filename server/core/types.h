// SPDX-License-Identifier: Apache-2.0
//
// What the engine takes and gives: plain values, no protobuf. The proto's comments (proto/ctkvr/v1) define the meaning
// of every field that has the same name there. Requests view the caller's bytes: those must stay valid until the
// callback has run. Thread-safe: values.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "kernels/formats.h"
#include "kernels/ops.h"
#include "server/core/clock.h"
#include "server/core/explain.h"
#include "server/core/session_config.h"
#include "server/core/stages.h"
#include "server/core/tenant.h"

namespace ctkvr {

// ---- Requests ----------------------------------------------------------------------------------------------------

// Who calls, and when the call stops being worth doing: looked at before work starts and before rows are gathered.
// To a call there are no sessions but its tenant's.
struct CallContext {
  TenantId tenant = kDefaultTenant;
  TimePoint deadline = TimePoint::max();
  std::function<bool()> cancelled;  // thread-safe; empty: never
  StageTimes* times = nullptr;      // where the call's time goes, for whoever asks; outlives the callback

  void Spent(Stage stage, std::chrono::nanoseconds duration) const {
    if (times != nullptr) times->Add(stage, duration);
  }
};

struct SessionRef {
  std::string id;
  uint64_t epoch = 0;       // 0: not compared
  std::string fingerprint;  // empty: not compared
};

// Arrays of dtype SessionConfig.dtype, shapes as in the proto; sizes are checked by the engine against the session.
struct Chunk {
  uint32_t layer = 0;
  uint32_t first_position = 0;
  uint32_t tokens = 0;
  uint32_t query_positions = 0;  // 0: no queries
  DType dtype = DType::kF16;
  // What the caller believes; refused when the layer differs.
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  uint32_t q_heads = 0;                // looked at when there are queries
  std::span<const std::byte> keys;     // [tokens, kv_heads, head_dim]
  std::span<const std::byte> values;   // [tokens, kv_heads, value_dim]
  std::span<const std::byte> queries;  // [query_positions, q_heads, head_dim]
  std::span<const float> weights;      // [tokens], or empty
  std::span<const uint32_t> classes;   // [tokens], or empty
};

struct AppendResult {
  uint64_t epoch = 0;
  uint32_t length = 0;
  bool repeated = false;
};

enum class AnswerMode : uint8_t { kIds, kScores, kRows, kNewRows, kAttention };

constexpr bool WantsScores(AnswerMode mode) { return mode == AnswerMode::kScores || mode == AnswerMode::kRows; }
constexpr bool WantsRows(AnswerMode mode) { return mode == AnswerMode::kRows || mode == AnswerMode::kNewRows; }

struct AnswerOptions {
  AnswerMode mode = AnswerMode::kScores;
  RowFormat row_format = RowFormat::kF16;  // of rows, or of the attention's output
  uint32_t known_code_generation = 0;
  bool remainder = false;
  DType remainder_dtype = DType::kF32;  // of its output
  bool explain = false;
};

struct Query {
  uint32_t layer = 0;
  uint32_t position = 0;
  uint32_t positions = 0;
  DType dtype = DType::kF16;
  uint32_t q_heads = 0;
  uint32_t head_dim = 0;
  std::span<const std::byte> queries;  // [positions, q_heads, head_dim]
  SelectionOverride selection;
  std::optional<uint32_t> local_begin;
  uint32_t local_sinks = 0;
  uint64_t cache_version = 0;  // kNewRows: of the rows the worker holds of this layer; 0: none
  AnswerOptions answer;
};

struct RowCodec {
  Format format = Format::kF32;
  uint32_t code_generation = 0;
  uint64_t rotation_seed = 0;
  std::vector<float> key_mean;  // [kv_heads, head_dim], empty while code_generation is 0
  uint32_t key_row_bytes = 0;
  uint32_t value_row_bytes = 0;
};

// One part of an attention, to be merged with others: see AnswerOptions.remainder in the proto.
struct PartialAttention {
  uint32_t positions = 0;
  uint32_t q_heads = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kF32;  // of the output
  std::string output;         // [positions, q_heads, value_dim]
  std::string log_sum_exp;    // [positions, q_heads] float32
};

// Bytes are std::string so that they move into a protobuf bytes field without a copy.
struct Answer {
  uint64_t epoch = 0;
  std::vector<uint32_t> counts;  // [P, G]
  std::string ids;
  std::string scores;
  std::string keys;
  std::string values;
  RowFormat row_format = RowFormat::kF16;
  std::optional<RowCodec> codec;
  uint32_t code_generation = 0;
  Selection used;
  Source source = Source::kDense;
  uint32_t length = 0;
  uint32_t indexed_length = 0;
  uint64_t bytes_read = 0;
  uint32_t always_tokens = 0;
  std::optional<PartialAttention> attention;  // AnswerMode::kAttention: over the chosen tokens
  // kNewRows alone.
  uint64_t cache_version = 0;
  std::string slots;
  std::vector<uint32_t> new_counts;  // [P, G]
  std::string new_slots;
  std::optional<PartialAttention> remainder;  // when asked for
  std::optional<Explanation> explanation;     // the same
};

// Append, retrieve, or append then retrieve: one item of a Decode message, and the whole of the unary calls.
struct StepRequest {
  SessionRef session;
  std::optional<Chunk> chunk;
  std::optional<Query> query;
};

struct StepResult {
  absl::StatusOr<AppendResult> append;  // meaningless without a chunk
  absl::StatusOr<Answer> answer;        // meaningless without a query; the append's error when that failed
};

struct MemoryInfo {
  uint64_t reserved_bytes = 0;
  uint64_t page_bytes = 0;
  uint64_t raw_bytes = 0;
  uint64_t index_bytes = 0;
  uint64_t state_bytes = 0;
  uint64_t slot_table_bytes = 0;  // host memory beside the arena: in none of the sums
  uint64_t tag_bytes = 0;         // the same
  uint64_t held_bytes() const { return page_bytes + raw_bytes + index_bytes + state_bytes; }
};

// What exact repeats of sampled retrievals found, softmaxes taken over all that the query saw; see Truth in the proto.
struct TruthInfo {
  uint64_t samples = 0;  // (layer, position) repeated
  uint64_t needles = 0;
  uint64_t needles_found = 0;
  uint64_t best_tokens = 0;  // of the exact best k
  uint64_t best_chosen = 0;  // of those, chosen
  uint64_t heads = 0;        // (query head, sample): what the sums below are over
  double mass_sum = 0;
  double output_error_sum = 0;
  std::optional<uint32_t> worst_head;  // of the query heads with limits::kWorstHeadNeedles needles or more
  double worst_head_share = 1;
};

struct LayerInfo {
  uint32_t length = 0;
  uint32_t indexed_length = 0;
  uint32_t query_centroids = 0;
  uint32_t clustered_length = 0;
  TruthInfo truth;
  uint32_t strength = 0;  // steps taken for the quality target
  // Of the last retrieval.
  Source served = Source::kDense;
  SelectionReason reason = SelectionReason::kNothingVisible;
  RowCodec codec;
};

struct SessionInfo {
  std::string id;
  uint64_t epoch = 0;
  SessionConfig config;
  std::vector<LayerInfo> layers;
  MemoryInfo memory;
  uint32_t lease_remaining_seconds = 0;
  uint64_t appended_tokens = 0;
  uint64_t retrievals = 0;
  TruthInfo truth;               // of all layers
  uint64_t shadows_skipped = 0;  // sampled retrievals that were not repeated
  bool shadow_pending = false;
};

struct SessionSummary {
  std::string id;
  uint64_t epoch = 0;
  uint64_t held_bytes = 0;
  uint64_t reserved_bytes = 0;
  uint32_t length_max = 0;
  uint32_t token_limit = 0;
  uint32_t lease_remaining_seconds = 0;
};

struct CloseResult {
  uint64_t epoch = 0;
  uint64_t freed_bytes = 0;
};

struct TruncateResult {
  uint64_t epoch = 0;
  std::vector<uint32_t> removed_tokens;  // [layers]
};

struct LeaseResult {
  uint64_t epoch = 0;
  uint32_t lease_remaining_seconds = 0;
};

struct MaintainResult {
  uint64_t epoch = 0;
  std::vector<uint32_t> indexed_length;  // [layers]
};

template <typename T>
using Callback = absl::AnyInvocable<void(absl::StatusOr<T>)>;

}  // namespace ctkvr
