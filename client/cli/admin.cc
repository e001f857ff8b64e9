// SPDX-License-Identifier: Apache-2.0
#include "client/cli/admin.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>

#include "client/cli/output.h"

namespace ctkvr::cli {
namespace {

// Closing is a round through a lane for each session.
constexpr std::chrono::minutes kCloseTimeout{10};

const std::map<std::string, v1::LogLevel>& LogLevels() {
  static const auto* const levels = new std::map<std::string, v1::LogLevel>{{"debug", v1::LOG_LEVEL_DEBUG},
                                                                            {"info", v1::LOG_LEVEL_INFO},
                                                                            {"warning", v1::LOG_LEVEL_WARNING},
                                                                            {"error", v1::LOG_LEVEL_ERROR},
                                                                            {"off", v1::LOG_LEVEL_OFF}};
  return *levels;
}

std::string LevelName(v1::LogLevel level) {
  for (const auto& [name, value] : LogLevels()) {
    if (value == level) return name;
  }
  return "?";
}

std::string Bytes(uint64_t bytes) { return cli::Bytes(static_cast<double>(bytes)); }
std::string Milliseconds(uint64_t us) { return us == 0 ? "-" : fmt::format("{:.1f}", static_cast<double>(us) / 1000); }

std::string Age(int64_t seconds) {
  if (seconds < 60) return fmt::format("{} s", seconds);
  if (seconds < 3600) return fmt::format("{} min {} s", seconds / 60, seconds % 60);
  return fmt::format("{} d {} h {} min", seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
}

std::string TimeText(const google::protobuf::Timestamp& time) {
  return fmt::format("{:%F %T}Z", fmt::gmtime(static_cast<std::time_t>(time.seconds())));
}

std::string Json(const google::protobuf::Message& message) { return ToJson(message).dump(1) + "\n"; }

// A reply, for people or as JSON.
template <typename Reply, typename Text>
absl::StatusOr<AdminResult> Show(const absl::StatusOr<Reply>& reply, bool json, Text text) {
  if (!reply.ok()) return reply.status();
  return AdminResult{.text = json ? Json(*reply) : text(*reply)};
}

absl::StatusOr<AdminResult> Close(const client::Admin& admin, const AdminFlags& flags, bool json) {
  v1::CloseSessionsRequest request;
  request.set_tenant(flags.tenant);
  request.mutable_session_ids()->Assign(flags.session_ids.begin(), flags.session_ids.end());
  const auto reply = admin.CloseSessions(request, {.timeout = kCloseTimeout});
  absl::StatusOr<AdminResult> result = Show(reply, json, ClosedText);
  if (result.ok()) result->good = reply->failures().empty();
  return result;
}

absl::StatusOr<AdminResult> SetLogLevel(const client::Admin& admin, const AdminFlags& flags, bool json) {
  const auto previous = admin.SetLogLevel(LogLevels().at(flags.level));
  if (!previous.ok()) return previous.status();
  const std::string was = LevelName(*previous);
  return AdminResult{.text = json ? nlohmann::json({{"level", flags.level}, {"previous", was}}).dump(1) + "\n"
                                  : fmt::format("log level is {}, was {}\n", flags.level, was)};
}

std::string DrainText(const v1::StartDrainReply& reply) {
  return fmt::format("{}: running calls have {} s to finish; {} sessions end with the process\n",
                     reply.draining_already() ? "draining already" : "draining", reply.drain_seconds(),
                     Count(reply.sessions()));
}

std::string LanesText(const v1::DumpStateReply& state) {
  Table table({"lane", "sessions", "reserved", "waiting", "oldest ms", "working ms"});
  for (int i = 0; i < state.lanes_size(); ++i) {
    const v1::LaneState& lane = state.lanes(i);
    table.Add({std::to_string(i), Count(lane.sessions()), Bytes(lane.planned_bytes()), Count(lane.queued_items()),
               Milliseconds(lane.oldest_wait_us()), Milliseconds(lane.working_for_us())});
  }
  return table.ToString();
}

}  // namespace

CLI::App* AddAdmin(CLI::App& app, AdminFlags* flags) {
  CLI::App* admin = app.add_subcommand("admin", "Administer a server whose admin_address is set");
  admin->require_subcommand(1);
  admin->fallthrough();
  admin->add_option("--admin-address", flags->address, "host:port of the server's Admin service")
      ->envname("CTKVR_ADMIN_ADDRESS")
      ->capture_default_str();
  admin->add_subcommand("state", "Lanes, queues, memory and sessions as they are now");
  CLI::App* slow = admin->add_subcommand("slow-calls", "The last calls that took long, and where their time went");
  slow->add_option("--method", flags->method, "Of this call alone: Retrieve, Decode, ...");
  slow->add_option("--limit", flags->limit, "The newest so many; 0: all that are kept")->capture_default_str();
  CLI::App* sessions = admin->add_subcommand("sessions", "Sessions of all tenants");
  sessions->add_option("--tenant", flags->tenant, "Of this tenant alone");
  CLI::App* close = admin->add_subcommand("close",
                                          "Close sessions by id, or all of a tenant; exit with 1 when one "
                                          "could not be closed");
  close->add_option("id", flags->session_ids, "Sessions' ids");
  close->add_option("--tenant", flags->tenant, "Whose sessions; without ids: all of them");
  admin->add_subcommand("drain", "Start what SIGTERM starts: finish running calls, end sessions, exit");
  CLI::App* level = admin->add_subcommand("log-level", "Set the level of the server's log");
  level->add_option("level", flags->level, "debug, info, warning, error or off")
      ->required()
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}));
  return admin;
}

absl::StatusOr<AdminResult> RunAdmin(const CLI::App& command, const client::Admin& admin, const AdminFlags& flags,
                                     bool json) {
  if (command.got_subcommand("state")) return Show(admin.DumpState(), json, StateText);
  if (command.got_subcommand("slow-calls")) {
    return Show(admin.ListSlowCalls(flags.method, flags.limit), json, SlowCallsText);
  }
  if (command.got_subcommand("sessions")) return Show(admin.ListSessions(flags.tenant), json, TenantSessionsText);
  if (command.got_subcommand("close")) return Close(admin, flags, json);
  if (command.got_subcommand("drain")) return Show(admin.StartDrain(), json, DrainText);
  return SetLogLevel(admin, flags, json);
}

std::string StateText(const v1::DumpStateReply& state) {
  const v1::ArenaState& arena = state.arena();
  const v1::SessionCounts& sessions = state.sessions();
  Table table({"server", state.version()}, Align::kLeft);
  table.Add({"boot id", fmt::format("{:016x}", state.header().boot_id())});
  table.Add({"state", state.draining() ? "draining" : "serving"});
  table.Add({"up", Age(state.now().seconds() - state.start().seconds()) + ", since " + TimeText(state.start())});
  table.Add({"device", state.device() + (state.device_healthy() ? "" : " (lost)")});
  table.Add({"log level", LevelName(state.log_level())});
  table.Add({"arena", Bytes(arena.bytes())});
  table.Add({"  reserved", Bytes(arena.reserved_bytes())});
  table.Add({"  held", Bytes(arena.held_bytes())});
  table.Add({"  free", Bytes(arena.free_bytes())});
  table.Add({"slot tables", Bytes(state.slot_table_bytes())});
  table.Add({"sessions", fmt::format("{} of {}", Count(sessions.open()), Count(state.sessions_max()))});
  table.Add(
      {"  since start", fmt::format("{} opened, {} closed, {} expired, {} failed", Count(sessions.opened()),
                                    Count(sessions.closed()), Count(sessions.expired()), Count(sessions.failed()))});
  table.Add({"tokens held", Count(state.held_tokens())});
  table.Add({"appended", Count(state.appended_tokens())});
  table.Add({"retrievals", Count(state.retrievals())});
  table.Add({"refused", Count(state.queue_rejections()) + " by a full queue"});
  table.Add({"device errors", Count(state.device_errors())});
  table.Add({"slow calls", state.slow_call_ms() == 0
                               ? "not kept"
                               : fmt::format("{} of {} ms or more", Count(state.slow_calls()), state.slow_call_ms())});
  return table.ToString() + fmt::format("\nlanes, with queues of {}\n", Count(state.queue_items_max())) +
         LanesText(state);
}

std::string SlowCallsText(const v1::ListSlowCallsReply& slow) {
  if (slow.calls().empty()) return "no slow calls\n";
  constexpr std::array<const char*, 6> kStages = {"wait", "prepare", "candidates", "select", "gather", "append"};
  std::vector<std::string> head = {"ended", "method", "code", "ms"};
  head.insert(head.end(), kStages.begin(), kStages.end());
  head.insert(head.end(), {"items", "layer", "in", "out", "session", "trace"});
  Table table(std::move(head), Align::kLeft);
  for (const v1::SlowCall& call : slow.calls()) {
    std::vector<std::string> row = {TimeText(call.ended()), call.method(), call.code(),
                                    Milliseconds(call.duration_us())};
    for (const char* name : kStages) {
      const auto found = std::find_if(call.stages().begin(), call.stages().end(),
                                      [name](const auto& stage) { return stage.stage() == name; });
      row.push_back(found == call.stages().end() ? "-" : Milliseconds(found->us()));
    }
    row.insert(row.end(),
               {call.items() == 0 ? "-" : Count(call.items()), call.has_layer() ? std::to_string(call.layer()) : "-",
                Bytes(call.bytes_in()), Bytes(call.bytes_out()), call.session_id().empty() ? "-" : call.session_id(),
                call.trace_id().empty() ? "-" : call.trace_id()});
    table.Add(std::move(row));
  }
  return table.ToString();
}

std::string TenantSessionsText(const v1::ListTenantSessionsReply& list) {
  if (list.sessions().empty()) return "no sessions\n";
  Table table({"session", "tenant", "epoch", "tokens", "limit", "held", "reserved", "lease s"});
  for (const v1::TenantSession& entry : list.sessions()) {
    const v1::ListSessionsReply::Entry& session = entry.session();
    table.Add({session.session_id(), entry.tenant(), fmt::format("{:x}", session.epoch()), Count(session.length_max()),
               Count(session.token_limit()), Bytes(session.held_bytes()), Bytes(session.reserved_bytes()),
               Count(session.lease_remaining_seconds())});
  }
  return table.ToString();
}

std::string ClosedText(const v1::CloseSessionsReply& closed) {
  std::string text = fmt::format("{} closed, {} freed\n", Count(closed.closed()), Bytes(closed.freed_bytes()));
  for (const auto& failure : closed.failures()) {
    text += fmt::format("not closed: {}: {}\n", failure.session_id(), failure.status().message());
  }
  return text;
}

}  // namespace ctkvr::cli
