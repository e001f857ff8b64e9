// SPDX-License-Identifier: Apache-2.0

#include "server/obs/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace ctkvr::obs {
namespace {

constexpr size_t kNameBytesMax = 64;

// Letters, digits, '-' and '_' alone: neither a path nor a dot gets through.
std::string SafeName(const std::string& id) {
  std::string name = id.substr(0, kNameBytesMax);
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
    if (!plain) c = '_';
  }
  return name;
}

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  return file ? absl::OkStatus() : absl::InternalError("cannot write " + path);
}

// [tokens, heads, dim] of dtype, to a .npy of [heads, tokens, dim] binary16.
std::string Npy(const std::string& rows, DType dtype, uint32_t tokens, uint32_t heads) {
  const size_t elements = rows.size() / DTypeBytes(dtype);
  const size_t dim = elements / tokens / heads;
  std::string header =
      absl::StrCat("{'descr': '<f2', 'fortran_order': False, 'shape': (", heads, ", ", tokens, ", ", dim, "), }");
  // Magic, version and length are 10 bytes; data begins at a multiple of 64.
  header.resize((header.size() + 10 + 64) / 64 * 64 - 10, ' ');
  header.back() = '\n';
  std::string npy("\x93NUMPY\x01\x00", 8);
  npy += static_cast<char>(header.size() & 0xff);
  npy += static_cast<char>(header.size() >> 8);
  npy += header;
  const size_t first = npy.size();
  npy.resize(first + elements * sizeof(uint16_t));
  auto* const to = reinterpret_cast<std::byte*>(npy.data() + first);
  const auto* const from = reinterpret_cast<const std::byte*>(rows.data());
  size_t next = 0;
  for (size_t head = 0; head < heads; ++head) {
    for (size_t token = 0; token < tokens; ++token) {
      const size_t row = (token * heads + head) * dim;
      for (size_t i = 0; i < dim; ++i) StoreElement(to, DType::kF16, next++, LoadElement(from, dtype, row + i));
    }
  }
  return npy;
}

nlohmann::json SelectionJson(const Selection& selection) {
  return {{"k_tokens", selection.k_tokens},
          {"sink_tokens", selection.sink_tokens},
          {"window_tokens", selection.window_tokens},
          {"keep_share", selection.keep_share},
          {"refine_planes", selection.refine_planes},
          {"candidate_tokens", selection.candidate_tokens},
          {"probes", selection.probes}};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Recorder>> Recorder::Create(const Options& options, Log& log) {
  std::error_code error;
  if (!std::filesystem::is_directory(options.directory, error) || access(options.directory.c_str(), W_OK) != 0) {
    return absl::InvalidArgumentError("record is \"" + options.directory + "\"; it must be a directory to write to");
  }
  return std::unique_ptr<Recorder>(new Recorder(options, log));
}

Recorder::Recorder(const Options& options, Log& log) : options_(options), log_(log), thread_([this] { Loop(); }) {}

Recorder::~Recorder() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_cv_.notify_one();
  thread_.join();
}

// ---- On lanes ------------------------------------------------------------------------------------------------------

Recorder::SessionRecord* Recorder::Take(uint64_t epoch, uint64_t bytes) {
  const auto found = sessions_.find(epoch);
  if (found == sessions_.end() || !found->second->complete) return nullptr;
  SessionRecord& record = *found->second;
  if (bytes > options_.bytes_max - bytes_) {
    record.complete = false;
    return nullptr;
  }
  bytes_ += bytes;
  record.bytes += bytes;
  return &record;
}

void Recorder::Opened(const std::string& id, uint64_t epoch, const SessionConfig& config) {
  auto record = std::make_unique<SessionRecord>();
  record->id = id;
  record->epoch = epoch;
  record->config = config;
  record->layers.resize(config.layers.size());
  const std::lock_guard lock(mutex_);
  sessions_[epoch] = std::move(record);
}

void Recorder::Appended(uint64_t epoch, const Chunk& chunk) {
  const std::lock_guard lock(mutex_);
  SessionRecord* const record = Take(epoch, chunk.keys.size() + chunk.values.size() + chunk.queries.size());
  if (record == nullptr) return;
  LayerRecord& layer = record->layers[chunk.layer];
  const auto text = [](std::span<const std::byte> bytes) {
    return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  layer.keys += text(chunk.keys);
  layer.values += text(chunk.values);
  layer.tokens = chunk.first_position + chunk.tokens;
  for (uint32_t i = 0; i < chunk.query_positions; ++i) {
    const size_t bytes = chunk.queries.size() / chunk.query_positions;
    layer.queries[layer.tokens - chunk.query_positions + i] = text(chunk.queries.subspan(i * bytes, bytes));
  }
}

void Recorder::Truncated(uint64_t epoch, uint32_t length) {
  const std::lock_guard lock(mutex_);
  SessionRecord* const record = Take(epoch, 0);
  if (record == nullptr) return;
  for (LayerRecord& layer : record->layers) {
    if (layer.tokens <= length) continue;
    layer.keys.resize(layer.keys.size() / layer.tokens * length);
    layer.values.resize(layer.values.size() / layer.tokens * length);
    layer.tokens = length;
    layer.queries.erase(layer.queries.lower_bound(length), layer.queries.end());
    layer.answers.erase(layer.answers.lower_bound(length), layer.answers.end());
  }
}

void Recorder::Answered(uint64_t epoch, const Query& query, const Answer& answer,
                        const std::vector<std::vector<uint32_t>>& chosen) {
  const uint32_t last = query.position + query.positions - 1;
  AnswerRecord own{.source = answer.source,
                   .used = answer.used,
                   .explanation = *answer.explanation,
                   .bytes_read = answer.bytes_read,
                   .chosen = chosen};
  uint64_t held = query.queries.size() + sizeof(AnswerRecord);
  for (const std::vector<uint32_t>& tokens : chosen) held += tokens.size() * sizeof(uint32_t);
  const std::lock_guard lock(mutex_);
  SessionRecord* const record = Take(epoch, held);
  if (record == nullptr) return;
  LayerRecord& layer = record->layers[query.layer];
  const size_t bytes = query.queries.size() / query.positions;
  for (uint32_t i = 0; i < query.positions; ++i) {
    const auto* const from = reinterpret_cast<const char*>(query.queries.data()) + i * bytes;
    layer.queries[query.position + i].assign(from, bytes);
  }
  layer.answers[last] = std::move(own);
}

void Recorder::Ended(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(epoch);
  if (found == sessions_.end()) return;
  ended_.push_back(std::move(found->second));
  sessions_.erase(found);
  work_cv_.notify_one();
}

// ---- Writing -------------------------------------------------------------------------------------------------------

void Recorder::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_cv_.wait(lock, [this] { return stopping_ || !ended_.empty(); });
    if (ended_.empty()) return;
    const std::unique_ptr<SessionRecord> record = std::move(ended_.front());
    ended_.pop_front();
    lock.unlock();
    Write(*record);
    lock.lock();
    bytes_ -= record->bytes;
  }
}

void Recorder::Write(const SessionRecord& record) {
  namespace fs = std::filesystem;
  const std::string name = absl::StrCat(SafeName(record.id), "-", absl::Hex(record.epoch, absl::kZeroPad16));
  const fs::path whole = fs::path(options_.directory) / name, partial = whole.string() + ".partial";
  std::error_code error;
  fs::create_directory(partial, error);
  absl::Status status = error ? absl::InternalError("cannot make " + partial.string()) : absl::OkStatus();
  for (uint32_t i = 0; i < record.layers.size() && status.ok(); ++i) {
    status = WriteLayer(record, i, absl::StrCat(partial.string(), "/layer", i < 10 ? "0" : "", i));
  }
  if (status.ok()) {
    fs::rename(partial, whole, error);
    if (error) status = absl::InternalError("cannot rename " + partial.string());
  }
  if (status.ok()) {
    log_.Info("recorded", {{"folder", whole.string()}, {"complete", record.complete}});
    return;
  }
  fs::remove_all(partial, error);
  log_.Error("record_failed", {{"message", std::string(status.message())}});
}

std::string Recorder::Line(uint32_t position, const AnswerRecord& answer) {
  const nlohmann::json line = {{"position", position},
                               {"source", SourceName(answer.source)},
                               {"reason", SelectionReasonName(answer.explanation.reason)},
                               {"used", SelectionJson(answer.used)},
                               {"bytes_read", answer.bytes_read},
                               {"scanned", answer.explanation.scanned},
                               {"survivors", answer.explanation.survivors},
                               {"candidates", answer.explanation.candidates},
                               {"scored", answer.explanation.scored},
                               {"chosen", answer.chosen}};
  return line.dump() + "\n";
}

absl::Status Recorder::WriteLayer(const SessionRecord& record, uint32_t layer, const std::string& folder) const {
  const LayerRecord& own = record.layers[layer];
  const LayerConfig& config = record.config.layers[layer];
  if (own.answers.empty()) return absl::OkStatus();
  const uint32_t prompt = own.answers.begin()->first;
  uint32_t end = prompt, first = prompt;
  while (end < own.tokens && own.queries.contains(end)) ++end;
  while (first > 0 && own.queries.contains(first - 1)) --first;
  if (end == prompt || prompt == 0) return absl::OkStatus();
  std::string queries, answers;
  for (uint32_t position = first; position < end; ++position) queries += own.queries.at(position);
  for (const auto& [position, answer] : own.answers) answers += Line(position, answer);
  const nlohmann::json meta = {{"tokens", end},
                               {"prompt_tokens", prompt},
                               {"query_first_position", first},
                               {"scale", config.softmax.scale},
                               {"session_id", record.id},
                               {"layer", layer},
                               {"format", FormatName(config.format)},
                               {"first_planes", record.config.first_planes},
                               {"rotation_seed", record.config.rotation_seed},
                               {"selection", SelectionJson(config.selection)},
                               {"complete", record.complete && end == own.tokens}};
  std::error_code error;
  std::filesystem::create_directory(folder, error);
  const auto rows = [&](const std::string& bytes) { return bytes.substr(0, bytes.size() / own.tokens * end); };
  const DType dtype = record.config.dtype;
  CTKVR_RETURN_IF_ERROR(WriteFile(folder + "/q.npy", Npy(queries, dtype, end - first, config.q_heads)));
  CTKVR_RETURN_IF_ERROR(WriteFile(folder + "/k.npy", Npy(rows(own.keys), dtype, end, config.kv_heads)));
  CTKVR_RETURN_IF_ERROR(WriteFile(folder + "/v.npy", Npy(rows(own.values), dtype, end, config.kv_heads)));
  CTKVR_RETURN_IF_ERROR(WriteFile(folder + "/answers.jsonl", answers));
  // Ids are any bytes: what is not UTF-8 is replaced.
  return WriteFile(folder + "/meta.json", meta.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace ctkvr::obs
