// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/status.h"

namespace ctkvr::rpc {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status full = EncodeStatus(status);
  return {static_cast<grpc::StatusCode>(status.code()), full.message(), full.SerializeAsString()};
}

}  // namespace ctkvr::rpc
