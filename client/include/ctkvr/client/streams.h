// SPDX-License-Identifier: Apache-2.0
//
// The two streaming calls: AppendStream for prompts, DecodeStream for the hot path.
//
// Streams are not retried. After a failed AppendStream, Session::Get gives each layer's length, and a new stream goes
// on from there; sending again what is held is acknowledged, not repeated. After a failed DecodeStream, open a new one
// and send again what was not answered: appends are idempotent by position.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/options.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

class Session;

struct AppendStreamResult {
  std::vector<uint32_t> lengths{};  // [layers]: tokens each layer holds
  uint64_t chunks = 0;              // messages sent, after splitting
  uint64_t repeated_chunks = 0;     // of these, held already
};

// Many chunks for one session, with no wait for an acknowledgement between them. Not thread-safe.
// Destroying a stream that was not finished cancels it; chunks the server took in stay.
class AppendStream {
 public:
  ~AppendStream();
  AppendStream(const AppendStream&) = delete;
  AppendStream& operator=(const AppendStream&) = delete;

  // Splits the chunk as Session::Append does, with a checksum a message. INVALID_ARGUMENT: bytes do not match the
  // layer's shape (nothing was sent). Any other error is the stream's end, as Finish would give it.
  absl::Status Write(const ChunkView& chunk);

  // Waits for the server's answer. Errors: those of Append, of the first chunk that failed; ABORTED when the server
  // was restarted. Once only.
  absl::StatusOr<AppendStreamResult> Finish();

 private:
  friend class Session;
  struct State;
  explicit AppendStream(std::unique_ptr<State> state);
  absl::Status End();

  std::unique_ptr<State> state_;
};

// One session's part of a Decode message: an append, a retrieval, or both (the append comes first).
struct DecodeEntry {
  const Session* session = nullptr;  // must be valid during Send
  std::optional<ChunkView> chunk{};  // never split: a step's few tokens
  std::optional<v1::Query> query{};  // see MakeQuery
};

// Messages of one layer each for a batch of sessions; replies come in the order of the messages, and several may be in
// flight. Thread-safe in this way: one thread may Send while another Receives; two threads must not Send at once, nor
// Receive at once. Cancel may be called from any thread.
// Destroying a stream cancels what is in flight; appends the server has done stay done.
class DecodeStream {
 public:
  ~DecodeStream();
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  // Returns the sequence number that the reply will carry: 1, 2, ...
  // INVALID_ARGUMENT: a chunk whose bytes do not match its layer's shape, or no entry. FAILED_PRECONDITION: sessions
  // of different boots. RESOURCE_EXHAUSTED: in_flight_max messages wait for Receive. UNAVAILABLE: the stream has
  // ended, and Receive says why. Nothing is sent on an error.
  absl::StatusOr<uint64_t> Send(std::span<const DecodeEntry> entries, const v1::AnswerOptions& answer);

  // Waits for the next reply. Its items follow the entries sent; each has its own status (see StatusOf).
  // FAILED_PRECONDITION: nothing is in flight. ABORTED: the reply is of another boot of the server. INTERNAL: a reply
  // out of order. Other errors: how the stream ended; every later call returns the same.
  absl::StatusOr<v1::DecodeReply> Receive();

  // Says that no more will be sent, and waits for the stream's end; replies not received are dropped.
  // Call from the thread that receives.
  absl::Status Finish();

  void Cancel();

  // Messages sent and not yet received.
  uint32_t in_flight() const;

 private:
  friend class Client;
  struct State;
  explicit DecodeStream(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

struct DecodeStreamOptions {
  // Bound on messages in flight. Without one, a sender that never receives would block for ever once both sides'
  // buffers are full.
  uint32_t in_flight_max = 64;
  CallOptions call{};
};

}  // namespace ctkvr::client
