// SPDX-License-Identifier: Apache-2.0
//
// ctkvrd: parse, build, serve, drain. server/README.md draws what is built here and in which order it ends.

#include <malloc.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "kernels/backend_registry.h"
#include "server/access_file.h"
#include "server/config.h"
#include "server/memory_limit.h"
#include "server/obs/ready_file.h"
#include "server/rpc/engine_facts.h"
#include "server/rpc/grpc_server.h"
#include "server/stop.h"

namespace ctkvr {
namespace {

int Refuse(obs::Log& log, const absl::Status& status) {
  log.Error("cannot_start", {{"message", status.ToString(absl::StatusToStringMode::kWithNoExtraData)}});
  return status.code() == absl::StatusCode::kInvalidArgument ? kExitUsage : kExitFailed;
}

int Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  return std::fflush(stdout) == 0 ? kExitOk : kExitFailed;
}

// What was asked for and what there is, where it cannot be had.
absl::Status WithMemory(const EngineOptions& options, const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(absl::StrCat(std::string(status.message()), "; arena_bytes is ",
                                                   FormatBytes(options.arena_bytes), ", scratch_bytes ",
                                                   FormatBytes(options.scratch_bytes), " for each of ", options.lanes,
                                                   " lanes; this process may use ", Describe(ReadMemoryLimit())));
}

rpc::TlsFiles Tls(const Config& config) {
  return {.certificate = config.tls_certificate, .key = config.tls_key, .client_ca = config.tls_client_ca};
}

rpc::Access::Options AccessOptions(const Config& config) {
  return {.file = config.access_file, .parse = ParseAccessFile};
}

// Off without a file.
absl::StatusOr<std::unique_ptr<rpc::Access>> OpenAccess(const Config& config, Engine& engine, obs::Log& log) {
  if (config.access_file.empty()) return std::make_unique<rpc::Access>();
  return rpc::Access::Create(AccessOptions(config), engine, log);
}

// What can be told without serving: the settings were read already; certificates and the backend can be had here.
int Check(const Config& config) {
  obs::Log log(config.log);
  rpc::Access off;
  const auto credentials = rpc::MakeServerCredentials(Tls(config), off);
  if (!credentials.ok()) return Refuse(log, credentials.status());
  if (!config.access_file.empty()) {
    const auto rules = rpc::Access::ReadRules(AccessOptions(config));
    if (!rules.ok()) return Refuse(log, rules.status());
  }
  const auto backend = CreateBackend(config.backend);
  return backend.ok() ? kExitOk : Refuse(log, backend.status());
}

// Waits for a signal, a request or a lost device, and drains. Returns whether all calls finished.
bool DrainWhenAsked(const Config& config, StopSignals& stop, const rpc::Edge& edge, rpc::GrpcServer& server) {
  const int cause = stop.Await([&] { return edge.engine.healthy(); });
  const bool requested = cause == StopSignals::kRequested;
  // A second signal ends the process at once. After a request the first is not yet one: it comes from a supervisor that
  // does not know of the request.
  stop.Release(requested ? 1 : 0);
  edge.log.Info("draining", {{"signal", int64_t{requested ? 0 : cause}},
                             {"requested", requested},
                             {"device_healthy", edge.engine.healthy()},
                             {"drain_seconds", int64_t{config.drain.count()}}});
  return server.Drain(config.drain);
}

int Serve(const Config& config, StopSignals& stop) {
  obs::Log log(config.log);
  rpc::RouteGrpcLog(&log);
  auto backend = CreateBackend(config.backend);
  if (!backend.ok()) return Refuse(log, backend.status());
  RealClock clock;
  EngineOptions engine_options = config.engine;
  std::unique_ptr<obs::Recorder> recorder;  // written out after the engine has ended
  if (!config.record.directory.empty()) {
    auto created = obs::Recorder::Create(config.record, log);
    if (!created.ok()) return Refuse(log, created.status());
    recorder = *std::move(created);
    engine_options.observer = recorder.get();
  }
  auto engine = Engine::Create(engine_options, **backend, clock);
  if (!engine.ok()) return Refuse(log, WithMemory(config.engine, engine.status()));
  auto access = OpenAccess(config, **engine, log);
  if (!access.ok()) return Refuse(log, access.status());
  obs::Metrics metrics((*engine)->stats(), [&] { return rpc::SampleServer(**engine, **access); },
                       rpc::EngineFacts(**engine, kVersion));
  obs::SlowCalls slow_calls(config.slow_call);
  const rpc::Edge edge{
      .engine = **engine, .clock = clock, .metrics = metrics, .log = log, .access = **access, .slow_calls = slow_calls};
  auto server =
      rpc::GrpcServer::Start({.address = config.listen_address, .version = kVersion, .tls = Tls(config)}, edge);
  if (!server.ok()) return Refuse(log, server.status());
  std::unique_ptr<rpc::AdminServer> admin;
  if (!config.admin_address.empty()) {
    auto started = rpc::AdminServer::Start(
        {.address = config.admin_address, .version = kVersion, .tls = Tls(config)}, edge,
        {.version = kVersion, .drain = config.drain, .start_drain = [&stop] { stop.Request(); }});
    if (!started.ok()) return Refuse(log, started.status());
    admin = *std::move(started);
  }
  auto metrics_address = metrics.Expose(config.metrics_address);
  if (!metrics_address.ok()) return Refuse(log, metrics_address.status());
  auto ready = obs::WriteReadyFile(config.ready_file, {(*server)->address(), *metrics_address, (*engine)->boot_id()});
  if (!ready.ok()) return Refuse(log, ready);
  log.Info("serving", {{"listen_address", (*server)->address()},
                       {"metrics_address", *metrics_address},
                       {"admin_address", admin == nullptr ? std::string() : admin->address()},
                       {"device", (*engine)->backend_info().device},
                       {"lanes", uint64_t{config.engine.lanes}},
                       {"arena_bytes", uint64_t{config.engine.arena_bytes}},
                       {"boot_id", (*engine)->boot_id()}});
  const bool finished = DrainWhenAsked(config, stop, edge, **server);
  admin.reset();                                   // it has told of the drain until now
  (*engine)->Drain(std::chrono::milliseconds(0));  // no call is left: this ends maintenance and sessions
  rpc::RouteGrpcLog(nullptr);
  log.Info("stopped", {{"all_work_finished", finished}});
  return finished && (*engine)->healthy() ? kExitOk : kExitFailed;
}

}  // namespace
}  // namespace ctkvr

int main(int argc, char** argv) {
  // Else glibc maps and unmaps every large message anew: 1,400 us instead of 470 us for a call of 1 MiB, as measured.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  auto parsed = ctkvr::ParseArguments({argv + 1, argv + argc});
  if (!parsed.ok()) {
    std::fprintf(stderr, "ctkvrd: %s\n", std::string(parsed.status().message()).c_str());
    return ctkvr::kExitUsage;
  }
  switch (parsed->action) {
    case ctkvr::Action::kPrintHelp:
      return ctkvr::Print(ctkvr::HelpText());
    case ctkvr::Action::kPrintVersion:
      return ctkvr::Print(ctkvr::VersionText());
    case ctkvr::Action::kPrintConfig:
      return ctkvr::Print(parsed->printed);
    case ctkvr::Action::kCheckConfig:
      return ctkvr::Check(parsed->config);
    case ctkvr::Action::kServe:
      break;
  }
  ctkvr::StopSignals stop;  // before any thread starts
  return ctkvr::Serve(parsed->config, stop);
}
