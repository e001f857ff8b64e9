// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/client.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/core.h"
#include "client/src/session_state.h"
#include "client/src/streams_state.h"

namespace ctkvr::client {
namespace {

constexpr uint32_t kListPageSize = 1000;

std::string RandomSessionId() {
  std::random_device device;
  const auto word = [&device] { return (uint64_t{device()} << 32) | device(); };
  return absl::StrCat("client-", absl::Hex(word(), absl::kZeroPad16), absl::Hex(word(), absl::kZeroPad16));
}

}  // namespace

Client::Client(std::shared_ptr<Core> core) : core_(std::move(core)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ConnectOptions& options) {
  if (absl::Status status = CheckToken(options); !status.ok()) return status;
  auto core = std::make_shared<Core>(MakeChannel(options), options);
  const auto info = core->FetchInfo(core->DeadlineOf({}));
  if (!info.ok()) return Annotate(info.status(), options.address);
  return std::unique_ptr<Client>(new Client(std::move(core)));
}

absl::StatusOr<v1::GetServerInfoReply> Client::ServerInfo(const CallOptions& call) const {
  return core_->FetchInfo(core_->DeadlineOf(call));
}

absl::StatusOr<Session> Client::OpenSession(const v1::SessionOptions& options, const OpenOptions& open,
                                            const CallOptions& call) const {
  v1::OpenSessionRequest request;
  request.set_session_id(open.session_id.empty() ? RandomSessionId() : open.session_id);
  *request.mutable_options() = options;
  v1::OpenSessionReply reply;
  const Outcome outcome =
      core_->Call(&v1::Cache::Stub::OpenSession, request, &reply, core_->DeadlineOf(call), Repeat::kSafe);
  const bool opened_by_lost_attempt =
      open.session_id.empty() && outcome.attempts > 1 && outcome.status.code() == absl::StatusCode::kAlreadyExists;
  if (opened_by_lost_attempt) {
    auto session = AttachSession({.session_id = request.session_id(), .fingerprint = options.fingerprint()}, call);
    if (session.ok()) session->state_->close_on_destroy = open.close_on_destroy;
    return session;
  }
  if (!outcome.status.ok()) return outcome.status;
  // The server may be another than the one whose limits are known.
  if (reply.header().boot_id() != core_->boot_id()) {
    if (const auto info = ServerInfo(call); !info.ok()) return info.status();
  }
  auto state = std::make_unique<Session::State>();
  state->core = core_;
  state->ref.set_session_id(reply.session().session_id());
  state->ref.set_epoch(reply.session().epoch());
  state->ref.set_fingerprint(options.fingerprint());
  state->options = reply.session().options();
  state->boot_id = reply.header().boot_id();
  state->close_on_destroy = open.close_on_destroy;
  return Session(std::move(state));
}

absl::StatusOr<Session> Client::AttachSession(const AttachOptions& attach, const CallOptions& call) const {
  v1::GetSessionRequest request;
  request.mutable_session()->set_session_id(attach.session_id);
  request.mutable_session()->set_epoch(attach.epoch);
  request.mutable_session()->set_fingerprint(attach.fingerprint);
  v1::GetSessionReply reply;
  const Outcome outcome =
      core_->Call(&v1::Cache::Stub::GetSession, request, &reply, core_->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  auto state = std::make_unique<Session::State>();
  state->core = core_;
  state->ref = request.session();
  state->ref.set_epoch(reply.session().epoch());
  state->options = reply.session().options();
  state->boot_id = reply.header().boot_id();
  return Session(std::move(state));
}

absl::StatusOr<v1::SessionInfo> Client::GetSession(const std::string& session_id, const CallOptions& call) const {
  v1::GetSessionRequest request;
  request.mutable_session()->set_session_id(session_id);
  v1::GetSessionReply reply;
  const Outcome outcome =
      core_->Call(&v1::Cache::Stub::GetSession, request, &reply, core_->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  return std::move(*reply.mutable_session());
}

absl::StatusOr<std::vector<v1::ListSessionsReply::Entry>> Client::ListSessions(const CallOptions& call) const {
  const Deadline deadline = core_->DeadlineOf(call);
  std::vector<v1::ListSessionsReply::Entry> entries;
  v1::ListSessionsRequest request;
  request.set_page_size(kListPageSize);
  do {
    v1::ListSessionsReply reply;
    const Outcome outcome = core_->Call(&v1::Cache::Stub::ListSessions, request, &reply, deadline, Repeat::kSafe);
    if (!outcome.status.ok()) return outcome.status;
    entries.insert(entries.end(), reply.sessions().begin(), reply.sessions().end());
    if (reply.next_page_token() == request.page_token() && !reply.next_page_token().empty()) {
      return absl::InternalError("the server gave the same page token twice");
    }
    request.set_page_token(reply.next_page_token());
  } while (!request.page_token().empty());
  return entries;
}

absl::StatusOr<v1::RetrieveReply> Client::Retrieve(std::span<const RetrieveEntry> entries,
                                                   const v1::AnswerOptions& answer, const CallOptions& call) const {
  if (entries.empty()) return absl::InvalidArgumentError("a Retrieve needs at least one entry");
  const uint64_t boot_id = entries.front().session->boot_id();
  v1::RetrieveRequest request;
  for (const RetrieveEntry& entry : entries) {
    if (entry.session->boot_id() != boot_id) {
      return absl::FailedPreconditionError("the sessions of a call must be of one boot of the server");
    }
    v1::RetrieveItem* item = request.add_items();
    *item->mutable_session() = entry.session->ref();
    *item->mutable_query() = entry.query;
  }
  *request.mutable_answer() = answer;
  v1::RetrieveReply reply;
  const Outcome outcome =
      core_->Call(&v1::Cache::Stub::Retrieve, request, &reply, core_->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return core_->ExplainSessionError(outcome.status, boot_id);
  if (auto s = Core::CheckBoot(reply.header(), boot_id); !s.ok()) return s;
  return reply;
}

std::unique_ptr<DecodeStream> Client::StartDecode(const DecodeStreamOptions& options) const {
  auto state = std::make_unique<DecodeStream::State>();
  state->core = core_;
  state->options = options;
  AddToken(core_->options(), state->context);
  if (options.call.timeout) state->context.set_deadline(core_->DeadlineOf(options.call));
  AddTraceparent(core_->options(), state->context);
  state->stream = core_->stub().Decode(&state->context);
  return std::unique_ptr<DecodeStream>(new DecodeStream(std::move(state)));
}

}  // namespace ctkvr::client
