// SPDX-License-Identifier: Apache-2.0
//
// ctkvrd: parse, build, serve, drain. server/README.md draws what is built here and in which order it ends.

#include <malloc.h>

#include <cstdio>

#include "kernels/backend_registry.h"
#include "server/config.h"
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

rpc::TlsFiles Tls(const Config& config) {
  return {.certificate = config.tls_certificate, .key = config.tls_key, .client_ca = config.tls_client_ca};
}

// What can be told without serving: the settings were read already; certificates and the backend can be had here.
int Check(const Config& config) {
  obs::Log log(config.log);
  const auto credentials = rpc::MakeServerCredentials(Tls(config));
  if (!credentials.ok()) return Refuse(log, credentials.status());
  const auto backend = CreateBackend(config.backend);
  return backend.ok() ? kExitOk : Refuse(log, backend.status());
}

int Serve(const Config& config, const StopSignals& stop) {
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
  if (!engine.ok()) return Refuse(log, engine.status());
  obs::Metrics metrics((*engine)->stats(), [&] { return rpc::SampleEngine(**engine); },
                       rpc::EngineFacts(**engine, kVersion));
  rpc::Access access;
  auto server =
      rpc::GrpcServer::Start({.address = config.listen_address, .version = kVersion, .tls = Tls(config)},
                             {.engine = **engine, .clock = clock, .metrics = metrics, .log = log, .access = access});
  if (!server.ok()) return Refuse(log, server.status());
  auto metrics_address = metrics.Expose(config.metrics_address);
  if (!metrics_address.ok()) return Refuse(log, metrics_address.status());
  auto ready = obs::WriteReadyFile(config.ready_file, {(*server)->address(), *metrics_address, (*engine)->boot_id()});
  if (!ready.ok()) return Refuse(log, ready);
  log.Info("serving", {{"listen_address", (*server)->address()},
                       {"metrics_address", *metrics_address},
                       {"device", (*engine)->backend_info().device},
                       {"lanes", uint64_t{config.engine.lanes}},
                       {"arena_bytes", uint64_t{config.engine.arena_bytes}},
                       {"boot_id", (*engine)->boot_id()}});
  const int signal_number = stop.Await([&] { return (*engine)->healthy(); });
  stop.Release();  // a second signal ends the process at once
  const bool healthy = (*engine)->healthy();
  log.Info("draining", {{"signal", int64_t{signal_number}},
                        {"device_healthy", healthy},
                        {"drain_seconds", int64_t{config.drain.count()}}});
  const bool finished = (*server)->Drain(config.drain);
  (*engine)->Drain(std::chrono::milliseconds(0));  // no call is left: this ends maintenance and sessions
  rpc::RouteGrpcLog(nullptr);
  log.Info("stopped", {{"all_work_finished", finished}});
  return finished && healthy ? kExitOk : kExitFailed;
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
  const ctkvr::StopSignals stop;  // before any thread starts
  return ctkvr::Serve(parsed->config, stop);
}
