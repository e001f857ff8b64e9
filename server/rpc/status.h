// SPDX-License-Identifier: Apache-2.0
//
// absl::Status as gRPC carries it: code and text, and google.rpc.Status (codec_status.h) in the details. Thread-safe:
// pure functions.

#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"
#include "server/rpc/codec_status.h"

namespace ctkvr::rpc {

grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace ctkvr::rpc
