// SPDX-License-Identifier: Apache-2.0

#include <bit>
#include <utility>

#include "server/core/error.h"
#include "server/core/limits.h"
#include "server/rpc/codec.h"
#include "server/rpc/codec_status.h"

namespace ctkvr::rpc {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian, and arrays are sent as they lie");

// Whether an answer may still join a reply of `used` bytes; adds its bytes when it may.
bool Fits(const absl::StatusOr<Answer>& answer, uint64_t* used) {
  if (!answer.ok()) return true;
  const uint64_t bytes = AnswerBytes(*answer);
  if (bytes > limits::kReplyBytesMax - *used) return false;
  *used += bytes;
  return true;
}

void EncodeLimits(const EngineOptions& options, v1::ServerLimits* message) {
  message->set_message_bytes_max(limits::kMessageBytesMax);
  message->set_sessions_max(options.sessions_max);
  message->set_layers_max(limits::kLayersMax);
  message->set_q_heads_max(limits::kQHeadsMax);
  message->set_kv_heads_max(limits::kKvHeadsMax);
  message->set_group_heads_max(limits::kGroupHeadsMax);
  message->set_head_dim_min(limits::kHeadDimMin);
  message->set_head_dim_max(limits::kHeadDimMax);
  message->set_head_dim_multiple(limits::kHeadDimMultiple);
  message->set_token_limit_max(limits::kTokenLimitMax);
  message->set_k_tokens_max(limits::kTokensMax);
  message->set_candidate_tokens_max(limits::kCandidateTokensMax);
  message->set_query_positions_max(limits::kQueryPositionsMax);
  message->set_items_max(limits::kItemsMax);
  message->set_centroids_max(limits::kCentroidsMax);
  message->set_list_tokens_max(limits::kListTokensMax);
  message->set_lease_seconds_min(limits::kLeaseSecondsMin);
  message->set_lease_seconds_max(limits::kLeaseSecondsMax);
  message->set_lease_seconds_default(limits::kLeaseSecondsDefault);
  message->set_queue_items_max(options.queue_items_max);
  message->set_magnitude_max(limits::kMagnitudeMax);
  message->set_append_tokens_max(limits::kAppendTokensMax);
  message->set_reply_bytes_max(limits::kReplyBytesMax);
  message->set_cache_slots_max(limits::kCacheSlotsMax);
  message->set_tokens_per_cluster_min(limits::kTokensPerClusterMin);
  message->set_tokens_per_cluster_max(limits::kTokensPerClusterMax);
}

void EncodeAttention(PartialAttention attention, v1::Tensor* output, v1::Tensor* log_sum_exp) {
  output->set_dtype(EncodeDType(attention.dtype));
  for (uint32_t dim : {attention.positions, attention.q_heads, attention.value_dim}) output->add_dims(dim);
  output->set_data(std::move(attention.output));
  log_sum_exp->set_dtype(v1::DTYPE_F32);
  for (uint32_t dim : {attention.positions, attention.q_heads}) log_sum_exp->add_dims(dim);
  log_sum_exp->set_data(std::move(attention.log_sum_exp));
}

absl::Status ReplyFull() {
  return absl::ResourceExhaustedError("the answers of this request take more than " +
                                      std::to_string(limits::kReplyBytesMax) +
                                      " bytes, the limit of a reply; ask for fewer items, positions, tokens or rows");
}

// The proto's numbers are ours and 1: 0 is unspecified there.
v1::SelectionReason EncodeReason(SelectionReason reason) {
  static_assert(static_cast<int>(SelectionReason::kQuality) + 1 == v1::SELECTION_REASON_QUALITY);
  static_assert(kSelectionReasonCount == v1::SelectionReason_MAX);
  return static_cast<v1::SelectionReason>(static_cast<int>(reason) + 1);
}

void EncodeExplanation(const Explanation& explanation, v1::Explanation* message) {
  message->set_reason(EncodeReason(explanation.reason));
  message->set_scanned(explanation.scanned);
  message->set_survivors(explanation.survivors);
  message->set_candidates(explanation.candidates);
  message->set_scored(explanation.scored);
  message->set_chosen(explanation.chosen);
}

void EncodeTruth(const TruthInfo& truth, v1::Truth* message) {
  message->set_samples(truth.samples);
  message->set_needles(truth.needles);
  message->set_needles_found(truth.needles_found);
  message->set_best_tokens(truth.best_tokens);
  message->set_best_chosen(truth.best_chosen);
  if (truth.heads != 0) {
    message->set_mass(truth.mass_sum / static_cast<double>(truth.heads));
    message->set_output_error(truth.output_error_sum / static_cast<double>(truth.heads));
  }
  if (!truth.worst_head.has_value()) return;
  message->set_worst_head(*truth.worst_head);
  message->set_worst_head_share(truth.worst_head_share);
}

}  // namespace

void EncodeHeader(uint64_t boot_id, uint64_t epoch, v1::ReplyHeader* header) {
  header->set_boot_id(boot_id);
  header->set_session_epoch(epoch);
}

void EncodeRowCodec(const RowCodec& codec, uint32_t head_dim, v1::RowCodec* message) {
  message->set_format(EncodeFormat(codec.format));
  message->set_code_generation(codec.code_generation);
  message->set_rotation_seed(codec.rotation_seed);
  message->set_key_row_bytes(codec.key_row_bytes);
  message->set_value_row_bytes(codec.value_row_bytes);
  if (codec.key_mean.empty()) return;
  v1::Tensor* mean = message->mutable_key_mean();
  mean->set_dtype(v1::DTYPE_F32);
  mean->add_dims(static_cast<uint32_t>(codec.key_mean.size() / head_dim));
  mean->add_dims(head_dim);
  mean->mutable_data()->assign(reinterpret_cast<const char*>(codec.key_mean.data()),
                               codec.key_mean.size() * sizeof(float));
}

void EncodeSessionInfo(const SessionInfo& info, v1::SessionInfo* message) {
  message->set_session_id(info.id);
  message->set_epoch(info.epoch);
  EncodeSessionOptions(info.config, message->mutable_options());
  uint64_t row_pairs = 0;  // tokens held, times KV heads
  uint64_t f32_bytes = 0;  // of the same keys and values
  for (uint32_t i = 0; i < info.layers.size(); ++i) {
    const LayerConfig& config = info.config.layers[i];
    const LayerInfo& layer = info.layers[i];
    v1::LayerInfo* out = message->add_layers();
    out->set_layer(i);
    out->set_length(layer.length);
    out->set_indexed_length(layer.indexed_length);
    out->set_query_centroids(layer.query_centroids);
    out->set_clustered_length(layer.clustered_length);
    out->set_absent(config.absent);
    if (config.absent) continue;
    EncodeRowCodec(layer.codec, config.head_dim, out->mutable_codec());
    EncodeSelection(config.selection, out->mutable_selection());
    EncodeSoftmax(config.softmax, out->mutable_softmax());
    EncodeTruth(layer.truth, out->mutable_truth());
    out->set_strength(layer.strength);
    out->set_served(EncodeSource(layer.served));
    out->set_reason(EncodeReason(layer.reason));
    const uint64_t pairs = uint64_t{layer.length} * config.kv_heads;
    row_pairs += pairs;
    f32_bytes += pairs * (config.head_dim + config.value_dim) * sizeof(float);
  }
  v1::SessionMemory* memory = message->mutable_memory();
  memory->set_reserved_bytes(info.memory.reserved_bytes);
  memory->set_held_bytes(info.memory.held_bytes());
  memory->set_page_bytes(info.memory.page_bytes);
  memory->set_raw_bytes(info.memory.raw_bytes);
  memory->set_index_bytes(info.memory.index_bytes);
  memory->set_state_bytes(info.memory.state_bytes);
  memory->set_slot_table_bytes(info.memory.slot_table_bytes);
  memory->set_tag_bytes(info.memory.tag_bytes);
  if (row_pairs != 0) {
    memory->set_bytes_per_token_head(static_cast<double>(info.memory.page_bytes) / static_cast<double>(row_pairs));
    memory->set_share_of_f32(static_cast<double>(info.memory.held_bytes()) / static_cast<double>(f32_bytes));
  }
  message->set_lease_remaining_seconds(info.lease_remaining_seconds);
  message->set_appended_tokens(info.appended_tokens);
  message->set_retrievals(info.retrievals);
  EncodeTruth(info.truth, message->mutable_truth());
  message->set_shadows_skipped(info.shadows_skipped);
  message->set_shadow_pending(info.shadow_pending);
}

uint64_t AnswerBytes(const Answer& answer) {
  constexpr uint64_t kCountBytesMax = 5;  // a 32-bit varint
  const auto attention_bytes = [](const std::optional<PartialAttention>& attention) {
    return attention ? attention->output.size() + attention->log_sum_exp.size() : 0;
  };
  return attention_bytes(answer.attention) + attention_bytes(answer.remainder) + answer.ids.size() +
         answer.scores.size() + answer.keys.size() + answer.values.size() + answer.slots.size() +
         answer.new_slots.size() + (answer.counts.size() + answer.new_counts.size()) * kCountBytesMax +
         (answer.codec ? answer.codec->key_mean.size() * sizeof(float) : 0);
}

void EncodeAnswer(Answer answer, uint32_t head_dim, v1::Answer* message) {
  message->mutable_counts()->Assign(answer.counts.begin(), answer.counts.end());
  message->set_ids(std::move(answer.ids));
  message->set_scores(std::move(answer.scores));
  message->set_keys(std::move(answer.keys));
  message->set_values(std::move(answer.values));
  message->set_row_format(EncodeRowFormat(answer.row_format));
  if (answer.codec.has_value()) EncodeRowCodec(*answer.codec, head_dim, message->mutable_codec());
  message->set_code_generation(answer.code_generation);
  EncodeSelection(answer.used, message->mutable_used());
  message->set_source(EncodeSource(answer.source));
  message->set_length(answer.length);
  message->set_indexed_length(answer.indexed_length);
  message->set_bytes_read(answer.bytes_read);
  message->set_always_tokens(answer.always_tokens);
  message->set_cache_version(answer.cache_version);
  message->set_slots(std::move(answer.slots));
  message->mutable_new_counts()->Assign(answer.new_counts.begin(), answer.new_counts.end());
  message->set_new_slots(std::move(answer.new_slots));
  if (answer.attention.has_value()) {
    EncodeAttention(*std::move(answer.attention), message->mutable_output(), message->mutable_log_sum_exp());
  }
  if (answer.remainder.has_value()) {
    EncodeAttention(*std::move(answer.remainder), message->mutable_remainder_output(),
                    message->mutable_remainder_log_sum_exp());
  }
  if (answer.explanation.has_value()) EncodeExplanation(*answer.explanation, message->mutable_explanation());
}

absl::Status EncodeRetrieve(const v1::RetrieveRequest& request, const RetrieveSteps& steps,
                            std::vector<StepResult> results, v1::RetrieveReply* reply) {
  for (const absl::Status& status : steps.statuses) EncodeItemStatus(status, reply->add_items()->mutable_status());
  uint64_t used = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const int index = static_cast<int>(steps.items[i]);
    v1::RetrieveReplyItem* item = reply->mutable_items(index);
    absl::StatusOr<Answer>& answer = results[i].answer;
    if (!Fits(answer, &used)) answer = ReplyFull();
    if (!answer.ok() && request.items_size() == 1) return answer.status();
    EncodeItemStatus(answer.status(), item->mutable_status());
    if (!answer.ok()) continue;
    item->set_session_epoch(answer->epoch);
    EncodeAnswer(*std::move(answer), request.items(index).query().queries().dims(2), item->mutable_answer());
  }
  return absl::OkStatus();
}

void EncodeDecode(const v1::DecodeRequest& request, std::vector<StepResult> results, v1::DecodeReply* reply) {
  reply->set_sequence(request.sequence());
  uint64_t used = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const v1::DecodeItem& asked = request.items(static_cast<int>(i));
    v1::DecodeReplyItem* item = reply->add_items();
    absl::StatusOr<AppendResult>& append = results[i].append;
    absl::StatusOr<Answer>& answer = results[i].answer;
    if (asked.has_chunk()) {
      EncodeItemStatus(append.status(), item->mutable_append_status());
      if (!append.ok()) {
        EncodeItemStatus(append.status(), item->mutable_status());
        continue;
      }
      item->set_length(append->length);
      item->set_repeated(append->repeated);
      item->set_session_epoch(append->epoch);
    }
    if (!asked.has_query()) continue;
    if (!Fits(answer, &used)) answer = ReplyFull();
    EncodeItemStatus(answer.status(), item->mutable_status());
    if (!answer.ok()) continue;
    item->set_length(answer->length);
    item->set_session_epoch(answer->epoch);
    EncodeAnswer(*std::move(answer), asked.query().queries().dims(2), item->mutable_answer());
  }
}

void EncodeListPage(const std::vector<SessionSummary>& summaries, uint32_t page_size, v1::ListSessionsReply* reply) {
  for (const SessionSummary& summary : summaries) {
    v1::ListSessionsReply::Entry* entry = reply->add_sessions();
    entry->set_session_id(summary.id);
    entry->set_epoch(summary.epoch);
    entry->set_held_bytes(summary.held_bytes);
    entry->set_reserved_bytes(summary.reserved_bytes);
    entry->set_length_max(summary.length_max);
    entry->set_token_limit(summary.token_limit);
    entry->set_lease_remaining_seconds(summary.lease_remaining_seconds);
  }
  if (summaries.size() == page_size) reply->set_next_page_token(summaries.back().id);
}

void EncodeServerInfo(const Engine& engine, const std::string& version, v1::GetServerInfoReply* reply) {
  EncodeHeader(engine.boot_id(), 0, reply->mutable_header());
  reply->set_version(version);
  BackendInfo backend = engine.backend_info();
  reply->set_backend(std::move(backend.name));
  reply->set_device(std::move(backend.device));
  EncodeLimits(engine.options(), reply->mutable_limits());
  for (Format format : kAllFormats) reply->add_formats(EncodeFormat(format));
  for (size_t i = 0; i < kSourceCount; ++i) reply->add_sources(EncodeSource(static_cast<Source>(i)));
  reply->add_sources(v1::SOURCE_AUTO);
  const EngineMemory memory = engine.memory();
  reply->set_lanes(engine.options().lanes);
  reply->set_arena_bytes(memory.arena_bytes);
  reply->set_arena_free_bytes(memory.arena_free_bytes);
  reply->set_draining(engine.draining());
}

}  // namespace ctkvr::rpc
