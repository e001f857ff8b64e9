// SPDX-License-Identifier: Apache-2.0
//
// The rows of the table of settings, and how one is found by its name.

#include <algorithm>
#include <numeric>
#include <utility>

#include "server/core/limits.h"
#include "server/settings.h"

namespace ctkvr {
namespace {

constexpr char kSizeUnit[] = "bytes, or with KiB, MiB, GiB, TiB";
constexpr const char* kBoolUnit = Setting::kBoolUnit;
constexpr uint64_t kMebi = uint64_t{1} << 20;

// Where it listens, and who gets in.
std::vector<Setting> EdgeSettings() {
  return {
      {.name = "listen_address",
       .unit = "address",
       .default_text = "127.0.0.1:7420",
       .field = &Values::listen_address,
       .help = "Address for gRPC: host:port, [ip6]:port or unix:/path. Port 0 takes a free one."},
      {.name = "metrics_address",
       .unit = "address",
       .default_text = "127.0.0.1:9464",
       .field = &Values::metrics_address,
       .help = "Address of the /metrics page over HTTP. Port 0 takes a free one; empty switches the page off."},
      {.name = "allow_plaintext",
       .unit = kBoolUnit,
       .default_text = "false",
       .field = &Values::allow_plaintext,
       .help = "Listen without encryption or authentication on an address that other machines can reach."},
      {.name = "tls_certificate",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_certificate,
       .help = "PEM file of the server's certificate and its chain, read again when it changes. Empty: no TLS."},
      {.name = "tls_key",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_key,
       .help = "PEM file of the certificate's private key, read again when it changes."},
      {.name = "tls_client_ca",
       .unit = "path",
       .default_text = "",
       .field = &Values::tls_client_ca,
       .help = "PEM file of who signs clients' certificates: only clients with one may connect. Empty: all may."},
      {.name = "access_file",
       .unit = "path",
       .default_text = "",
       .field = &Values::access_file,
       .help =
           "File of TOML that names who may call, read again when it changes. Empty: whoever connects, one tenant."},
      {.name = "allow_plaintext_tokens",
       .unit = kBoolUnit,
       .default_text = "false",
       .field = &Values::allow_plaintext_tokens,
       .help = "Take tokens over connections that are not encrypted, on an address that other machines can reach."},
  };
}

// What computes, and with what.
std::vector<Setting> EngineSettings() {
  return {
      {.name = "backend",
       .unit = "name",
       .default_text = "auto",
       .field = &Values::backend,
       .help = "What computes: auto, cpu, cpu:portable, cpu:avx2 or cpu:avx512."},
      {.name = "lanes",
       .unit = "threads",
       .default_text = "0",
       .field = &Values::lanes,
       .zero_is_auto = true,
       .least = 1,
       .most = kLanesMax,
       .help = "Threads that own sessions and work on them. 0: one for each processor."},
      {.name = "arena_bytes",
       .unit = kSizeUnit,
       .default_text = "0",
       .field = &Values::arena_bytes,
       .is_size = true,
       .zero_is_auto = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help =
           "Memory for all sessions, admitted when they open. 0: what this process may use, by its cgroup or else the "
           "machine, less headroom for all else it needs."},
      {.name = "scratch_bytes",
       .unit = kSizeUnit,
       .default_text = "256MiB",
       .field = &Values::scratch_bytes,
       .is_size = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help = "Memory of each lane for the intermediate results of a batch."},
  };
}

// How much is taken, told and waited for.
std::vector<Setting> ProcessSettings() {
  return {
      {.name = "queue_items_max",
       .unit = "calls a lane",
       .default_text = "1024",
       .field = &Values::queue_items_max,
       .least = 1,
       .most = 1u << 20,
       .help = "Calls that may wait for a lane; more are refused with RESOURCE_EXHAUSTED."},
      {.name = "sessions_max",
       .unit = "sessions",
       .default_text = "100000",
       .field = &Values::sessions_max,
       .least = 1,
       .most = limits::kSessionsMax,
       .help = "Sessions that may be open at a time."},
      {.name = "log_level",
       .unit = "name",
       .default_text = "info",
       .field = &Values::log_level,
       .names = {"debug", "info", "warning", "error", "off"},
       .help = "Least level that is logged."},
      {.name = "log_format",
       .unit = "name",
       .default_text = "text",
       .field = &Values::log_format,
       .names = {"text", "json"},
       .help = "Form of log lines on stderr."},
      {.name = "access_log",
       .unit = kBoolUnit,
       .default_text = "true",
       .field = &Values::access_log,
       .help = "Log one line for each call."},
      {.name = "drain_seconds",
       .unit = "seconds",
       .default_text = "25",
       .field = &Values::drain_seconds,
       .least = 0,
       .most = 3600,
       .help = "Time that running calls have to finish once a drain starts."},
      {.name = "ready_file",
       .unit = "path",
       .default_text = "",
       .field = &Values::ready_file,
       .help = "File that receives the addresses taken, as JSON, once the server serves. Empty: none."},
  };
}

// What those who run the server may ask it.
std::vector<Setting> AdminSettings() {
  return {
      {.name = "admin_address",
       .unit = "address",
       .default_text = "",
       .field = &Values::admin_address,
       .help = "Address of service ctkvr.v1.Admin, which closes sessions of all tenants and drains: host:port or "
               "unix:/path, best on this machine alone. Empty: not served."},
      {.name = "slow_call_ms",
       .unit = "milliseconds",
       .default_text = "50",
       .field = &Values::slow_call_ms,
       .least = 0,
       .most = 3'600'000,
       .help =
           "Calls that take as long are kept for ctkvr-cli admin slow-calls, the newest 32 of each method. 0: none."},
  };
}

// What the server finds out about itself.
std::vector<Setting> TruthSettings() {
  return {
      {.name = "truth_share",
       .unit = "share",
       .default_text = "0.01",
       .field = &Values::truth_share,
       .help =
           "Share of the retrievals that is repeated exactly in idle time, to know recall and needle share; 0: none."},
      {.name = "truth_budget",
       .unit = "share",
       .default_text = "0.02",
       .field = &Values::truth_budget,
       .help = "Share of a lane's time that those repeats may take; above 0."},
      {.name = "record",
       .unit = "path",
       .default_text = "",
       .field = &Values::record,
       .help = "Directory for records of the sessions that ask to be recorded: their keys, values and queries in the "
               "clear. Empty: such sessions are refused."},
      {.name = "record_bytes",
       .unit = kSizeUnit,
       .default_text = "1GiB",
       .field = &Values::record_bytes,
       .is_size = true,
       .least = kMebi,
       .most = Setting::kUsableMemory,
       .help = "Memory that records may take until their sessions end; what is over it is left out."},
  };
}

const std::vector<Setting>& Table() {
  static const auto* const table = [] {
    auto* rows = new std::vector<Setting>(EdgeSettings());
    for (const std::vector<Setting>& more : {EngineSettings(), ProcessSettings(), AdminSettings(), TruthSettings()}) {
      rows->insert(rows->end(), more.begin(), more.end());
    }
    return rows;
  }();
  return *table;
}

// Letters to insert, delete or replace to make `b` of `a`.
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string Underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace

std::span<const Setting> Settings() { return Table(); }

const Setting* FindSetting(const std::string& name) {
  for (const Setting& setting : Table()) {
    if (name == setting.name) return &setting;
  }
  return nullptr;
}

std::string NearestName(const std::string& name, const std::vector<std::string>& more) {
  std::vector<std::string> names = more;
  for (const Setting& setting : Table()) names.emplace_back(setting.name);
  const std::string sought = Underscored(name);
  return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return Distance(sought, Underscored(a)) < Distance(sought, Underscored(b));
  });
}

}  // namespace ctkvr
