// SPDX-License-Identifier: Apache-2.0
//
// What a client, its sessions and its streams share: the channel, the options, and what the server said of itself.
// Thread-safe.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/src/retry.h"
#include "client/src/status.h"
#include "ctkvr/client/options.h"
#include "ctkvr/v1/cache.grpc.pb.h"

namespace ctkvr::client {

// ABORTED, SERVER_RESTARTED: the error of a reply from another boot.
absl::Status ServerRestarted(uint64_t expected_boot_id, uint64_t boot_id);

// Contacts nobody.
std::shared_ptr<grpc::Channel> MakeChannel(const ConnectOptions& options);
// Asks ConnectOptions.traceparent for the call that begins; what is no such text is left out.
void AddTraceparent(const ConnectOptions& options, grpc::ClientContext& context);

// INVALID_ARGUMENT: the token is none that can be sent. FAILED_PRECONDITION: it would cross a network in the clear.
absl::Status CheckToken(const ConnectOptions& options);
// Who calls, where the options say it.
void AddToken(const ConnectOptions& options, grpc::ClientContext& context);

class Core {
 public:
  Core(const std::shared_ptr<grpc::Channel>& channel, ConnectOptions options);

  const ConnectOptions& options() const { return options_; }
  v1::Cache::Stub& stub() const { return *stub_; }

  Deadline DeadlineOf(const CallOptions& call) const { return DeadlineOf(call, options_.timeout); }
  static Deadline DeadlineOf(const CallOptions& call, std::chrono::milliseconds otherwise) {
    return std::chrono::system_clock::now() + call.timeout.value_or(otherwise);
  }

  // A unary call with retries; `reply` is filled on success.
  template <typename Request, typename Reply>
  Outcome Call(grpc::Status (v1::Cache::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
               const Request& request, Reply* reply, Deadline deadline, Repeat repeat) const {
    return RunWithRetries(options_.retry, deadline, repeat, [&](Deadline until) {
      grpc::ClientContext context;
      context.set_deadline(until);
      AddTraceparent(options_, context);
      AddToken(options_, context);
      reply->Clear();
      return FromGrpc(((*stub_).*method)(&context, request, reply));
    });
  }

  // Asks the server and remembers the answer.
  absl::StatusOr<v1::GetServerInfoReply> FetchInfo(Deadline deadline);
  // As last heard.
  v1::ServerLimits limits() const;
  uint64_t boot_id() const;

  // OK, or ServerRestarted. The reply's own session_epoch is compared by the server (SessionRef.epoch).
  static absl::Status CheckBoot(const v1::ReplyHeader& header, uint64_t expected_boot_id);

  // A restarted server knows nothing of the session and says NOT_FOUND, or has another one of the same name. Asks which
  // boot answers, and turns such an error into ServerRestarted; any other status stays as it is.
  absl::Status ExplainSessionError(const absl::Status& status, uint64_t expected_boot_id);

 private:
  const ConnectOptions options_;
  const std::unique_ptr<v1::Cache::Stub> stub_;
  mutable std::mutex mutex_;
  v1::GetServerInfoReply info_;  // guarded by mutex_
};

}  // namespace ctkvr::client
