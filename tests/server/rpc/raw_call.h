// SPDX-License-Identifier: Apache-2.0
//
// Calls of services whose protos are not part of this repository (health, reflection), by their bytes. Thread-safe.

#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace ctkvr::testing {

struct RawReply {
  grpc::Status status;
  std::string bytes;  // of the first message
};
// Sends one message and reads one, whatever kind of call it is. `token`: who calls; empty: nobody says.
RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& bytes,
                 const std::string& token = "");

// grpc.health.v1: 1 SERVING, 2 NOT_SERVING; minus the status code where the call failed.
int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);

}  // namespace ctkvr::testing
