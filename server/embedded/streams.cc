// SPDX-License-Identifier: Apache-2.0

#include "server/embedded/streams.h"

#include <utility>

#include "server/rpc/codec.h"

namespace ctkvr::embedded {

AppendStream::~AppendStream() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return !running_; });
}

absl::Status AppendStream::CheckSession(const SessionRef& session) {
  if (!session_.has_value()) {
    session_ = session;
    return absl::OkStatus();
  }
  if (session.id == session_->id && session.epoch == session_->epoch) return absl::OkStatus();
  return absl::InvalidArgumentError("session.session_id is \"" + session.id + "\" in chunk " +
                                    std::to_string(reply_->chunks()) +
                                    "; all chunks of a stream go to one session, \"" + session_->id + "\"");
}

void AppendStream::Append(std::string_view request, Done done) {
  if (!error_.ok()) return done({.status = error_, .reply = {}});
  if (absl::Status status = ParseMessage(request, &current_); !status.ok()) return End(status, std::move(done));
  auto step = rpc::DecodeAppend(current_);
  if (!step.ok()) return End(step.status(), std::move(done));
  if (absl::Status status = CheckSession(step->session); !status.ok()) return End(status, std::move(done));
  std::vector<StepRequest> steps;
  steps.push_back(*std::move(step));
  {
    std::lock_guard lock(mutex_);
    running_ = true;
  }
  service_.engine().Step(std::move(steps), context_,
                         [this, done = std::move(done)](std::vector<StepResult> results) mutable {
                           const absl::StatusOr<AppendResult>& result = results[0].append;
                           if (result.ok()) {
                             reply_->set_chunks(reply_->chunks() + 1);
                             if (result->repeated) reply_->set_repeated_chunks(reply_->repeated_chunks() + 1);
                           }
                           End(result.status(), std::move(done));
                         });
}

// Whoever waits for `done` may end the stream: nothing is touched after it.
void AppendStream::End(const absl::Status& status, Done done) {
  {
    std::lock_guard lock(mutex_);
    error_ = status;
    running_ = false;
    idle_.notify_all();
  }
  done({.status = status, .reply = {}});
}

void AppendStream::Finish(Done done) {
  if (!error_.ok()) return done({.status = error_, .reply = {}});
  if (!session_.has_value()) {
    return done(
        {.status = absl::InvalidArgumentError("the stream carried no chunk; at least 1 is needed"), .reply = {}});
  }
  auto finish = [reply = std::move(reply_), boot_id = service_.engine().boot_id(),
                 done = std::move(done)](absl::StatusOr<SessionInfo> info) mutable {
    if (!info.ok()) return done({.status = info.status(), .reply = {}});
    rpc::EncodeHeader(boot_id, info->epoch, reply->mutable_header());
    for (const LayerInfo& layer : info->layers) reply->add_lengths(layer.length);
    done({.status = absl::OkStatus(), .reply = std::move(reply)});
  };
  service_.engine().Get(*session_, context_, std::move(finish));
}

DecodeStream::DecodeStream(Service& service, TimePoint deadline)
    : service_(service), context_{.deadline = deadline, .cancelled = [this] { return cancelled_.load(); }} {}

DecodeStream::~DecodeStream() {
  Cancel();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return running_ == 0 && !submitting_; });
}

void DecodeStream::Write(std::string_view request) {
  auto slot = std::make_unique<Slot>();
  slot->parsed = ParseMessage(request, &slot->request);
  slot->bytes = request.size();
  std::unique_lock lock(mutex_);
  if (end_.has_value()) return;  // nobody reads what comes after the end
  waiting_.push_back(std::move(slot));
  Advance(std::move(lock));
}

void DecodeStream::EndWrites() {
  std::unique_lock lock(mutex_);
  writes_ended_ = true;
  Advance(std::move(lock));
}

void DecodeStream::Read(Done done) {
  std::unique_lock lock(mutex_);
  reader_ = std::move(done);
  Advance(std::move(lock));
}

void DecodeStream::Cancel() {
  cancelled_ = true;
  std::unique_lock lock(mutex_);
  end_ = absl::CancelledError("the client cancelled the call, or its deadline passed");
  waiting_.clear();
  Advance(std::move(lock));
}

// Starts and delivers whatever may be now. Whoever reads may end the stream: nothing is touched after that.
void DecodeStream::Advance(std::unique_lock<std::mutex> lock) {
  SubmitWaiting(lock);
  std::optional<Outcome> outcome = reader_ ? Next() : std::nullopt;
  if (!outcome.has_value()) return;
  Done reader = std::exchange(reader_, nullptr);
  SubmitWaiting(lock);  // into the place that the reply has left
  lock.unlock();
  reader(*std::move(outcome));
}

// What a read would get now; nullopt: it has to wait.
std::optional<Outcome> DecodeStream::Next() {
  if (cancelled_) return Outcome{.status = *end_, .reply = {}};
  if (!slots_.empty()) {
    if (!slots_.front()->ready) return std::nullopt;
    Outcome outcome{.status = absl::OkStatus(), .reply = std::move(slots_.front()->reply)};
    held_bytes_ -= slots_.front()->bytes;
    slots_.pop_front();
    return outcome;
  }
  if (end_.has_value()) return Outcome{.status = *end_, .reply = {}};
  if (writes_ended_ && waiting_.empty()) return Outcome{.status = absl::OkStatus(), .reply = {}};
  return std::nullopt;
}

void DecodeStream::SubmitWaiting(std::unique_lock<std::mutex>& lock) {
  if (submitting_) return;  // that thread goes on
  submitting_ = true;
  while (!waiting_.empty() && slots_.size() < kMessagesMax && held_bytes_ < kHeldBytesMax) {
    slots_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    Slot* slot = slots_.back().get();
    held_bytes_ += slot->bytes;
    ++running_;
    lock.unlock();
    Submit(slot);
    lock.lock();
  }
  submitting_ = false;
  idle_.notify_all();
}

void DecodeStream::Submit(Slot* slot) {
  auto steps =
      slot->parsed.ok() ? rpc::DecodeDecode(slot->request) : absl::StatusOr<std::vector<StepRequest>>(slot->parsed);
  if (steps.ok()) {
    service_.engine().Step(*std::move(steps), context_,
                           [this, slot](std::vector<StepResult> results) { Answer(slot, std::move(results)); });
    return;
  }
  std::lock_guard lock(mutex_);  // nothing was started behind it, so it is the newest slot
  --running_;
  held_bytes_ -= slot->bytes;
  slots_.pop_back();
  waiting_.clear();
  if (!end_.has_value()) end_ = steps.status();
}

void DecodeStream::Answer(Slot* slot, std::vector<StepResult> results) {
  slot->reply = std::make_unique<v1::DecodeReply>();
  rpc::EncodeHeader(service_.engine().boot_id(), 0, slot->reply->mutable_header());
  rpc::EncodeDecode(slot->request, std::move(results), slot->reply.get());
  v1::DecodeRequest().Swap(&slot->request);  // its memory goes now, not when the reply is read
  const uint64_t bytes = slot->reply->ByteSizeLong();
  std::unique_lock lock(mutex_);
  held_bytes_ += bytes - slot->bytes;
  slot->bytes = bytes;
  slot->ready = true;
  --running_;
  idle_.notify_all();
  Advance(std::move(lock));
}

}  // namespace ctkvr::embedded
