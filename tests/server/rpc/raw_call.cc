// SPDX-License-Identifier: Apache-2.0

#include "tests/server/rpc/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

#include <vector>

#include "kernels/base/check.h"

namespace ctkvr::testing {
namespace {

void Wait(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  CTKVR_CHECK(queue.Next(&tag, &ok));  // whether it went well shows in the status
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

}  // namespace

RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& bytes,
                 const std::string& token) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  Wait(queue);
  const grpc::Slice slice(bytes);
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  Wait(queue);
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  Wait(queue);
  RawReply result;
  call->Finish(&result.status, nullptr);
  Wait(queue);
  result.bytes = ToString(reply);
  return result;
}

int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  if (!service.empty()) request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  const RawReply reply = RawCall(channel, "/grpc.health.v1.Health/Check", request);
  if (!reply.status.ok()) return -static_cast<int>(reply.status.error_code());
  return reply.bytes.size() == 2 && reply.bytes[0] == 0x08 ? reply.bytes[1] : 0;
}

}  // namespace ctkvr::testing
