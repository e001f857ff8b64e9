// SPDX-License-Identifier: Apache-2.0
//
// A server that does as a test says: it keeps no tokens, answers with plausible replies, and fails the calls that the
// test has scripted. Listens on 127.0.0.1, port 0. Thread-safe.

#pragma once

#include <grpcpp/server.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ctkvr/v1/cache.grpc.pb.h"

namespace ctkvr::testing {

// An error with google.rpc details. retry_ms < 0: no RetryInfo.
grpc::Status RichError(grpc::StatusCode code, const std::string& message, const std::string& reason,
                       const std::map<std::string, std::string>& metadata = {}, int64_t retry_ms = -1);

class FakeCache final : public v1::Cache::Service {
 public:
  // The next calls of `method` ("Append") end like this, in order; then calls succeed again. An OK in the script lets
  // one call through.
  void Script(const std::string& method, std::vector<grpc::Status> outcomes);
  // Takes effect on the next reply.
  void SetBootId(uint64_t boot_id);
  void SetLimits(const v1::ServerLimits& limits);
  // In place of an empty answer.
  void SetAnswer(const v1::Answer& answer);
  // Decode: holds every reply back until ReleaseReplies.
  void HoldReplies();
  void ReleaseReplies();
  // Decode: sequence numbers of replies start this far off.
  void SetSequenceOffset(uint64_t offset);

  uint32_t calls(const std::string& method) const;
  std::vector<v1::AppendRequest> appends() const;
  bool open(const std::string& session_id) const;

 private:
  template <typename T>
  using Reader = grpc::ServerReader<T>;

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*, v1::GetServerInfoReply*) override;
  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*, v1::OpenSessionReply*) override;
  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest*, v1::CloseSessionReply*) override;
  grpc::Status TruncateSession(grpc::ServerContext*, const v1::TruncateSessionRequest*,
                               v1::TruncateSessionReply*) override;
  grpc::Status GetSession(grpc::ServerContext*, const v1::GetSessionRequest*, v1::GetSessionReply*) override;
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest*, v1::ListSessionsReply*) override;
  grpc::Status KeepAlive(grpc::ServerContext*, const v1::KeepAliveRequest*, v1::KeepAliveReply*) override;
  grpc::Status MaintainSession(grpc::ServerContext*, const v1::MaintainSessionRequest*,
                               v1::MaintainSessionReply*) override;
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest*, v1::AppendReply*) override;
  grpc::Status AppendStream(grpc::ServerContext*, Reader<v1::AppendRequest>*, v1::AppendStreamReply*) override;
  grpc::Status Retrieve(grpc::ServerContext*, const v1::RetrieveRequest*, v1::RetrieveReply*) override;
  grpc::Status Decode(grpc::ServerContext*, grpc::ServerReaderWriter<v1::DecodeReply, v1::DecodeRequest>*) override;

  // Counts the call and takes its scripted outcome.
  grpc::Status Enter(const std::string& method);
  v1::ReplyHeader Header() const;
  grpc::Status Find(const v1::SessionRef& ref, v1::SessionInfo* info) const;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  bool hold_ = false;
  uint64_t boot_id_ = 0xb001;
  uint64_t epoch_ = 100;
  uint64_t sequence_offset_ = 0;
  v1::ServerLimits limits_;
  v1::Answer answer_;
  std::map<std::string, std::deque<grpc::Status>> scripts_;
  std::map<std::string, uint32_t> calls_;
  std::map<std::string, v1::SessionInfo> sessions_;
  std::vector<v1::AppendRequest> appends_;
};

class FakeServer {
 public:
  FakeServer();
  ~FakeServer();

  FakeCache& cache() { return cache_; }
  const std::string& address() const { return address_; }
  // Ends the process of the server, as far as a client can tell.
  void Stop();

 private:
  FakeCache cache_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ctkvr::testing
