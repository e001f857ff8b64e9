// SPDX-License-Identifier: Apache-2.0
//
// What an error of the service says beside code and text, so that a program can act on it.
//
// Every absl::Status of this library that came from a server carries the details of google.rpc.Status as payloads
// (type URLs "type.googleapis.com/google.rpc.ErrorInfo" and ".../google.rpc.RetryInfo"); DetailOf reads them.
// Thread-safe: pure functions.

#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::client {

// Reason of the error that this library makes itself when a reply comes from another boot of the server than the one
// that opened the session. Code ABORTED: the session is gone, open a new one and append again.
inline constexpr char kReasonServerRestarted[] = "SERVER_RESTARTED";

struct ErrorDetail {
  // Upper case, for example "WRONG_POSITION"; empty when the error carries none.
  std::string reason;
  // "ctkvr" for errors of the service and of this library.
  std::string domain;
  // For example {"expected_position", "4096"}. proto/ctkvr/v1/cache.proto names the keys.
  std::map<std::string, std::string> metadata;
  // When the server says that a retry may succeed: after how long.
  std::optional<std::chrono::milliseconds> retry_delay;
};

// The details of `status`; empty for OK and for errors without details.
ErrorDetail DetailOf(const absl::Status& status);

// True for the ABORTED error described at kReasonServerRestarted.
bool IsServerRestarted(const absl::Status& status);

// The status of one item of a Retrieve or Decode reply, with its reason and metadata as details.
absl::Status StatusOf(const v1::ItemStatus& item);

}  // namespace ctkvr::client
