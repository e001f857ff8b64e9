// SPDX-License-Identifier: Apache-2.0
//
// A small engine inside the test, and calls that wait for their outcome. Not thread-safe.

#pragma once

#include <future>
#include <memory>
#include <string>
#include <utility>

#include "server/embedded/service.h"
#include "tests/server/rpc/messages.h"

namespace ctkvr::embedded {

inline std::unique_ptr<Service> SmallService() {
  auto service = Service::Create({{"arena_bytes", "64MiB"}, {"scratch_bytes", "32MiB"}, {"lanes", "2"}}, "1.2.3");
  return service.ok() ? *std::move(service) : nullptr;
}

// The outcome of what `start(done)` begins.
template <typename Start>
Outcome Await(Start start) {
  std::promise<Outcome> promise;
  std::future<Outcome> future = promise.get_future();
  start([&](Outcome outcome) { promise.set_value(std::move(outcome)); });
  return future.get();
}

inline Outcome Call(Service& service, const std::string& method, const google::protobuf::Message& request,
                    CallContext context = {}) {
  const std::string bytes = request.SerializeAsString();
  return Await([&](Done done) { service.Call(method, bytes, std::move(context), std::move(done)); });
}

template <typename Reply>
const Reply& As(const Outcome& outcome) {
  return dynamic_cast<const Reply&>(*outcome.reply);
}

}  // namespace ctkvr::embedded
