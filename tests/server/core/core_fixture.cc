// SPDX-License-Identifier: Apache-2.0

#include "tests/server/core/core_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "tests/testing/compare.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::testing {

// ---- Sessions ------------------------------------------------------------------------------------------------------

SessionRef Ref(const std::string& id, uint64_t epoch, const std::string& fingerprint) {
  return {.id = id, .epoch = epoch, .fingerprint = fingerprint};
}

LayerConfig SmallLayer(Format format, Source source) {
  LayerConfig layer;
  layer.q_heads = 4;
  layer.kv_heads = 2;
  layer.head_dim = 32;
  layer.value_dim = 16;
  layer.format = format;
  layer.selection.source = source;
  layer.selection.k_tokens = 16;
  layer.selection.sink_tokens = 4;
  layer.selection.window_tokens = 8;
  layer.selection.dense_below_tokens = 0;
  layer.selection.candidate_tokens = 64;
  layer.softmax.scale = 1 / std::sqrt(32.0f);
  if (source == Source::kQueryCentroids) layer.query_centroids = {.centroids = 24, .list_tokens = 32, .name = "own"};
  return layer;
}

SessionConfig SmallConfig(const LayerConfig& layer, uint32_t token_limit, uint32_t layers) {
  SessionConfig config;
  config.layers.assign(layers, layer);
  config.token_limit = token_limit;
  config.maintenance = Maintenance::kManual;
  config.rotation_seed = 12345;
  config.fingerprint = "fp";
  return config;
}

// ---- Tokens --------------------------------------------------------------------------------------------------------

void Tokens::Add(std::vector<std::byte>& bytes, What what, uint32_t position, uint64_t variant) const {
  const uint32_t dim = what == What::kValue ? layer_.value_dim : layer_.head_dim;
  const uint32_t heads = what == What::kQuery ? layer_.q_heads : layer_.kv_heads;
  // A generator a row, cheap to make; near seeds are mixed first, for such generators start alike.
  uint64_t seed = TestSeed() + (((salt_ * 31 + static_cast<uint64_t>(what)) * 1009 + variant) * 1000003 + position);
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
  std::minstd_rand random(static_cast<uint32_t>(seed >> 33));
  std::normal_distribution<float> normal;
  std::vector<float> numbers;
  for (uint32_t i = 0; i < heads * dim; ++i) {
    // Keys have a mean of their own, as real ones do.
    const float mean = what == What::kKey ? 2 * std::sin(static_cast<float>(i % dim)) : 0;
    numbers.push_back(normal(random) + mean);
  }
  const std::vector<std::byte> row = ToBytes(numbers, dtype_);
  bytes.insert(bytes.end(), row.begin(), row.end());
}

OwnedChunk Tokens::Append(uint32_t first, uint32_t tokens, uint32_t query_positions, uint64_t variant) const {
  OwnedChunk owned;
  for (uint32_t p = first; p < first + tokens; ++p) {
    Add(owned.keys, What::kKey, p, variant);
    Add(owned.values, What::kValue, p, variant);
    if (p >= first + tokens - query_positions) Add(owned.queries, What::kQuery, p, variant);
  }
  owned.chunk = {.layer = 0,
                 .first_position = first,
                 .tokens = tokens,
                 .query_positions = query_positions,
                 .dtype = dtype_,
                 .kv_heads = layer_.kv_heads,
                 .head_dim = layer_.head_dim,
                 .value_dim = layer_.value_dim,
                 .q_heads = layer_.q_heads,
                 .keys = owned.keys,
                 .values = owned.values,
                 .queries = owned.queries};
  return owned;
}

OwnedQuery Tokens::Ask(uint32_t position, uint32_t positions, uint64_t variant) const {
  OwnedQuery owned;
  for (uint32_t p = position; p < position + positions; ++p) Add(owned.bytes, What::kQuery, p, variant);
  owned.query.position = position;
  owned.query.positions = positions;
  owned.query.dtype = dtype_;
  owned.query.q_heads = layer_.q_heads;
  owned.query.head_dim = layer_.head_dim;
  owned.query.queries = owned.bytes;
  return owned;
}

oracle::Matrix Tokens::Rows(What what, uint32_t position, uint64_t variant, uint32_t dim) const {
  std::vector<std::byte> bytes;
  Add(bytes, what, position, variant);
  const oracle::Row flat = oracle::FromElements(bytes, dtype_);
  oracle::Matrix rows;
  for (size_t i = 0; i < flat.size(); i += dim) rows.emplace_back(flat.begin() + i, flat.begin() + i + dim);
  return rows;
}
oracle::Matrix Tokens::Keys(uint32_t p, uint64_t v) const { return Rows(What::kKey, p, v, layer_.head_dim); }
oracle::Matrix Tokens::Values(uint32_t p, uint64_t v) const { return Rows(What::kValue, p, v, layer_.value_dim); }
oracle::Matrix Tokens::Queries(uint32_t p, uint64_t v) const { return Rows(What::kQuery, p, v, layer_.head_dim); }

// ---- The engine ----------------------------------------------------------------------------------------------------

Harness::Harness(const HarnessOptions& options)
    : backend_({.shares_host_memory = options.shares_host_memory, .on_call = options.on_call}) {
  auto engine = Engine::Create(options.engine, backend_, clock_);
  CTKVR_CHECK(engine.ok());
  engine_ = *std::move(engine);
}

absl::StatusOr<SessionInfo> Harness::Open(const std::string& id, const SessionConfig& config) {
  return Await<SessionInfo>([&](auto done) { engine_->Open(id, config, {}, std::move(done)); });
}

absl::StatusOr<AppendResult> Harness::Append(const std::string& id, const OwnedChunk& chunk) {
  StepRequest request;
  request.session.id = id;
  request.chunk = chunk.chunk;
  return Step({request})[0].append;
}

absl::StatusOr<Answer> Harness::Retrieve(const std::string& id, const OwnedQuery& query, CallContext context) {
  StepRequest request;
  request.session.id = id;
  request.query = query.query;
  return std::move(Step({request}, std::move(context))[0].answer);
}

std::vector<StepResult> Harness::Step(std::vector<StepRequest> requests, CallContext context) {
  std::optional<std::vector<StepResult>> results;
  engine_->Step(std::move(requests), std::move(context),
                [&](std::vector<StepResult> values) { results.emplace(std::move(values)); });
  RunUntil([&] { return results.has_value(); });
  return *std::move(results);
}

absl::StatusOr<TruncateResult> Harness::Truncate(const std::string& id, uint32_t length) {
  return Await<TruncateResult>([&](auto done) { engine_->Truncate(Ref(id), length, {}, std::move(done)); });
}
absl::StatusOr<CloseResult> Harness::Close(const SessionRef& session) {
  return Await<CloseResult>([&](auto done) { engine_->Close(session, {}, std::move(done)); });
}
absl::StatusOr<SessionInfo> Harness::Get(const SessionRef& session) {
  return Await<SessionInfo>([&](auto done) { engine_->Get(session, {}, std::move(done)); });
}
absl::StatusOr<LeaseResult> Harness::KeepAlive(const std::string& id) {
  return Await<LeaseResult>([&](auto done) { engine_->KeepAlive(Ref(id), {}, std::move(done)); });
}
absl::StatusOr<MaintainResult> Harness::Maintain(const std::string& id, std::vector<uint32_t> layers) {
  return Await<MaintainResult>([&](auto done) { engine_->Maintain(Ref(id), layers, {}, std::move(done)); });
}
absl::StatusOr<std::vector<SessionSummary>> Harness::List(const std::string& after, uint32_t limit) {
  return Await<std::vector<SessionSummary>>([&](auto done) { engine_->List(after, limit, {}, std::move(done)); });
}

void Harness::RunAll() {
  for (bool any = true; any;) {
    any = false;
    for (uint32_t lane = 0; lane < engine_->options().lanes; ++lane) any = engine_->RunLane(lane) || any;
  }
}

// ---- What a layer holds --------------------------------------------------------------------------------------------

oracle::Codec MakeCodec(const LayerConfig& layer, DType dtype, const RowCodec& codec, uint32_t kv_head) {
  oracle::Codec made{.format = codec.format,
                     .head_dim = layer.head_dim,
                     .value_dim = layer.value_dim,
                     .raw = KeysAreCoded(codec.format) && codec.code_generation == 0,
                     .raw_dtype = dtype,
                     .mean = {},
                     .signs = {}};
  if (KeysAreCoded(codec.format) && !made.raw) {
    const auto begin = codec.key_mean.begin() + kv_head * layer.head_dim;
    made.mean.assign(begin, begin + layer.head_dim);
    made.signs = oracle::Signs(layer.head_dim, codec.rotation_seed);
  }
  return made;
}

StoredLayer ReadRows(Harness& harness, const std::string& id, const SessionConfig& config, uint32_t layer) {
  OwnedQuery ask = Tokens(config.layers[layer], config.dtype, 0).Ask(0x7fffffff);
  ask.query.layer = layer;
  ask.query.selection.source = Source::kDense;
  ask.query.answer = {.mode = AnswerMode::kRows, .row_format = RowFormat::kStorage};
  absl::StatusOr<Answer> answer = harness.Retrieve(id, ask);
  StoredLayer stored;
  EXPECT_TRUE(answer.ok()) << answer.status();
  if (!answer.ok()) return stored;
  EXPECT_TRUE(answer->codec.has_value());
  if (!answer->codec.has_value()) return stored;
  stored.codec = *answer->codec;
  stored.tokens = answer->counts[0];
  stored.key_bytes = std::move(answer->keys);
  stored.value_bytes = std::move(answer->values);
  return stored;
}

StoredLayer ReadLayer(Harness& harness, const std::string& id, const SessionConfig& config, uint32_t layer) {
  StoredLayer stored = ReadRows(harness, id, config, layer);
  const LayerConfig& layer_config = config.layers[layer];
  const auto* keys = reinterpret_cast<const std::byte*>(stored.key_bytes.data());
  const auto* values = reinterpret_cast<const std::byte*>(stored.value_bytes.data());
  size_t row = 0;
  for (uint32_t h = 0; h < layer_config.kv_heads; ++h) {
    const oracle::Codec codec = MakeCodec(layer_config, config.dtype, stored.codec, h);
    stored.keys.emplace_back();
    stored.values.emplace_back();
    for (uint32_t t = 0; t < stored.tokens; ++t, ++row) {
      stored.keys.back().push_back(
          oracle::DecodeKey(codec, {keys + row * stored.codec.key_row_bytes, stored.codec.key_row_bytes}));
      stored.values.back().push_back(
          oracle::DecodeValue(codec, {values + row * stored.codec.value_row_bytes, stored.codec.value_row_bytes}));
    }
  }
  return stored;
}

// ---- Answers -------------------------------------------------------------------------------------------------------

std::vector<AnswerSet> SplitAnswer(const Answer& answer, uint32_t heads) {
  std::vector<AnswerSet> sets;
  size_t token = 0;
  size_t score = 0;
  for (uint32_t count : answer.counts) {
    AnswerSet& set = sets.emplace_back();
    set.first_row = token;
    set.ids.resize(count);
    CTKVR_CHECK(answer.ids.size() >= (token + count) * 4);
    if (count > 0) std::memcpy(set.ids.data(), answer.ids.data() + token * 4, count * 4);
    token += count;
    if (answer.scores.empty()) continue;
    for (uint32_t r = 0; r < heads; ++r) {
      std::vector<float> row(count);
      CTKVR_CHECK(answer.scores.size() >= (score + count) * 4);
      if (count > 0) std::memcpy(row.data(), answer.scores.data() + score * 4, count * 4);
      score += count;
      set.scores.emplace_back(row.begin(), row.end());
    }
  }
  EXPECT_EQ(answer.ids.size(), token * 4) << "ids beyond the counts";
  EXPECT_EQ(answer.scores.size(), score * 4) << "scores beyond the counts";
  return sets;
}

namespace {

// Float32 sums of a few hundred products near 10.
constexpr double kScoreBound = 2e-3;

::testing::AssertionResult HasRightScores(const AnswerSet& set, const oracle::Matrix& keys,
                                          const oracle::Matrix& queries) {
  for (size_t r = 0; r < queries.size(); ++r) {
    for (size_t i = 0; i < set.ids.size(); ++i) {
      const double expected = oracle::Dot(queries[r], keys[set.ids[i]]);
      if (std::fabs(set.scores[r][i] - expected) <= kScoreBound) continue;
      return ::testing::AssertionFailure() << "score of head " << r << " and token " << set.ids[i] << " is "
                                           << set.scores[r][i] << ", expected " << expected;
    }
  }
  return ::testing::AssertionSuccess();
}

// One set, and what it is chosen from.
struct SetCase {
  SetCase(const StoredLayer& stored, const oracle::Matrix& all_queries, const AnswerCheck& check, size_t set)
      : heads(check.selection.reduction == Reduction::kPerHead ? 1 : check.layer->group_heads()),
        kv_head(static_cast<uint32_t>(set * heads / check.layer->group_heads())),
        keys(stored.keys[kv_head]),
        queries(all_queries.begin() + set * heads, all_queries.begin() + (set + 1) * heads) {
    const uint32_t seen = std::min(stored.tokens, check.position + 1);
    const uint32_t end = std::min(seen, check.local_begin.value_or(seen));
    const uint32_t force_from = std::min(seen - std::min(seen, check.selection.window_tokens), check.tail_begin);
    for (uint32_t t = check.local_sinks; t < end; ++t) {
      const bool is_forced = t < check.selection.sink_tokens || t >= force_from;
      const bool is_candidate = check.candidates.empty() || std::binary_search(check.candidates[kv_head].begin(),
                                                                               check.candidates[kv_head].end(), t);
      if (is_forced || is_candidate) tokens.push_back(t);
      if (is_forced) forced.push_back(t);
      if (is_candidate && !is_forced) others.push_back(t);
    }
  }

  uint32_t heads;
  uint32_t kv_head;
  const oracle::Matrix& keys;  // [tokens]
  oracle::Matrix queries;      // [heads]
  std::vector<uint32_t> tokens, forced, others;
};

::testing::AssertionResult IsSoundSet(const AnswerSet& set, const SetCase& set_case, uint32_t k) {
  if (auto ascending = IsAscendingSet(set.ids); !ascending) return ascending;
  if (!std::includes(set_case.tokens.begin(), set_case.tokens.end(), set.ids.begin(), set.ids.end())) {
    return ::testing::AssertionFailure() << "a token was chosen that was no candidate";
  }
  if (!std::includes(set.ids.begin(), set.ids.end(), set_case.forced.begin(), set_case.forced.end())) {
    return ::testing::AssertionFailure() << "tokens that are always included are missing";
  }
  if (set.ids.size() > set_case.forced.size() + k) {
    return ::testing::AssertionFailure() << set.ids.size() << " tokens chosen; " << set_case.forced.size()
                                         << " are always included and k is " << k;
  }
  return HasRightScores(set, set_case.keys, set_case.queries);
}

// Group ranks of set_case.others.
oracle::Row OtherRanks(const SetCase& set_case, const AnswerCheck& check, size_t set) {
  const LayerConfig& layer = *check.layer;
  oracle::Matrix listed;
  for (uint32_t t : set_case.tokens) listed.push_back(set_case.keys[t]);
  oracle::Softmax softmax{.scale = layer.softmax.scale, .softcap = layer.softmax.softcap, .sink_logits = {}};
  if (!layer.softmax.sink_logits.empty()) {
    const auto first = layer.softmax.sink_logits.begin() + set * set_case.heads;
    softmax.sink_logits.assign(first, first + set_case.heads);
  }
  const bool largest = check.selection.reduction == Reduction::kMaxSoftmax;
  const oracle::Row ranks = oracle::GroupRanks(oracle::LogShares(oracle::Scores(set_case.queries, listed), softmax),
                                               largest ? GroupReduction::kMaxSoftmax : GroupReduction::kSumSoftmax);
  oracle::Row other_ranks;
  for (size_t i = 0; i < set_case.tokens.size(); ++i) {
    const bool other = std::binary_search(set_case.others.begin(), set_case.others.end(), set_case.tokens[i]);
    if (other) other_ranks.push_back(ranks[i]);
  }
  return other_ranks;
}

}  // namespace

::testing::AssertionResult IsSoundAnswer(const std::vector<AnswerSet>& sets, const StoredLayer& stored,
                                         const oracle::Matrix& queries, const AnswerCheck& check) {
  for (size_t s = 0; s < sets.size(); ++s) {
    const SetCase set_case(stored, queries, check, s);
    if (auto sound = IsSoundSet(sets[s], set_case, check.selection.k_tokens); !sound) return sound << " in set " << s;
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult IsExactAnswer(const std::vector<AnswerSet>& sets, const StoredLayer& stored,
                                         const oracle::Matrix& queries, const AnswerCheck& check) {
  if (auto sound = IsSoundAnswer(sets, stored, queries, check); !sound) return sound;
  for (size_t s = 0; s < sets.size(); ++s) {
    const SetCase set_case(stored, queries, check, s);
    std::vector<uint32_t> chosen;
    for (uint32_t id : sets[s].ids) {
      const auto found = std::lower_bound(set_case.others.begin(), set_case.others.end(), id);
      if (found == set_case.others.end() || *found != id) continue;
      chosen.push_back(static_cast<uint32_t>(found - set_case.others.begin()));
    }
    // Two float32 scores may differ from the oracle's by their rounding.
    const auto best = IsTopK(chosen, OtherRanks(set_case, check, s), check.selection.k_tokens, 1e-3);
    if (!best) return ::testing::AssertionFailure() << best.message() << " in set " << s;
  }
  return ::testing::AssertionSuccess();
}

oracle::Attention AttentionAt(const PartialAttention& given, uint32_t position) {
  const auto* output = reinterpret_cast<const std::byte*>(given.output.data());
  const auto* log_sum_exp = reinterpret_cast<const std::byte*>(given.log_sum_exp.data());
  EXPECT_EQ(given.output.size(), size_t{given.positions} * given.q_heads * given.value_dim * DTypeBytes(given.dtype));
  oracle::Attention attention;
  for (uint32_t h = 0; h < given.q_heads; ++h) {
    const size_t row = size_t{position} * given.q_heads + h;
    oracle::Row& values = attention.output.emplace_back();
    for (uint32_t i = 0; i < given.value_dim; ++i) {
      values.push_back(LoadElement(output, given.dtype, row * given.value_dim + i));
    }
    attention.log_sum_exp.push_back(LoadElement(log_sum_exp, DType::kF32, row));
  }
  return attention;
}

}  // namespace ctkvr::testing
