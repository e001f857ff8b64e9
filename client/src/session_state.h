// SPDX-License-Identifier: Apache-2.0
//
// The inside of Session, for the files of this folder.

#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "client/src/core.h"
#include "ctkvr/client/session.h"

namespace ctkvr::client {

struct Session::State {
  std::shared_ptr<Core> core;
  v1::SessionRef ref;
  v1::SessionOptions options;
  uint64_t boot_id = 0;
  bool close_on_destroy = false;
  std::atomic<bool> closed = false;

  // A unary call about this session: checks the boot of the reply and explains errors.
  template <typename Request, typename Reply>
  Outcome Call(grpc::Status (v1::Cache::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
               const Request& request, Reply* reply, Deadline deadline, Repeat repeat) const {
    Outcome outcome = core->Call(method, request, reply, deadline, repeat);
    outcome.status = outcome.status.ok() ? Core::CheckBoot(reply->header(), boot_id)
                                         : core->ExplainSessionError(outcome.status, boot_id);
    return outcome;
  }
};

}  // namespace ctkvr::client
