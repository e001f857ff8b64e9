// SPDX-License-Identifier: Apache-2.0
//
// ctkvr-cli admin: what those who run a server do to it (service ctkvr.v1.Admin), and what it prints for them.
// Thread-safe: pure functions; RunAdmin calls the server.

#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ctkvr/client/admin.h"
#include "ctkvr/v1/admin.pb.h"

namespace ctkvr::cli {

struct AdminFlags {
  std::string address = "127.0.0.1:7421";
  std::string tenant;                    // sessions, close; empty: all
  std::vector<std::string> session_ids;  // close
  std::string level;                     // log-level
  std::string method;                    // slow-calls; empty: all
  uint32_t limit = 20;                   // slow-calls
};

// The subcommand and its own.
CLI::App* AddAdmin(CLI::App& app, AdminFlags* flags);

struct AdminResult {
  std::string text;  // tables, or JSON
  bool good = true;  // false: a session could not be closed
};
// Does what `command`, made by AddAdmin, was parsed to.
absl::StatusOr<AdminResult> RunAdmin(const CLI::App& command, const client::Admin& admin, const AdminFlags& flags,
                                     bool json);

std::string StateText(const v1::DumpStateReply& state);
std::string SlowCallsText(const v1::ListSlowCallsReply& slow);
std::string TenantSessionsText(const v1::ListTenantSessionsReply& list);
std::string ClosedText(const v1::CloseSessionsReply& closed);

}  // namespace ctkvr::cli
