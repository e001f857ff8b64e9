// SPDX-License-Identifier: Apache-2.0
//
// Records sessions that ask for it, as traces that `ctkvr-cli replay` reads: a folder a session, <name>-<epoch>, in it
// a folder a layer, layerNN, with q.npy, k.npy, v.npy and meta.json (client/README.md) and answers.jsonl, a line an
// answered position: source, reason, settings, what each stage looked at, and the chosen tokens of each set. `name` is
// the session's id with every byte but letters, digits, '-' and '_' replaced. A folder appears when its session ends,
// whole, or not at all.
//
// A trace begins with the first token. It is decoded from the first answered position on, and ends before the first
// position whose query is not known; a layer without answers is left out. Tensors become binary16.
//
// Thread-safe. Lanes copy into memory; files are written on a thread of the recorder's own.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/observer.h"
#include "server/obs/logging.h"

namespace ctkvr::obs {

class Recorder final : public SessionObserver {
 public:
  struct Options {
    std::string directory;   // exists
    uint64_t bytes_max = 0;  // that all recorded sessions may hold; what is over it is left out
  };
  // INVALID_ARGUMENT: no such directory, or it cannot be written to. `log` must outlive the recorder.
  static absl::StatusOr<std::unique_ptr<Recorder>> Create(const Options& options, Log& log);
  ~Recorder() override;  // writes what has ended

  void Opened(const std::string& id, uint64_t epoch, const SessionConfig& config) override;
  void Appended(uint64_t epoch, const Chunk& chunk) override;
  void Truncated(uint64_t epoch, uint32_t length) override;
  void Answered(uint64_t epoch, const Query& query, const Answer& answer,
                const std::vector<std::vector<uint32_t>>& chosen) override;
  void Ended(uint64_t epoch) override;

 private:
  struct AnswerRecord {
    Source source = Source::kDense;
    Selection used;
    Explanation explanation;
    uint64_t bytes_read = 0;
    std::vector<std::vector<uint32_t>> chosen;  // [sets]
  };
  struct LayerRecord {
    uint32_t tokens = 0;
    std::string keys, values;                  // [tokens, heads, dim] of the session's dtype
    std::map<uint32_t, std::string> queries;   // by position: [q_heads, head_dim] of it
    std::map<uint32_t, AnswerRecord> answers;  // by position
  };
  struct SessionRecord {
    std::string id;
    uint64_t epoch = 0;
    SessionConfig config;
    std::vector<LayerRecord> layers;
    uint64_t bytes = 0;
    bool complete = true;
  };

  Recorder(const Options& options, Log& log);
  // Null: not recorded, or over the limit. Takes `bytes` for it. Called under the lock.
  SessionRecord* Take(uint64_t epoch, uint64_t bytes);
  void Loop();
  void Write(const SessionRecord& record);
  static std::string Line(uint32_t position, const AnswerRecord& answer);
  absl::Status WriteLayer(const SessionRecord& record, uint32_t layer, const std::string& folder) const;

  const Options options_;
  Log& log_;
  std::mutex mutex_;  // guards all below
  std::condition_variable work_cv_;
  std::map<uint64_t, std::unique_ptr<SessionRecord>> sessions_;  // by epoch
  std::deque<std::unique_ptr<SessionRecord>> ended_;
  uint64_t bytes_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ctkvr::obs
