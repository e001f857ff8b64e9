// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/decode_reactor.h"

#include <utility>

#include "server/core/error.h"
#include "server/rpc/codec.h"
#include "server/rpc/service_base.h"

namespace ctkvr::rpc {

void DecodeStreams::EndAll() {
  std::lock_guard lock(mutex_);
  ending_ = true;
  for (DecodeReactor* stream : streams_) stream->Drain();
}

void DecodeStreams::Add(DecodeReactor* stream) {
  std::lock_guard lock(mutex_);
  streams_.insert(stream);
  if (ending_) stream->Drain();
}

void DecodeStreams::Remove(DecodeReactor* stream) {
  std::lock_guard lock(mutex_);
  streams_.erase(stream);
}

DecodeReactor::DecodeReactor(grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter,
                             DecodeStreams& streams)
    : Call(obs::Method::kDecode, context, edge, counter), context_(context), streams_(streams) {
  if (!caller().ok()) end_ = caller().status();
  streams_.Add(this);
  if (caller().ok()) edge.access.Watch(*caller(), this);
  Advance(std::unique_lock(mutex_));
}

void DecodeReactor::Drain() {
  EndWith(MakeError(absl::StatusCode::kUnavailable, "the server is draining", kReasonDraining));
}

// The first reason stays.
void DecodeReactor::EndWith(const absl::Status& status) {
  std::unique_lock lock(mutex_);
  if (!end_.has_value()) end_ = status;
  Advance(std::move(lock));
}

// `reading_` stays set until the message is at the engine: so messages get there in the order they were read, and a
// refused one is still the newest slot.
void DecodeReactor::OnReadDone(bool ok) {
  std::unique_lock lock(mutex_);
  if (ok && !end_.has_value()) {  // else it came after the end: never started, so its sender may try elsewhere
    grpc::ByteBuffer bytes;
    bytes.Swap(&incoming_);
    slots_.push_back(std::make_unique<Slot>());
    Slot* slot = slots_.back().get();
    slot->start = std::chrono::steady_clock::now();
    slot->bytes = bytes.Length();
    NoteReceived(slot->bytes);
    NoteItems(1);
    held_bytes_ += slot->bytes;
    ++running_;
    lock.unlock();
    Submit(std::move(bytes), slot);
    lock.lock();
  } else if (!ok && !end_.has_value()) {
    end_ = absl::OkStatus();
  }
  reading_ = false;
  Advance(std::move(lock));
}

void DecodeReactor::Submit(grpc::ByteBuffer bytes, Slot* slot) {
  const absl::Status parsed = ParseMessage(&bytes, &slot->request);
  auto steps = parsed.ok() ? DecodeDecode(slot->request) : absl::StatusOr<std::vector<StepRequest>>(parsed);
  const absl::Status taken = steps.ok() ? TakeCall() : absl::OkStatus();
  if (!taken.ok()) {
    return Answer(slot, std::vector<StepResult>(steps->size(), {.append = taken, .answer = taken}));
  }
  if (steps.ok()) {
    edge().engine.Step(*std::move(steps), Context(slot->times),
                       [this, slot](std::vector<StepResult> results) { Answer(slot, std::move(results)); });
    return;
  }
  std::lock_guard lock(mutex_);
  --running_;
  held_bytes_ -= slot->bytes;
  slots_.pop_back();
  if (!end_.has_value()) end_ = steps.status();
}

void DecodeReactor::Answer(Slot* slot, std::vector<StepResult> results) {
  v1::DecodeReply reply;
  EncodeHeader(edge().engine.boot_id(), 0, reply.mutable_header());
  EncodeDecode(slot->request, std::move(results), &reply);
  for (const v1::DecodeReplyItem& item : reply.items()) {
    edge().metrics.ItemDone(obs::Method::kDecode, item.status().code());
  }
  slot->reply = SerializeMessage(reply);
  const std::chrono::nanoseconds duration = std::chrono::steady_clock::now() - slot->start;
  edge().metrics.MessageDone(obs::Method::kDecode, duration);
  if (edge().slow_calls.IsSlow(duration)) KeepSlowMessage(*slot, duration);
  v1::DecodeRequest().Swap(&slot->request);  // its memory goes now, not when the client has read the reply
  std::unique_lock lock(mutex_);
  held_bytes_ -= slot->bytes;
  slot->bytes = slot->reply.Length();
  held_bytes_ += slot->bytes;
  slot->ready = true;
  --running_;
  Advance(std::move(lock));
}

// Its items have statuses of their own: the code is OK.
void DecodeReactor::KeepSlowMessage(const Slot& slot, std::chrono::nanoseconds duration) const {
  obs::SlowCall slow{.duration = duration,
                     .items = static_cast<uint64_t>(slot.request.items_size()),
                     .bytes_in = slot.bytes,
                     .bytes_out = slot.reply.Length()};
  if (slow.items == 1) {
    const v1::DecodeItem& item = slot.request.items(0);
    slow.SetSession(item.session().session_id());
    slow.layer = item.has_chunk() ? item.chunk().layer() : item.query().layer();
  }
  KeepSlow(slow, slot.times);
}

void DecodeReactor::OnWriteDone(bool ok) {
  std::unique_lock lock(mutex_);
  writing_ = false;
  held_bytes_ -= slots_.front()->bytes;
  slots_.pop_front();
  if (!ok) {
    gone_ = true;
    if (!end_.has_value() || end_->ok()) end_ = absl::CancelledError("the client has gone");
  }
  Advance(std::move(lock));
}

void DecodeReactor::OnCancel() {
  Call::OnCancel();
  std::unique_lock lock(mutex_);
  gone_ = true;
  // A read that failed for this reason may have come first, and looked like the client's last word.
  if (!end_.has_value() || end_->ok()) {
    end_ = absl::CancelledError("the client cancelled the call, or its deadline passed");
  }
  Advance(std::move(lock));
}

void DecodeReactor::OnDone() {
  edge().access.Unwatch(this);
  streams_.Remove(this);
  delete this;
}

// Starts whatever may start now. Reactions of gRPC never run inside StartRead and StartWrite, so the lock may be held
// there; it is let go before Finish, as the object may be gone at once. For the same reason nobody touches the object
// after Advance, and every change of state shares one hold of the lock with the Advance that follows it.
void DecodeReactor::Advance(std::unique_lock<std::mutex> lock) {
  if (finished_) return;
  if (gone_ && !writing_ && running_ == 0) slots_.clear();
  if (!gone_ && !writing_ && !slots_.empty() && slots_.front()->ready) {
    writing_ = true;
    NoteSent(slots_.front()->bytes);
    StartWrite(&slots_.front()->reply);
  }
  if (!reading_ && !end_.has_value() && slots_.size() < kMessagesMax && held_bytes_ < kHeldBytesMax) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (!end_.has_value() || writing_ || running_ != 0 || !slots_.empty()) return;
  finished_ = true;
  const grpc::Status status = End(*end_);
  lock.unlock();
  Finish(status);
}

}  // namespace ctkvr::rpc
