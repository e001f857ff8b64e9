// SPDX-License-Identifier: Apache-2.0
//
// The reactor of one Decode stream. Messages go to the engine as they are read, several at once; replies are written
// in the order of the requests:
//
//   read ─▶ slots_ [oldest ... newest] ─▶ write      a slot is ready once the engine has answered it;
//                                                    only a ready front slot is written
//
// A malformed message ends the stream with its error once the replies to earlier messages are out. Deletes itself.
// Thread-safe: gRPC's threads, the lanes' and main's call in.

#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "ctkvr/v1/cache.pb.h"
#include "server/core/limits.h"
#include "server/rpc/call.h"

namespace ctkvr::rpc {

class DecodeReactor;

// The Decode streams that are open, so that a drain can end them. Thread-safe.
class DecodeStreams {
 public:
  // From now on streams end as soon as they have answered what they have read, new ones at once.
  void EndAll();

 private:
  friend class DecodeReactor;
  void Add(DecodeReactor* stream);
  void Remove(DecodeReactor* stream);

  std::mutex mutex_;
  std::set<DecodeReactor*> streams_;
  bool ending_ = false;
};

class DecodeReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                            public Call,
                            public WatchedStream {
 public:
  // Reading pauses while a stream has so much unanswered or unwritten: a client that does not read its replies must
  // not fill the server's memory.
  static constexpr size_t kMessagesMax = 32;
  static constexpr uint64_t kHeldBytesMax = limits::kMessageBytesMax;

  DecodeReactor(grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter, DecodeStreams& streams);

  // Reads no more and finishes with UNAVAILABLE once what was read is answered.
  void Drain();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void EndWith(const absl::Status& status) override;
  void Abort() override { context_.TryCancel(); }

 private:
  // One message on its way. The engine views `request` until the slot is ready.
  struct Slot {
    v1::DecodeRequest request;
    grpc::ByteBuffer reply;
    TimePoint start;
    StageTimes times;
    uint64_t bytes = 0;  // of the request, then of the reply
    bool ready = false;
  };

  void Advance(std::unique_lock<std::mutex> lock);  // takes mutex_ held
  void Submit(grpc::ByteBuffer bytes, Slot* slot);
  void Answer(Slot* slot, std::vector<StepResult> results);
  void KeepSlowMessage(const Slot& slot, std::chrono::nanoseconds duration) const;

  grpc::CallbackServerContext& context_;
  DecodeStreams& streams_;

  std::mutex mutex_;                         // guards all below
  grpc::ByteBuffer incoming_;                // being read
  std::deque<std::unique_ptr<Slot>> slots_;  // read, not yet written, in order
  size_t running_ = 0;                       // slots at the engine
  uint64_t held_bytes_ = 0;                  // of slots_
  bool reading_ = false;
  bool writing_ = false;
  bool gone_ = false;  // nothing can be written any more
  bool finished_ = false;
  std::optional<absl::Status> end_;  // set: nothing more is read, and this ends the stream
};

}  // namespace ctkvr::rpc
