// SPDX-License-Identifier: Apache-2.0
//
// The way in: a connection to one ctkvr server.
//
//   ctkvr::client::ConnectOptions options{.address = "127.0.0.1:7420"};
//   auto client = ctkvr::client::Client::Connect(options);          // absl::StatusOr<std::unique_ptr<Client>>
//   auto session = (*client)->OpenSession(session_options);         // absl::StatusOr<Session>
//   session->Append(chunk);  session->Retrieve(query, answer_options);
//
// client/examples/quickstart.cc is a whole program. Nothing throws; every failure is an absl::Status with the
// server's details (error.h). Thread-safe: all methods may be called at once; one client a process is enough.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/answer.h"
#include "ctkvr/client/attention.h"
#include "ctkvr/client/error.h"
#include "ctkvr/client/options.h"
#include "ctkvr/client/row_cache.h"
#include "ctkvr/client/row_decoder.h"
#include "ctkvr/client/session.h"
#include "ctkvr/client/streams.h"
#include "ctkvr/client/tensor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

struct OpenOptions {
  // 1 to 128 bytes. Empty: the client draws a random one before its first attempt, so that a retry cannot open twice.
  std::string session_id{};
  // The destructor of the handle closes the session, waits up to two seconds for it and ignores the outcome.
  bool close_on_destroy = false;
};

struct AttachOptions {
  std::string session_id{};
  // Compared when not 0.
  uint64_t epoch = 0;
  // Compared when not empty, with this call and all later ones.
  std::string fingerprint{};
};

// One item of Client::Retrieve.
struct RetrieveEntry {
  const Session* session = nullptr;
  v1::Query query{};
};

class Client {
 public:
  // Connects and asks for the server's limits. UNAVAILABLE: nobody answers at the address.
  // UNAUTHENTICATED: the server wants another token. FAILED_PRECONDITION: the token would cross a network in the clear.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ConnectOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Version, boot id, backend, limits, memory: as of now.
  absl::StatusOr<v1::GetServerInfoReply> ServerInfo(const CallOptions& call = {}) const;

  // Admits the memory of the whole token limit, or refuses. INVALID_ARGUMENT: the message names field and limit.
  // RESOURCE_EXHAUSTED: no room, also after the retries the server asked for. ALREADY_EXISTS: the id is in use;
  // after an attempt whose answer was lost it may be in use by this very call, and AttachSession tells.
  absl::StatusOr<Session> OpenSession(const v1::SessionOptions& options, const OpenOptions& open = {},
                                      const CallOptions& call = {}) const;

  // A handle to a session that is open already. NOT_FOUND, FAILED_PRECONDITION (epoch or fingerprint differ).
  absl::StatusOr<Session> AttachSession(const AttachOptions& attach, const CallOptions& call = {}) const;

  absl::StatusOr<v1::SessionInfo> GetSession(const std::string& session_id, const CallOptions& call = {}) const;

  // Every session, by id, read page by page: sessions opened or closed meanwhile may be missing or gone.
  absl::StatusOr<std::vector<v1::ListSessionsReply::Entry>> ListSessions(const CallOptions& call = {}) const;

  // Retrieval for several sessions or layers in one call. Items follow the entries; with two or more entries each item
  // has its own status (see StatusOf), with one its error is the call's. FAILED_PRECONDITION: sessions of different
  // boots. ABORTED: the server was restarted.
  absl::StatusOr<v1::RetrieveReply> Retrieve(std::span<const RetrieveEntry> entries, const v1::AnswerOptions& answer,
                                             const CallOptions& call = {}) const;

  // Starts a stream for the hot path; any sessions of this server may use it.
  std::unique_ptr<DecodeStream> StartDecode(const DecodeStreamOptions& options = {}) const;

 private:
  explicit Client(std::shared_ptr<Core> core);

  std::shared_ptr<Core> core_;  // shared with the sessions and streams, which may outlive the client
};

}  // namespace ctkvr::client
