// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/error.h"

#include <grpcpp/support/status.h>

#include <utility>

#include "absl/strings/cord.h"
#include "client/src/status.h"
#include "google/rpc/status.pb.h"

namespace ctkvr::client {
namespace {

// A Status forgets its payloads when it is made anew.
void CopyPayloads(const absl::Status& from, absl::Status* to) {
  from.ForEachPayload([to](absl::string_view url, const absl::Cord& payload) { to->SetPayload(url, payload); });
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status rich;
  // Details that do not parse are no reason to lose the error itself.
  if (status.error_details().empty() || !rich.ParseFromString(status.error_details())) return out;
  for (const auto& detail : rich.details()) out.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  return out;
}

absl::Status MakeStatus(absl::StatusCode code, const std::string& message, const std::string& reason,
                        const std::map<std::string, std::string>& metadata) {
  absl::Status out(code, message);
  if (reason.empty() && metadata.empty()) return out;
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("ctkvr");
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  out.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return out;
}

absl::Status Annotate(const absl::Status& status, const std::string& text) {
  if (status.ok()) return status;
  absl::Status out(status.code(), text + ": " + std::string(status.message()));
  CopyPayloads(status, &out);
  return out;
}

ErrorDetail DetailOf(const absl::Status& status) {
  ErrorDetail detail;
  google::rpc::ErrorInfo info;
  if (const auto payload = status.GetPayload(kErrorInfoUrl); payload && info.ParseFromString(std::string(*payload))) {
    detail.reason = info.reason();
    detail.domain = info.domain();
    for (const auto& [key, value] : info.metadata()) detail.metadata[key] = value;
  }
  google::rpc::RetryInfo retry;
  if (const auto payload = status.GetPayload(kRetryInfoUrl); payload && retry.ParseFromString(std::string(*payload))) {
    const auto delay =
        std::chrono::seconds(retry.retry_delay().seconds()) + std::chrono::nanoseconds(retry.retry_delay().nanos());
    detail.retry_delay = std::chrono::ceil<std::chrono::milliseconds>(delay);
  }
  return detail;
}

bool IsServerRestarted(const absl::Status& status) {
  return status.code() == absl::StatusCode::kAborted && DetailOf(status).reason == kReasonServerRestarted;
}

absl::Status StatusOf(const v1::ItemStatus& item) {
  if (item.code() == 0) return absl::OkStatus();
  return MakeStatus(static_cast<absl::StatusCode>(item.code()), item.message(), item.reason(),
                    {item.metadata().begin(), item.metadata().end()});
}

}  // namespace ctkvr::client
