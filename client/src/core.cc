// SPDX-License-Identifier: Apache-2.0
#include "client/src/core.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ctkvr/client/error.h"

namespace ctkvr::client {
namespace {

// Whether nobody between here and the address can read along.
bool StaysOnThisMachine(const std::string& address) {
  if (address.starts_with("unix:")) return true;
  const std::string host = address.substr(0, address.rfind(':'));
  if (host == "localhost" || host == "[::1]") return true;
  return host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string::npos;
}

// gRPC waits a second before it dials again, longer than all attempts of a retried call together. Its lower bound on
// that wait stays as it is: the same number bounds how long one connection may take.
constexpr int kReconnectBackoffInitialMs = 100;
constexpr int kReconnectBackoffMaxMs = 5000;

grpc::ChannelArguments ChannelArgumentsOf(const ConnectOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.receive_bytes_max));
  arguments.SetMaxSendMessageSize(-1);  // the server's limit is the one that counts
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectBackoffInitialMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectBackoffMaxMs);
  // Two clients of one process are two connections.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (options.keepalive_interval.count() > 0) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(options.keepalive_interval.count()));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(options.keepalive_timeout.count()));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  }
  return arguments;
}

// gRPC's last user waits for its background poller, now and then for ten seconds. So this process keeps gRPC for good
// once it has connected, and destroying a client stays quick.
void KeepGrpc() {
  static const bool kept = [] {
    grpc_init();
    return true;
  }();
  static_cast<void>(kept);
}

// What gRPC takes as metadata and a server may understand: else no call would get through.
bool IsTraceparent(const std::string& text) {
  const auto allowed = [](unsigned char c) { return c == '-' || absl::ascii_isalnum(c); };
  return text.size() >= 55 && std::all_of(text.begin(), text.end(), allowed);
}

}  // namespace

std::shared_ptr<grpc::Channel> MakeChannel(const ConnectOptions& options) {
  KeepGrpc();
  const auto credentials = options.credentials ? options.credentials : grpc::InsecureChannelCredentials();
  return grpc::CreateCustomChannel(options.address, credentials, ChannelArgumentsOf(options));
}

void AddTraceparent(const ConnectOptions& options, grpc::ClientContext& context) {
  if (!options.traceparent) return;
  const std::string text = options.traceparent();
  if (IsTraceparent(text)) context.AddMetadata("traceparent", text);
}

absl::Status ServerRestarted(uint64_t expected_boot_id, uint64_t boot_id) {
  return MakeStatus(absl::StatusCode::kAborted,
                    absl::StrCat("the server was restarted: boot id ", absl::Hex(boot_id),
                                 " answers, the session is of ", absl::Hex(expected_boot_id)),
                    kReasonServerRestarted,
                    {{"boot_id", std::to_string(boot_id)}, {"expected_boot_id", std::to_string(expected_boot_id)}});
}

absl::Status CheckToken(const ConnectOptions& options) {
  if (options.token.empty()) return absl::OkStatus();
  // What else may stand in a header is nobody's token, and gRPC ends the process over it.
  const auto sendable = [](unsigned char c) { return c > 0x20 && c < 0x7f; };
  if (!std::all_of(options.token.begin(), options.token.end(), sendable)) {
    return absl::InvalidArgumentError("token has characters that no token has");
  }
  if (options.credentials || options.allow_plaintext_token || StaysOnThisMachine(options.address)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(options.address,
                                                    " would get the token unencrypted; give "
                                                    "credentials, or allow_plaintext_token"));
}

void AddToken(const ConnectOptions& options, grpc::ClientContext& context) {
  if (!options.token.empty()) context.AddMetadata("authorization", "Bearer " + options.token);
}

Core::Core(const std::shared_ptr<grpc::Channel>& channel, ConnectOptions options)
    : options_(std::move(options)), stub_(v1::Cache::NewStub(channel)) {}

absl::StatusOr<v1::GetServerInfoReply> Core::FetchInfo(Deadline deadline) {
  v1::GetServerInfoReply reply;
  const Outcome outcome =
      Call(&v1::Cache::Stub::GetServerInfo, v1::GetServerInfoRequest(), &reply, deadline, Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  const std::lock_guard lock(mutex_);
  info_ = reply;
  return reply;
}

v1::ServerLimits Core::limits() const {
  const std::lock_guard lock(mutex_);
  return info_.limits();
}

uint64_t Core::boot_id() const {
  const std::lock_guard lock(mutex_);
  return info_.header().boot_id();
}

absl::Status Core::CheckBoot(const v1::ReplyHeader& header, uint64_t expected_boot_id) {
  if (header.boot_id() == expected_boot_id) return absl::OkStatus();
  return ServerRestarted(expected_boot_id, header.boot_id());
}

absl::Status Core::ExplainSessionError(const absl::Status& status, uint64_t expected_boot_id) {
  const bool unknown = status.code() == absl::StatusCode::kNotFound;
  const bool other_session =
      status.code() == absl::StatusCode::kFailedPrecondition && DetailOf(status).reason == "EPOCH_MISMATCH";
  if (!unknown && !other_session) return status;
  const auto info = FetchInfo(DeadlineOf({}));
  if (!info.ok()) return status;
  const absl::Status boot = CheckBoot(info->header(), expected_boot_id);
  return boot.ok() ? status : boot;
}

}  // namespace ctkvr::client
