// SPDX-License-Identifier: Apache-2.0
//
// A program of someone else that talks to a server. Nobody listens on port 1, and the client says so.

#include <ctkvr/client/client.h>
#include <ctkvr/v1/session.pb.h>

#include <chrono>
#include <cstdio>

int main() {
  ctkvr::client::ConnectOptions options;
  options.address = "127.0.0.1:1";
  options.timeout = std::chrono::milliseconds(2000);
  options.retry.attempts_max = 1;
  const auto client = ctkvr::client::Client::Connect(options);
  if (client.ok()) return 1;
  std::printf("consumer: %s\n", client.status().ToString().c_str());
  return client.status().code() == absl::StatusCode::kUnavailable ||
                 client.status().code() == absl::StatusCode::kDeadlineExceeded
             ? 0
             : 1;
}
