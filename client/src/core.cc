// SPDX-License-Identifier: Apache-2.0
#include "client/src/core.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ctkvr/client/error.h"

namespace ctkvr::client {

absl::Status ServerRestarted(uint64_t expected_boot_id, uint64_t boot_id) {
  return MakeStatus(absl::StatusCode::kAborted,
                    absl::StrCat("the server was restarted: boot id ", absl::Hex(boot_id),
                                 " answers, the session is of ", absl::Hex(expected_boot_id)),
                    kReasonServerRestarted,
                    {{"boot_id", std::to_string(boot_id)}, {"expected_boot_id", std::to_string(expected_boot_id)}});
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
