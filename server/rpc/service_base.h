// SPDX-License-Identifier: Apache-2.0
//
// The generated service with callbacks, whose streams carry bytes instead of messages: a typed stream cannot tell a
// message that does not parse from the end of the stream, so a broken chunk would end an upload with OK.

#pragma once

#include "absl/status/status.h"
#include "ctkvr/v1/cache.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace ctkvr::rpc {

template <class Base, template <class> class... Methods>
struct Stack {
  using Type = Base;
};
template <class Base, template <class> class First, template <class> class... Rest>
struct Stack<Base, First, Rest...> {
  using Type = First<typename Stack<Base, Rest...>::Type>;
};

using ServiceBase = Stack<v1::Cache::Service, v1::Cache::WithCallbackMethod_GetServerInfo,
                          v1::Cache::WithCallbackMethod_OpenSession, v1::Cache::WithCallbackMethod_CloseSession,
                          v1::Cache::WithCallbackMethod_TruncateSession, v1::Cache::WithCallbackMethod_ForkSession,
                          v1::Cache::WithCallbackMethod_GetSession, v1::Cache::WithCallbackMethod_ListSessions,
                          v1::Cache::WithCallbackMethod_KeepAlive, v1::Cache::WithCallbackMethod_MaintainSession,
                          v1::Cache::WithCallbackMethod_Append, v1::Cache::WithCallbackMethod_Retrieve,
                          v1::Cache::WithCallbackMethod_SnapshotSession, v1::Cache::WithCallbackMethod_RestoreSession,
                          v1::Cache::WithRawCallbackMethod_AppendStream, v1::Cache::WithRawCallbackMethod_Decode>::Type;

// INVALID_ARGUMENT: `bytes` are no such message. Empties `bytes`.
template <typename Message>
absl::Status ParseMessage(grpc::ByteBuffer* bytes, Message* message) {
  if (grpc::SerializationTraits<Message>::Deserialize(bytes, message).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError("the message cannot be parsed as " + std::string(message->GetTypeName()));
}

template <typename Message>
grpc::ByteBuffer SerializeMessage(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own_buffer);
  return bytes;
}

}  // namespace ctkvr::rpc
