// SPDX-License-Identifier: Apache-2.0
//
// The one door: every call of every service of a port, reflection and names that nobody serves included, is refused
// here unless access.h knows its caller. Only health goes through, for probes have no token.
//
// gRPC's C++ interface has such a door for TLS alone, so this one is hung into the C credentials, encrypted or not.

#pragma once

#include <memory>

#include "grpc/grpc_security.h"
#include "grpcpp/security/server_credentials.h"
#include "server/rpc/access.h"

namespace ctkvr::rpc {

// Calls to these go through: its name, a slash at both ends.
inline constexpr char kHealthPath[] = "/grpc.health.v1.Health/";

// Takes `credentials`. `access` must outlive the server. Thread-safe.
std::shared_ptr<grpc::ServerCredentials> GuardCredentials(grpc_server_credentials* credentials, Access& access);

}  // namespace ctkvr::rpc
