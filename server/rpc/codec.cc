// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/codec.h"

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"
#include "server/rpc/codec_checks.h"
#include "xxhash.h"

namespace ctkvr::rpc {
namespace {

struct TensorView {
  DType dtype = DType::kF16;
  std::array<uint32_t, 3> dims{};
  std::span<const std::byte> data;
};

// The three dims that a field's comment gives, with what each may be.
struct TensorLimits {
  uint32_t rows_max = 0;
  uint32_t heads_max = 0;
};

std::string ShapeText(const v1::Tensor& tensor) {
  return "[" + std::to_string(tensor.dims(0)) + ", " + std::to_string(tensor.dims(1)) + ", " +
         std::to_string(tensor.dims(2)) + "]";
}

absl::StatusOr<TensorView> DecodeTensor(const v1::Tensor& tensor, const TensorLimits& limits, const FieldPath& field) {
  TensorView view;
  CTKVR_ASSIGN_OR_RETURN(view.dtype, DecodeDType(tensor.dtype(), FieldPath(field, "dtype")));
  if (tensor.dims_size() != 3) {
    return absl::InvalidArgumentError(field.Text() + ".dims has " + std::to_string(tensor.dims_size()) +
                                      " entries; it takes 3");
  }
  const uint64_t element_bytes = DTypeBytes(view.dtype);
  const auto bytes = CheckedProduct({tensor.dims(0), tensor.dims(1), tensor.dims(2), element_bytes});
  if (!bytes.has_value()) {
    return absl::InvalidArgumentError(field.Text() + ".dims is " + ShapeText(tensor) +
                                      "; its bytes do not fit 64 bits");
  }
  if (*bytes != tensor.data().size()) {
    return absl::InvalidArgumentError(field.Text() + ".data has " + std::to_string(tensor.data().size()) +
                                      " bytes; dims " + ShapeText(tensor) + " of " + DTypeName(view.dtype) + " take " +
                                      std::to_string(*bytes));
  }
  const std::array<uint32_t, 3> most = {limits.rows_max, limits.heads_max, limits::kHeadDimMax};
  for (int i = 0; i < 3; ++i) {
    const FieldPath name(field, "dims", i);
    if (tensor.dims(i) == 0) return BelowLimit(name, 0, 1);
    CTKVR_RETURN_IF_ERROR(AtMost(name, tensor.dims(i), most[static_cast<size_t>(i)]));
    view.dims[static_cast<size_t>(i)] = tensor.dims(i);
  }
  view.data = std::as_bytes(std::span(tensor.data().data(), tensor.data().size()));
  return view;
}

// Two fields of one message that must say the same.
absl::Status Equal(const FieldPath& field, uint64_t value, const char* other, uint64_t other_value) {
  if (value == other_value) return absl::OkStatus();
  return absl::InvalidArgumentError(field.Text() + " is " + std::to_string(value) + "; it must equal " + other +
                                    ", which is " + std::to_string(other_value));
}

absl::Status SameDType(const FieldPath& field, DType dtype, const char* other, DType other_dtype) {
  if (dtype == other_dtype) return absl::OkStatus();
  return absl::InvalidArgumentError(field.Text() + ".dtype is " + DTypeName(dtype) + "; it must equal that of " +
                                    other + ", which is " + DTypeName(other_dtype));
}

absl::Status DecodeChunkQueries(const v1::Tensor& message, const FieldPath& where, Chunk* chunk) {
  const FieldPath field(where, "queries");
  CTKVR_ASSIGN_OR_RETURN(const TensorView queries,
                         DecodeTensor(message, {limits::kAppendTokensMax, limits::kQHeadsMax}, field));
  CTKVR_RETURN_IF_ERROR(SameDType(field, queries.dtype, "keys", chunk->dtype));
  CTKVR_RETURN_IF_ERROR(AtMost(FieldPath(field, "dims", 0), queries.dims[0], chunk->tokens));
  CTKVR_RETURN_IF_ERROR(Equal(FieldPath(field, "dims", 2), queries.dims[2], "keys.dims[2]", chunk->head_dim));
  chunk->query_positions = queries.dims[0];
  chunk->q_heads = queries.dims[1];
  chunk->queries = queries.data;
  return absl::OkStatus();
}

absl::Status CheckChecksum(const v1::AppendRequest& request) {
  if (request.checksum() == 0) return absl::OkStatus();
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  CTKVR_CHECK(state != nullptr);
  XXH3_64bits_reset(state.get());
  for (const v1::Tensor* tensor : {&request.chunk().keys(), &request.chunk().values(), &request.chunk().queries()}) {
    XXH3_64bits_update(state.get(), tensor->data().data(), tensor->data().size());
  }
  const uint64_t actual = XXH3_64bits_digest(state.get());
  if (actual == request.checksum()) return absl::OkStatus();
  return absl::DataLossError("checksum is " + std::to_string(request.checksum()) + "; the data received has " +
                             std::to_string(actual));
}

absl::StatusOr<StepRequest> DecodeRetrieveItem(const v1::RetrieveItem& item, const AnswerOptions& answer,
                                               const FieldPath& where) {
  StepRequest step;
  CTKVR_ASSIGN_OR_RETURN(step.session, DecodeSessionRef(item.session(), FieldPath(where, "session")));
  if (!item.has_query()) return Missing(FieldPath(where, "query"));
  CTKVR_ASSIGN_OR_RETURN(step.query, DecodeQuery(item.query(), answer, FieldPath(where, "query")));
  return step;
}

absl::StatusOr<StepRequest> DecodeDecodeItem(const v1::DecodeItem& item, const AnswerOptions& answer,
                                             const FieldPath& where) {
  StepRequest step;
  CTKVR_ASSIGN_OR_RETURN(step.session, DecodeSessionRef(item.session(), FieldPath(where, "session")));
  if (!item.has_chunk() && !item.has_query()) {
    return absl::InvalidArgumentError(where.Text() + " has neither chunk nor query");
  }
  if (item.has_chunk()) {
    CTKVR_ASSIGN_OR_RETURN(step.chunk, DecodeChunk(item.chunk(), FieldPath(where, "chunk")));
  }
  if (item.has_query()) {
    CTKVR_ASSIGN_OR_RETURN(step.query, DecodeQuery(item.query(), answer, FieldPath(where, "query")));
  }
  return step;
}

absl::Status CheckItemCount(int count) {
  if (count == 0) return BelowLimit("items", 0, 1);
  return AtMost("items", static_cast<uint64_t>(count), limits::kItemsMax);
}

absl::StatusOr<AnswerMode> DecodeAnswerMode(v1::AnswerMode mode) {
  switch (mode) {
    case v1::ANSWER_MODE_IDS:
      return AnswerMode::kIds;
    case v1::ANSWER_MODE_UNSPECIFIED:
    case v1::ANSWER_MODE_SCORES:
      return AnswerMode::kScores;
    case v1::ANSWER_MODE_ROWS:
      return AnswerMode::kRows;
    case v1::ANSWER_MODE_NEW_ROWS:
      return AnswerMode::kNewRows;
    case v1::ANSWER_MODE_ATTENTION:
      return AnswerMode::kAttention;
    default:
      return UnknownEnum("answer.mode", mode, v1::AnswerMode_MAX);
  }
}

absl::StatusOr<RowFormat> DecodeRowFormat(v1::RowFormat format, AnswerMode mode) {
  switch (format) {
    case v1::ROW_FORMAT_UNSPECIFIED:
      return mode == AnswerMode::kAttention ? RowFormat::kF32 : RowFormat::kF16;
    case v1::ROW_FORMAT_F32:
      return RowFormat::kF32;
    case v1::ROW_FORMAT_F16:
      return RowFormat::kF16;
    case v1::ROW_FORMAT_BF16:
      return RowFormat::kBF16;
    case v1::ROW_FORMAT_STORAGE:
      return RowFormat::kStorage;
    default:
      return UnknownEnum("answer.row_format", format, v1::RowFormat_MAX);
  }
}

}  // namespace

absl::Status AboveLimit(const FieldPath& field, uint64_t value, uint64_t limit) {
  return absl::InvalidArgumentError(field.Text() + " is " + std::to_string(value) + "; the limit is " +
                                    std::to_string(limit));
}

absl::Status BelowLimit(const FieldPath& field, uint64_t value, uint64_t minimum) {
  return absl::InvalidArgumentError(field.Text() + " is " + std::to_string(value) + "; it must be at least " +
                                    std::to_string(minimum));
}

absl::Status Missing(const FieldPath& field) { return absl::InvalidArgumentError(field.Text() + " is missing"); }

absl::Status UnknownEnum(const FieldPath& field, int value, int last) {
  return absl::InvalidArgumentError(field.Text() + " is " + std::to_string(value) + "; the known values are 0 to " +
                                    std::to_string(last));
}

absl::Status NotServed(const FieldPath& field) {
  return absl::UnimplementedError(field.Text() + " is not served by this version of the server");
}

absl::StatusOr<DType> DecodeDType(v1::DType dtype, const FieldPath& field) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return DType::kF32;
    case v1::DTYPE_F16:
      return DType::kF16;
    case v1::DTYPE_BF16:
      return DType::kBF16;
    case v1::DTYPE_UNSPECIFIED:
      return Missing(field);
    default:
      return UnknownEnum(field, dtype, v1::DType_MAX);
  }
}

absl::StatusOr<SessionRef> DecodeSessionRef(const v1::SessionRef& message, const FieldPath& where) {
  if (message.session_id().empty()) return Missing(FieldPath(where, "session_id"));
  CTKVR_RETURN_IF_ERROR(
      AtMost(FieldPath(where, "session_id bytes"), message.session_id().size(), limits::kSessionIdBytesMax));
  CTKVR_RETURN_IF_ERROR(
      AtMost(FieldPath(where, "fingerprint bytes"), message.fingerprint().size(), limits::kFingerprintBytesMax));
  return SessionRef{.id = message.session_id(), .epoch = message.epoch(), .fingerprint = message.fingerprint()};
}

absl::StatusOr<std::string> DecodeNewSessionId(const std::string& id) {
  CTKVR_RETURN_IF_ERROR(AtMost("session_id bytes", id.size(), limits::kSessionIdBytesMax));
  return id;
}

absl::StatusOr<Chunk> DecodeChunk(const v1::Chunk& message, const FieldPath& where) {
  if (message.segments_size() != 0) return NotServed(FieldPath(where, "segments"));
  if (!message.has_keys()) return Missing(FieldPath(where, "keys"));
  if (!message.has_values()) return Missing(FieldPath(where, "values"));
  const TensorLimits most = {limits::kAppendTokensMax, limits::kKvHeadsMax};
  const FieldPath keys_field(where, "keys");
  const FieldPath values_field(where, "values");
  CTKVR_ASSIGN_OR_RETURN(const TensorView keys, DecodeTensor(message.keys(), most, keys_field));
  CTKVR_ASSIGN_OR_RETURN(const TensorView values, DecodeTensor(message.values(), most, values_field));
  CTKVR_RETURN_IF_ERROR(SameDType(values_field, values.dtype, "keys", keys.dtype));
  CTKVR_RETURN_IF_ERROR(Equal(FieldPath(values_field, "dims", 0), values.dims[0], "keys.dims[0]", keys.dims[0]));
  CTKVR_RETURN_IF_ERROR(Equal(FieldPath(values_field, "dims", 1), values.dims[1], "keys.dims[1]", keys.dims[1]));
  Chunk chunk = {.layer = message.layer(),
                 .first_position = message.first_position(),
                 .tokens = keys.dims[0],
                 .dtype = keys.dtype,
                 .kv_heads = keys.dims[1],
                 .head_dim = keys.dims[2],
                 .value_dim = values.dims[2],
                 .keys = keys.data,
                 .values = values.data,
                 .queries = {},
                 .weights = {message.weights().data(), static_cast<size_t>(message.weights_size())},
                 .classes = {message.classes().data(), static_cast<size_t>(message.classes_size())}};
  if (message.has_queries()) CTKVR_RETURN_IF_ERROR(DecodeChunkQueries(message.queries(), where, &chunk));
  return chunk;
}

absl::StatusOr<AnswerOptions> DecodeAnswerOptions(const v1::AnswerOptions& message) {
  AnswerOptions options;
  CTKVR_ASSIGN_OR_RETURN(options.mode, DecodeAnswerMode(message.mode()));
  CTKVR_ASSIGN_OR_RETURN(options.row_format, DecodeRowFormat(message.row_format(), options.mode));
  options.remainder = message.remainder();
  if (message.row_format() == v1::ROW_FORMAT_F16) options.remainder_dtype = DType::kF16;
  if (message.row_format() == v1::ROW_FORMAT_BF16) options.remainder_dtype = DType::kBF16;
  options.known_code_generation = message.known_code_generation();
  options.explain = message.explain();
  return options;
}

absl::StatusOr<Query> DecodeQuery(const v1::Query& message, const AnswerOptions& answer, const FieldPath& where) {
  if (!message.has_queries()) return Missing(FieldPath(where, "queries"));
  CTKVR_ASSIGN_OR_RETURN(
      const TensorView queries,
      DecodeTensor(message.queries(), {limits::kQueryPositionsMax, limits::kQHeadsMax}, FieldPath(where, "queries")));
  Query query = {.layer = message.layer(),
                 .position = message.position(),
                 .positions = queries.dims[0],
                 .dtype = queries.dtype,
                 .q_heads = queries.dims[1],
                 .head_dim = queries.dims[2],
                 .queries = queries.data,
                 .selection = {},
                 .local_begin = std::nullopt,
                 .local_sinks = message.local_sinks(),
                 .cache_version = message.cache_version(),
                 .answer = answer};
  CTKVR_ASSIGN_OR_RETURN(query.selection, DecodeSelection(message.selection(), FieldPath(where, "selection")));
  if (message.has_local_begin()) query.local_begin = message.local_begin();
  return query;
}

absl::StatusOr<StepRequest> DecodeAppend(const v1::AppendRequest& request) {
  StepRequest step;
  CTKVR_ASSIGN_OR_RETURN(step.session, DecodeSessionRef(request.session()));
  if (!request.has_chunk()) return Missing("chunk");
  CTKVR_ASSIGN_OR_RETURN(step.chunk, DecodeChunk(request.chunk()));
  CTKVR_RETURN_IF_ERROR(CheckChecksum(request));
  return step;
}

absl::StatusOr<RetrieveSteps> DecodeRetrieve(const v1::RetrieveRequest& request) {
  CTKVR_RETURN_IF_ERROR(CheckItemCount(request.items_size()));
  CTKVR_ASSIGN_OR_RETURN(const AnswerOptions answer, DecodeAnswerOptions(request.answer()));
  RetrieveSteps decoded;
  decoded.statuses.resize(static_cast<size_t>(request.items_size()));
  for (int i = 0; i < request.items_size(); ++i) {
    const auto index = static_cast<uint32_t>(i);
    auto step = DecodeRetrieveItem(request.items(i), answer, FieldPath("items", i));
    if (!step.ok() && request.items_size() == 1) return step.status();
    decoded.statuses[index] = step.status();
    if (!step.ok()) continue;
    decoded.steps.push_back(*std::move(step));
    decoded.items.push_back(index);
  }
  return decoded;
}

absl::StatusOr<std::vector<StepRequest>> DecodeDecode(const v1::DecodeRequest& request) {
  CTKVR_RETURN_IF_ERROR(CheckItemCount(request.items_size()));
  CTKVR_ASSIGN_OR_RETURN(const AnswerOptions answer, DecodeAnswerOptions(request.answer()));
  std::vector<StepRequest> steps;
  steps.reserve(static_cast<size_t>(request.items_size()));
  for (int i = 0; i < request.items_size(); ++i) {
    CTKVR_ASSIGN_OR_RETURN(StepRequest step, DecodeDecodeItem(request.items(i), answer, FieldPath("items", i)));
    steps.push_back(std::move(step));
  }
  return steps;
}

absl::StatusOr<std::vector<uint32_t>> DecodeMaintainLayers(const v1::MaintainSessionRequest& request) {
  CTKVR_RETURN_IF_ERROR(AtMost("layers count", static_cast<uint64_t>(request.layers_size()), limits::kLayersMax));
  return std::vector<uint32_t>(request.layers().begin(), request.layers().end());
}

absl::StatusOr<ListPage> DecodeListPage(const v1::ListSessionsRequest& request) {
  CTKVR_RETURN_IF_ERROR(AtMost("page_size", request.page_size(), limits::kListSessionsPageMax));
  CTKVR_RETURN_IF_ERROR(AtMost("page_token bytes", request.page_token().size(), limits::kSessionIdBytesMax));
  constexpr uint32_t kDefaultPage = 100;  // as the contract says
  return ListPage{.after = request.page_token(), .size = request.page_size() == 0 ? kDefaultPage : request.page_size()};
}

}  // namespace ctkvr::rpc
