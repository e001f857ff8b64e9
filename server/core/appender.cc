// SPDX-License-Identifier: Apache-2.0

#include "server/core/appender.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "server/core/elements.h"
#include "server/core/error.h"
#include "server/core/limits.h"
#include "server/core/repeat_check.h"

namespace ctkvr {
namespace {

absl::Status CheckEqual(const char* field, uint64_t value, uint64_t expected) {
  if (value == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; the layer has ", expected));
}

absl::Status CheckBytes(const char* tensor, size_t bytes, std::initializer_list<uint64_t> factors) {
  const std::optional<uint64_t> expected = CheckedProduct(factors);
  if (expected.has_value() && bytes == *expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(tensor, " has ", bytes, " bytes; its dims need ",
                                                 expected.has_value() ? absl::StrCat(*expected) : "too many"));
}

absl::Status CheckShapes(const Layer& layer, const Chunk& chunk) {
  const LayerConfig& config = layer.config();
  if (chunk.dtype != layer.dtype()) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", DTypeName(chunk.dtype), "; the session has ", DTypeName(layer.dtype())));
  }
  if (chunk.tokens > limits::kAppendTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens is ", chunk.tokens, "; the limit is ", limits::kAppendTokensMax));
  }
  CTKVR_RETURN_IF_ERROR(CheckEqual("kv_heads", chunk.kv_heads, config.kv_heads));
  CTKVR_RETURN_IF_ERROR(CheckEqual("head_dim", chunk.head_dim, config.head_dim));
  CTKVR_RETURN_IF_ERROR(CheckEqual("value_dim", chunk.value_dim, config.value_dim));
  const uint64_t element = DTypeBytes(chunk.dtype);
  CTKVR_RETURN_IF_ERROR(
      CheckBytes("keys", chunk.keys.size(), {chunk.tokens, config.kv_heads, config.head_dim, element}));
  CTKVR_RETURN_IF_ERROR(
      CheckBytes("values", chunk.values.size(), {chunk.tokens, config.kv_heads, config.value_dim, element}));
  if (chunk.query_positions > 0) CTKVR_RETURN_IF_ERROR(CheckEqual("q_heads", chunk.q_heads, config.q_heads));
  CTKVR_RETURN_IF_ERROR(
      CheckBytes("queries", chunk.queries.size(), {chunk.query_positions, config.q_heads, config.head_dim, element}));
  CTKVR_RETURN_IF_ERROR(TokenTags::Check(chunk));
  if (layer.tags() == nullptr && !(chunk.weights.empty() && chunk.classes.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat(chunk.weights.empty() ? "classes" : "weights", " are given; the session takes no tags"));
  }
  if (chunk.query_positions > chunk.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("queries has ", chunk.query_positions, " positions; the chunk has ", chunk.tokens, " tokens"));
  }
  return absl::OkStatus();
}

enum class Placement { kNothing, kNew, kHeld };

absl::StatusOr<Placement> Place(const Layer& layer, const Chunk& chunk, uint32_t token_limit) {
  if (chunk.tokens == 0) return Placement::kNothing;
  const uint64_t end = uint64_t{chunk.first_position} + chunk.tokens;
  if (end <= layer.length()) return Placement::kHeld;
  if (chunk.first_position != layer.length()) {
    return MakeError(absl::StatusCode::kOutOfRange,
                     absl::StrCat("first_position is ", chunk.first_position, " with ", chunk.tokens,
                                  " tokens; the expected position is ", layer.length()),
                     kReasonWrongPosition, {{"expected_position", absl::StrCat(layer.length())}});
  }
  if (end > token_limit) {
    return MakeError(absl::StatusCode::kOutOfRange,
                     absl::StrCat("the append would make ", end, " tokens; token_limit is ", token_limit),
                     kReasonTokenLimit, {{"token_limit", absl::StrCat(token_limit)}});
  }
  return Placement::kNew;
}

// One append that writes.
struct Write {
  const AppendTask* task = nullptr;
  Layer* layer = nullptr;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t raw_end = 0;        // positions [begin, raw_end) are written raw
  bool becomes_coded = false;  // with this append
  std::vector<float> mean;     // [kv_heads, head_dim], when it does
  std::optional<QueryIndex::RingWrite> ring;
  int64_t bad_key = -1;  // the first element of the chunk that did not fit
  int64_t bad_value = -1;
  absl::Status status;
};

Write MakeWrite(const AppendTask& task, Layer& layer) {
  const uint32_t end = layer.length() + task.chunk->tokens;
  Write write{.task = &task,
              .layer = &layer,
              .begin = layer.length(),
              .end = end,
              .raw_end = layer.length(),
              .becomes_coded = false,
              .mean = {},
              .ring = std::nullopt,
              .bad_key = -1,
              .bad_value = -1,
              .status = {}};
  if (layer.raw()) {
    write.raw_end = std::min(end, layer.coding_length());
    write.becomes_coded = end >= layer.coding_length();
  }
  return write;
}

// Collects operations' items and enqueues them together; where staged inputs fill the scratch, it runs what it has and
// goes on.
class Writer {
 public:
  explicit Writer(LaneDevice device) : device_(device), memory_(device) {}

  absl::Status Run(std::deque<Write>& writes) {
    for (Write& write : writes) {
      CTKVR_RETURN_IF_ERROR(AddChunk(write, write.begin, write.raw_end, true));
      if (!write.layer->raw()) CTKVR_RETURN_IF_ERROR(AddChunk(write, write.begin, write.end, false));
    }
    CTKVR_RETURN_IF_ERROR(Enqueue());
    CTKVR_RETURN_IF_ERROR(FitMeans(writes));
    for (Write& write : writes) {
      if (!write.becomes_coded) continue;
      CTKVR_RETURN_IF_ERROR(AddRawKeys(write));
      CTKVR_RETURN_IF_ERROR(AddChunk(write, write.raw_end, write.end, false));
    }
    CTKVR_RETURN_IF_ERROR(Flush());
    CheckBadElements(writes);
    return WriteRings(writes);
  }
  absl::Status Settle() { return memory_.Settle(); }

 private:
  // Elements that did not fit, as the operation reports them.
  struct Bad {
    Write* write = nullptr;
    uint32_t kv_head = 0;
    uint32_t token = 0;  // of the chunk, where the item begins
    int64_t key = -1;
    int64_t value = -1;
  };

  // Runs `add`, which stages inputs and pushes items; once more after a flush when scratch was short.
  template <typename Add>
  absl::Status Staged(Add add) {
    const BatchMemory::Mark mark = memory_.mark();
    const size_t items = items_.size();
    add();
    if (!memory_.exhausted()) return memory_.status();
    items_.resize(items);
    memory_.ResetTo(mark);
    CTKVR_RETURN_IF_ERROR(Flush());
    add();
    return memory_.exhausted() ? memory_.ExhaustedError("an append") : memory_.status();
  }

  absl::Status Enqueue() {
    if (items_.empty()) return absl::OkStatus();
    const absl::Status status = device_.backend.WriteTokens(device_.stream, items_);
    items_.clear();
    return status;
  }
  absl::Status Flush() {
    CTKVR_RETURN_IF_ERROR(Enqueue());
    return memory_.FinishAndReset();
  }

  // Tokens that are staged at a time: a quarter of the scratch, so that pieces of several sessions share a call.
  uint32_t PieceTokens(const Layer& layer) const {
    if (memory_.shares_host_memory()) return limits::kAppendTokensMax;
    const LayerConfig& config = layer.config();
    const size_t bytes = size_t{config.kv_heads} * (config.head_dim + config.value_dim) * DTypeBytes(layer.dtype());
    return static_cast<uint32_t>(std::max<size_t>(1, device_.scratch.capacity_bytes() / 4 / bytes));
  }

  // Positions [begin, end) of the chunk, keys raw or in the layer's format.
  absl::Status AddChunk(Write& write, uint32_t begin, uint32_t end, bool raw) {
    while (begin < end) {
      const uint32_t piece_end = begin + std::min(end - begin, PieceTokens(*write.layer));
      CTKVR_RETURN_IF_ERROR(Staged([&] { AddPiece(write, begin, piece_end, raw); }));
      begin = piece_end;
    }
    return absl::OkStatus();
  }

  void AddPiece(Write& write, uint32_t begin, uint32_t end, bool raw) {
    const Chunk& chunk = *write.task->chunk;
    const LayerConfig& config = write.layer->config();
    const size_t key_bytes = config.head_dim * DTypeBytes(chunk.dtype);
    const size_t value_bytes = config.value_dim * DTypeBytes(chunk.dtype);
    const size_t key_stride = key_bytes * config.kv_heads;
    const size_t value_stride = value_bytes * config.kv_heads;
    const uint32_t token = begin - write.begin;
    const std::byte* keys = memory_.In(chunk.keys.data() + token * key_stride, (end - begin) * key_stride);
    const std::byte* values = memory_.In(chunk.values.data() + token * value_stride, (end - begin) * value_stride);
    const uint32_t first_block = begin / kSketchTokens, first = first_block * kSketchTokens;
    for (uint32_t h = 0; h < config.kv_heads; ++h) {
      Bad& bad = bad_.emplace_back(Bad{.write = &write, .kv_head = h, .token = token});
      items_.push_back({.view = memory_.Stage(write.layer->Places(h, first_block, raw), Layer::page_count(end - first)),
                        .first_position = begin - first,
                        .count = end - begin,
                        .keys = keys + h * key_bytes,
                        .values = values + h * value_bytes,
                        .key_stride = key_stride,
                        .value_stride = value_stride,
                        .dtype = chunk.dtype,
                        .bad_key_element = memory_.Out(&bad.key, 1),
                        .bad_value_element = memory_.Out(&bad.value, 1)});
    }
  }

  absl::Status FitMeans(std::deque<Write>& writes) {
    const auto becomes_coded = [](const Write& write) { return write.becomes_coded; };
    if (std::none_of(writes.begin(), writes.end(), becomes_coded)) return absl::OkStatus();
    if (!memory_.shares_host_memory()) CTKVR_RETURN_IF_ERROR(Flush());  // room for page tables
    std::vector<FitMeanItem> items;
    for (Write& write : writes) {
      if (!write.becomes_coded) continue;
      const LayerConfig& config = write.layer->config();
      const uint32_t end = write.layer->coding_length();
      for (uint32_t h = 0; h < config.kv_heads; ++h) {
        HeadView view = memory_.Stage(write.layer->Places(h, 0, true), Layer::page_count(end));
        view.length = end;
        items.push_back(
            {.view = view, .begin = config.selection.sink_tokens, .end = end, .mean = write.layer->MeanPlace(h)});
      }
    }
    if (memory_.exhausted()) return memory_.ExhaustedError("an append");
    CTKVR_RETURN_IF_ERROR(memory_.status());
    CTKVR_RETURN_IF_ERROR(device_.backend.FitMean(device_.stream, items));
    for (Write& write : writes) {
      if (!write.becomes_coded) continue;
      write.mean.resize(size_t{write.layer->config().kv_heads} * write.layer->config().head_dim);
      memory_.CopyOut(write.mean.data(), write.layer->MeanPlace(0), write.mean.size());
    }
    return memory_.status();
  }

  // Raw keys [0, raw_end) once more, as codes.
  absl::Status AddRawKeys(Write& write) {
    const LayerConfig& config = write.layer->config();
    const size_t key_bytes = config.head_dim * DTypeBytes(write.layer->dtype());
    for (uint32_t h = 0; h < config.kv_heads; ++h) {
      CTKVR_RETURN_IF_ERROR(Staged([&] {
        const HeadView raw = write.layer->Places(h, 0, true);
        const HeadView coded = memory_.Stage(write.layer->Places(h, 0, false), Layer::page_count(write.raw_end));
        for (uint32_t begin = 0; begin < write.raw_end; begin += kPageTokens) {
          Bad& bad = bad_.emplace_back(Bad{.write = &write, .kv_head = h, .token = 0});
          items_.push_back({.view = coded,
                            .first_position = begin,
                            .count = std::min(kPageTokens, write.raw_end - begin),
                            .keys = raw.raw_pages[begin / kPageTokens],
                            .values = nullptr,
                            .key_stride = key_bytes,
                            .value_stride = 0,
                            .dtype = write.layer->dtype(),
                            .bad_key_element = memory_.Out(&bad.key, 1),
                            .bad_value_element = nullptr});
        }
      }));
    }
    return absl::OkStatus();
  }

  void CheckBadElements(std::deque<Write>& writes) {
    const auto note = [](int64_t& first, const Bad& bad, int64_t element, int64_t dim) {
      if (element < 0) return;
      const int64_t token = bad.token + element / dim;
      const int64_t index = (token * bad.write->layer->config().kv_heads + bad.kv_head) * dim + element % dim;
      if (first < 0 || index < first) first = index;
    };
    for (const Bad& bad : bad_) {
      note(bad.write->bad_key, bad, bad.key, bad.write->layer->config().head_dim);
      note(bad.write->bad_value, bad, bad.value, bad.write->layer->config().value_dim);
    }
    for (Write& write : writes) {
      if (write.bad_key < 0 && write.bad_value < 0) continue;
      const bool in_keys = write.bad_key >= 0;
      write.status = absl::InvalidArgumentError(
          absl::StrCat(in_keys ? "keys[" : "values[", in_keys ? write.bad_key : write.bad_value,
                       "] does not fit format ", FormatName(write.layer->config().format)));
    }
  }

  absl::Status WriteRings(std::deque<Write>& writes) {
    std::vector<WriteCentroidsItem> items;
    for (Write& write : writes) {
      const Chunk& chunk = *write.task->chunk;
      if (!write.status.ok() || write.layer->index() == nullptr || chunk.query_positions == 0) continue;
      AddRing(write, items);
      if (memory_.exhausted()) return memory_.ExhaustedError("the queries of an append");
    }
    if (items.empty()) return absl::OkStatus();
    CTKVR_RETURN_IF_ERROR(memory_.status());
    CTKVR_RETURN_IF_ERROR(device_.backend.WriteCentroids(device_.stream, items));
    return memory_.Finish();
  }

  void AddRing(Write& write, std::vector<WriteCentroidsItem>& items) {
    const Chunk& chunk = *write.task->chunk;
    QueryIndex& index = *write.layer->index();
    write.ring = index.BeginRingWrite(write.end - chunk.query_positions, chunk.query_positions);
    index.StageRingWrite({.queries = chunk.queries, .dtype = chunk.dtype}, *write.ring, memory_, items);
  }

  const LaneDevice device_;
  BatchMemory memory_;
  std::vector<WriteTokensItem> items_;
  std::deque<Bad> bad_;
};

void Publish(Write& write, Stats& stats) {
  const Chunk& chunk = *write.task->chunk;
  if (write.layer->length() == 0) stats.layers_held.fetch_add(1, std::memory_order_relaxed);
  if (write.layer->tags() != nullptr) write.layer->tags()->Append(chunk);
  if (write.becomes_coded) write.layer->FixMean(std::move(write.mean));
  write.layer->Commit(write.end);
  if (write.ring.has_value()) {
    write.layer->index()->CommitRing(*write.ring, true);
  }
  write.task->session->CountAppended(chunk.tokens);
  stats.appended_tokens.fetch_add(chunk.tokens, std::memory_order_relaxed);
  stats.append_bytes.fetch_add(chunk.keys.size() + chunk.values.size() + chunk.queries.size(),
                               std::memory_order_relaxed);
  stats.tokens_held.fetch_add(chunk.tokens, std::memory_order_relaxed);
  *write.task->result = AppendResult{.epoch = write.task->session->epoch(), .length = write.end, .repeated = false};
}

// Decides what a task is and answers all but those that write.
absl::Status Begin(LaneDevice device, Stats& stats, const AppendTask& task, std::deque<Write>& writes) {
  Session& session = *task.session;
  CTKVR_RETURN_IF_ERROR(session.CheckHealthy());
  CTKVR_ASSIGN_OR_RETURN(Layer * layer, session.FindLayer(task.chunk->layer));
  CTKVR_RETURN_IF_ERROR(CheckShapes(*layer, *task.chunk));
  CTKVR_ASSIGN_OR_RETURN(const Placement placement, Place(*layer, *task.chunk, session.config().token_limit));
  if (layer->coded()) {
    CTKVR_RETURN_IF_ERROR(CheckKeyNorms({.keys = task.chunk->keys,
                                         .dtype = task.chunk->dtype,
                                         .head_dim = task.chunk->head_dim,
                                         .magnitude_max = task.key_magnitude_max}));
  }
  if (placement == Placement::kNew) {
    layer->Grow(layer->length() + task.chunk->tokens);
    writes.push_back(MakeWrite(task, *layer));
    return absl::OkStatus();
  }
  if (placement == Placement::kHeld) {
    if (layer->tags() != nullptr) CTKVR_RETURN_IF_ERROR(layer->tags()->CheckRepeat(*task.chunk));
    const absl::Status same = CheckRepeat(device, *layer, *task.chunk);
    NoteDeviceError(stats, same);
    CTKVR_RETURN_IF_ERROR(same);
    stats.repeated_appends.fetch_add(1, std::memory_order_relaxed);
  }
  *task.result =
      AppendResult{.epoch = session.epoch(), .length = layer->length(), .repeated = placement == Placement::kHeld};
  return absl::OkStatus();
}

}  // namespace

void RunAppends(LaneDevice device, Stats& stats, std::span<const AppendTask> tasks) {
  std::deque<Write> writes;
  for (const AppendTask& task : tasks) {
    const absl::Status status = Begin(device, stats, task, writes);
    if (!status.ok()) *task.result = status;
  }
  if (writes.empty()) return;
  bool unknown_outcome = false;
  absl::Status status;
  {
    Writer writer(device);
    status = writer.Run(writes);
    // Places are given back only when the device is done with them.
    if (!status.ok()) unknown_outcome = !writer.Settle().ok();
    NoteDeviceError(stats, status);
  }
  for (Write& write : writes) {
    if (write.status.ok()) write.status = status;
    if (write.status.ok()) {
      Publish(write, stats);
      continue;
    }
    *write.task->result = write.status;
    if (!unknown_outcome) {
      write.layer->Abandon();
    } else if (!write.task->session->failed()) {
      write.task->session->Fail();
      stats.sessions_failed.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

}  // namespace ctkvr
