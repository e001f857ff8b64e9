// SPDX-License-Identifier: Apache-2.0

#include "server/embedded/service.h"

#include <climits>
#include <utility>
#include <vector>

#include "ctkvr/v1/cache.pb.h"
#include "kernels/backend_registry.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/engine_options.h"
#include "server/rpc/codec.h"

namespace ctkvr::embedded {
namespace {

// One call on its way. It holds the request, whose bytes the engine views, and the reply that is filled.
template <typename Request, typename Reply>
struct Job {
  Service& service;
  CallContext context;
  Done done;
  Request request = {};
  std::unique_ptr<Reply> reply = std::make_unique<Reply>();

  Engine& engine() const { return service.engine(); }
  void Header(uint64_t epoch) { rpc::EncodeHeader(engine().boot_id(), epoch, reply->mutable_header()); }
  void Finish(const absl::Status& status) {
    if (!status.ok()) reply.reset();
    done({.status = status, .reply = std::move(reply)});
  }
};
template <typename Request, typename Reply>
using Owned = std::unique_ptr<Job<Request, Reply>>;

// A callback for the engine: ends the job with the error, or encodes the value.
template <typename Result, typename Request, typename Reply, typename Encode>
Callback<Result> Then(Owned<Request, Reply> job, Encode encode) {
  return [job = std::move(job), encode = std::move(encode)](absl::StatusOr<Result> result) mutable {
    if (result.ok()) encode(*result, *job);
    job->Finish(result.status());
  };
}

void Serve(Owned<v1::GetServerInfoRequest, v1::GetServerInfoReply> job) {
  rpc::EncodeServerInfo(job->engine(), job->service.version(), job->reply.get());
  job->Finish(absl::OkStatus());
}

void Serve(Owned<v1::OpenSessionRequest, v1::OpenSessionReply> job) {
  auto id = rpc::DecodeNewSessionId(job->request.session_id());
  if (!id.ok()) return job->Finish(id.status());
  auto config = rpc::DecodeSessionOptions(job->request.options());
  if (!config.ok()) return job->Finish(config.status());
  Engine& engine = job->engine();
  const CallContext context = job->context;
  engine.Open(*std::move(id), *std::move(config), context,
              Then<SessionInfo>(std::move(job), [](const SessionInfo& info, auto& opened) {
                opened.Header(info.epoch);
                rpc::EncodeSessionInfo(info, opened.reply->mutable_session());
              }));
}

void Serve(Owned<v1::ListSessionsRequest, v1::ListSessionsReply> job) {
  auto page = rpc::DecodeListPage(job->request);
  if (!page.ok()) return job->Finish(page.status());
  Engine& engine = job->engine();
  const CallContext context = job->context;
  using Summaries = std::vector<SessionSummary>;
  engine.List(page->after, page->size, context,
              Then<Summaries>(std::move(job), [size = page->size](const Summaries& summaries, auto& listed) {
                listed.Header(0);
                rpc::EncodeListPage(summaries, size, listed.reply.get());
              }));
}

// The calls that name one session: `call(engine, session, context, job)` once the session's reference is decoded.
template <typename Request, typename Reply, typename Call>
void WithSession(Owned<Request, Reply> job, Call call) {
  auto session = rpc::DecodeSessionRef(job->request.session());
  if (!session.ok()) return job->Finish(session.status());
  Engine& engine = job->engine();
  CallContext context = job->context;
  call(engine, *std::move(session), std::move(context), std::move(job));
}

void Serve(Owned<v1::CloseSessionRequest, v1::CloseSessionReply> job) {
  WithSession(std::move(job), [](Engine& engine, SessionRef session, CallContext context, auto owned) {
    engine.Close(std::move(session), std::move(context),
                 Then<CloseResult>(std::move(owned), [](const CloseResult& result, auto& closed) {
                   closed.Header(result.epoch);
                   closed.reply->set_freed_bytes(result.freed_bytes);
                 }));
  });
}

void Serve(Owned<v1::TruncateSessionRequest, v1::TruncateSessionReply> job) {
  WithSession(std::move(job), [](Engine& engine, SessionRef session, CallContext context, auto owned) {
    const uint32_t length = owned->request.length();
    engine.Truncate(std::move(session), length, std::move(context),
                    Then<TruncateResult>(std::move(owned), [](const TruncateResult& result, auto& truncated) {
                      truncated.Header(result.epoch);
                      truncated.reply->mutable_removed_tokens()->Assign(result.removed_tokens.begin(),
                                                                        result.removed_tokens.end());
                    }));
  });
}

void Serve(Owned<v1::GetSessionRequest, v1::GetSessionReply> job) {
  WithSession(std::move(job), [](Engine& engine, SessionRef session, CallContext context, auto owned) {
    engine.Get(std::move(session), std::move(context),
               Then<SessionInfo>(std::move(owned), [](const SessionInfo& info, auto& got) {
                 got.Header(info.epoch);
                 rpc::EncodeSessionInfo(info, got.reply->mutable_session());
               }));
  });
}

void Serve(Owned<v1::KeepAliveRequest, v1::KeepAliveReply> job) {
  WithSession(std::move(job), [](Engine& engine, SessionRef session, CallContext context, auto owned) {
    engine.KeepAlive(std::move(session), std::move(context),
                     Then<LeaseResult>(std::move(owned), [](const LeaseResult& result, auto& kept) {
                       kept.Header(result.epoch);
                       kept.reply->set_lease_remaining_seconds(result.lease_remaining_seconds);
                     }));
  });
}

void Serve(Owned<v1::MaintainSessionRequest, v1::MaintainSessionReply> job) {
  WithSession(std::move(job), [](Engine& engine, SessionRef session, CallContext context, auto owned) {
    auto layers = rpc::DecodeMaintainLayers(owned->request);
    if (!layers.ok()) return owned->Finish(layers.status());
    engine.Maintain(std::move(session), *std::move(layers), std::move(context),
                    Then<MaintainResult>(std::move(owned), [](const MaintainResult& result, auto& maintained) {
                      maintained.Header(result.epoch);
                      maintained.reply->mutable_indexed_length()->Assign(result.indexed_length.begin(),
                                                                         result.indexed_length.end());
                    }));
  });
}

void Serve(Owned<v1::AppendRequest, v1::AppendReply> job) {
  auto step = rpc::DecodeAppend(job->request);
  if (!step.ok()) return job->Finish(step.status());
  std::vector<StepRequest> steps;
  steps.push_back(*std::move(step));
  Engine& engine = job->engine();
  const CallContext context = job->context;
  auto done = Then<AppendResult>(std::move(job), [](const AppendResult& result, auto& appended) {
    appended.Header(result.epoch);
    appended.reply->set_length(result.length);
    appended.reply->set_repeated(result.repeated);
  });
  engine.Step(std::move(steps), context, [done = std::move(done)](std::vector<StepResult> results) mutable {
    done(std::move(results[0].append));
  });
}

void Serve(Owned<v1::RetrieveRequest, v1::RetrieveReply> job) {
  auto decoded = rpc::DecodeRetrieve(job->request);
  if (!decoded.ok()) return job->Finish(decoded.status());
  auto steps = std::move(decoded->steps);
  Engine& engine = job->engine();
  const CallContext context = job->context;
  engine.Step(std::move(steps), context,
              [job = std::move(job), plan = *std::move(decoded)](std::vector<StepResult> results) {
                v1::RetrieveReply& reply = *job->reply;
                const absl::Status status = rpc::EncodeRetrieve(job->request, plan, std::move(results), &reply);
                job->Header(reply.items_size() == 1 ? reply.items(0).session_epoch() : 0);
                job->Finish(status);
              });
}

using Handler = void (*)(Service&, std::string_view, CallContext, Done);

template <typename Request, typename Reply>
void Handle(Service& service, std::string_view request, CallContext context, Done done) {
  Owned<Request, Reply> job(
      new Job<Request, Reply>{.service = service, .context = std::move(context), .done = std::move(done)});
  const absl::Status parsed = ParseMessage(request, &job->request);
  if (!parsed.ok()) return job->Finish(parsed);
  Serve(std::move(job));
}

const std::map<std::string, Handler>& Handlers() {
  static const auto* const handlers = new std::map<std::string, Handler>{
      {"GetServerInfo", Handle<v1::GetServerInfoRequest, v1::GetServerInfoReply>},
      {"OpenSession", Handle<v1::OpenSessionRequest, v1::OpenSessionReply>},
      {"CloseSession", Handle<v1::CloseSessionRequest, v1::CloseSessionReply>},
      {"TruncateSession", Handle<v1::TruncateSessionRequest, v1::TruncateSessionReply>},
      {"GetSession", Handle<v1::GetSessionRequest, v1::GetSessionReply>},
      {"ListSessions", Handle<v1::ListSessionsRequest, v1::ListSessionsReply>},
      {"KeepAlive", Handle<v1::KeepAliveRequest, v1::KeepAliveReply>},
      {"MaintainSession", Handle<v1::MaintainSessionRequest, v1::MaintainSessionReply>},
      {"Append", Handle<v1::AppendRequest, v1::AppendReply>},
      {"Retrieve", Handle<v1::RetrieveRequest, v1::RetrieveReply>}};
  return *handlers;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Service>> Service::Create(const std::map<std::string, std::string>& settings,
                                                         const std::string& version) {
  CTKVR_ASSIGN_OR_RETURN(const Values values, ReadEngineSettings(settings));
  std::unique_ptr<Service> self(new Service(version));
  CTKVR_ASSIGN_OR_RETURN(self->backend_, CreateBackend(values.backend));
  CTKVR_ASSIGN_OR_RETURN(self->engine_, Engine::Create(MakeEngineOptions(values), *self->backend_, self->clock_));
  return self;
}

Service::~Service() = default;

void Service::Call(const std::string& method, std::string_view request, CallContext context, Done done) {
  const auto handler = Handlers().find(method);
  if (handler == Handlers().end()) {
    done({.status = absl::UnimplementedError(method + " is not served by this version of the server"), .reply = {}});
    return;
  }
  handler->second(*this, request, std::move(context), std::move(done));
}

absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message* message) {
  static_assert(limits::kMessageBytesMax <= INT_MAX, "what protobuf's parser takes");
  if (bytes.size() > limits::kMessageBytesMax) {  // in gRPC's words
    return absl::ResourceExhaustedError("Received message larger than max (" + std::to_string(bytes.size()) + " vs. " +
                                        std::to_string(limits::kMessageBytesMax) + ")");
  }
  if (message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return absl::InvalidArgumentError("the message cannot be parsed as " + std::string(message->GetTypeName()));
}

}  // namespace ctkvr::embedded
