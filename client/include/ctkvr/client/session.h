// SPDX-License-Identifier: Apache-2.0
//
// A handle to one session on a server: append, retrieve, roll back, close.
//
// Lifetime. Destroying the handle frees nothing on the server unless OpenOptions.close_on_destroy was set: a worker
// that is restarted can attach to its session again (Client::AttachSession), and a destructor that waits for the
// network is a surprise. A session ends by Close, or when no call has named it for its lease.
//
// Identity. The handle carries the epoch and the boot id under which the session was opened; both are compared with
// every reply. A session of the same name that someone opened later, or that a restarted server holds, is never taken
// for this one: FAILED_PRECONDITION (reason EPOCH_MISMATCH), or ABORTED (reason SERVER_RESTARTED, see error.h).
//
// Thread-safe: all methods may be called at once. The server applies a session's calls in the order they arrive, so
// appends that must follow each other need the caller's own order.
//
// Errors common to all methods: NOT_FOUND (closed, or its lease ran out), FAILED_PRECONDITION (epoch, fingerprint,
// failed session), ABORTED (server restarted), RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED after the retries
// that options.h describes. Each call's own codes: proto/ctkvr/v1/cache.proto.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/options.h"
#include "ctkvr/client/streams.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

class Core;

struct AppendResult {
  uint32_t length = 0;           // tokens the layer holds now
  uint32_t chunks = 0;           // messages sent, after splitting
  uint32_t repeated_chunks = 0;  // of these, held already
};

class Session {
 public:
  ~Session();
  Session(Session&& other) noexcept;
  Session& operator=(Session&& other) noexcept;

  const std::string& id() const;
  uint64_t epoch() const;
  uint64_t boot_id() const;
  // As the server resolved them: every default filled in.
  const v1::SessionOptions& options() const;
  // What requests name the session by.
  v1::SessionRef ref() const;
  // OUT_OF_RANGE: a layer that is not there.
  absl::StatusOr<LayerShape> Shape(uint32_t layer) const;

  // Adds tokens to one layer, in as many messages as the server's limits and ConnectOptions.append_bytes ask for, each
  // with its XXH3 checksum. Each message is atomic; when one fails, the earlier ones stay, and the whole chunk may
  // simply be appended again. INVALID_ARGUMENT: bytes do not match the shape. OUT_OF_RANGE: wrong position (the error's
  // metadata has "expected_position") or the token limit. ALREADY_EXISTS: other bytes are held there.
  absl::StatusOr<AppendResult> Append(const ChunkView& chunk, const CallOptions& call = {}) const;

  // The streaming form, for prompts.
  absl::StatusOr<std::unique_ptr<AppendStream>> StartAppend(const CallOptions& call = {}) const;

  // Which tokens matter to these queries. See MakeQuery, AnswerView, RowDecoder and AttentionOf.
  absl::StatusOr<v1::Answer> Retrieve(const v1::Query& query, const v1::AnswerOptions& answer,
                                      const CallOptions& call = {}) const;

  // Forgets positions at and after `length` in every layer; returns how many tokens each layer lost.
  // FAILED_PRECONDITION: a layer holds fewer.
  absl::StatusOr<std::vector<uint32_t>> Truncate(uint32_t length, const CallOptions& call = {}) const;

  // Takes the tail into the index now and waits for it (ConnectOptions.maintain_timeout). `layers` empty: all.
  // Returns each layer's indexed length.
  absl::StatusOr<std::vector<uint32_t>> Maintain(const std::vector<uint32_t>& layers = {},
                                                 const CallOptions& call = {}) const;

  absl::StatusOr<v1::SessionInfo> Get(const CallOptions& call = {}) const;

  // Renews the lease, as every call does; returns the seconds it has left.
  absl::StatusOr<uint32_t> KeepAlive(const CallOptions& call = {}) const;

  // Frees everything on the server; returns the bytes freed (0 when a repeated attempt finds it closed already).
  // Later calls return NOT_FOUND.
  absl::StatusOr<uint64_t> Close(const CallOptions& call = {});

 private:
  friend class Client;
  friend class DecodeStream;
  struct State;
  explicit Session(std::unique_ptr<State> state);
  void CloseIfOwned();

  std::unique_ptr<State> state_;
};

}  // namespace ctkvr::client
