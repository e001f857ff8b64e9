// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_server.h"

#include <grpc/grpc.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>

#include "google/rpc/status.pb.h"

namespace ctkvr::testing {

grpc::Status RichError(grpc::StatusCode code, const std::string& message, const std::string& reason,
                       const std::map<std::string, std::string>& metadata, int64_t retry_ms) {
  google::rpc::Status rich;
  rich.set_code(static_cast<int>(code));
  rich.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("ctkvr");
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  rich.add_details()->PackFrom(info);
  if (retry_ms >= 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000 * 1000000));
    rich.add_details()->PackFrom(retry);
  }
  return grpc::Status(code, message, rich.SerializeAsString());
}

void FakeCache::Script(const std::string& method, std::vector<grpc::Status> outcomes) {
  const std::lock_guard lock(mutex_);
  scripts_[method].assign(outcomes.begin(), outcomes.end());
}

void FakeCache::SetBootId(uint64_t boot_id) {
  const std::lock_guard lock(mutex_);
  boot_id_ = boot_id;
}

void FakeCache::SetLimits(const v1::ServerLimits& limits) {
  const std::lock_guard lock(mutex_);
  limits_ = limits;
}

void FakeCache::SetAnswer(const v1::Answer& answer) {
  const std::lock_guard lock(mutex_);
  answer_ = answer;
}

void FakeCache::HoldReplies() {
  const std::lock_guard lock(mutex_);
  hold_ = true;
}

void FakeCache::ReleaseReplies() {
  const std::lock_guard lock(mutex_);
  hold_ = false;
  released_.notify_all();
}

void FakeCache::SetSequenceOffset(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  sequence_offset_ = offset;
}

uint32_t FakeCache::calls(const std::string& method) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(method);
  return found == calls_.end() ? 0 : found->second;
}

std::vector<v1::AppendRequest> FakeCache::appends() const {
  const std::lock_guard lock(mutex_);
  return appends_;
}

bool FakeCache::open(const std::string& session_id) const {
  const std::lock_guard lock(mutex_);
  return sessions_.count(session_id) > 0;
}

grpc::Status FakeCache::Enter(const std::string& method) {
  ++calls_[method];
  auto& script = scripts_[method];
  if (script.empty()) return grpc::Status::OK;
  const grpc::Status status = script.front();
  script.pop_front();
  return status;
}

v1::ReplyHeader FakeCache::Header() const {
  v1::ReplyHeader header;
  header.set_boot_id(boot_id_);
  return header;
}

grpc::Status FakeCache::Find(const v1::SessionRef& ref, v1::SessionInfo* info) const {
  const auto found = sessions_.find(ref.session_id());
  if (found == sessions_.end()) {
    return RichError(grpc::StatusCode::NOT_FOUND, "no such session", "SESSION_UNKNOWN");
  }
  if (ref.epoch() != 0 && ref.epoch() != found->second.epoch()) {
    return RichError(grpc::StatusCode::FAILED_PRECONDITION, "another epoch", "EPOCH_MISMATCH");
  }
  *info = found->second;
  return grpc::Status::OK;
}

grpc::Status FakeCache::GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                                      v1::GetServerInfoReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("GetServerInfo"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  *reply->mutable_limits() = limits_;
  reply->set_version("fake");
  return grpc::Status::OK;
}

grpc::Status FakeCache::OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                                    v1::OpenSessionReply* reply) {
  const std::lock_guard lock(mutex_);
  // The text "answer lost" stands for just that: the session is open all the same.
  const grpc::Status scripted = Enter("OpenSession");
  const bool lost = scripted.error_message() == "answer lost";
  if (!scripted.ok() && !lost) return scripted;
  if (sessions_.count(request->session_id()) > 0) {
    return RichError(grpc::StatusCode::ALREADY_EXISTS, "in use", "");
  }
  v1::SessionInfo& info = sessions_[request->session_id()];
  info.set_session_id(request->session_id());
  info.set_epoch(++epoch_);
  *info.mutable_options() = request->options();
  *reply->mutable_header() = Header();
  *reply->mutable_session() = info;
  return scripted;
}

grpc::Status FakeCache::CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest* request,
                                     v1::CloseSessionReply* reply) {
  const std::lock_guard lock(mutex_);
  const grpc::Status scripted = Enter("CloseSession");
  if (!scripted.ok() && scripted.error_message() != "answer lost") return scripted;
  v1::SessionInfo info;
  if (auto s = Find(request->session(), &info); !s.ok()) return s;
  sessions_.erase(request->session().session_id());
  *reply->mutable_header() = Header();
  reply->set_freed_bytes(4096);
  return scripted;
}

grpc::Status FakeCache::TruncateSession(grpc::ServerContext*, const v1::TruncateSessionRequest* request,
                                        v1::TruncateSessionReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("TruncateSession"); !s.ok()) return s;
  v1::SessionInfo info;
  if (auto s = Find(request->session(), &info); !s.ok()) return s;
  *reply->mutable_header() = Header();
  reply->add_removed_tokens(7);
  return grpc::Status::OK;
}

grpc::Status FakeCache::GetSession(grpc::ServerContext*, const v1::GetSessionRequest* request,
                                   v1::GetSessionReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("GetSession"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  return Find(request->session(), reply->mutable_session());
}

grpc::Status FakeCache::ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest* request,
                                     v1::ListSessionsReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("ListSessions"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  // One session a page.
  auto next = sessions_.upper_bound(request->page_token());
  if (next == sessions_.end()) return grpc::Status::OK;
  reply->add_sessions()->set_session_id(next->first);
  if (std::next(next) != sessions_.end()) reply->set_next_page_token(next->first);
  return grpc::Status::OK;
}

grpc::Status FakeCache::KeepAlive(grpc::ServerContext*, const v1::KeepAliveRequest* request,
                                  v1::KeepAliveReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("KeepAlive"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  reply->set_lease_remaining_seconds(600);
  v1::SessionInfo info;
  return Find(request->session(), &info);
}

grpc::Status FakeCache::MaintainSession(grpc::ServerContext*, const v1::MaintainSessionRequest* request,
                                        v1::MaintainSessionReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("MaintainSession"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  reply->add_indexed_length(42);
  v1::SessionInfo info;
  return Find(request->session(), &info);
}

grpc::Status FakeCache::Append(grpc::ServerContext*, const v1::AppendRequest* request, v1::AppendReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("Append"); !s.ok()) return s;
  v1::SessionInfo info;
  if (auto s = Find(request->session(), &info); !s.ok()) return s;
  appends_.push_back(*request);
  *reply->mutable_header() = Header();
  reply->set_length(request->chunk().first_position() + request->chunk().keys().dims(0));
  return grpc::Status::OK;
}

grpc::Status FakeCache::AppendStream(grpc::ServerContext*, Reader<v1::AppendRequest>* reader,
                                     v1::AppendStreamReply* reply) {
  v1::AppendRequest request;
  uint32_t length = 0;
  while (reader->Read(&request)) {
    const std::lock_guard lock(mutex_);
    if (auto s = Enter("AppendStream"); !s.ok()) return s;
    appends_.push_back(request);
    length = request.chunk().first_position() + request.chunk().keys().dims(0);
    reply->set_chunks(reply->chunks() + 1);
  }
  const std::lock_guard lock(mutex_);
  *reply->mutable_header() = Header();
  reply->add_lengths(length);
  return grpc::Status::OK;
}

grpc::Status FakeCache::Retrieve(grpc::ServerContext*, const v1::RetrieveRequest* request, v1::RetrieveReply* reply) {
  const std::lock_guard lock(mutex_);
  if (auto s = Enter("Retrieve"); !s.ok()) return s;
  *reply->mutable_header() = Header();
  for (const v1::RetrieveItem& item : request->items()) {
    v1::SessionInfo info;
    if (auto s = Find(item.session(), &info); !s.ok() && request->items_size() == 1) return s;
    *reply->add_items()->mutable_answer() = answer_;
  }
  return grpc::Status::OK;
}

grpc::Status FakeCache::Decode(grpc::ServerContext* context,
                               grpc::ServerReaderWriter<v1::DecodeReply, v1::DecodeRequest>* stream) {
  v1::DecodeRequest request;
  while (stream->Read(&request)) {
    v1::DecodeReply reply;
    {
      std::unique_lock lock(mutex_);
      if (auto s = Enter("Decode"); !s.ok()) return s;
      // Wakes up now and then only to notice that the client has gone.
      while (hold_ && !context->IsCancelled()) released_.wait_for(lock, std::chrono::milliseconds(5));
      *reply.mutable_header() = Header();
      reply.set_sequence(request.sequence() + sequence_offset_);
      for (int i = 0; i < request.items_size(); ++i) *reply.add_items()->mutable_answer() = answer_;
    }
    if (!stream->Write(reply)) break;
  }
  return grpc::Status::OK;
}

FakeServer::FakeServer() {
  // Kept for good: else the end of the last server may wait ten seconds for gRPC's background poller.
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&cache_);
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Stop() {
  if (!server_) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

}  // namespace ctkvr::testing
