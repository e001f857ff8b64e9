// SPDX-License-Identifier: Apache-2.0
//
// How the command line connects to a server that wants TLS. Thread-safe: pure functions.

#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
}

namespace ctkvr::cli {

// Paths of PEM files.
struct TlsFlags {
  std::string ca;           // who signed the server's certificate; empty: plaintext
  std::string certificate;  // of this client, where the server wants one
  std::string key;
};
void AddTlsFlags(CLI::App* app, TlsFlags* flags);

// Null for plaintext. INVALID_ARGUMENT: certificate or key without the other or without ca, or a file that cannot be
// read.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const TlsFlags& flags);

}  // namespace ctkvr::cli
