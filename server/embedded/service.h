// SPDX-License-Identifier: Apache-2.0
//
// The calls of proto/ctkvr/v1/cache.proto in this process: an engine, with serialised requests in and replies out.
// Each: decode, one engine call, encode, by the codec that the gRPC edge uses, so that answers are the same.
//
//   Service ── owns ── Backend, Clock, Engine          streams.h: the calls of many messages
//
// Thread-safe. A call answers through its callback, exactly once: at once on the caller's thread, or on a lane's, where
// it must not block, nor end the stream that calls it.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message.h"
#include "kernels/backend.h"
#include "server/core/engine.h"

namespace ctkvr::embedded {

// What became of a call, or of one message of a stream. A stream that has ended well says OK without a reply.
struct Outcome {
  absl::Status status;
  std::unique_ptr<google::protobuf::Message> reply;
};
using Done = absl::AnyInvocable<void(Outcome)>;

class Service {
 public:
  // `settings`: name to text, those of ctkvrd (server/settings.h) that are the engine's, and `backend`.
  // INVALID_ARGUMENT: another name, or a value outside its limits. RESOURCE_EXHAUSTED: no memory for the arena.
  static absl::StatusOr<std::unique_ptr<Service>> Create(const std::map<std::string, std::string>& settings,
                                                         const std::string& version);
  ~Service();  // cancels what still runs; sessions end

  // A unary call by the contract's name, "Retrieve". `request` is parsed before Call returns.
  // UNIMPLEMENTED: no such call is served.
  void Call(const std::string& method, std::string_view request, CallContext context, Done done);

  Engine& engine() { return *engine_; }
  const std::string& version() const { return version_; }

 private:
  explicit Service(std::string version) : version_(std::move(version)) {}

  const std::string version_;
  RealClock clock_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Engine> engine_;
};

// Parses, as the gRPC edge would: RESOURCE_EXHAUSTED over limits::kMessageBytesMax, INVALID_ARGUMENT where `bytes` are
// no such message.
absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message* message);

}  // namespace ctkvr::embedded
