// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/admin_service.h"

#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/time_util.h>

#include <algorithm>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/rpc/codec.h"
#include "server/rpc/codec_checks.h"
#include "server/rpc/status.h"

namespace ctkvr::rpc {
namespace {

using google::protobuf::util::TimeUtil;
using std::chrono::system_clock;

// Waits for the engine, which answers every call once.
template <typename Result, typename Start>
absl::StatusOr<Result> Await(Start start) {
  std::promise<absl::StatusOr<Result>> promise;
  auto future = promise.get_future();
  start(
      [promise = std::move(promise)](absl::StatusOr<Result> result) mutable { promise.set_value(std::move(result)); });
  return future.get();
}

CallContext ContextOf(const grpc::ServerContext& context, const Clock& clock) {
  return {.deadline = EngineDeadline(context, clock), .cancelled = [&context] { return context.IsCancelled(); }};
}

// Session ids and numbers: no request of this service holds more. Cut where it would not fit a line.
std::string RequestText(const google::protobuf::Message& request) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(request, &text, options);  // no Any in it, so it cannot fail
  return CapMessage(text);
}

google::protobuf::Timestamp Timestamp(system_clock::time_point time) {
  return TimeUtil::MillisecondsToTimestamp(
      std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count());
}

uint64_t Microseconds(std::chrono::nanoseconds duration) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(duration).count()));
}

// The proto's numbers are ours with 0 in front.
v1::LogLevel EncodeLogLevel(obs::LogLevel level) { return static_cast<v1::LogLevel>(static_cast<int>(level) + 1); }

absl::StatusOr<obs::LogLevel> DecodeLogLevel(v1::LogLevel level) {
  if (level < v1::LOG_LEVEL_DEBUG || level > v1::LOG_LEVEL_OFF) {
    return absl::InvalidArgumentError(absl::StrCat("level is ", static_cast<int>(level), "; it must be LOG_LEVEL_DEBUG",
                                                   " to LOG_LEVEL_OFF, 1 to 5"));
  }
  return static_cast<obs::LogLevel>(static_cast<int>(level) - 1);
}

void EncodeSummary(const SessionSummary& summary, v1::ListSessionsReply::Entry* entry) {
  v1::ListSessionsReply page;
  EncodeListPage({summary}, /*page_size=*/2, &page);
  entry->Swap(page.mutable_sessions(0));
}

void EncodeLane(const LaneState& lane, v1::LaneState* message) {
  message->set_sessions(lane.sessions);
  message->set_planned_bytes(lane.planned_bytes);
  message->set_queued_items(lane.queued_items);
  message->set_oldest_wait_us(Microseconds(lane.oldest_wait));
  message->set_working_for_us(Microseconds(lane.working_for));
}

void EncodeArena(const EngineMemory& memory, v1::ArenaState* message) {
  message->set_bytes(memory.arena_bytes);
  message->set_free_bytes(memory.arena_free_bytes);
  message->set_reserved_bytes(memory.arena_reserved_bytes);
  message->set_held_bytes(memory.arena_held_bytes);
}

void EncodeCounts(const Stats& stats, v1::SessionCounts* message) {
  const auto ended = [&stats](SessionEnd end) { return stats.sessions_ended[static_cast<size_t>(end)].load(); };
  message->set_open(static_cast<uint64_t>(std::max<int64_t>(0, stats.sessions)));
  message->set_opened(stats.sessions_opened);
  message->set_closed(ended(SessionEnd::kClosed));
  message->set_expired(ended(SessionEnd::kExpired));
  message->set_failed(stats.sessions_failed);
}

void EncodeWork(const Stats& stats, v1::DumpStateReply* reply) {
  uint64_t retrievals = 0;
  for (const auto& count : stats.retrievals) retrievals += count;
  reply->set_held_tokens(static_cast<uint64_t>(std::max<int64_t>(0, stats.tokens_held)));
  reply->set_retrievals(retrievals);
  reply->set_appended_tokens(stats.appended_tokens);
  reply->set_queue_rejections(stats.queue_rejections);
  reply->set_device_errors(stats.device_errors);
}

void EncodeSlowCall(const obs::SlowCall& call, v1::SlowCall* message) {
  message->set_method(obs::MethodName(call.method));
  message->set_code(obs::CodeName(call.code));
  *message->mutable_ended() = Timestamp(call.ended);
  message->set_duration_us(Microseconds(call.duration));
  for (size_t i = 0; i < kStageCount; ++i) {
    if (call.stages[i].count() <= 0) continue;
    v1::SlowCall::StageTime* stage = message->add_stages();
    stage->set_stage(StageName(static_cast<Stage>(i)));
    stage->set_us(Microseconds(call.stages[i]));
  }
  message->set_session_id(call.SessionId());
  if (call.layer.has_value()) message->set_layer(*call.layer);
  message->set_items(call.items);
  message->set_bytes_in(call.bytes_in);
  message->set_bytes_out(call.bytes_out);
  if (!call.trace.has_value()) return;
  message->set_trace_id(call.trace->TraceId());
  message->set_span_id(call.trace->SpanId());
}

absl::StatusOr<std::optional<obs::Method>> DecodeMethod(const std::string& name) {
  if (name.empty()) return std::optional<obs::Method>();
  const auto found = std::find(obs::kMethodNames.begin(), obs::kMethodNames.end(), name);
  if (found == obs::kMethodNames.end()) {
    return absl::InvalidArgumentError("method is \"" + name + "\"; it must be a call of service Cache, or empty");
  }
  return std::optional(static_cast<obs::Method>(found - obs::kMethodNames.begin()));
}

}  // namespace

grpc::Status AdminService::Serve(obs::AdminMethod method, const Context& context,
                                 const google::protobuf::Message& request, Work work) {
  const absl::StatusOr<Caller> caller = edge_.access.Authenticate(context);
  absl::Status status = caller.ok() ? edge_.access.AuthoriseAdmin(*caller) : caller.status();
  std::string result;
  if (status.ok()) {
    absl::StatusOr<std::string> worked = work();
    status = worked.status();
    if (worked.ok()) result = *std::move(worked);
  }
  const int code = static_cast<int>(status.code());
  edge_.metrics.AdminCallDone(method, code);
  edge_.log.Audit({.method = obs::kAdminMethodNames[static_cast<size_t>(method)],
                   .code = obs::CodeName(code),
                   .message = CapMessage(std::string(status.message())),
                   .tenant = caller.ok() ? caller->tenant.name : "",
                   .peer = context.peer(),
                   .request = RequestText(request),
                   .result = result,
                   .trace = TraceOf(context)});
  return ToGrpcStatus(status);
}

void AdminService::Header(v1::ReplyHeader* header) const { EncodeHeader(edge_.engine.boot_id(), 0, header); }

absl::StatusOr<std::vector<Tenant>> AdminService::TenantsOf(const std::string& name) const {
  if (name.empty()) return edge_.access.Tenants();
  if (const auto id = edge_.access.FindTenant(name)) return std::vector<Tenant>{{.id = *id, .name = name}};
  return absl::InvalidArgumentError("tenant is \"" + CapMessage(name) + "\"; there is none of that name");
}

// ---- Sessions ------------------------------------------------------------------------------------------------------

grpc::Status AdminService::ListTenantSessions(Context* context, const v1::ListTenantSessionsRequest* request,
                                              v1::ListTenantSessionsReply* reply) {
  return Serve(obs::AdminMethod::kListTenantSessions, *context, *request, [&]() -> absl::StatusOr<std::string> {
    CTKVR_ASSIGN_OR_RETURN(const std::vector<Tenant> tenants, TenantsOf(request->tenant()));
    CTKVR_RETURN_IF_ERROR(AtMost("page_size", request->page_size(), limits::kListSessionsPageMax));
    CTKVR_RETURN_IF_ERROR(AtMost("page_token bytes", request->page_token().size(),
                                 limits::kTenantNameBytesMax + 1 + limits::kSessionIdBytesMax));
    const int size = request->page_size() == 0 ? static_cast<int>(limits::kListSessionsPageMax)
                                               : static_cast<int>(request->page_size());
    // The last session of the page before: tenant, "/", id. Names of tenants have none.
    const size_t slash = std::min(request->page_token().find('/'), request->page_token().size());
    const std::string last_tenant = request->page_token().substr(0, slash);
    for (const Tenant& tenant : tenants) {
      if (tenant.name < last_tenant) continue;
      std::string after;
      if (tenant.name == last_tenant && slash < request->page_token().size()) {
        after = request->page_token().substr(slash + 1);
      }
      CallContext whose = ContextOf(*context, edge_.clock);
      whose.tenant = tenant.id;
      using Summaries = std::vector<SessionSummary>;
      const auto left = static_cast<uint32_t>(size - reply->sessions_size());
      CTKVR_ASSIGN_OR_RETURN(const Summaries summaries, Await<Summaries>([&](auto done) {
                               edge_.engine.List(after, left, whose, std::move(done));
                             }));
      for (const SessionSummary& summary : summaries) {
        v1::TenantSession* session = reply->add_sessions();
        session->set_tenant(tenant.name);
        EncodeSummary(summary, session->mutable_session());
      }
      if (reply->sessions_size() < size) continue;
      reply->set_next_page_token(tenant.name + "/" + summaries.back().id);
      break;
    }
    Header(reply->mutable_header());
    return absl::StrCat(reply->sessions_size(), " sessions");
  });
}

// An id may be open for several tenants.
absl::Status AdminService::CloseOne(const SessionRef& session, const std::vector<Tenant>& tenants, CallContext context,
                                    v1::CloseSessionsReply* reply) {
  absl::Status failure_status = absl::OkStatus();
  bool closed = false;
  for (const Tenant& tenant : tenants) {
    context.tenant = tenant.id;
    const auto result = Await<CloseResult>([&](auto done) { edge_.engine.Close(session, context, std::move(done)); });
    if (absl::IsDeadlineExceeded(result.status()) || absl::IsCancelled(result.status())) return result.status();
    if (result.ok()) {
      closed = true;
      reply->set_closed(reply->closed() + 1);
      reply->set_freed_bytes(reply->freed_bytes() + result->freed_bytes);
    } else if (failure_status.ok() || absl::IsNotFound(failure_status)) {
      failure_status = result.status();
    }
  }
  const bool failed = !failure_status.ok() && (!closed || !absl::IsNotFound(failure_status));
  if (failed && reply->failures_size() < static_cast<int>(limits::kListSessionsPageMax)) {
    v1::CloseSessionsReply::Failure* failure = reply->add_failures();
    failure->set_session_id(session.id);
    EncodeItemStatus(failure_status, failure->mutable_status());
  }
  return absl::OkStatus();
}

absl::Status AdminService::CloseById(const v1::CloseSessionsRequest& request, const std::vector<Tenant>& tenants,
                                     const CallContext& context, v1::CloseSessionsReply* reply) {
  for (int i = 0; i < request.session_ids_size(); ++i) {
    const FieldPath field("session_ids", i);
    const std::string& id = request.session_ids(i);
    if (id.empty()) return absl::InvalidArgumentError(field.Text() + " is empty; the least is 1 byte");
    CTKVR_RETURN_IF_ERROR(AtMost(field, id.size(), limits::kSessionIdBytesMax));
  }
  for (const std::string& id : request.session_ids())
    CTKVR_RETURN_IF_ERROR(CloseOne({.id = id}, tenants, context, reply));
  return absl::OkStatus();
}

// Page by page: sessions that are opened meanwhile are closed too where they sort behind.
absl::Status AdminService::CloseByTenant(const Tenant& tenant, CallContext context, v1::CloseSessionsReply* reply) {
  context.tenant = tenant.id;
  using Summaries = std::vector<SessionSummary>;
  std::string after;
  for (;;) {
    CTKVR_ASSIGN_OR_RETURN(const Summaries page, Await<Summaries>([&](auto done) {
                             edge_.engine.List(after, limits::kListSessionsPageMax, context, std::move(done));
                           }));
    for (const SessionSummary& summary : page) {
      CTKVR_RETURN_IF_ERROR(CloseOne({.id = summary.id, .epoch = summary.epoch}, {tenant}, context, reply));
    }
    if (page.size() < limits::kListSessionsPageMax) return absl::OkStatus();
    after = page.back().id;
  }
}

grpc::Status AdminService::CloseSessions(Context* context, const v1::CloseSessionsRequest* request,
                                         v1::CloseSessionsReply* reply) {
  return Serve(obs::AdminMethod::kCloseSessions, *context, *request, [&]() -> absl::StatusOr<std::string> {
    CTKVR_ASSIGN_OR_RETURN(const std::vector<Tenant> tenants, TenantsOf(request->tenant()));
    CTKVR_RETURN_IF_ERROR(
        AtMost("session_ids", static_cast<uint64_t>(request->session_ids_size()), limits::kListSessionsPageMax));
    if (request->tenant().empty() && request->session_ids().empty()) {
      return absl::InvalidArgumentError("session_ids and tenant are empty; give ids, a tenant or both");
    }
    const CallContext engine_context = ContextOf(*context, edge_.clock);
    CTKVR_RETURN_IF_ERROR(request->session_ids().empty() ? CloseByTenant(tenants[0], engine_context, reply)
                                                         : CloseById(*request, tenants, engine_context, reply));
    Header(reply->mutable_header());
    return absl::StrCat(reply->closed(), " sessions closed, ", reply->freed_bytes(), " bytes freed, ",
                        reply->failures_size(), " failed");
  });
}

// ---- The server ----------------------------------------------------------------------------------------------------

grpc::Status AdminService::StartDrain(Context* context, const v1::StartDrainRequest* request,
                                      v1::StartDrainReply* reply) {
  return Serve(obs::AdminMethod::kStartDrain, *context, *request, [&]() -> absl::StatusOr<std::string> {
    const bool already = drain_asked_.exchange(true) || edge_.engine.draining();
    reply->set_draining_already(already);
    reply->set_drain_seconds(static_cast<uint32_t>(options_.drain.count()));
    reply->set_sessions(static_cast<uint64_t>(std::max<int64_t>(0, edge_.engine.stats().sessions)));
    Header(reply->mutable_header());
    if (!already) options_.start_drain();
    return std::string(already ? "draining already" : "drain started");
  });
}

grpc::Status AdminService::SetLogLevel(Context* context, const v1::SetLogLevelRequest* request,
                                       v1::SetLogLevelReply* reply) {
  return Serve(obs::AdminMethod::kSetLogLevel, *context, *request, [&]() -> absl::StatusOr<std::string> {
    CTKVR_ASSIGN_OR_RETURN(const obs::LogLevel level, DecodeLogLevel(request->level()));
    const obs::LogLevel previous = edge_.log.SetLevel(level);
    reply->set_previous(EncodeLogLevel(previous));
    Header(reply->mutable_header());
    return absl::StrCat("from ", obs::LogLevelName(previous), " to ", obs::LogLevelName(level));
  });
}

grpc::Status AdminService::DumpState(Context* context, const v1::DumpStateRequest* request, v1::DumpStateReply* reply) {
  return Serve(obs::AdminMethod::kDumpState, *context, *request, [&]() -> absl::StatusOr<std::string> {
    const Engine& engine = edge_.engine;
    Header(reply->mutable_header());
    reply->set_version(options_.version);
    reply->set_device(engine.backend_info().device);
    *reply->mutable_start() = Timestamp(start_);
    *reply->mutable_now() = Timestamp(system_clock::now());
    reply->set_draining(engine.draining());
    reply->set_device_healthy(engine.healthy());
    reply->set_log_level(EncodeLogLevel(edge_.log.level()));
    for (const LaneState& lane : engine.lanes()) EncodeLane(lane, reply->add_lanes());
    reply->set_queue_items_max(engine.options().queue_items_max);
    const EngineMemory memory = engine.memory();
    EncodeArena(memory, reply->mutable_arena());
    reply->set_slot_table_bytes(memory.slot_table_bytes);
    EncodeCounts(engine.stats(), reply->mutable_sessions());
    reply->set_sessions_max(engine.options().sessions_max);
    EncodeWork(engine.stats(), reply);
    reply->set_slow_call_ms(Microseconds(edge_.slow_calls.threshold()) / 1000);
    reply->set_slow_calls(edge_.slow_calls.count());
    return std::string();
  });
}

grpc::Status AdminService::ListSlowCalls(Context* context, const v1::ListSlowCallsRequest* request,
                                         v1::ListSlowCallsReply* reply) {
  return Serve(obs::AdminMethod::kListSlowCalls, *context, *request, [&]() -> absl::StatusOr<std::string> {
    CTKVR_ASSIGN_OR_RETURN(const std::optional<obs::Method> method, DecodeMethod(request->method()));
    const size_t limit = request->limit() == 0 ? SIZE_MAX : request->limit();
    for (const obs::SlowCall& call : edge_.slow_calls.Recent(method, limit)) EncodeSlowCall(call, reply->add_calls());
    Header(reply->mutable_header());
    return absl::StrCat(reply->calls_size(), " calls");
  });
}

}  // namespace ctkvr::rpc
