// SPDX-License-Identifier: Apache-2.0
//
// Sessions through the engine: memory by kind against the arena's own counters and against the formula, truncation
// (a session that took back tokens is the one that never saw them), maintenance by itself and on request.

#include "server/core/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

LayerConfig LlamaLike(Format format) {
  LayerConfig layer = SmallLayer(format, KeysAreCoded(format) ? Source::kSketch : Source::kExact);
  layer.q_heads = 4;
  layer.kv_heads = 2;
  layer.head_dim = layer.value_dim = 128;
  return layer;
}

// ---- Memory --------------------------------------------------------------------------------------------------------

TEST(SessionMemoryTest, HeldBytesAreWithinTheSharesOfF32AtHeadDim128) {
  for (const auto& [format, limit] : {std::pair{Format::kK8V4, 0.21}, std::pair{Format::kK6V4, 0.18}}) {
    SCOPED_TRACE(FormatName(format));
    Harness harness;
    const SessionConfig config = SmallConfig(LlamaLike(format), 8192);
    ASSERT_THAT(harness.Open("s", config), IsOk());
    const Tokens tokens(config.layers[0], config.dtype, 1);
    for (uint32_t t = 0; t < 8192; t += 2048) ASSERT_THAT(harness.Append("s", tokens.Append(t, 2048)), IsOk());
    const MemoryInfo memory = harness.Get(Ref("s"))->memory;
    const double f32_bytes = 8192.0 * 2 * (128 + 128) * 4;
    EXPECT_LE(static_cast<double>(memory.held_bytes()) / f32_bytes, limit);
    EXPECT_EQ(memory.raw_bytes, 0u);
    // 64 tokens a page: planes and two scales a key, codes and group scales a value.
    const uint64_t token_bytes = KeyPlanes(format) * 16 + 4 + 64 + 16;
    EXPECT_EQ(memory.page_bytes, 8192 * 2 * token_bytes);
  }
}

TEST(SessionMemoryTest, TheSessionAndTheArenaCountTheSameBytes) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, Source::kQueryCentroids), 1024, 3);
  config.layers[1] = LlamaLike(Format::kF16);
  config.layers[2].head_dim = 80;
  const auto check = [&](const char* when) {
    SCOPED_TRACE(when);
    uint64_t held = 0, reserved = 0;
    for (const char* id : {"a", "b"}) {
      const auto info = harness.Get(Ref(id));
      if (!info.ok()) continue;
      held += info->memory.held_bytes();
      reserved += info->memory.reserved_bytes;
    }
    EXPECT_EQ(harness.engine().memory().arena_held_bytes, held);
    EXPECT_EQ(harness.engine().memory().arena_reserved_bytes, reserved);
  };
  check("empty");
  ASSERT_THAT(harness.Open("a", config), IsOk());
  ASSERT_THAT(harness.Open("b", config), IsOk());
  check("opened");
  for (uint32_t layer = 0; layer < 3; ++layer) {
    const Tokens tokens(config.layers[layer], config.dtype, layer);
    for (uint32_t t = 0; t < 900; t += 150) {
      OwnedChunk chunk = tokens.Append(t, 150, 30);
      chunk.chunk.layer = layer;
      ASSERT_THAT(harness.Append("a", chunk), IsOk());
      check("appended");
    }
  }
  const MemoryInfo raw_gone = harness.Get(Ref("a"))->memory;
  EXPECT_EQ(raw_gone.raw_bytes, 0u);
  EXPECT_GT(raw_gone.index_bytes, 0u);
  EXPECT_GT(raw_gone.state_bytes, 0u);
  EXPECT_LT(raw_gone.reserved_bytes, harness.Get(Ref("b"))->memory.reserved_bytes) << "raw pages were given back";
  ASSERT_THAT(harness.Maintain("a"), IsOk());
  check("indexed");
  ASSERT_THAT(harness.Truncate("a", 100), IsOk());
  check("truncated");
  ASSERT_THAT(harness.Close(Ref("a")), IsOk());
  check("closed one");
  ASSERT_THAT(harness.Close(Ref("b")), IsOk());
  check("closed both");
  EXPECT_EQ(harness.engine().memory().arena_free_bytes, harness.engine().memory().arena_bytes);
}

TEST(SessionMemoryTest, TheWholeTokenLimitIsAdmittedAtOpenOrRefused) {
  HarnessOptions options;
  options.engine.arena_bytes = size_t{16} << 20;
  Harness harness(options);
  const SessionConfig config = SmallConfig(LlamaLike(Format::kF32), 1 << 20);
  const auto refused = harness.Open("s", config);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("bytes needed")));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonArenaFull);
  EXPECT_EQ(harness.engine().memory().arena_reserved_bytes, 0u);
  EXPECT_EQ(harness.engine().stats().sessions, 0);
  // The id is free, and a smaller session fits; then every append up to its limit does.
  ASSERT_THAT(harness.Open("s", SmallConfig(LlamaLike(Format::kF32), 2048)), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  for (uint32_t t = 0; t < 2048; t += 512) ASSERT_THAT(harness.Append("s", tokens.Append(t, 512)), IsOk());
}

TEST(SessionMemoryTest, AFullIndexStaysWithinWhatWasAdmitted) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, Source::kQueryCentroids), 1000, 2);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    OwnedChunk chunk = Tokens(config.layers[0], config.dtype, 1).Append(0, 900, 900);
    chunk.chunk.layer = layer;
    ASSERT_THAT(harness.Append("s", chunk), IsOk());
  }
  // Twice: the second build needs the spare set beside two live ones.
  for (uint32_t end : {900u, 950u}) {
    for (uint32_t layer = 0; layer < 2 && end > 900; ++layer) {
      OwnedChunk chunk = Tokens(config.layers[0], config.dtype, 1).Append(900, 50, 50);
      chunk.chunk.layer = layer;
      ASSERT_THAT(harness.Append("s", chunk), IsOk());
    }
    const auto result = harness.Maintain("s");
    ASSERT_THAT(result, IsOk());
    EXPECT_EQ(result->indexed_length, (std::vector<uint32_t>{end, end}));
  }
}

// ---- Truncation ----------------------------------------------------------------------------------------------------

TEST(SessionTruncateTest, TokensPastTheLengthAreGone) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer());
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 700)), IsOk());
  const auto result = harness.Truncate("s", 650);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->removed_tokens, std::vector<uint32_t>{50});
  EXPECT_EQ(ReadLayer(harness, "s", config).tokens, 650u);
  EXPECT_EQ(harness.engine().stats().tokens_held, 650);
  // The same again changes nothing; other tokens may follow.
  EXPECT_EQ(harness.Truncate("s", 650)->removed_tokens, std::vector<uint32_t>{0});
  EXPECT_EQ(harness.Append("s", tokens.Append(650, 10, 0, 9))->length, 660u);
}

TEST(SessionTruncateTest, AShorterLayerRefusesAndNothingChanges) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(), 100, 3);
  config.layers[2].absent = true;
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    OwnedChunk chunk = tokens.Append(0, 20 + layer);
    chunk.chunk.layer = layer;
    ASSERT_THAT(harness.Append("s", chunk), IsOk());
  }
  const auto refused = harness.Truncate("s", 21);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("20, 21, 0")));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonShorterLayer);
  EXPECT_EQ(harness.Get(Ref("s"))->layers[1].length, 21u);
  EXPECT_EQ(harness.Truncate("s", 20)->removed_tokens, (std::vector<uint32_t>{0, 1, 0}));
}

TEST(SessionTruncateTest, TheMeanStaysWhenTheLayerFallsBelowItsLength) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer());
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 600)), IsOk());
  const RowCodec before = harness.Get(Ref("s"))->layers[0].codec;
  ASSERT_THAT(harness.Truncate("s", 10), IsOk());
  ASSERT_THAT(harness.Append("s", tokens.Append(10, 600, 0, 5)), IsOk());
  const RowCodec after = harness.Get(Ref("s"))->layers[0].codec;
  EXPECT_EQ(after.code_generation, 1u);
  EXPECT_EQ(after.key_mean, before.key_mean);
  const StoredLayer stored = ReadLayer(harness, "s", config);
  const oracle::Codec codec = MakeCodec(config.layers[0], config.dtype, stored.codec, 1);
  EXPECT_NEAR(stored.keys[1][300][5], oracle::StoredKey(codec, tokens.Keys(300, 5)[1])[5], 0.25);
}

// Drafts of several tokens are appended, answered and partly taken back, over and over, as speculative decoding does.
TEST(SessionTruncateTest, ADecoderThatTakesBackDraftsEqualsOneThatNeverDrafted) {
  for (const bool shares : {true, false}) {
    for (Source source : {Source::kExact, Source::kSketch, Source::kQueryCentroids}) {
      SCOPED_TRACE(SourceName(source));
      Harness harness({.shares_host_memory = shares});
      const SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, source), 1024);
      const Tokens tokens(config.layers[0], config.dtype, 1);
      for (const char* id : {"drafts", "plain"}) {
        ASSERT_THAT(harness.Open(id, config), IsOk());
        ASSERT_THAT(harness.Append(id, tokens.Append(0, 600, 40)), IsOk());
        if (source == Source::kQueryCentroids) {
          ASSERT_THAT(harness.Maintain(id), IsOk());
        }
      }
      std::mt19937_64 random = MakeRandom(5);
      SCOPED_TRACE(TestSeed());
      uint32_t length = 600;
      for (uint32_t step = 0; step < 30; ++step) {
        const uint32_t drafted = 1 + random() % 8;
        const uint32_t accepted = random() % (drafted + 1);
        // The accepted are the real text, the rejected another.
        ASSERT_THAT(harness.Append("drafts", tokens.Append(length, accepted, accepted)), IsOk());
        ASSERT_THAT(harness.Append("drafts",
                                   tokens.Append(length + accepted, drafted - accepted, drafted - accepted, 1 + step)),
                    IsOk());
        ASSERT_THAT(harness.Retrieve("drafts", tokens.Ask(length, drafted)), IsOk());
        ASSERT_THAT(harness.Truncate("drafts", length + accepted), IsOk());
        ASSERT_THAT(harness.Append("plain", tokens.Append(length, accepted, accepted)), IsOk());
        length += accepted;
        const auto a = harness.Retrieve("drafts", tokens.Ask(length));
        const auto b = harness.Retrieve("plain", tokens.Ask(length));
        ASSERT_THAT(a, IsOk());
        ASSERT_THAT(b, IsOk());
        EXPECT_EQ(a->ids, b->ids);
        EXPECT_EQ(a->scores, b->scores);
      }
      EXPECT_TRUE(SameBytes(ReadRows(harness, "drafts", config), ReadRows(harness, "plain", config)));
      if (source != Source::kQueryCentroids) continue;
      // And an index built now is the same: the newest queries are.
      for (const char* id : {"drafts", "plain"}) ASSERT_THAT(harness.Maintain(id), IsOk());
      EXPECT_EQ(harness.Retrieve("drafts", tokens.Ask(length))->ids,
                harness.Retrieve("plain", tokens.Ask(length))->ids);
    }
  }
}

TEST(SessionTruncateTest, ListsLoseWhatWasTakenBackBeforeTheAnswer) {
  for (const bool shares : {true, false}) {
    Harness harness({.shares_host_memory = shares});
    const SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids), 1024);
    ASSERT_THAT(harness.Open("s", config), IsOk());
    const Tokens tokens(config.layers[0], config.dtype, 1);
    // Queries along the whole text, so that some centroids stay: chunks of 100 with 4 queries each.
    for (uint32_t t = 0; t < 900; t += 100) ASSERT_THAT(harness.Append("s", tokens.Append(t, 100, 4)), IsOk());
    ASSERT_THAT(harness.Maintain("s"), IsOk());
    EXPECT_EQ(harness.Get(Ref("s"))->layers[0].query_centroids, 24u);
    ASSERT_THAT(harness.Truncate("s", 650), IsOk());
    const LayerInfo info = harness.Get(Ref("s"))->layers[0];
    EXPECT_EQ(info.indexed_length, 650u);
    EXPECT_EQ(info.query_centroids, 12u) << "queries at 396 to 399, 496 to 499 and 596 to 599";
    ASSERT_THAT(harness.Append("s", tokens.Append(650, 200, 0, 7)), IsOk());
    OwnedQuery query = tokens.Ask(850);
    query.query.selection.probes = 12;
    query.query.selection.k_tokens = 8192;
    query.query.selection.top_p = 0.999999f;  // no short cut to a dense answer
    const auto answer = harness.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, Source::kQueryCentroids);
    EXPECT_EQ(answer->always_tokens, 4u + 200);
    // Everything up to the tail, or nothing: no centroid is left whose queries stay.
    ASSERT_THAT(harness.Truncate("s", 300), IsOk());
    EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, 0u);
    EXPECT_EQ(harness.Retrieve("s", tokens.Ask(300))->source, Source::kExact);
  }
}

// ---- Maintenance ---------------------------------------------------------------------------------------------------

SessionConfig AutoConfig() {
  LayerConfig layer = SmallLayer(Format::kF16, Source::kQueryCentroids);
  layer.selection.dense_below_tokens = 500;
  SessionConfig config = SmallConfig(layer, 4096);
  config.maintenance = Maintenance::kAuto;
  return config;
}

TEST(SessionMaintenanceTest, AnIndexIsBuiltOnceTheLayerIsNoLongerDense) {
  Harness harness;
  const SessionConfig config = AutoConfig();
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 499, 30)), IsOk());
  harness.RunAll();
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, 0u);
  ASSERT_THAT(harness.Append("s", tokens.Append(499, 101, 30)), IsOk());
  harness.RunAll();
  // Short of the positions that drafts may still be asked about.
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, 600 - limits::kQueryPositionsMax);
  EXPECT_EQ(harness.Retrieve("s", tokens.Ask(600))->source, Source::kQueryCentroids);
}

TEST(SessionMaintenanceTest, TheTailIsTakenInAtItsLimitAndNotBefore) {
  Harness harness;
  const SessionConfig config = AutoConfig();
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 600, 30)), IsOk());
  harness.RunAll();
  const uint32_t indexed = 600 - limits::kQueryPositionsMax;
  ASSERT_THAT(harness.Append("s", tokens.Append(600, indexed + limits::kTailTokens - 601)), IsOk());
  harness.RunAll();
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, indexed);
  const uint32_t length = indexed + limits::kTailTokens;
  ASSERT_THAT(harness.Append("s", tokens.Append(length - 1, 1)), IsOk());
  harness.RunAll();
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, length - limits::kQueryPositionsMax);
}

TEST(SessionMaintenanceTest, AHalfBuiltIndexIsNeverSearched) {
  Harness harness;
  const SessionConfig config = AutoConfig();
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 600, 30)), IsOk());
  // One build: the set, then 16 and 8 centroids of each of two heads.
  for (uint32_t step = 0; step < 4; ++step) {
    const auto answer = harness.Retrieve("s", tokens.Ask(600));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, Source::kExact) << "step " << step;
    EXPECT_EQ(answer->indexed_length, 0u);
  }
  harness.RunAll();
  EXPECT_EQ(harness.engine().stats().maintenance_steps, 5u);
  EXPECT_EQ(harness.Retrieve("s", tokens.Ask(600))->source, Source::kQueryCentroids);
}

TEST(SessionMaintenanceTest, TruncationAbandonsARunningBuildAndItsMemory) {
  Harness harness;
  const SessionConfig config = AutoConfig();
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 600, 30)), IsOk());
  harness.engine().RunLane(0);
  ASSERT_THAT(harness.Truncate("s", 580), IsOk());
  harness.RunAll();
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, 580 - limits::kQueryPositionsMax);
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].query_centroids, 10u) << "queries 570 to 579";
  EXPECT_EQ(harness.engine().memory().arena_held_bytes, harness.Get(Ref("s"))->memory.held_bytes());
}

TEST(SessionMaintenanceTest, ManualSessionsWaitToBeAsked) {
  Harness harness;
  SessionConfig config = AutoConfig();
  config.maintenance = Maintenance::kManual;
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  // Asked before there is anything to index: done, and not done later.
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 600)), IsOk());
  EXPECT_EQ(harness.Maintain("s")->indexed_length, std::vector<uint32_t>{0});
  ASSERT_THAT(harness.Append("s", tokens.Append(600, 1400, 30)), IsOk());
  harness.RunAll();
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].indexed_length, 0u);
  EXPECT_EQ(harness.Maintain("s")->indexed_length, std::vector<uint32_t>{2000});
  EXPECT_EQ(harness.Maintain("s")->indexed_length, std::vector<uint32_t>{2000}) << "nothing left to do";
}

TEST(SessionMaintenanceTest, OnlyTheLayersNamedAreMaintained) {
  Harness harness;
  SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids), 1024, 3);
  config.layers[2] = SmallLayer(Format::kF16, Source::kExact);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  for (uint32_t layer = 0; layer < 3; ++layer) {
    OwnedChunk chunk = Tokens(config.layers[layer], config.dtype, 1).Append(0, 300, 30);
    chunk.chunk.layer = layer;
    ASSERT_THAT(harness.Append("s", chunk), IsOk());
  }
  EXPECT_EQ(harness.Maintain("s", {1})->indexed_length, (std::vector<uint32_t>{0, 300, 0}));
  EXPECT_EQ(harness.Maintain("s", {2})->indexed_length, (std::vector<uint32_t>{0, 300, 0}));
  EXPECT_THAT(harness.Maintain("s", {3}), StatusIs(absl::StatusCode::kOutOfRange));
  EXPECT_EQ(harness.Maintain("s")->indexed_length, (std::vector<uint32_t>{300, 300, 0}));
}

TEST(SessionMaintenanceTest, TheNewestQueriesBecomeTheCentroids) {
  Harness harness;
  // One query head a KV head: then a list does not depend on the norms of the queries it was made of.
  LayerConfig layer = SmallLayer(Format::kF32, Source::kQueryCentroids);
  layer.q_heads = 2;
  const SessionConfig config = SmallConfig(layer, 1024);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  // More queries than ring slots, so that the ring has gone round.
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 500, 500)), IsOk());
  ASSERT_THAT(harness.Append("s", tokens.Append(500, 7, 7)), IsOk());
  ASSERT_THAT(harness.Maintain("s"), IsOk());
  // A query that was a centroid finds its own list: k of it is exactly what exact selection of that query finds.
  OwnedQuery query = tokens.Ask(600, 1);
  query.bytes = tokens.Ask(495).bytes;
  query.query.queries = query.bytes;
  query.query.selection.probes = 1;
  query.query.selection.window_tokens = 0;
  const auto listed = harness.Retrieve("s", query);
  query.query.selection.source = Source::kExact;
  const auto exact = harness.Retrieve("s", query);
  ASSERT_THAT(listed, IsOk());
  EXPECT_EQ(listed->source, Source::kQueryCentroids);
  EXPECT_EQ(listed->ids, exact->ids);
}

}  // namespace
}  // namespace ctkvr::testing
