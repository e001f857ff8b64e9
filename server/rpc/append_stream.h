// SPDX-License-Identifier: Apache-2.0
//
// The reactor of one AppendStream: chunks go to the engine one after the other, so that the first error leaves nothing
// of later chunks behind; while one is written the next is read. Deletes itself. Thread-safe: gRPC's threads and the
// lanes' call in.

#pragma once

#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "ctkvr/v1/cache.pb.h"
#include "server/rpc/call.h"

namespace ctkvr::rpc {

class AppendStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public Call, public WatchedStream {
 public:
  // `reply` is gRPC's; it is written when the stream ends well.
  AppendStream(grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter, grpc::ByteBuffer& reply);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void EndWith(const absl::Status& status) override;
  void Abort() override { context_.TryCancel(); }

 private:
  void Advance(std::unique_lock<std::mutex> lock);  // takes mutex_ held
  void Append(grpc::ByteBuffer bytes);
  absl::Status CheckSession(const SessionRef& session);
  void AppendDone(const absl::StatusOr<AppendResult>& result, TimePoint start);
  void ReportLengths();

  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& reply_bytes_;
  v1::AppendRequest current_;        // the engine views it
  std::optional<StageTimes> times_;  // of the chunk at the engine
  v1::AppendStreamReply reply_;

  std::mutex mutex_;                         // guards all below
  grpc::ByteBuffer incoming_;                // being read
  std::optional<grpc::ByteBuffer> waiting_;  // read, its turn has not come
  bool reading_ = false;
  bool appending_ = false;
  bool read_all_ = false;
  bool finishing_ = false;
  absl::Status error_;                 // the first one
  std::optional<SessionRef> session_;  // of the first chunk
};

}  // namespace ctkvr::rpc
