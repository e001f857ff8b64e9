// SPDX-License-Identifier: Apache-2.0
//
// How a client connects, how long it waits and when it tries again. Thread-safe: plain values.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace grpc {
class ChannelCredentials;
}

namespace ctkvr::client {

// When a failed call is tried again. Only where trying again cannot do harm:
//   UNAVAILABLE          calls that read, Append (idempotent by position), Open (the id is fixed before the first
//                        attempt), Close, KeepAlive, Maintain; after a back-off that doubles. Not when the server
//                        drains, and never Truncate: a late first attempt could remove what was appended since.
//   RESOURCE_EXHAUSTED   every call, when the error carries RetryInfo: the server refused before it began. After at
//                        least the delay it names.
// Everything else is returned as it is, and so is the last error when attempts or the deadline run out.
// Streams are never retried: see streams.h for how to resume.
struct RetryOptions {
  // Attempts of a call in all; 1 switches retries off.
  uint32_t attempts_max = 4;
  // Wait before the second attempt; doubles with each further one up to backoff_max. Spread by +-20 %.
  std::chrono::milliseconds backoff_initial{50};
  std::chrono::milliseconds backoff_max{2000};
  // Called to wait. Empty: sleeps. For tests. Must be thread-safe.
  std::function<void(std::chrono::milliseconds)> sleep{};
};

struct ConnectOptions {
  // "host:port", "unix:/path", or any other target gRPC understands.
  std::string address = "127.0.0.1:7420";
  // Null: no encryption and no authentication.
  std::shared_ptr<grpc::ChannelCredentials> credentials{};
  // Proves who calls, to a server with access control: sent with every call, never logged. Empty: none.
  std::string token{};
  // A token is refused (FAILED_PRECONDITION) where it would cross a network unencrypted: without credentials only
  // "unix:", "localhost", "127.x.y.z" and "[::1]" are taken. True: something else encrypts.
  bool allow_plaintext_token = false;
  // Of a unary call with all its attempts, unless CallOptions says otherwise.
  std::chrono::milliseconds timeout{30000};
  // Of MaintainSession, which builds an index and waits for it.
  std::chrono::milliseconds maintain_timeout{600000};
  RetryOptions retry{};
  // Largest reply accepted, bytes. gRPC's own default of 4 MiB is too small for rows; the server's limit on the rows
  // of a reply (ServerLimits.reply_bytes_max) is 256 MiB, this leaves room beside them.
  uint32_t receive_bytes_max = 320u << 20;
  // Append splits into messages of about so many bytes, fewer where the server's limits ask for it.
  uint32_t append_bytes = 8u << 20;
  // Asked at the start of every call and stream for the W3C trace context that it belongs to
  // ("00-<trace id>-<span id>-<flags>"), which the server writes into its log lines; "" for none. Empty: none is sent.
  // Must be thread-safe.
  std::function<std::string()> traceparent{};
  // An idle connection is probed so often; 0: never. Servers drop clients that probe more often than they allow.
  std::chrono::milliseconds keepalive_interval{0};
  // A probe unanswered for so long ends the connection.
  std::chrono::milliseconds keepalive_timeout{20000};
};

// Of one call.
struct CallOptions {
  // In place of ConnectOptions.timeout. Of a stream: of its whole life, which has no limit by default.
  std::optional<std::chrono::milliseconds> timeout{};
};

}  // namespace ctkvr::client
