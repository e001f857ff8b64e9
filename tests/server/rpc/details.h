// SPDX-License-Identifier: Apache-2.0
//
// What a client reads from an error's details, and matchers for gRPC statuses. Thread-safe: pure functions.

#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <string>

#include "google/rpc/status.pb.h"

namespace ctkvr::testing {

template <typename Detail>
Detail DetailOf(const grpc::Status& status) {
  google::rpc::Status details;
  Detail detail;
  if (!details.ParseFromString(status.error_details())) return detail;
  for (const auto& any : details.details()) {
    if (any.UnpackTo(&detail)) break;
  }
  return detail;
}

inline std::string ReasonOf(const grpc::Status& status) { return DetailOf<google::rpc::ErrorInfo>(status).reason(); }

inline std::string MetadataOf(const grpc::Status& status, const std::string& key) {
  const auto info = DetailOf<google::rpc::ErrorInfo>(status);
  const auto found = info.metadata().find(key);
  return found == info.metadata().end() ? "" : found->second;
}

// 0 where no retry is proposed.
inline double RetrySecondsOf(const grpc::Status& status) {
  const auto retry = DetailOf<google::rpc::RetryInfo>(status);
  return static_cast<double>(retry.retry_delay().seconds()) + 1e-9 * retry.retry_delay().nanos();
}

MATCHER(IsRpcOk, "is OK") {
  *result_listener << arg.error_code() << ": " << arg.error_message();
  return arg.ok();
}

MATCHER_P2(IsRpc, code, text, "has such a code and text") {
  *result_listener << arg.error_code() << ": " << arg.error_message();
  return arg.error_code() == code && arg.error_message().find(text) != std::string::npos;
}

}  // namespace ctkvr::testing
