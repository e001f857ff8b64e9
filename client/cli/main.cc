// SPDX-License-Identifier: Apache-2.0
//
// ctkvr-cli: looks at a running server, replays recorded attention through it, measures it.
// Exit codes: 0 done; 1 the server or a check said no; 2 the command line is wrong.

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/cli/admin.h"
#include "client/cli/bench.h"
#include "client/cli/credentials.h"
#include "client/cli/inspect.h"
#include "client/cli/output.h"
#include "client/cli/replay.h"
#include "client/cli/size.h"
#include "client/cli/token.h"
#include "client/cli/trace.h"
#include "ctkvr/client/admin.h"
#include "ctkvr/client/client.h"

namespace ctkvr::cli {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

struct Flags {
  std::string address = "127.0.0.1:7420";
  TlsFlags tls;
  bool json = false;
  std::string session_id;
  std::vector<std::string> traces;
  ReplayFlags replay;
  double min_needle_share = 0;
  BenchFlags bench;
  SizeFlags size;
  AdminFlags admin;
  std::string token_file;
  bool allow_plaintext_token = false;
  std::string token_expires;
};

void Print(const nlohmann::json& json) { Write(stdout, fmt::format("{}\n", json.dump(1))); }

// Says what went wrong, with the server's reason where there is one.
int Fail(const absl::Status& status) {
  const client::ErrorDetail detail = client::DetailOf(status);
  Write(stderr, fmt::format("ctkvr-cli: {}{}{}\n", status.ToString(absl::StatusToStringMode::kWithNoExtraData),
                            detail.reason.empty() ? "" : " reason ", detail.reason));
  return kExitFailed;
}

int Info(const client::Client& client, const Flags& flags) {
  const auto info = client.ServerInfo();
  if (!info.ok()) return Fail(info.status());
  if (flags.json) {
    Print(ToJson(*info));
  } else {
    Write(stdout, InfoText(*info));
  }
  return 0;
}

int Sessions(const client::Client& client, const Flags& flags) {
  if (!flags.session_id.empty()) {
    const auto session = client.GetSession(flags.session_id);
    if (!session.ok()) return Fail(session.status());
    if (flags.json) {
      Print(ToJson(*session));
    } else {
      Write(stdout, SessionText(*session));
    }
    return 0;
  }
  const auto sessions = client.ListSessions();
  if (!sessions.ok()) return Fail(sessions.status());
  if (flags.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& entry : *sessions) list.push_back(ToJson(entry));
    Print({{"sessions", std::move(list)}});
  } else {
    Write(stdout, SessionListText(*sessions));
  }
  return 0;
}

// Checks that were asked for; says what failed.
int Judge(const std::vector<ReplayResult>& results, const Flags& flags) {
  int exit = 0;
  for (const ReplayResult& result : results) {
    if (result.online) {
      Write(stderr, OnlineText(result.name, *result.online));
      if (!result.online->agrees()) exit = kExitFailed;
    }
    if (!result.verify) continue;
    const VerifyReport& verify = *result.verify;
    Write(stderr,
          fmt::format(
              "{}: {} sets checked against brute force over the stored keys: {} wrong, {} wrong scores, {} tokens "
              "within the tie band{}{}\n",
              result.name, Count(verify.sets), verify.wrong_sets, verify.wrong_scores, verify.tied_tokens,
              verify.first.empty() ? "" : "; first: ", verify.first));
    if (!verify.good()) exit = kExitFailed;
  }
  const double share = TotalNeedleShare(results).value_or(1);
  if (share < flags.min_needle_share) {
    Write(stderr, fmt::format("ctkvr-cli: needle share is {:.4f}; at least {:.4f} was asked for\n", share,
                              flags.min_needle_share));
    exit = kExitFailed;
  }
  return exit;
}

int ReplayTraces(const client::Client& client, const Flags& flags) {
  if (flags.min_needle_share > 0 && flags.replay.selection.answer == "attention") {
    return Fail(absl::FailedPreconditionError("min-needle-share needs ids; answer is attention"));
  }
  Progress progress = Progress::Stderr();
  std::vector<ReplayResult> results;
  for (const std::string& folder : flags.traces) {
    const auto trace = LoadTrace(folder);
    if (!trace.ok()) return Fail(trace.status());
    auto result = Replay(client, *trace, flags.replay, &progress);
    if (!result.ok()) return Fail(result.status());
    results.push_back(*std::move(result));
  }
  if (flags.json) {
    Print(ReplayJson(results));
  } else {
    Write(stdout, ReplayTable(results));
  }
  std::fflush(stdout);
  return Judge(results, flags);
}

int RunBench(const client::Client& client, const Flags& flags) {
  Progress progress = Progress::Stderr();
  const auto result = Bench(client, flags.bench, &progress);
  if (!result.ok()) return Fail(result.status());
  if (flags.json) {
    Print(BenchJson(*result));
  } else {
    Write(stdout, BenchTable(*result));
  }
  return 0;
}

int Administer(const CLI::App& command, client::ConnectOptions options, const Flags& flags) {
  options.address = flags.admin.address;
  const auto admin = client::Admin::Connect(options);
  const auto result = RunAdmin(command, *admin, flags.admin, flags.json);
  if (!result.ok()) return Fail(result.status());
  Write(stdout, result->text);
  return result->good ? 0 : kExitFailed;
}

int PrintSize(const Flags& flags) {
  const auto report = Size(flags.size);
  if (!report.ok()) {
    Fail(report.status());
    return kExitUsage;
  }
  if (flags.json) {
    Print(SizeJson(*report));
  } else {
    Write(stdout, SizeText(*report, flags.size));
  }
  return 0;
}

int PrintToken(const Flags& flags) {
  const auto token = MakeToken(flags.token_expires);
  if (!token.ok()) {
    Fail(token.status());
    return kExitUsage;
  }
  if (flags.json) {
    Print({{"token", token->text}, {"line", token->line}});
  } else {
    Write(stdout, fmt::format("{}\n{}\n", token->text, token->line));
  }
  return 0;
}

void AddReplay(CLI::App& app, Flags* flags) {
  CLI::App* replay = app.add_subcommand("replay", "Replay traces and compare what is chosen with exact attention");
  replay->add_option("trace", flags->traces, "Folders of q.npy, k.npy, v.npy and meta.json")->required();
  AddSelectionFlags(replay, &flags->replay.selection);
  replay->add_option("--steps", flags->replay.steps, "Tokens decoded at most; 0: all")->capture_default_str();
  replay->add_option("--every", flags->replay.every, "Retrieve at every so manyth decoded token")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  replay->add_flag("--hold-decoded", flags->replay.hold_decoded,
                   "Always include all decoded tokens, as the window grows, in place of a window that slides");
  replay->add_flag("--verify-exact", flags->replay.verify_exact,
                   "Source exact: compare ids and scores with brute force over the decoded stored keys");
  replay->add_flag("--online", flags->replay.online,
                   "Compare with the figures of the server, which repeats every sampled retrieval exactly; exit with 1 "
                   "when they differ by more than 0.01. Wants a server with --truth_share 1 --truth_budget 1");
  replay->add_flag("--record", flags->replay.record, "Ask the server (ctkvrd --record DIR) to record the session");
  replay->add_option("--min-needle-share", flags->min_needle_share, "Exit with 1 when the needle share is lower")
      ->check(CLI::Range(0.0, 1.0));
}

void AddBench(CLI::App& app, Flags* flags) {
  CLI::App* bench = app.add_subcommand("bench", "Measure retrievals of one layer of synthetic keys and values");
  AddSelectionFlags(bench, &flags->bench.selection);
  bench->add_option("--q-heads", flags->bench.q_heads, "Query heads")->capture_default_str();
  bench->add_option("--kv-heads", flags->bench.kv_heads, "KV heads")->capture_default_str();
  bench->add_option("--head-dim", flags->bench.head_dim, "Dimensions of queries and keys")->capture_default_str();
  bench->add_option("--value-dim", flags->bench.value_dim, "Dimensions of values; 0: as head-dim")
      ->capture_default_str();
  bench->add_option("--tokens", flags->bench.tokens, "Tokens appended")->capture_default_str();
  bench->add_option("--retrievals", flags->bench.retrievals, "Retrievals of each run")->capture_default_str();
  bench->add_option("--in-flight", flags->bench.in_flight, "Retrievals in flight in the second run")
      ->capture_default_str();
}

void AddSize(CLI::App& app, SizeFlags* flags) {
  CLI::App* size = app.add_subcommand("size", "Memory that sessions of a model take; needs no server");
  size->add_option("--model", flags->model, "Geometry of a known model: " + KnownModelNames());
  size->add_option("--layers", flags->layers, "Layers; these four win over --model");
  size->add_option("--q-heads", flags->q_heads, "Query heads");
  size->add_option("--kv-heads", flags->kv_heads, "KV heads");
  size->add_option("--head-dim", flags->head_dim, "Dimensions of queries and keys");
  size->add_option("--value-dim", flags->value_dim, "Dimensions of values; 0: as head-dim")->capture_default_str();
  size->add_option("--tokens", flags->tokens, "Token limit of a session; k is 1,024")->capture_default_str();
  size->add_option("--sessions", flags->sessions, "Sessions open at a time")->capture_default_str();
  size->add_option("--format", flags->format, "How keys and values are stored")->capture_default_str();
  size->add_option("--tokens-per-cluster", flags->tokens_per_cluster,
                   "Tokens a key cluster; 0: none; left out: as the server does");
  size->add_option("--centroids", flags->centroids, "Query centroids a KV head; 0: none")->capture_default_str();
  size->add_option("--list-tokens", flags->list_tokens, "Tokens a list of them")->capture_default_str();
  size->add_option("--cache-slots", flags->cache_slots, "Slots of workers' row caches; 0: none")->capture_default_str();
  size->add_option("--lanes", flags->lanes, "Lanes of the server")->capture_default_str();
  size->add_option("--scratch-mib", flags->scratch_mib, "Scratch memory of a lane, MiB")->capture_default_str();
}

void AddToken(CLI::App& app, Flags* flags) {
  app.add_option("--token-file", flags->token_file,
                 "File of the token that proves who calls; else variable CTKVR_TOKEN is looked at")
      ->envname("CTKVR_TOKEN_FILE");
  app.add_flag("--allow-plaintext-token", flags->allow_plaintext_token,
               "Send the token unencrypted to an address that is not this machine's");
  CLI::App* token = app.add_subcommand(
      "token", "Make a token: prints it, and on the next line what the server's access file gets; needs no server");
  token->add_option("--expires", flags->token_expires, "Time from which it is nobody's, as 2027-01-01T00:00:00Z");
}

// INVALID_ARGUMENT: files of the flags that cannot be used.
absl::StatusOr<client::ConnectOptions> Options(const Flags& flags, const std::string& address) {
  const auto credentials = MakeCredentials(flags.tls);
  if (!credentials.ok()) return credentials.status();
  const auto token = ReadToken(flags.token_file);
  if (!token.ok()) return token.status();
  return client::ConnectOptions{.address = address,
                                .credentials = *credentials,
                                .token = *token,
                                .allow_plaintext_token = flags.allow_plaintext_token};
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Looks at a ctkvr server, replays recorded attention through it, measures it.", "ctkvr-cli");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print this help message with those of the subcommands and exit");
  app.fallthrough();  // --address and --json may follow the subcommand
  app.add_option("--address", flags.address, "host:port of the server")
      ->envname("CTKVR_ADDRESS")
      ->capture_default_str();
  AddTlsFlags(&app, &flags.tls);
  app.add_flag("--json", flags.json, "Print JSON in place of tables");
  app.add_subcommand("info", "Version, limits and memory of the server");
  CLI::App* sessions = app.add_subcommand("sessions", "All sessions, or one in detail");
  sessions->add_option("id", flags.session_id, "A session's id");
  AddReplay(app, &flags);
  AddBench(app, &flags);
  AddSize(app, &flags.size);
  const CLI::App* admin = AddAdmin(app, &flags.admin);
  AddToken(app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // CLI11 has no other way; it also says --help like this
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (app.got_subcommand("size")) return PrintSize(flags);
  if (app.got_subcommand("token")) return PrintToken(flags);
  const auto options = Options(flags, flags.address);
  if (!options.ok()) {
    Fail(options.status());
    return kExitUsage;
  }
  if (app.got_subcommand("admin")) return Administer(*admin, *options, flags);
  const auto client = client::Client::Connect(*options);
  if (!client.ok()) return Fail(client.status());
  if (app.got_subcommand("info")) return Info(**client, flags);
  if (app.got_subcommand("sessions")) return Sessions(**client, flags);
  if (app.got_subcommand("replay")) return ReplayTraces(**client, flags);
  return RunBench(**client, flags);
}

}  // namespace
}  // namespace ctkvr::cli

int main(int argc, char** argv) {
  // A standard stream that the caller closed: else the connection takes its number, and our messages go to the server.
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
  if (fd >= 0) close(fd);
  // As the server does: else glibc maps and unmaps every large reply anew, and that is what would be measured.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  return ctkvr::cli::Main(argc, argv);
}
