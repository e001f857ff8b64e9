// SPDX-License-Identifier: Apache-2.0
//
// Between grpc::Status and absl::Status, details kept. Thread-safe: pure functions.

#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <string>

#include "absl/status/status.h"

namespace ctkvr::client {

inline constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
inline constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";

// Code and text as they are; the details of google.rpc.Status become payloads, one a type URL.
absl::Status FromGrpc(const grpc::Status& status);

// An error of this library, or of an item, with an ErrorInfo where there is a reason.
absl::Status MakeStatus(absl::StatusCode code, const std::string& message, const std::string& reason,
                        const std::map<std::string, std::string>& metadata = {});

// The same error with `text` in front of its message.
absl::Status Annotate(const absl::Status& status, const std::string& text);

}  // namespace ctkvr::client
