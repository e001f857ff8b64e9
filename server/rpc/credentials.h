// SPDX-License-Identifier: Apache-2.0
//
// How connections are encrypted and clients told apart: TLS from files that are read again when they change, so that
// rotated certificates need no restart. Thread-safe: values.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "server/rpc/access.h"

namespace ctkvr::rpc {

// How often files are looked at, seconds. Connections that are there keep what they began with.
inline constexpr unsigned kCertificateRefreshSeconds = 2;

// Paths of PEM files; all empty: plaintext.
struct TlsFiles {
  std::string certificate;  // the server's, with the chain behind it
  std::string key;          // its private key, not encrypted
  std::string client_ca;    // who signs clients' certificates; empty: clients need none
};

// Plaintext, TLS, or mutual TLS: with `client_ca`, a connection without a certificate that it signed is refused in the
// handshake, before any call. Calls go through the gate of `access` (gate.h), which must outlive the server. TLS 1.2 at
// least. Also starts to watch the files.
// INVALID_ARGUMENT: one of certificate and key is missing, client_ca stands alone, or a file cannot be read or holds no
// PEM; names the setting and the path.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const TlsFiles& files, Access& access);

}  // namespace ctkvr::rpc
