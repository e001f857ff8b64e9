// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/codec_status.h"

#include <cmath>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "server/core/error.h"

namespace ctkvr::rpc {
namespace {

// Only what the server refused for lack of room: those calls changed nothing, so a retry is safe.
std::optional<double> RetrySeconds(const absl::Status& status, const ErrorDetail& detail) {
  if (status.code() != absl::StatusCode::kResourceExhausted) return std::nullopt;
  const std::string& reason = detail.reason;
  if (reason == kReasonQueueFull || reason == kReasonQueueQuota) return kRetryQueueSeconds;
  for (const char* room : {kReasonArenaFull, kReasonSessionLimit, kReasonMemoryQuota, kReasonSessionQuota}) {
    if (reason == room) return kRetryMemorySeconds;
  }
  int64_t milliseconds = 0;
  const auto found = detail.metadata.find("retry_ms");
  if (found == detail.metadata.end() || !absl::SimpleAtoi(found->second, &milliseconds)) return std::nullopt;
  return static_cast<double>(milliseconds) / 1000;
}

std::string MessageOf(const absl::Status& status) {
  return CapMessage(std::string(status.message().data(), status.message().size()));
}

}  // namespace

std::string CapMessage(const std::string& message) {
  if (message.size() <= kErrorMessageBytesMax) return message;
  size_t end = kErrorMessageBytesMax;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return message.substr(0, end);
}

google::rpc::Status EncodeStatus(const absl::Status& status) {
  google::rpc::Status full;
  if (status.ok()) return full;
  const ErrorDetail detail = GetErrorDetail(status);
  full.set_code(static_cast<int>(status.code()));
  full.set_message(MessageOf(status));
  if (!detail.reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(detail.reason);
    info.set_domain(kErrorDomain);
    info.mutable_metadata()->insert(detail.metadata.begin(), detail.metadata.end());
    full.add_details()->PackFrom(info);
  }
  if (const auto seconds = RetrySeconds(status, detail)) {
    google::rpc::RetryInfo retry;
    const double whole = std::floor(*seconds);
    retry.mutable_retry_delay()->set_seconds(static_cast<int64_t>(whole));
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(std::lround((*seconds - whole) * 1e9)));
    full.add_details()->PackFrom(retry);
  }
  return full;
}

void EncodeItemStatus(const absl::Status& status, v1::ItemStatus* item) {
  if (status.ok()) return;
  ErrorDetail detail = GetErrorDetail(status);
  item->set_code(static_cast<int>(status.code()));
  item->set_message(MessageOf(status));
  item->set_reason(std::move(detail.reason));
  item->mutable_metadata()->insert(detail.metadata.begin(), detail.metadata.end());
}

}  // namespace ctkvr::rpc
