// SPDX-License-Identifier: Apache-2.0
//
// The calls of many messages in this process, with the rules of server/rpc/append_stream.h and decode_reactor.h.
//
// Thread-safe, save that a stream's messages come one after the other, and so do its reads. A stream must end before
// its service, and not inside a callback of its own; its destructor waits until the engine has let go of its messages.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "ctkvr/v1/cache.pb.h"
#include "server/core/limits.h"
#include "server/embedded/service.h"

namespace ctkvr::embedded {

// AppendStream: chunks of one session.
class AppendStream {
 public:
  AppendStream(Service& service, CallContext context) : service_(service), context_(std::move(context)) {}
  ~AppendStream();

  // Appends one chunk; OK without a reply once it is held. The first error ends the stream, and is the outcome of every
  // later call.
  // REQUIRES: the chunk before is done.
  void Append(std::string_view request, Done done);
  // The whole reply. INVALID_ARGUMENT: there was no chunk. REQUIRES: every chunk is done.
  void Finish(Done done);

 private:
  absl::Status CheckSession(const SessionRef& session);
  void End(const absl::Status& status, Done done);

  Service& service_;
  const CallContext context_;
  v1::AppendRequest current_;          // the engine views it
  std::optional<SessionRef> session_;  // of the first chunk
  std::unique_ptr<v1::AppendStreamReply> reply_ = std::make_unique<v1::AppendStreamReply>();
  absl::Status error_;

  std::mutex mutex_;
  std::condition_variable idle_;
  bool running_ = false;  // guarded by mutex_
};

// Decode: messages go to the engine as they come, several at once, and replies come in their order.
class DecodeStream {
 public:
  // More messages, or more bytes, wait here until some are answered and read.
  static constexpr size_t kMessagesMax = 32;
  static constexpr uint64_t kHeldBytesMax = limits::kMessageBytesMax;

  DecodeStream(Service& service, TimePoint deadline);
  ~DecodeStream();

  // A message that cannot be parsed or decoded ends the stream with its error, once those before it are answered.
  void Write(std::string_view request);
  // Says that there are no more; the stream ends once all are read.
  void EndWrites();
  // The next reply, or how the stream ended. REQUIRES: the read before is done.
  void Read(Done done);
  // Ends the stream at once; appends that are done stay done.
  void Cancel();

 private:
  // One message on its way. The engine views `request` until the slot is ready.
  struct Slot {
    absl::Status parsed;
    v1::DecodeRequest request;
    std::unique_ptr<v1::DecodeReply> reply;
    uint64_t bytes = 0;  // of the request, then of the reply
    bool ready = false;
  };

  void Advance(std::unique_lock<std::mutex> lock);  // takes mutex_ held
  void SubmitWaiting(std::unique_lock<std::mutex>& lock);
  void Submit(Slot* slot);
  void Answer(Slot* slot, std::vector<StepResult> results);
  std::optional<Outcome> Next();

  Service& service_;
  CallContext context_;
  std::atomic<bool> cancelled_{false};

  std::mutex mutex_;                           // guards all below
  std::condition_variable idle_;               // nothing runs
  std::deque<std::unique_ptr<Slot>> waiting_;  // written, not at the engine
  std::deque<std::unique_ptr<Slot>> slots_;    // at the engine, or answered and not read
  Done reader_;                                // a read that waits
  size_t running_ = 0;                         // slots at the engine
  uint64_t held_bytes_ = 0;                    // of slots_
  bool submitting_ = false;                    // by one thread at a time, so that messages keep their order
  bool writes_ended_ = false;
  std::optional<absl::Status> end_;  // set: no later message is started, and this ends the stream
};

}  // namespace ctkvr::embedded
