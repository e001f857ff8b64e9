// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/cache_service.h"

#include <utility>
#include <vector>

#include "server/rpc/append_stream.h"
#include "server/rpc/codec.h"

namespace ctkvr::rpc {
namespace {

absl::Status NotServedCall(obs::Method method) {
  return absl::UnimplementedError(std::string(obs::MethodName(method)) +
                                  " is not served by this version of the server");
}

}  // namespace

bool CacheService::Drain(std::chrono::milliseconds timeout) {
  decode_streams_.EndAll();
  return calls_.WaitIdle(timeout);
}

UnaryCall* CacheService::Start(obs::Method method, Context* context, const google::protobuf::Message* request,
                               const google::protobuf::Message* reply) {
  return new UnaryCall(method, *context, edge_, calls_, *request, *reply);  // deletes itself in OnDone
}

UnaryCall* CacheService::Refuse(obs::Method method, Context* context, const google::protobuf::Message* request,
                                const google::protobuf::Message* reply) {
  UnaryCall* call = Start(method, context, request, reply);
  const absl::Status admitted = call->Admit();
  return call->Fail(admitted.ok() ? NotServedCall(method) : admitted);
}

void CacheService::Header(uint64_t epoch, v1::ReplyHeader* header) const {
  EncodeHeader(edge_.engine.boot_id(), epoch, header);
}

CacheService::Reactor* CacheService::GetServerInfo(Context* context, const v1::GetServerInfoRequest* request,
                                                   v1::GetServerInfoReply* reply) {
  UnaryCall* call = Start(obs::Method::kGetServerInfo, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  EncodeServerInfo(edge_.engine, version_, reply);
  return call->Succeed();
}

CacheService::Reactor* CacheService::OpenSession(Context* context, const v1::OpenSessionRequest* request,
                                                 v1::OpenSessionReply* reply) {
  UnaryCall* call = Start(obs::Method::kOpenSession, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto id = DecodeNewSessionId(request->session_id());
  if (!id.ok()) return call->Fail(id.status());
  call->NoteSession(*id);
  auto config = DecodeSessionOptions(request->options());
  if (!config.ok()) return call->Fail(config.status());
  edge_.engine.Open(*std::move(id), *std::move(config), call->Context(),
                    call->Then<SessionInfo>([=, this](const SessionInfo& info) {
                      call->NoteSession(info.id);
                      Header(info.epoch, reply->mutable_header());
                      EncodeSessionInfo(info, reply->mutable_session());
                    }));
  return call;
}

CacheService::Reactor* CacheService::CloseSession(Context* context, const v1::CloseSessionRequest* request,
                                                  v1::CloseSessionReply* reply) {
  UnaryCall* call = Start(obs::Method::kCloseSession, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto session = DecodeSessionRef(request->session());
  if (!session.ok()) return call->Fail(session.status());
  call->NoteSession(session->id);
  edge_.engine.Close(*std::move(session), call->Context(),
                     call->Then<CloseResult>([=, this](const CloseResult& result) {
                       Header(result.epoch, reply->mutable_header());
                       reply->set_freed_bytes(result.freed_bytes);
                     }));
  return call;
}

CacheService::Reactor* CacheService::TruncateSession(Context* context, const v1::TruncateSessionRequest* request,
                                                     v1::TruncateSessionReply* reply) {
  UnaryCall* call = Start(obs::Method::kTruncateSession, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto session = DecodeSessionRef(request->session());
  if (!session.ok()) return call->Fail(session.status());
  call->NoteSession(session->id);
  edge_.engine.Truncate(*std::move(session), request->length(), call->Context(),
                        call->Then<TruncateResult>([=, this](const TruncateResult& result) {
                          Header(result.epoch, reply->mutable_header());
                          reply->mutable_removed_tokens()->Assign(result.removed_tokens.begin(),
                                                                  result.removed_tokens.end());
                        }));
  return call;
}

CacheService::Reactor* CacheService::ForkSession(Context* context, const v1::ForkSessionRequest* request,
                                                 v1::ForkSessionReply* reply) {
  return Refuse(obs::Method::kForkSession, context, request, reply);
}

CacheService::Reactor* CacheService::GetSession(Context* context, const v1::GetSessionRequest* request,
                                                v1::GetSessionReply* reply) {
  UnaryCall* call = Start(obs::Method::kGetSession, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto session = DecodeSessionRef(request->session());
  if (!session.ok()) return call->Fail(session.status());
  call->NoteSession(session->id);
  edge_.engine.Get(*std::move(session), call->Context(), call->Then<SessionInfo>([=, this](const SessionInfo& info) {
    Header(info.epoch, reply->mutable_header());
    EncodeSessionInfo(info, reply->mutable_session());
  }));
  return call;
}

CacheService::Reactor* CacheService::ListSessions(Context* context, const v1::ListSessionsRequest* request,
                                                  v1::ListSessionsReply* reply) {
  UnaryCall* call = Start(obs::Method::kListSessions, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto page = DecodeListPage(*request);
  if (!page.ok()) return call->Fail(page.status());
  using Summaries = std::vector<SessionSummary>;
  edge_.engine.List(page->after, page->size, call->Context(),
                    call->Then<Summaries>([=, this, size = page->size](const Summaries& summaries) {
                      Header(0, reply->mutable_header());
                      EncodeListPage(summaries, size, reply);
                    }));
  return call;
}

CacheService::Reactor* CacheService::KeepAlive(Context* context, const v1::KeepAliveRequest* request,
                                               v1::KeepAliveReply* reply) {
  UnaryCall* call = Start(obs::Method::kKeepAlive, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto session = DecodeSessionRef(request->session());
  if (!session.ok()) return call->Fail(session.status());
  call->NoteSession(session->id);
  edge_.engine.KeepAlive(*std::move(session), call->Context(),
                         call->Then<LeaseResult>([=, this](const LeaseResult& result) {
                           Header(result.epoch, reply->mutable_header());
                           reply->set_lease_remaining_seconds(result.lease_remaining_seconds);
                         }));
  return call;
}

CacheService::Reactor* CacheService::MaintainSession(Context* context, const v1::MaintainSessionRequest* request,
                                                     v1::MaintainSessionReply* reply) {
  UnaryCall* call = Start(obs::Method::kMaintainSession, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  auto session = DecodeSessionRef(request->session());
  if (!session.ok()) return call->Fail(session.status());
  call->NoteSession(session->id);
  auto layers = DecodeMaintainLayers(*request);
  if (!layers.ok()) return call->Fail(layers.status());
  edge_.engine.Maintain(*std::move(session), *std::move(layers), call->Context(),
                        call->Then<MaintainResult>([=, this](const MaintainResult& result) {
                          Header(result.epoch, reply->mutable_header());
                          reply->mutable_indexed_length()->Assign(result.indexed_length.begin(),
                                                                  result.indexed_length.end());
                        }));
  return call;
}

CacheService::Reactor* CacheService::Append(Context* context, const v1::AppendRequest* request,
                                            v1::AppendReply* reply) {
  UnaryCall* call = Start(obs::Method::kAppend, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  call->NoteSession(request->session().session_id());
  call->NoteLayer(request->chunk().layer());
  auto step = DecodeAppend(*request);
  if (!step.ok()) return call->Fail(step.status());
  std::vector<StepRequest> steps;
  steps.push_back(*std::move(step));
  auto done = call->Then<AppendResult>([=, this](const AppendResult& result) {
    Header(result.epoch, reply->mutable_header());
    reply->set_length(result.length);
    reply->set_repeated(result.repeated);
  });
  edge_.engine.Step(
      std::move(steps), call->Context(),
      [done = std::move(done)](std::vector<StepResult> results) mutable { done(std::move(results[0].append)); });
  return call;
}

grpc::ServerReadReactor<grpc::ByteBuffer>* CacheService::AppendStream(Context* context, grpc::ByteBuffer* reply) {
  return new rpc::AppendStream(*context, edge_, calls_, *reply);  // deletes itself in OnDone
}

CacheService::Reactor* CacheService::Retrieve(Context* context, const v1::RetrieveRequest* request,
                                              v1::RetrieveReply* reply) {
  UnaryCall* call = Start(obs::Method::kRetrieve, context, request, reply);
  if (absl::Status status = call->Admit(); !status.ok()) return call->Fail(status);
  call->NoteItems(static_cast<uint64_t>(request->items_size()));
  auto decoded = DecodeRetrieve(*request);
  if (!decoded.ok()) return call->Fail(decoded.status());
  if (request->items_size() == 1) {
    call->NoteSession(request->items(0).session().session_id());
    call->NoteLayer(request->items(0).query().layer());
  }
  auto steps = std::move(decoded->steps);
  edge_.engine.Step(std::move(steps), call->Context(),
                    [=, this, plan = *std::move(decoded)](std::vector<StepResult> results) {
                      const absl::Status status = EncodeRetrieve(*request, plan, std::move(results), reply);
                      FinishRetrieve(call, status, reply);
                    });
  return call;
}

void CacheService::FinishRetrieve(UnaryCall* call, const absl::Status& status, v1::RetrieveReply* reply) {
  for (const v1::RetrieveReplyItem& item : reply->items()) {
    edge_.metrics.ItemDone(obs::Method::kRetrieve,
                           status.ok() ? item.status().code() : static_cast<int>(status.code()));
  }
  if (!status.ok()) {
    call->Fail(status);
    return;
  }
  Header(reply->items_size() == 1 ? reply->items(0).session_epoch() : 0, reply->mutable_header());
  call->Succeed();
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Decode(Context* context) {
  return new DecodeReactor(*context, edge_, calls_, decode_streams_);  // deletes itself in OnDone
}

CacheService::Reactor* CacheService::SnapshotSession(Context* context, const v1::SnapshotSessionRequest* request,
                                                     v1::SnapshotSessionReply* reply) {
  return Refuse(obs::Method::kSnapshotSession, context, request, reply);
}

CacheService::Reactor* CacheService::RestoreSession(Context* context, const v1::RestoreSessionRequest* request,
                                                    v1::RestoreSessionReply* reply) {
  return Refuse(obs::Method::kRestoreSession, context, request, reply);
}

}  // namespace ctkvr::rpc
