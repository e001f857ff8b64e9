// SPDX-License-Identifier: Apache-2.0
//
// The inside of the streams, for the files of this folder.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/sync_stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "client/src/core.h"
#include "ctkvr/client/streams.h"

namespace ctkvr::client {

struct AppendStream::State {
  std::shared_ptr<Core> core;
  v1::SessionRef ref;
  v1::SessionOptions options;
  uint64_t boot_id = 0;
  grpc::ClientContext context;
  v1::AppendStreamReply reply;
  std::unique_ptr<grpc::ClientWriter<v1::AppendRequest>> writer;
  std::optional<absl::Status> end;  // of the stream, once known
};

struct DecodeStream::State {
  std::shared_ptr<Core> core;
  DecodeStreamOptions options;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeReply>> stream;

  uint64_t sent = 0;                  // the sender's: sequence of the last message
  uint64_t received = 0;              // the receiver's
  std::atomic<uint64_t> boot_id = 0;  // of the sessions sent; 0: none yet
  std::atomic<uint32_t> in_flight = 0;
  std::atomic<bool> write_failed = false;
  std::mutex mutex;
  std::optional<absl::Status> end;  // guarded by mutex; of the stream, once known
};

}  // namespace ctkvr::client
