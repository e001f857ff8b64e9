// SPDX-License-Identifier: Apache-2.0
//
// Random calls on several sessions, good ones and bad ones, with faults of the device, time that passes and sessions
// that end, against a model that only remembers which text each layer holds. The seed comes from CTKVR_TEST_SEED.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::seconds;

struct ModelSession {
  SessionConfig config;
  uint64_t epoch = 0;
  std::vector<std::vector<uint64_t>> variants;  // [layers][length]: which text each position holds
  TimePoint expiry;
};

class ModelTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  ModelTest()
      : harness_({.shares_host_memory = std::get<1>(GetParam())}), random_(MakeRandom(std::get<0>(GetParam()))) {}

  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  bool Chance(uint32_t one_in) { return Below(one_in) == 0; }
  std::string AnyId() { return std::string(1, static_cast<char>('a' + Below(4))); }

  SessionConfig AnyConfig() {
    const Format formats[] = {Format::kF32, Format::kF16, Format::kK8V4, Format::kK6V4};
    SessionConfig config = SmallConfig(SmallLayer(), 800, 2);
    config.dtype = Chance(2) ? DType::kF16 : DType::kF32;
    config.maintenance = Chance(2) ? Maintenance::kAuto : Maintenance::kManual;
    config.lease = seconds(100);
    for (LayerConfig& layer : config.layers) {
      layer = SmallLayer(formats[Below(4)], Source::kQueryCentroids);
      if (KeysAreCoded(layer.format) && Chance(2)) layer.selection.source = Source::kSketch;
      layer.selection.dense_below_tokens = Chance(2) ? 0 : 50;
      if (Chance(2)) layer.tokens_per_cluster = 16;
      const Placement placements[] = {Placement::kLast, Placement::kStrided, Placement::kClustered};
      layer.query_centroids.placement = placements[Below(3)];
      if (Chance(2)) {
        layer.query_centroids.adjust_tokens = limits::kAdjustTokensMin;
        layer.query_centroids.centroids_max = layer.query_centroids.centroids + Below(20);
      }
    }
    return config;
  }

  // The session of an id, as far as it is alive.
  ModelSession* Find(const std::string& id) {
    const auto found = model_.find(id);
    if (found == model_.end()) return nullptr;
    if (harness_.clock().Now() >= found->second.expiry) {
      model_.erase(found);
      return nullptr;
    }
    return &found->second;
  }
  void Renew(ModelSession& session) { session.expiry = harness_.clock().Now() + session.config.lease; }

  void Open() {
    harness_.RunAll();  // the lanes notice leases that ran out
    const std::string id = AnyId();
    const SessionConfig config = AnyConfig();
    const bool exists = Find(id) != nullptr;
    const auto result = harness_.Open(id, config);
    if (exists) {
      EXPECT_THAT(result, StatusIs(absl::StatusCode::kAlreadyExists));
      return;
    }
    ASSERT_THAT(result, IsOk());
    ModelSession& session = model_[id];
    session = {.config = config, .epoch = result->epoch, .variants = {{}, {}}, .expiry = {}};
    Renew(session);
  }

  void Append() {
    const std::string id = AnyId();
    ModelSession* session = Find(id);
    if (session == nullptr) return ExpectNotFound(id);
    const uint32_t layer = Below(2);
    std::vector<uint64_t>& held = session->variants[layer];
    const auto length = static_cast<uint32_t>(held.size());
    const uint32_t count = 1 + Below(Chance(3) ? 300 : 9);
    // Mostly at the end; else anywhere, which may be a repeat, a gap or a straddle.
    const uint32_t first = Chance(5) ? Below(length + 5) : length;
    const uint64_t variant = Chance(4) ? 1 + Below(3) : 0;
    OwnedChunk chunk = Text(*session, layer, first, count, variant);
    // Not where a step of maintenance may follow the append at once and meet the fault in its place.
    const bool fails = Chance(6) && session->config.maintenance == Maintenance::kManual;
    if (fails) harness_.RunAll();
    if (fails) harness_.backend().Fail({.first = Below(4), .count = 1, .after_work = Chance(2)});
    StepRequest request{.session = Ref(id), .chunk = chunk.chunk};
    const auto result = harness_.Step({request})[0].append;
    const bool failed = !harness_.backend().failed_call().empty() && fails;
    harness_.backend().StopFailing();
    Renew(*session);
    if (failed) {
      EXPECT_FALSE(result.ok());
    } else if (first == length && length + count <= 800) {
      ASSERT_THAT(result, IsOk());
      EXPECT_EQ(result->length, length + count);
      EXPECT_FALSE(result->repeated);
      held.resize(length + count, variant);
    } else if (first + count <= length) {
      const bool same =
          std::all_of(held.begin() + first, held.begin() + first + count, [&](uint64_t v) { return v == variant; });
      EXPECT_THAT(result, StatusIs(same ? absl::StatusCode::kOk : absl::StatusCode::kAlreadyExists));
      if (same) {
        EXPECT_TRUE(result->repeated);
      }
    } else {
      EXPECT_THAT(result, StatusIs(absl::StatusCode::kOutOfRange));
    }
  }

  OwnedChunk Text(const ModelSession& session, uint32_t layer, uint32_t first, uint32_t count, uint64_t variant) {
    const Tokens tokens(session.config.layers[layer], session.config.dtype, layer);
    OwnedChunk chunk = tokens.Append(first, count, Chance(2) ? Below(count + 1) : 0, variant);
    chunk.chunk.layer = layer;
    return chunk;
  }

  // The layer as the model knows it, decoded from what the engine stores where it is coded.
  StoredLayer Stored(const std::string& id, const ModelSession& session, uint32_t layer) {
    StoredLayer stored = ReadLayer(harness_, id, session.config, layer);
    const std::vector<uint64_t>& held = session.variants[layer];
    EXPECT_EQ(stored.tokens, held.size());
    const Tokens tokens(session.config.layers[layer], session.config.dtype, layer);
    const bool coded = KeysAreCoded(session.config.layers[layer].format);
    // A few tokens say whether the text is the right one: another text differs by more than any code's step.
    for (uint32_t i = 0; i < 8 && !held.empty(); ++i) {
      const uint32_t t = Below(static_cast<uint32_t>(held.size()));
      for (uint32_t h = 0; h < 2; ++h) {
        const oracle::Row key = tokens.Keys(t, held[t])[h], value = tokens.Values(t, held[t])[h];
        for (size_t d = 0; d < key.size(); ++d) EXPECT_NEAR(stored.keys[h][t][d], key[d], coded ? 0.4 : 4e-3);
        for (size_t d = 0; d < value.size(); ++d) EXPECT_NEAR(stored.values[h][t][d], value[d], coded ? 0.4 : 4e-3);
      }
    }
    return stored;
  }

  void Retrieve() {
    const std::string id = AnyId();
    ModelSession* session = Find(id);
    if (session == nullptr) return ExpectNotFound(id);
    const uint32_t layer = Below(2);
    const LayerConfig& config = session->config.layers[layer];
    const auto length = static_cast<uint32_t>(session->variants[layer].size());
    const Tokens tokens(config, session->config.dtype, layer);
    OwnedQuery query = tokens.Ask(Chance(3) ? Below(length + 1) : length, 1 + Below(3));
    query.query.layer = layer;
    const Source sources[] = {Source::kDense, Source::kExact, Source::kQueryCentroids, config.selection.source};
    query.query.selection.source = sources[Below(4)];
    if (config.tokens_per_cluster > 0 && Chance(3)) {
      query.query.selection.source = KeysAreCoded(config.format) ? Source::kKeyCentroidsSketch : Source::kKeyCentroids;
      query.query.selection.candidate_tokens = 64;
      query.query.selection.open_share = 0.05f;
    }
    const Reduction reductions[] = {Reduction::kSumSoftmax, Reduction::kMaxSoftmax, Reduction::kPerHead};
    query.query.selection.reduction = reductions[Below(3)];
    if (Chance(4)) query.query.local_begin = Below(length + 2);
    if (Chance(4)) query.query.local_sinks = Below(8);
    if (config.tokens_per_cluster > 0) query.query.answer.remainder = Chance(2);
    harness_.RunAll();  // no step of maintenance between the two calls
    const uint32_t clustered = harness_.Get(Ref(id, session->epoch))->layers[layer].clustered_length;
    const auto answer = harness_.Retrieve(id, query);
    Renew(*session);
    if (!answer.ok()) {
      EXPECT_EQ(GetErrorDetail(answer.status()).reason, kReasonBeforeIndex) << answer.status();
      return;
    }
    const Source asked_for = answer->used.source;
    const bool of_clusters = asked_for == Source::kKeyCentroids || asked_for == Source::kKeyCentroidsSketch;
    // Without clusters nothing is tail, but for the remainder.
    const bool has_tail = query.query.answer.remainder || (of_clusters && clustered > 0);
    const uint32_t tail_begin = has_tail ? clustered : 0xffffffff;
    ExpectAnswer(Stored(id, *session, layer), config, tokens, {query.query, *answer, tail_begin});
    Renew(*session);
  }

  struct Asked {
    const Query& query;
    const Answer& answer;
    uint32_t tail_begin = 0;  // of the key clusters
  };
  void ExpectAnswer(const StoredLayer& stored, const LayerConfig& config, const Tokens& tokens, const Asked& asked) {
    const Query& query = asked.query;
    const Answer& answer = asked.answer;
    EXPECT_EQ(answer.remainder.has_value(), query.answer.remainder);
    const uint32_t heads = answer.used.reduction == Reduction::kPerHead ? 1 : config.group_heads();
    const auto sets = SplitAnswer(answer, heads);
    const size_t per_position = sets.size() / query.positions;
    for (uint32_t p = 0; p < query.positions; ++p) {
      AnswerCheck check{.layer = &config,
                        .selection = answer.used,
                        .position = query.position + p,
                        .local_sinks = query.local_sinks,
                        .local_begin = query.local_begin,
                        .tail_begin = asked.tail_begin};
      if (answer.indexed_length > 0 && answer.used.source == Source::kQueryCentroids) {
        check.tail_begin = std::min(check.tail_begin, answer.indexed_length);
      }
      const std::vector<AnswerSet> own(sets.begin() + p * per_position, sets.begin() + (p + 1) * per_position);
      const oracle::Matrix queries = tokens.Queries(query.position + p);
      // Dense positions answer with everything, which is exact for any k.
      const uint32_t end = std::min({stored.tokens, check.position + 1, query.local_begin.value_or(stored.tokens)});
      const uint32_t visible = end - std::min(end, query.local_sinks);
      if (own[0].ids.size() == visible) check.selection.k_tokens = 8192;
      if (answer.remainder.has_value()) {
        float log_sum_exp = 0;
        std::memcpy(&log_sum_exp, &answer.remainder->log_sum_exp[p * config.q_heads * sizeof(float)], sizeof(float));
        EXPECT_EQ(std::isfinite(log_sum_exp), own[0].ids.size() < visible);
      }
      if (answer.source == Source::kExact) {
        EXPECT_TRUE(IsExactAnswer(own, stored, queries, check));
      } else {
        EXPECT_TRUE(IsSoundAnswer(own, stored, queries, check));
      }
    }
  }

  void Truncate() {
    const std::string id = AnyId();
    ModelSession* session = Find(id);
    if (session == nullptr) return ExpectNotFound(id);
    const size_t shortest = std::min(session->variants[0].size(), session->variants[1].size());
    const uint32_t length =
        Chance(3) ? Below(900) : static_cast<uint32_t>(shortest - std::min<size_t>(shortest, Below(9)));
    const auto result = harness_.Truncate(id, length);
    Renew(*session);
    if (length > shortest) {
      EXPECT_THAT(result, StatusIs(absl::StatusCode::kFailedPrecondition));
      return;
    }
    ASSERT_THAT(result, IsOk());
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(result->removed_tokens[i], session->variants[i].size() - length);
      session->variants[i].resize(length);
    }
  }

  void Maintain() {
    const std::string id = AnyId();
    ModelSession* session = Find(id);
    if (session == nullptr) return ExpectNotFound(id);
    EXPECT_THAT(harness_.Maintain(id), IsOk());
    Renew(*session);
  }

  void Close() {
    const std::string id = AnyId();
    ModelSession* session = Find(id);
    if (session == nullptr) return ExpectNotFound(id);
    EXPECT_THAT(harness_.Close(Ref(id, session->epoch)), IsOk());
    model_.erase(id);
  }

  void ExpectNotFound(const std::string& id) {
    EXPECT_THAT(harness_.Get(Ref(id)), StatusIs(absl::StatusCode::kNotFound));
  }

  // What must hold at any time.
  void CheckAll() {
    harness_.RunAll();
    uint64_t held = 0, reserved = 0;
    int64_t tokens = 0;
    for (const char* id : {"a", "b", "c", "d"}) {
      ModelSession* session = Find(id);
      const auto info = harness_.Get(Ref(id));
      ASSERT_EQ(info.ok(), session != nullptr) << id;
      if (session == nullptr) continue;
      Renew(*session);
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_EQ(info->layers[i].length, session->variants[i].size());
        ASSERT_LE(info->layers[i].indexed_length, info->layers[i].length);
        ASSERT_LE(info->layers[i].clustered_length, info->layers[i].length);
        tokens += info->layers[i].length;
      }
      held += info->memory.held_bytes();
      reserved += info->memory.reserved_bytes;
    }
    ASSERT_EQ(harness_.engine().memory().arena_held_bytes, held);
    ASSERT_EQ(harness_.engine().memory().arena_reserved_bytes, reserved);
    ASSERT_EQ(harness_.engine().stats().tokens_held, tokens);
  }

  Harness harness_;
  std::mt19937_64 random_;
  std::map<std::string, ModelSession> model_;
};

TEST_P(ModelTest, RandomCallsDoWhatTheModelDoes) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(TestSeed()));
  for (int step = 0; step < 200 && !HasFatalFailure() && !HasNonfatalFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const uint32_t roll = Below(100);
    if (roll < 12)
      Open();
    else if (roll < 55)
      Append();
    else if (roll < 75)
      Retrieve();
    else if (roll < 85)
      Truncate();
    else if (roll < 92)
      Maintain();
    else if (roll < 95)
      Close();
    else
      harness_.clock().Advance(seconds(Below(60)));
    if (step % 10 == 9) CheckAll();
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, ModelTest, ::testing::Combine(::testing::Range(0, 6), ::testing::Bool()),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) ? "SharedWithHost" : "OfItsOwn");
                         });

}  // namespace
}  // namespace ctkvr::testing
