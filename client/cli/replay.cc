// SPDX-License-Identifier: Apache-2.0
#include "client/cli/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/scores.h"

namespace ctkvr::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kPromptSlice = 512;  // tokens a Write, so that progress shows
constexpr unsigned kTruthThreads = 2;

v1::SessionOptions OptionsOf(const Trace& trace, const ReplayFlags& flags, uint32_t token_limit) {
  v1::SessionOptions options = MakeSessionOptions(flags.selection);
  v1::Geometry* geometry = options.mutable_geometry();
  geometry->set_layers(1);
  geometry->set_q_heads(trace.q_heads);
  geometry->set_kv_heads(trace.kv_heads);
  geometry->set_head_dim(trace.head_dim);
  geometry->set_value_dim(trace.value_dim);
  geometry->set_dtype(v1::DTYPE_F16);
  options.mutable_softmax()->set_softmax_scale(trace.scale);
  options.set_token_limit(token_limit);
  options.set_record(flags.record);
  return options;
}

client::ChunkView ChunkOf(const Trace& trace, uint32_t begin, uint32_t count, bool with_queries) {
  client::ChunkView chunk{.first_position = begin,
                          .tokens = count,
                          .keys = std::as_bytes(trace.keys_of(begin, count)),
                          .values = std::as_bytes(trace.values_of(begin, count))};
  const uint32_t end = begin + count;
  if (with_queries && end > trace.query_first_position) {
    const uint32_t first = std::max(begin, trace.query_first_position);
    chunk.query_positions = end - first;
    chunk.queries = std::as_bytes(trace.queries_of(first, end - first));
  }
  return chunk;
}

// One replay in work.
class Replayer {
 public:
  Replayer(const client::Client& client, const Trace& trace, const ReplayFlags& flags, Progress* progress)
      : client_(client), trace_(trace), flags_(flags), progress_(progress) {
    const uint32_t decoded = trace.tokens - trace.prompt_tokens;
    end_ = trace.prompt_tokens + (flags.steps == 0 ? decoded : std::min(flags.steps, decoded));
    result_.name = trace.name;
    if (flags.selection.answer == "new_rows") {
      cache_.emplace(per_head() ? trace.q_heads : trace.kv_heads, flags.selection.cache_slots);
    }
  }

  absl::StatusOr<ReplayResult> Run() {
    auto session = client_.OpenSession(OptionsOf(trace_, flags_, end_), {.close_on_destroy = true});
    if (!session.ok()) return session.status();
    if (auto s = AppendPrompt(*session); !s.ok()) return s;
    if (auto s = Decode(*session); !s.ok()) return s;
    const auto info = AwaitTruth(*session);
    if (!info.ok()) return info.status();
    result_.memory = info->memory();
    result_.appended_tokens = info->appended_tokens();
    result_.strength = info->layers(0).strength();
    if (flags_.verify_exact) {
      if (auto s = Verify(*session); !s.ok()) return s;
    }
    if (const auto closed = session->Close(); !closed.ok()) return closed.status();
    CompareWithExact();
    if (flags_.online && info->truth().samples() == 0) {
      return absl::FailedPreconditionError("online: the server has repeated nothing; start it with --truth_share 1");
    }
    if (flags_.online) result_.online = CompareOnline(*info, result_.metrics);
    std::sort(result_.latency_us.begin(), result_.latency_us.end());
    return std::move(result_);
  }

 private:
  absl::Status AppendPrompt(const client::Session& session);
  absl::Status Decode(const client::Session& session);
  absl::Status DecodeStep(const client::Session& session, const client::LayerShape& shape, client::DecodeStream& stream,
                          uint32_t position);
  absl::Status Record(const v1::Answer& answer, const client::LayerShape& shape, uint32_t position);
  absl::Status RecordChosen(const v1::Answer& answer, const client::LayerShape& shape, uint32_t position);
  absl::StatusOr<std::vector<uint32_t>> ChosenIds(const v1::Answer& answer, const client::LayerShape& shape);
  absl::StatusOr<std::vector<std::vector<float>>> StoredKeys(const client::Session& session) const;
  absl::Status Verify(const client::Session& session);
  void CompareWithExact();
  void Observe(const KeyBlocks<float>& keys, uint32_t kv_head, const StepRecord& step, uint64_t first_id, uint32_t set,
               Metrics* metrics) const;

  bool per_head() const { return flags_.selection.reduction == "per_head"; }
  uint32_t set_heads() const { return per_head() ? 1 : trace_.group_heads(); }

  const client::Client& client_;
  const Trace& trace_;
  const ReplayFlags& flags_;
  Progress* progress_;
  uint32_t end_ = 0;                       // tokens replayed
  std::optional<client::RowCache> cache_;  // where answers bring new rows only
  ReplayResult result_;
  std::vector<StepRecord> steps_;
};

absl::Status Replayer::AppendPrompt(const client::Session& session) {
  auto stream = session.StartAppend();
  if (!stream.ok()) return stream.status();
  progress_->Start(trace_.name + ": prompt", trace_.prompt_tokens);
  for (uint32_t begin = 0; begin < trace_.prompt_tokens; begin += kPromptSlice) {
    const uint32_t count = std::min(kPromptSlice, trace_.prompt_tokens - begin);
    if (auto s = (*stream)->Write(ChunkOf(trace_, begin, count, true)); !s.ok()) return s;
    progress_->Update(begin + count);
  }
  if (const auto done = (*stream)->Finish(); !done.ok()) return done.status();
  progress_->Finish();
  if (const auto indexed = session.Maintain(); !indexed.ok()) return indexed.status();
  return absl::OkStatus();
}

absl::Status Replayer::Decode(const client::Session& session) {
  const auto shape = session.Shape(0);
  if (!shape.ok()) return shape.status();
  const auto stream = client_.StartDecode();
  progress_->Start(trace_.name + ": decode", end_ - trace_.prompt_tokens);
  for (uint32_t position = trace_.prompt_tokens; position < end_; ++position) {
    if (auto s = DecodeStep(session, *shape, *stream, position); !s.ok()) return s;
    progress_->Update(position + 1 - trace_.prompt_tokens);
  }
  progress_->Finish();
  return stream->Finish();
}

absl::Status Replayer::DecodeStep(const client::Session& session, const client::LayerShape& shape,
                                  client::DecodeStream& stream, uint32_t position) {
  const uint32_t step = position - trace_.prompt_tokens;
  client::DecodeEntry entry{.session = &session, .chunk = ChunkOf(trace_, position, 1, false)};
  if (step % flags_.every == 0) {
    auto query = client::MakeQuery(shape, 0, position, 1, std::as_bytes(trace_.queries_of(position, 1)));
    if (!query.ok()) return query.status();
    if (flags_.hold_decoded) query->mutable_selection()->set_window_tokens(flags_.selection.window_tokens + step + 1);
    if (cache_) query->set_cache_version(cache_->version());
    entry.query = *std::move(query);
  }
  const bool retrieves = entry.query.has_value();
  const auto begin = Clock::now();
  if (const auto sent = stream.Send({&entry, 1}, MakeAnswerOptions(flags_.selection)); !sent.ok()) {
    return stream.Receive().status();
  }
  const auto reply = stream.Receive();
  if (!reply.ok()) return reply.status();
  const std::chrono::duration<double, std::micro> elapsed = Clock::now() - begin;
  if (reply->items_size() != 1) return absl::InternalError("a Decode reply without its item");
  if (auto s = client::StatusOf(reply->items(0).append_status()); !s.ok()) return s;
  if (!retrieves) return absl::OkStatus();
  if (auto s = client::StatusOf(reply->items(0).status()); !s.ok()) return s;
  result_.latency_us.push_back(elapsed.count());
  if (flags_.online) {
    if (const auto repeated = AwaitTruth(session); !repeated.ok()) return repeated.status();
  }
  return Record(reply->items(0).answer(), shape, position);
}

absl::Status Replayer::Record(const v1::Answer& answer, const client::LayerShape& shape, uint32_t position) {
  absl::Status status;
  if (flags_.selection.answer == "attention") {
    status = client::AttentionOf(answer, shape).status();
  } else {
    status = RecordChosen(answer, shape, position);
  }
  ++result_.retrievals;
  result_.source = answer.source();
  result_.bytes_read += answer.bytes_read();
  result_.reply_bytes += answer.ByteSizeLong();
  result_.key_scan_bytes += 2.0 * (position + 1) * trace_.kv_heads * trace_.head_dim;
  return status;
}

// In the order of Answer.counts.
absl::StatusOr<std::vector<uint32_t>> Replayer::ChosenIds(const v1::Answer& answer, const client::LayerShape& shape) {
  const auto expected_sets = static_cast<int>(trace_.q_heads / set_heads());
  if (answer.counts_size() != expected_sets) {
    return absl::InternalError("the answer has other sets than were asked for");
  }
  std::vector<uint32_t> ids;
  if (cache_) {
    if (auto s = cache_->Apply(answer); !s.ok()) return s;
    for (uint32_t set = 0; set < static_cast<uint32_t>(expected_sets); ++set) {
      for (const uint16_t slot : cache_->slots(0, set)) ids.push_back(cache_->token(set, slot));
    }
    return ids;
  }
  const auto view = client::AnswerView::Create(answer, shape);
  if (!view.ok()) return view.status();
  ids.resize(view->rows());
  std::memcpy(ids.data(), answer.ids().data(), answer.ids().size());
  return ids;
}

absl::Status Replayer::RecordChosen(const v1::Answer& answer, const client::LayerShape& shape, uint32_t position) {
  auto ids = ChosenIds(answer, shape);
  if (!ids.ok()) return ids.status();
  StepRecord record{.position = position,
                    .always_tokens = answer.always_tokens(),
                    .counts = {answer.counts().begin(), answer.counts().end()},
                    .ids = *std::move(ids),
                    .scores = std::vector<float>(flags_.verify_exact ? answer.scores().size() / sizeof(float) : 0)};
  if (!record.scores.empty()) std::memcpy(record.scores.data(), answer.scores().data(), answer.scores().size());
  steps_.push_back(std::move(record));
  return absl::OkStatus();
}

// [kv_heads][tokens, head_dim]: every key as the server stores it.
absl::StatusOr<std::vector<std::vector<float>>> Replayer::StoredKeys(const client::Session& session) const {
  const auto shape = session.Shape(0);
  if (!shape.ok()) return shape.status();
  auto query = client::MakeQuery(*shape, 0, end_ - 1, 1, std::as_bytes(trace_.queries_of(end_ - 1, 1)));
  if (!query.ok()) return query.status();
  query->mutable_selection()->set_source(v1::SOURCE_DENSE);
  query->mutable_selection()->set_reduction(v1::GROUP_REDUCTION_SUM_SOFTMAX);
  v1::AnswerOptions options;
  options.set_mode(v1::ANSWER_MODE_ROWS);
  options.set_row_format(v1::ROW_FORMAT_STORAGE);
  const auto answer = session.Retrieve(*query, options);
  if (!answer.ok()) return answer.status();
  const auto view = client::AnswerView::Create(*answer, *shape);
  if (!view.ok()) return view.status();
  const auto decoder = client::RowDecoder::Create(answer->codec(), *shape);
  if (!decoder.ok()) return decoder.status();
  const auto rows = std::as_bytes(std::span(answer->keys()));
  if (rows.size() != view->rows() * decoder->key_row_bytes() || view->rows() != size_t{end_} * trace_.kv_heads) {
    return absl::InternalError("a dense answer without all of its rows");
  }
  std::vector<std::vector<float>> keys(trace_.kv_heads, std::vector<float>(size_t{end_} * trace_.head_dim));
  for (uint32_t head = 0; head < trace_.kv_heads; ++head) {
    const auto part = rows.subspan(view->first_row(0, head) * decoder->key_row_bytes(),
                                   view->ids(0, head).size() * decoder->key_row_bytes());
    if (auto s = decoder->DecodeKeys(head, part, keys[head]); !s.ok()) return s;
  }
  return keys;
}

absl::Status Replayer::Verify(const client::Session& session) {
  const auto keys = StoredKeys(session);
  if (!keys.ok()) return keys.status();
  const v1::Selection selection = MakeSessionOptions(flags_.selection).selection();
  const VerifySettings settings{.k_tokens = selection.k_tokens(),
                                .sink_tokens = selection.sink_tokens(),
                                .softmax_scale = trace_.scale,
                                .reduction = selection.reduction()};
  result_.verify = VerifySteps(trace_, settings, *keys, steps_);
  return absl::OkStatus();
}

void Replayer::Observe(const KeyBlocks<float>& keys, uint32_t kv_head, const StepRecord& step, uint64_t first_id,
                       uint32_t set, Metrics* metrics) const {
  const uint32_t dim = trace_.head_dim;
  const uint32_t tokens = step.position + 1;
  const uint32_t first_head = per_head() ? set : kv_head * trace_.group_heads();
  std::vector<float> queries(size_t{set_heads()} * dim);
  const auto stored = trace_.queries_of(step.position, 1).subspan(size_t{first_head} * dim, queries.size());
  for (size_t i = 0; i < queries.size(); ++i) queries[i] = client::HalfToFloat(stored[i]);
  std::vector<float> scores(set_heads() * keys.stride());
  keys.Score(queries, tokens, scores);
  const SelectionFlags& flags = flags_.selection;
  const uint32_t sinks = std::min(flags.sink_tokens, tokens);
  metrics->Add({.first_head = first_head,
                .heads = set_heads(),
                .tokens = tokens,
                .scores = scores,
                .stride = keys.stride(),
                .softmax_scale = trace_.scale,
                .chosen = std::span(step.ids).subspan(first_id, step.counts[set]),
                .k_tokens = flags.k_tokens,
                .reduction = MakeSessionOptions(flags).selection().reduction(),
                .force_below = sinks,
                .force_from = tokens - (step.always_tokens - std::min(sinks, step.always_tokens)),
                .needle_begin = sinks,
                .needle_end = trace_.prompt_tokens - std::min(flags.window_tokens, trace_.prompt_tokens)});
}

void Replayer::CompareWithExact() {
  result_.metrics = Metrics(trace_.q_heads);
  if (steps_.empty()) return;
  std::vector<Metrics> parts(kTruthThreads, Metrics(trace_.q_heads));
  std::vector<KeyBlocks<float>> keys;
  std::vector<float> head_keys(size_t{end_} * trace_.head_dim);
  for (uint32_t head = 0; head < trace_.kv_heads; ++head) {
    for (uint32_t t = 0; t < end_; ++t) {
      const auto row = trace_.keys_of(t, 1).subspan(size_t{head} * trace_.head_dim, trace_.head_dim);
      for (uint32_t i = 0; i < trace_.head_dim; ++i) {
        head_keys[size_t{t} * trace_.head_dim + i] = client::HalfToFloat(row[i]);
      }
    }
    keys.emplace_back(head_keys, trace_.head_dim);
  }
  progress_->Start(trace_.name + ": exact attention", steps_.size() / kTruthThreads);
  std::vector<std::thread> threads;
  for (unsigned part = 0; part < kTruthThreads; ++part) {
    threads.emplace_back([this, part, &keys, &parts] {
      uint64_t done = 0;
      for (size_t s = part; s < steps_.size(); s += kTruthThreads) {
        uint64_t first_id = 0;
        for (uint32_t set = 0; set < steps_[s].counts.size(); ++set) {
          const uint32_t kv_head = set * set_heads() / trace_.group_heads();
          Observe(keys[kv_head], kv_head, steps_[s], first_id, set, &parts[part]);
          first_id += steps_[s].counts[set];
        }
        if (part == 0) progress_->Update(++done);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  progress_->Finish();
  for (const Metrics& part : parts) result_.metrics.Merge(part);
}

// A retrieval's share of `bytes`.
double Mean(uint64_t bytes, uint64_t retrievals) {
  return retrievals == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(retrievals);
}

std::optional<double> ReadShare(double bytes_read, double scan_bytes) {
  if (scan_bytes == 0) return std::nullopt;
  return bytes_read / scan_bytes;
}

std::vector<std::string> RowOf(const ReplayResult& r) {
  return {r.name,
          ShortName(r.source),
          Count(r.appended_tokens),
          Count(r.retrievals),
          Number(r.metrics.recall(), 4),
          Count(r.metrics.needles()),
          Number(r.metrics.needle_share(), 4),
          Number(r.metrics.worst_head(), 2),
          Number(r.metrics.mass(), 4),
          Number(r.metrics.tokens_chosen(), 0),
          Bytes(Mean(r.bytes_read, r.retrievals)),
          Percent(ReadShare(static_cast<double>(r.bytes_read), r.key_scan_bytes)),
          Bytes(Mean(r.reply_bytes, r.retrievals)),
          Number(Quantile(r.latency_us, 0.5) / 1000, 2),
          Number(Quantile(r.latency_us, 0.99) / 1000, 2),
          Number(r.memory.bytes_per_token_head(), 1),
          Percent(r.memory.share_of_f32())};
}

}  // namespace

absl::StatusOr<ReplayResult> Replay(const client::Client& client, const Trace& trace, const ReplayFlags& flags,
                                    Progress* progress) {
  if (flags.every == 0) return absl::InvalidArgumentError("every is 0; at least 1 is needed");
  if (flags.verify_exact && flags.selection.source != "exact") {
    return absl::FailedPreconditionError("verify-exact needs source exact");
  }
  if (flags.verify_exact && flags.selection.answer == "attention") {
    return absl::FailedPreconditionError("verify-exact needs ids and scores; answer is attention");
  }
  if (flags.online && (!flags.hold_decoded || flags.selection.answer == "attention")) {
    return absl::FailedPreconditionError("online needs hold-decoded, and an answer other than attention");
  }
  return Replayer(client, trace, flags, progress).Run();
}

std::optional<double> TotalNeedleShare(const std::vector<ReplayResult>& results) {
  uint64_t needles = 0, found = 0;
  for (const ReplayResult& result : results) {
    needles += result.metrics.needles();
    found += result.metrics.needles_found();
  }
  if (needles == 0) return std::nullopt;
  return static_cast<double>(found) / static_cast<double>(needles);
}

std::string ReplayTable(const std::vector<ReplayResult>& results) {
  Table table({"trace", "source", "tokens", "retrievals", "recall", "needles", "needle share", "worst head",
               "mass kept", "chosen", "bytes read", "of f16 scan", "reply bytes", "p50 ms", "p99 ms", "bytes/token",
               "of f32"});
  uint64_t tokens = 0, retrievals = 0, needles = 0;
  double bytes_read = 0, scan = 0;
  std::vector<double> latencies;
  std::optional<double> worst;
  for (const ReplayResult& r : results) {
    table.Add(RowOf(r));
    tokens += r.appended_tokens;
    retrievals += r.retrievals;
    needles += r.metrics.needles();
    bytes_read += static_cast<double>(r.bytes_read);
    scan += r.key_scan_bytes;
    latencies.insert(latencies.end(), r.latency_us.begin(), r.latency_us.end());
    if (const auto head = r.metrics.worst_head()) worst = std::min(worst.value_or(1), *head);
  }
  if (results.size() > 1) {
    std::sort(latencies.begin(), latencies.end());
    table.Add({"all", "", Count(tokens), Count(retrievals), "", Count(needles), Number(TotalNeedleShare(results), 4),
               Number(worst, 2), "", "", "", Percent(ReadShare(bytes_read, scan)), "",
               Number(Quantile(latencies, 0.5) / 1000, 2), Number(Quantile(latencies, 0.99) / 1000, 2)});
  }
  return table.ToString();
}

nlohmann::json ReplayJson(const std::vector<ReplayResult>& results) {
  const auto optional = [](std::optional<double> value) { return value ? nlohmann::json(*value) : nlohmann::json(); };
  nlohmann::json traces = nlohmann::json::array();
  uint64_t needles = 0;
  for (const ReplayResult& r : results) {
    needles += r.metrics.needles();
    nlohmann::json entry = {
        {"name", r.name},
        {"source", ShortName(r.source)},
        {"tokens_appended", r.appended_tokens},
        {"retrievals", r.retrievals},
        {"strength", r.strength},
        {"recall", optional(r.metrics.recall())},
        {"needles", r.metrics.needles()},
        {"needles_found", r.metrics.needles_found()},
        {"needle_share", optional(r.metrics.needle_share())},
        {"worst_head", optional(r.metrics.worst_head())},
        {"mass_kept", optional(r.metrics.mass())},
        {"tokens_chosen", optional(r.metrics.tokens_chosen())},
        {"bytes_read_per_retrieval", Mean(r.bytes_read, r.retrievals)},
        {"reply_bytes_per_retrieval", Mean(r.reply_bytes, r.retrievals)},
        {"share_of_f16_key_scan", optional(ReadShare(static_cast<double>(r.bytes_read), r.key_scan_bytes))},
        {"latency_us_p50", Quantile(r.latency_us, 0.5)},
        {"latency_us_p99", Quantile(r.latency_us, 0.99)},
        {"memory", ToJson(r.memory)}};
    if (r.verify) {
      entry["verify_exact"] = {{"sets", r.verify->sets},
                               {"wrong_sets", r.verify->wrong_sets},
                               {"tied_tokens", r.verify->tied_tokens},
                               {"wrong_scores", r.verify->wrong_scores},
                               {"score_error_max", r.verify->score_error_max},
                               {"first_mismatch", r.verify->first}};
    }
    if (r.online) entry["online"] = OnlineJson(*r.online);
    traces.push_back(std::move(entry));
  }
  return {{"traces", std::move(traces)},
          {"total", {{"needles", needles}, {"needle_share", optional(TotalNeedleShare(results))}}}};
}

}  // namespace ctkvr::cli
