// SPDX-License-Identifier: Apache-2.0
//
// The reactor of one unary call. It lives from the handler until the reply is on its way, as the request and the reply
// do, so that a core request may view the message's bytes. Deletes itself.
//
//   auto* call = new UnaryCall(...);           in the handler
//   return call->Fail(status);                 or
//   engine.Get(..., call->Context(), call->Then<SessionInfo>([=](SessionInfo info) { encode into the reply }));
//   return call;

#pragma once

#include <utility>

#include "absl/status/statusor.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "server/core/types.h"
#include "server/rpc/call.h"

namespace ctkvr::rpc {

class UnaryCall final : public grpc::ServerUnaryReactor, public Call {
 public:
  // `reply` is weighed when the call ends.
  UnaryCall(obs::Method method, grpc::CallbackServerContext& context, const Edge& edge, CallCounter& counter,
            const google::protobuf::Message& request, const google::protobuf::Message& reply)
      : Call(method, context, edge, counter), reply_(reply) {
    NoteReceived(request.ByteSizeLong());
  }

  UnaryCall* Fail(const absl::Status& status) {
    Finish(End(status));
    return this;
  }
  UnaryCall* Succeed() {
    NoteSent(reply_.ByteSizeLong());
    Finish(End(absl::OkStatus()));
    return this;
  }

  // A callback for the engine: fails the call with the error, or encodes the value and succeeds.
  template <typename Result, typename Encode>
  Callback<Result> Then(Encode encode) {
    return [this, encode = std::move(encode)](absl::StatusOr<Result> result) mutable {
      if (!result.ok()) {
        Fail(result.status());
        return;
      }
      encode(*std::move(result));
      Succeed();
    };
  }

  void OnCancel() override { Call::OnCancel(); }
  void OnDone() override { delete this; }

 private:
  const google::protobuf::Message& reply_;
};

}  // namespace ctkvr::rpc
