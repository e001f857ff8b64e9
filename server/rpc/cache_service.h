// SPDX-License-Identifier: Apache-2.0
//
// The calls of proto/ctkvr/v1/cache.proto over the engine. Each: decode (or fail with the codec's error), one engine
// call, encode. Holds borrowed pointers and nothing about sessions. Thread-safe.

#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "server/rpc/call.h"
#include "server/rpc/decode_reactor.h"
#include "server/rpc/service_base.h"
#include "server/rpc/unary_call.h"

namespace ctkvr::rpc {

class CacheService final : public ServiceBase {
 public:
  CacheService(const Edge& edge, std::string version) : edge_(edge), version_(std::move(version)) {}

  // Ends Decode streams between two messages, and waits until no call runs. Whether that came before `timeout`.
  bool Drain(std::chrono::milliseconds timeout);

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* GetServerInfo(Context* context, const v1::GetServerInfoRequest* request,
                         v1::GetServerInfoReply* reply) override;
  Reactor* OpenSession(Context* context, const v1::OpenSessionRequest* request, v1::OpenSessionReply* reply) override;
  Reactor* CloseSession(Context* context, const v1::CloseSessionRequest* request,
                        v1::CloseSessionReply* reply) override;
  Reactor* TruncateSession(Context* context, const v1::TruncateSessionRequest* request,
                           v1::TruncateSessionReply* reply) override;
  Reactor* ForkSession(Context* context, const v1::ForkSessionRequest* request, v1::ForkSessionReply* reply) override;
  Reactor* GetSession(Context* context, const v1::GetSessionRequest* request, v1::GetSessionReply* reply) override;
  Reactor* ListSessions(Context* context, const v1::ListSessionsRequest* request,
                        v1::ListSessionsReply* reply) override;
  Reactor* KeepAlive(Context* context, const v1::KeepAliveRequest* request, v1::KeepAliveReply* reply) override;
  Reactor* MaintainSession(Context* context, const v1::MaintainSessionRequest* request,
                           v1::MaintainSessionReply* reply) override;
  Reactor* Append(Context* context, const v1::AppendRequest* request, v1::AppendReply* reply) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* AppendStream(Context* context, grpc::ByteBuffer* reply) override;
  Reactor* Retrieve(Context* context, const v1::RetrieveRequest* request, v1::RetrieveReply* reply) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Decode(Context* context) override;
  Reactor* SnapshotSession(Context* context, const v1::SnapshotSessionRequest* request,
                           v1::SnapshotSessionReply* reply) override;
  Reactor* RestoreSession(Context* context, const v1::RestoreSessionRequest* request,
                          v1::RestoreSessionReply* reply) override;

 private:
  UnaryCall* Start(obs::Method method, Context* context, const google::protobuf::Message* request,
                   const google::protobuf::Message* reply);
  // Calls of the contract that this version does not serve.
  UnaryCall* Refuse(obs::Method method, Context* context, const google::protobuf::Message* request,
                    const google::protobuf::Message* reply);
  void Header(uint64_t epoch, v1::ReplyHeader* header) const;
  void FinishRetrieve(UnaryCall* call, const absl::Status& status, v1::RetrieveReply* reply);

  const Edge edge_;
  const std::string version_;
  CallCounter calls_;
  DecodeStreams decode_streams_;
};

}  // namespace ctkvr::rpc
