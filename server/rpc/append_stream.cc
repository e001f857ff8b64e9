// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/append_stream.h"

#include <utility>
#include <vector>

#include "server/rpc/codec.h"
#include "server/rpc/service_base.h"

namespace ctkvr::rpc {

AppendStream::AppendStream(grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter,
                           grpc::ByteBuffer& reply)
    : Call(obs::Method::kAppendStream, context, edge, counter), context_(context), reply_bytes_(reply) {
  error_ = caller().status();
  if (error_.ok()) edge.access.Watch(*caller(), this);
  Advance(std::unique_lock(mutex_));
}

void AppendStream::OnReadDone(bool ok) {
  std::unique_lock lock(mutex_);
  reading_ = false;
  if (ok) {
    waiting_.emplace();
    waiting_->Swap(&incoming_);
  } else {
    read_all_ = true;
  }
  Advance(std::move(lock));
}

void AppendStream::OnCancel() {
  Call::OnCancel();
  EndWith(absl::CancelledError("the client cancelled the call, or its deadline passed"));
}

void AppendStream::OnDone() {
  edge().access.Unwatch(this);
  delete this;
}

void AppendStream::EndWith(const absl::Status& status) {
  std::unique_lock lock(mutex_);
  if (error_.ok()) error_ = status;
  Advance(std::move(lock));
}

// Starts whatever may start now. Reactions of gRPC never run inside StartRead, so the lock may be held there; it is let
// go before Finish, as the object may be gone at once. For the same reason nobody touches the object after Advance,
// and every change of state shares one hold of the lock with the Advance that follows it.
void AppendStream::Advance(std::unique_lock<std::mutex> lock) {
  if (finishing_) return;
  std::optional<grpc::ByteBuffer> next;
  if (!appending_ && error_.ok()) next.swap(waiting_);
  if (next.has_value()) appending_ = true;
  finishing_ = !appending_ && (!error_.ok() || read_all_);
  if (!finishing_ && !reading_ && !read_all_ && !waiting_.has_value() && error_.ok()) {
    reading_ = true;
    StartRead(&incoming_);
  }
  const bool finish = finishing_;
  const absl::Status error = error_;
  lock.unlock();
  if (next.has_value()) return Append(*std::move(next));
  if (finish && error.ok()) return ReportLengths();
  if (finish) Finish(End(error));
}

absl::Status AppendStream::CheckSession(const SessionRef& session) {
  if (!session_.has_value()) {
    session_ = session;
    NoteSession(session.id);
    return absl::OkStatus();
  }
  if (session.id == session_->id && session.epoch == session_->epoch) return absl::OkStatus();
  return absl::InvalidArgumentError("session.session_id is \"" + session.id + "\" in chunk " +
                                    std::to_string(reply_.chunks()) + "; all chunks of a stream go to one session, \"" +
                                    session_->id + "\"");
}

void AppendStream::Append(grpc::ByteBuffer bytes) {
  NoteReceived(bytes.Length());
  NoteItems(1);
  const TimePoint start = std::chrono::steady_clock::now();
  times_.emplace();
  if (absl::Status status = TakeCall(); !status.ok()) return AppendDone(status, start);
  if (absl::Status status = ParseMessage(&bytes, &current_); !status.ok()) return AppendDone(status, start);
  auto step = DecodeAppend(current_);
  if (!step.ok()) return AppendDone(step.status(), start);
  if (absl::Status status = CheckSession(step->session); !status.ok()) return AppendDone(status, start);
  std::vector<StepRequest> steps;
  steps.push_back(*std::move(step));
  edge().engine.Step(std::move(steps), Context(*times_),
                     [this, start](std::vector<StepResult> results) { AppendDone(results[0].append, start); });
}

void AppendStream::AppendDone(const absl::StatusOr<AppendResult>& result, TimePoint start) {
  const std::chrono::nanoseconds duration = std::chrono::steady_clock::now() - start;
  edge().metrics.MessageDone(obs::Method::kAppendStream, duration);
  if (edge().slow_calls.IsSlow(duration)) {
    obs::SlowCall slow{.code = static_cast<int>(result.status().code()),
                       .duration = duration,
                       .layer = current_.chunk().layer(),
                       .bytes_in = current_.ByteSizeLong()};
    slow.SetSession(current_.session().session_id());
    KeepSlow(slow, *times_);
  }
  if (result.ok()) {
    reply_.set_chunks(reply_.chunks() + 1);
    if (result->repeated) reply_.set_repeated_chunks(reply_.repeated_chunks() + 1);
  }
  std::unique_lock lock(mutex_);
  appending_ = false;
  if (error_.ok()) error_ = result.status();
  Advance(std::move(lock));
}

void AppendStream::ReportLengths() {
  if (!session_.has_value()) {
    Finish(End(absl::InvalidArgumentError("the stream carried no chunk; at least 1 is needed")));
    return;
  }
  edge().engine.Get(*session_, Context(), [this](absl::StatusOr<SessionInfo> info) {
    if (info.ok()) {
      EncodeHeader(edge().engine.boot_id(), info->epoch, reply_.mutable_header());
      for (const LayerInfo& layer : info->layers) reply_.add_lengths(layer.length);
      reply_bytes_ = SerializeMessage(reply_);
      NoteSent(reply_bytes_.Length());
    }
    Finish(End(info.status()));
  });
}

}  // namespace ctkvr::rpc
