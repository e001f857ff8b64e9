// SPDX-License-Identifier: Apache-2.0
//
// Messages to core types and back. Every check of untrusted bytes stands here: sizes, products of dims, bytes against
// dims, enum numbers, lengths of names; what depends on a session's state or settings is the engine's. Whether
// elements are finite is the engine's too, as it reads them anyway.
//
// Decoding never allocates by a number that a message claims before that number is checked, and never throws.
// Errors: INVALID_ARGUMENT names field, value and limit. UNIMPLEMENTED names a field that the contract has and this
// server does not serve: such a field is never ignored. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ctkvr/v1/cache.pb.h"
#include "ctkvr/v1/session.pb.h"
#include "server/core/engine.h"
#include "server/core/types.h"
#include "server/rpc/field_path.h"

namespace ctkvr::rpc {

// ---- Untrusted bytes in (codec.cc, codec_options.cc) -------------------------------------------------------------
// `where` is the path of the message in its request, for texts: "items[3].query".

absl::StatusOr<SessionRef> DecodeSessionRef(const v1::SessionRef& message, const FieldPath& where = "session");

// An id chosen by the client at open; empty is left to the engine.
absl::StatusOr<std::string> DecodeNewSessionId(const std::string& id);

// Resolves every default and the layer overrides, in their order. Whether numbers are within limits and go together is
// left to ValidateSessionConfig, save for those that bound work here.
absl::StatusOr<SessionConfig> DecodeSessionOptions(const v1::SessionOptions& options);

absl::StatusOr<SelectionOverride> DecodeSelection(const v1::Selection& message, const FieldPath& where);

// The result views the message's bytes.
absl::StatusOr<Chunk> DecodeChunk(const v1::Chunk& message, const FieldPath& where = "chunk");
absl::StatusOr<Query> DecodeQuery(const v1::Query& message, const AnswerOptions& answer,
                                  const FieldPath& where = "query");
absl::StatusOr<AnswerOptions> DecodeAnswerOptions(const v1::AnswerOptions& message);

// Chunk and session of an append, checksum compared. DATA_LOSS when it differs. Views the message's bytes.
absl::StatusOr<StepRequest> DecodeAppend(const v1::AppendRequest& request);

// The steps of a Retrieve: those that decode, with their place in the request, and an error for each of the others.
struct RetrieveSteps {
  std::vector<StepRequest> steps;
  std::vector<uint32_t> items;         // [steps]: index of the step's item
  std::vector<absl::Status> statuses;  // [items of the request]: OK where there is a step
};
// Fails as a whole for settings of the whole request, a wrong number of items, and the one item of a request of one.
absl::StatusOr<RetrieveSteps> DecodeRetrieve(const v1::RetrieveRequest& request);

// A step an item. Fails as a whole when one item is malformed.
absl::StatusOr<std::vector<StepRequest>> DecodeDecode(const v1::DecodeRequest& request);

absl::StatusOr<std::vector<uint32_t>> DecodeMaintainLayers(const v1::MaintainSessionRequest& request);

struct ListPage {
  std::string after;
  uint32_t size = 0;
};
absl::StatusOr<ListPage> DecodeListPage(const v1::ListSessionsRequest& request);

// ---- Results out (codec_encode.cc, codec_encode_options.cc) -----------------------------------------------------
// Byte strings move from the result into the message, without a copy.

// What a client gets back at open: options that, sent again, open an equal session.
void EncodeSessionOptions(const SessionConfig& config, v1::SessionOptions* options);
void EncodeSelection(const Selection& selection, v1::Selection* message);
void EncodeSoftmax(const SoftmaxConfig& softmax, v1::SoftmaxOptions* message);
v1::Format EncodeFormat(Format format);
v1::Source EncodeSource(Source source);
v1::DType EncodeDType(DType dtype);
v1::RowFormat EncodeRowFormat(RowFormat format);

void EncodeHeader(uint64_t boot_id, uint64_t epoch, v1::ReplyHeader* header);
void EncodeSessionInfo(const SessionInfo& info, v1::SessionInfo* message);
void EncodeRowCodec(const RowCodec& codec, uint32_t head_dim, v1::RowCodec* message);

// Bytes that an answer adds to its reply, without the few of its framing.
uint64_t AnswerBytes(const Answer& answer);
void EncodeAnswer(Answer answer, uint32_t head_dim, v1::Answer* message);

// Items over limits::kReplyBytesMax together answer RESOURCE_EXHAUSTED from the first that does not fit.
// `results` [steps]; replies come in the order of the request's items.
// EncodeRetrieve returns the error of the one item of a request of one; else OK.
absl::Status EncodeRetrieve(const v1::RetrieveRequest& request, const RetrieveSteps& steps,
                            std::vector<StepResult> results, v1::RetrieveReply* reply);
void EncodeDecode(const v1::DecodeRequest& request, std::vector<StepResult> results, v1::DecodeReply* reply);

// A full page may be followed by another, perhaps an empty one. REQUIRES: page_size > 0.
void EncodeListPage(const std::vector<SessionSummary>& summaries, uint32_t page_size, v1::ListSessionsReply* reply);

void EncodeServerInfo(const Engine& engine, const std::string& version, v1::GetServerInfoReply* reply);

}  // namespace ctkvr::rpc
