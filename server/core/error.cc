// SPDX-License-Identifier: Apache-2.0

#include "server/core/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace ctkvr {
namespace {

// Payloads need a type URL; these are ours and never leave the process.
constexpr char kReasonUrl[] = "ctkvr/reason";
constexpr char kMetadataUrlPrefix[] = "ctkvr/metadata/";

}  // namespace

absl::Status MakeError(absl::StatusCode code, const std::string& message, const std::string& reason,
                       const std::map<std::string, std::string>& metadata) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  for (const auto& [key, value] : metadata) status.SetPayload(kMetadataUrlPrefix + key, absl::Cord(value));
  return status;
}

ErrorDetail GetErrorDetail(const absl::Status& status) {
  ErrorDetail detail;
  const std::string prefix = kMetadataUrlPrefix;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    const std::string name(url);
    if (name == kReasonUrl) {
      detail.reason = std::string(payload);
    } else if (name.compare(0, prefix.size(), prefix) == 0) {
      detail.metadata[name.substr(prefix.size())] = std::string(payload);
    }
  });
  return detail;
}

}  // namespace ctkvr
