// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/chunk.h"
#include "client/src/session_state.h"
#include "client/src/streams_state.h"

namespace ctkvr::client {

// ---- AppendStream ------------------------------------------------------------------------------------------------

AppendStream::AppendStream(std::unique_ptr<State> state) : state_(std::move(state)) {}

AppendStream::~AppendStream() {
  if (state_->end) return;
  state_->context.TryCancel();
  static_cast<void>(End());
}

absl::Status AppendStream::End() {
  if (!state_->end) {
    const absl::Status status = FromGrpc(state_->writer->Finish());
    state_->end = status.ok() ? Core::CheckBoot(state_->reply.header(), state_->boot_id)
                              : state_->core->ExplainSessionError(status, state_->boot_id);
  }
  return *state_->end;
}

absl::Status AppendStream::Write(const ChunkView& chunk) {
  if (state_->end) return state_->end->ok() ? absl::FailedPreconditionError("the stream was finished") : *state_->end;
  const auto shape = ShapeOfLayer(state_->options, chunk.layer);
  if (!shape.ok()) return shape.status();
  if (auto s = CheckChunk(chunk, *shape); !s.ok()) return s;
  const uint32_t step = TokensPerMessage(*shape, chunk, state_->core->limits(), state_->core->options().append_bytes);
  for (uint32_t begin = 0; begin < chunk.tokens;) {
    const uint32_t end = begin + std::min(step, chunk.tokens - begin);
    const ChunkView part = Part(chunk, *shape, begin, end);
    v1::AppendRequest request;
    *request.mutable_session() = state_->ref;
    *request.mutable_chunk() = ToMessage(part, *shape);
    request.set_checksum(Checksum(part));
    if (!state_->writer->Write(request)) {
      const absl::Status status = End();
      // A server that answers early has not taken this chunk in.
      return status.ok() ? absl::InternalError("the server ended the stream before its last chunk") : status;
    }
    begin = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<AppendStreamResult> AppendStream::Finish() {
  if (!state_->end) state_->writer->WritesDone();
  if (auto s = End(); !s.ok()) return s;
  const v1::AppendStreamReply& reply = state_->reply;
  return AppendStreamResult{.lengths = {reply.lengths().begin(), reply.lengths().end()},
                            .chunks = reply.chunks(),
                            .repeated_chunks = reply.repeated_chunks()};
}

// ---- DecodeStream ------------------------------------------------------------------------------------------------

namespace {

absl::Status AddItem(const DecodeEntry& entry, const v1::SessionRef& ref, v1::DecodeItem* item) {
  *item->mutable_session() = ref;
  if (entry.chunk) {
    const auto shape = entry.session->Shape(entry.chunk->layer);
    if (!shape.ok()) return shape.status();
    if (auto s = CheckChunk(*entry.chunk, *shape); !s.ok()) return s;
    *item->mutable_chunk() = ToMessage(*entry.chunk, *shape);
  }
  if (entry.query) *item->mutable_query() = *entry.query;
  return absl::OkStatus();
}

}  // namespace

DecodeStream::DecodeStream(std::unique_ptr<State> state) : state_(std::move(state)) {}

DecodeStream::~DecodeStream() {
  if (state_->end) return;
  state_->context.TryCancel();
  static_cast<void>(state_->stream->Finish());
}

absl::StatusOr<uint64_t> DecodeStream::Send(std::span<const DecodeEntry> entries, const v1::AnswerOptions& answer) {
  if (entries.empty()) return absl::InvalidArgumentError("a Decode message needs at least one entry");
  const uint32_t limit = state_->options.in_flight_max;
  if (state_->in_flight >= limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("in_flight is ", limit, "; the limit is ", limit, ": receive first"));
  }
  v1::DecodeRequest request;
  uint64_t boot_id = state_->boot_id;
  for (const DecodeEntry& entry : entries) {
    if (boot_id == 0) boot_id = entry.session->boot_id();
    if (entry.session->boot_id() != boot_id) {
      return absl::FailedPreconditionError("the sessions of a stream must be of one boot of the server");
    }
    if (auto s = AddItem(entry, entry.session->ref(), request.add_items()); !s.ok()) return s;
  }
  *request.mutable_answer() = answer;
  request.set_sequence(state_->sent + 1);
  state_->boot_id = boot_id;
  // Counted first: the reply may be received before Write returns.
  ++state_->in_flight;
  if (state_->write_failed || !state_->stream->Write(request)) {
    --state_->in_flight;
    state_->write_failed = true;
    return absl::UnavailableError("the stream has ended; Receive says why");
  }
  return ++state_->sent;
}

absl::StatusOr<v1::DecodeReply> DecodeStream::Receive() {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->end) return state_->end->ok() ? absl::FailedPreconditionError("the stream was finished") : *state_->end;
  }
  if (state_->in_flight == 0 && !state_->write_failed) {
    return absl::FailedPreconditionError("nothing is in flight; send first");
  }
  v1::DecodeReply reply;
  if (!state_->stream->Read(&reply)) {
    absl::Status status = FromGrpc(state_->stream->Finish());
    if (status.ok()) status = absl::UnavailableError("the server ended the stream");
    const std::lock_guard lock(state_->mutex);
    state_->end = status;
    state_->write_failed = true;
    return status;
  }
  --state_->in_flight;
  ++state_->received;
  if (auto s = Core::CheckBoot(reply.header(), state_->boot_id); !s.ok()) return s;
  if (reply.sequence() != state_->received) {
    return absl::InternalError(absl::StrCat("reply ", reply.sequence(), " came in place of ", state_->received));
  }
  return reply;
}

absl::Status DecodeStream::Finish() {
  const std::lock_guard lock(state_->mutex);
  if (state_->end) return *state_->end;
  state_->stream->WritesDone();
  v1::DecodeReply dropped;
  while (state_->stream->Read(&dropped)) {
  }
  state_->end = FromGrpc(state_->stream->Finish());
  state_->write_failed = true;
  state_->in_flight = 0;
  return *state_->end;
}

void DecodeStream::Cancel() { state_->context.TryCancel(); }

uint32_t DecodeStream::in_flight() const { return state_->in_flight; }

}  // namespace ctkvr::client
