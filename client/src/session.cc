// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/chunk.h"
#include "client/src/session_state.h"
#include "client/src/streams_state.h"
#include "ctkvr/client/error.h"

namespace ctkvr::client {
namespace {

constexpr std::chrono::milliseconds kDestructorCloseTimeout{2000};

}  // namespace

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::~Session() { CloseIfOwned(); }
Session::Session(Session&& other) noexcept = default;

Session& Session::operator=(Session&& other) noexcept {
  if (this != &other) {
    CloseIfOwned();
    state_ = std::move(other.state_);
  }
  return *this;
}

void Session::CloseIfOwned() {
  if (!state_ || !state_->close_on_destroy || state_->closed) return;
  // The outcome has nobody to go to; the lease ends what this leaves behind.
  static_cast<void>(Close({.timeout = kDestructorCloseTimeout}));
}

const std::string& Session::id() const { return state_->ref.session_id(); }
uint64_t Session::epoch() const { return state_->ref.epoch(); }
uint64_t Session::boot_id() const { return state_->boot_id; }
const v1::SessionOptions& Session::options() const { return state_->options; }
v1::SessionRef Session::ref() const { return state_->ref; }
absl::StatusOr<LayerShape> Session::Shape(uint32_t layer) const { return ShapeOfLayer(state_->options, layer); }

absl::StatusOr<AppendResult> Session::Append(const ChunkView& chunk, const CallOptions& call) const {
  const auto shape = Shape(chunk.layer);
  if (!shape.ok()) return shape.status();
  if (auto s = CheckChunk(chunk, *shape); !s.ok()) return s;
  const Deadline deadline = state_->core->DeadlineOf(call);
  const uint32_t step = TokensPerMessage(*shape, chunk, state_->core->limits(), state_->core->options().append_bytes);
  AppendResult result;
  for (uint32_t begin = 0; begin < chunk.tokens;) {
    const uint32_t end = begin + std::min(step, chunk.tokens - begin);
    const ChunkView part = Part(chunk, *shape, begin, end);
    v1::AppendRequest request;
    *request.mutable_session() = state_->ref;
    *request.mutable_chunk() = ToMessage(part, *shape);
    request.set_checksum(Checksum(part));
    v1::AppendReply reply;
    const Outcome outcome = state_->Call(&v1::Cache::Stub::Append, request, &reply, deadline, Repeat::kSafe);
    if (!outcome.status.ok()) return outcome.status;
    result.length = reply.length();
    ++result.chunks;
    if (reply.repeated()) ++result.repeated_chunks;
    begin = end;
  }
  return result;
}

absl::StatusOr<std::unique_ptr<AppendStream>> Session::StartAppend(const CallOptions& call) const {
  auto state = std::make_unique<AppendStream::State>();
  state->core = state_->core;
  state->ref = state_->ref;
  state->options = state_->options;
  state->boot_id = state_->boot_id;
  AddToken(state_->core->options(), state->context);
  if (call.timeout) state->context.set_deadline(state_->core->DeadlineOf(call));
  AddTraceparent(state_->core->options(), state->context);
  state->writer = state_->core->stub().AppendStream(&state->context, &state->reply);
  return std::unique_ptr<AppendStream>(new AppendStream(std::move(state)));
}

absl::StatusOr<v1::Answer> Session::Retrieve(const v1::Query& query, const v1::AnswerOptions& answer,
                                             const CallOptions& call) const {
  v1::RetrieveRequest request;
  v1::RetrieveItem* item = request.add_items();
  *item->mutable_session() = state_->ref;
  *item->mutable_query() = query;
  *request.mutable_answer() = answer;
  v1::RetrieveReply reply;
  const Outcome outcome =
      state_->Call(&v1::Cache::Stub::Retrieve, request, &reply, state_->core->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  if (reply.items_size() != 1) {
    return absl::InternalError(absl::StrCat("the reply has ", reply.items_size(), " items; 1 was asked for"));
  }
  if (auto s = StatusOf(reply.items(0).status()); !s.ok()) return s;
  return std::move(*reply.mutable_items(0)->mutable_answer());
}

absl::StatusOr<std::vector<uint32_t>> Session::Truncate(uint32_t length, const CallOptions& call) const {
  v1::TruncateSessionRequest request;
  *request.mutable_session() = state_->ref;
  request.set_length(length);
  v1::TruncateSessionReply reply;
  const Outcome outcome =
      state_->Call(&v1::Cache::Stub::TruncateSession, request, &reply, state_->core->DeadlineOf(call), Repeat::kUnsafe);
  if (!outcome.status.ok()) return outcome.status;
  return std::vector<uint32_t>(reply.removed_tokens().begin(), reply.removed_tokens().end());
}

absl::StatusOr<std::vector<uint32_t>> Session::Maintain(const std::vector<uint32_t>& layers,
                                                        const CallOptions& call) const {
  v1::MaintainSessionRequest request;
  *request.mutable_session() = state_->ref;
  request.mutable_layers()->Add(layers.begin(), layers.end());
  v1::MaintainSessionReply reply;
  const Deadline deadline = Core::DeadlineOf(call, state_->core->options().maintain_timeout);
  const Outcome outcome = state_->Call(&v1::Cache::Stub::MaintainSession, request, &reply, deadline, Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  return std::vector<uint32_t>(reply.indexed_length().begin(), reply.indexed_length().end());
}

absl::StatusOr<v1::SessionInfo> Session::Get(const CallOptions& call) const {
  v1::GetSessionRequest request;
  *request.mutable_session() = state_->ref;
  v1::GetSessionReply reply;
  const Outcome outcome =
      state_->Call(&v1::Cache::Stub::GetSession, request, &reply, state_->core->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  return std::move(*reply.mutable_session());
}

absl::StatusOr<uint32_t> Session::KeepAlive(const CallOptions& call) const {
  v1::KeepAliveRequest request;
  *request.mutable_session() = state_->ref;
  v1::KeepAliveReply reply;
  const Outcome outcome =
      state_->Call(&v1::Cache::Stub::KeepAlive, request, &reply, state_->core->DeadlineOf(call), Repeat::kSafe);
  if (!outcome.status.ok()) return outcome.status;
  return reply.lease_remaining_seconds();
}

absl::StatusOr<uint64_t> Session::Close(const CallOptions& call) {
  v1::CloseSessionRequest request;
  *request.mutable_session() = state_->ref;
  v1::CloseSessionReply reply;
  const Outcome outcome =
      state_->Call(&v1::Cache::Stub::CloseSession, request, &reply, state_->core->DeadlineOf(call), Repeat::kSafe);
  const bool done_by_lost_attempt = outcome.attempts > 1 && outcome.status.code() == absl::StatusCode::kNotFound;
  if (!outcome.status.ok() && !done_by_lost_attempt) return outcome.status;
  state_->closed = true;
  return outcome.status.ok() ? reply.freed_bytes() : 0;
}

}  // namespace ctkvr::client
