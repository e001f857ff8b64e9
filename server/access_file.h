// SPDX-License-Identifier: Apache-2.0
//
// The access file: who may call, as TOML. `ctkvr-cli token` makes a token and the line for it.
//
//   [[tenant]]
//   name = "research"                    # letters, digits, "_", "-" and "."; a label of metrics
//   admin = false                        # may call service ctkvr.v1.Admin
//   tokens = [{sha256 = "9f86…", expires = 2027-01-01T00:00:00Z}]
//   certificates = ["worker.research"]   # subject alternative or common names, with tls_client_ca
//   memory_bytes = "16GiB"               # quotas; without one there is no limit but the server's
//   sessions = 100
//   queued_calls = 64
//   calls_per_second = 500.0
//   calls_burst = 50                     # at once, beside that; else one second's calls
//
// Thread-safe: pure functions.

#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/rpc/access_rules.h"

namespace ctkvr {

// INVALID_ARGUMENT: no TOML, an unknown key, a value of another type or outside its limit, a name, digest or
// certificate's name that is there twice, a tenant that nobody could be; with the line. `path` stands in errors alone.
absl::StatusOr<rpc::AccessRules> ParseAccessFile(const std::string& text, const std::string& path);

}  // namespace ctkvr
