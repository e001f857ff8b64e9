// SPDX-License-Identifier: Apache-2.0
//
// Appends through the engine: where a chunk may lie, what it must hold, what is stored (against the oracle's encoder),
// and that the way a text is cut into chunks leaves no trace. On a backend that shares host memory and on one that does
// not.

#include "server/core/appender.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

class AppenderTest : public ::testing::TestWithParam<bool> {
 protected:
  AppenderTest() : harness_({.shares_host_memory = GetParam()}) {}

  void Open(const SessionConfig& config) { ASSERT_THAT(harness_.Open("s", config), IsOk()); }
  uint32_t Length() { return harness_.Get(Ref("s"))->layers[0].length; }

  Harness harness_;
};
INSTANTIATE_TEST_SUITE_P(Memory, AppenderTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

TEST_P(AppenderTest, TokensBecomeVisibleAtOnceAndTheLengthIsTold) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 1);
  EXPECT_EQ(harness_.Append("s", tokens.Append(0, 10))->length, 10u);
  EXPECT_EQ(harness_.Append("s", tokens.Append(10, 1))->length, 11u);
  EXPECT_EQ(ReadLayer(harness_, "s", config).tokens, 11u);
  EXPECT_EQ(harness_.engine().stats().appended_tokens, 11u);
  EXPECT_EQ(harness_.engine().stats().tokens_held, 11);
}

TEST_P(AppenderTest, EveryFormatStoresWhatTheOracleEncodes) {
  for (Format format : kAllFormats) {
    SCOPED_TRACE(FormatName(format));
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(DTypeName(dtype));
      SessionConfig config = SmallConfig(SmallLayer(format, Source::kExact));
      config.dtype = dtype;
      Open(config);
      const Tokens tokens(config.layers[0], dtype, 2);
      const uint32_t count = 4 + limits::kMeanTokens + 70;
      ASSERT_THAT(harness_.Append("s", tokens.Append(0, count)), IsOk());
      const StoredLayer stored = ReadLayer(harness_, "s", config);
      ASSERT_EQ(stored.tokens, count);
      // Float32 may fall on the other side of a code's border now and then, one step away.
      size_t elements = 0, one_step = 0;
      const auto compare = [&](const oracle::Row& actual, const oracle::Row& expected, double step) {
        for (size_t i = 0; i < expected.size(); ++i, ++elements) {
          ASSERT_NEAR(actual[i], expected[i], step);
          one_step += std::fabs(actual[i] - expected[i]) > 1e-4;
        }
      };
      const bool coded = KeysAreCoded(format);
      for (uint32_t h = 0; h < 2; ++h) {
        const oracle::Codec codec = MakeCodec(config.layers[0], dtype, stored.codec, h);
        for (uint32_t t = 0; t < count; ++t) {
          compare(stored.keys[h][t], oracle::StoredKey(codec, tokens.Keys(t)[h]), coded ? 0.25 : 1e-6);
          compare(stored.values[h][t], oracle::StoredValue(codec, tokens.Values(t)[h]), coded ? 0.5 : 1e-6);
        }
      }
      EXPECT_LE(one_step, coded ? elements / 1000 : 0);
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(AppenderTest, TheMeanIsTakenOverTheFirstTokensAfterTheSinks) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 3);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 515)), IsOk());
  EXPECT_EQ(harness_.Get(Ref("s"))->layers[0].codec.code_generation, 0u);
  ASSERT_THAT(harness_.Append("s", tokens.Append(515, 30)), IsOk());
  const RowCodec codec = harness_.Get(Ref("s"))->layers[0].codec;
  EXPECT_EQ(codec.code_generation, 1u);
  ASSERT_EQ(codec.key_mean.size(), 64u);
  for (uint32_t h = 0; h < 2; ++h) {
    oracle::Row sum(32);
    for (uint32_t t = 4; t < 516; ++t) {
      for (uint32_t i = 0; i < 32; ++i) sum[i] += tokens.Keys(t)[h][i];
    }
    for (uint32_t i = 0; i < 32; ++i) EXPECT_NEAR(codec.key_mean[h * 32 + i], sum[i] / 512, 1e-5);
  }
}

// Splits around the borders of pages, of value groups and of the mean, against one append of everything.
TEST_P(AppenderTest, AnyChunkingLeavesTheSameBytes) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kK6V4, Source::kQueryCentroids));
  const Tokens tokens(config.layers[0], config.dtype, 4);
  const uint32_t total = 600;
  Open(config);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, total, 40)), IsOk());
  ASSERT_THAT(harness_.Maintain("s"), IsOk());
  const StoredLayer whole = ReadRows(harness_, "s", config);
  const absl::StatusOr<Answer> expected = harness_.Retrieve("s", tokens.Ask(total));
  ASSERT_THAT(expected, IsOk());
  for (uint32_t split : {1u,   2u,   3u,   4u,   5u,   31u,  32u,  33u,  63u,  64u,  65u,  127u, 128u,
                         129u, 511u, 512u, 513u, 514u, 515u, 516u, 517u, 575u, 576u, 577u, 598u, 599u}) {
    SCOPED_TRACE(split);
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    Open(config);
    // Queries of the last 40 positions, whichever chunk they come with.
    const uint32_t second = total - split;
    const uint32_t in_first = 40 - std::min(40u, second);
    ASSERT_THAT(harness_.Append("s", tokens.Append(0, split, in_first)), IsOk());
    ASSERT_THAT(harness_.Append("s", tokens.Append(split, second, 40 - in_first)), IsOk());
    ASSERT_THAT(harness_.Maintain("s"), IsOk());
    EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config), whole));
    const absl::StatusOr<Answer> answer = harness_.Retrieve("s", tokens.Ask(total));
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->ids, expected->ids);
    EXPECT_EQ(answer->scores, expected->scores);
  }
}

TEST_P(AppenderTest, OneByOneLeavesTheSameBytesToo) {
  const SessionConfig config = SmallConfig(SmallLayer());
  const Tokens tokens(config.layers[0], config.dtype, 5);
  Open(config);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 540)), IsOk());
  const StoredLayer whole = ReadRows(harness_, "s", config);
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  Open(config);
  for (uint32_t t = 0; t < 540; ++t) ASSERT_THAT(harness_.Append("s", tokens.Append(t, 1)), IsOk());
  EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config), whole));
}

TEST_P(AppenderTest, AppendAtAWrongPositionSaysTheExpectedOne) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 6);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 10)), IsOk());
  for (const auto& [first, count] : {std::pair{11u, 1u}, std::pair{9u, 2u}, std::pair{0u, 11u}, std::pair{500u, 1u}}) {
    SCOPED_TRACE(first);
    const auto result = harness_.Append("s", tokens.Append(first, count));
    EXPECT_THAT(result, StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("expected position is 10")));
    EXPECT_EQ(GetErrorDetail(result.status()).reason, kReasonWrongPosition);
    EXPECT_EQ(GetErrorDetail(result.status()).metadata.at("expected_position"), "10");
  }
  EXPECT_EQ(Length(), 10u);
}

TEST_P(AppenderTest, ARepeatIsAcknowledgedAndNotRepeated) {
  for (uint32_t length : {100u, 600u}) {  // raw, and coded
    SCOPED_TRACE(length);
    const SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, Source::kQueryCentroids));
    Open(config);
    const Tokens tokens(config.layers[0], config.dtype, 7);
    ASSERT_THAT(harness_.Append("s", tokens.Append(0, length, 10)), IsOk());
    const StoredLayer before = ReadRows(harness_, "s", config);
    for (const auto& [first, count] : {std::pair{0u, length}, std::pair{length - 1, 1u}, std::pair{60u, 10u}}) {
      SCOPED_TRACE(first);
      const auto result = harness_.Append("s", tokens.Append(first, count));
      ASSERT_THAT(result, IsOk());
      EXPECT_TRUE(result->repeated);
      EXPECT_EQ(result->length, length);
    }
    EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config), before));
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
  EXPECT_EQ(harness_.engine().stats().repeated_appends, 6u);
}

TEST_P(AppenderTest, OtherBytesAtAHeldPositionAreRefused) {
  for (Format format : {Format::kF32, Format::kF16, Format::kK8V4, Format::kK6V4}) {
    for (uint32_t length : {100u, 600u}) {
      SCOPED_TRACE(std::string(FormatName(format)) + " " + std::to_string(length));
      const SessionConfig config = SmallConfig(SmallLayer(format, Source::kExact));
      Open(config);
      const Tokens tokens(config.layers[0], config.dtype, 8);
      ASSERT_THAT(harness_.Append("s", tokens.Append(0, length)), IsOk());
      const StoredLayer before = ReadRows(harness_, "s", config);
      for (const bool in_key : {true, false}) {
        OwnedChunk chunk = tokens.Append(40, 30);
        // The last KV head of token 69: any earlier check passes.
        std::vector<std::byte>& tensor = in_key ? chunk.keys : chunk.values;
        for (size_t i = 1; i <= 16; ++i) StoreElement(tensor.data(), config.dtype, tensor.size() / 2 - i, 3.25f);
        const auto result = harness_.Append("s", chunk);
        EXPECT_THAT(result, StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("position 69")));
        EXPECT_EQ(GetErrorDetail(result.status()).reason, kReasonDifferentBytes);
      }
      EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config), before));
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(AppenderTest, TheTokenLimitHoldsToTheToken) {
  const SessionConfig config = SmallConfig(SmallLayer(), 70);
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 9);
  const auto beyond = harness_.Append("s", tokens.Append(0, 71));
  EXPECT_THAT(beyond, StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("token_limit is 70")));
  EXPECT_EQ(GetErrorDetail(beyond.status()).reason, kReasonTokenLimit);
  EXPECT_EQ(GetErrorDetail(beyond.status()).metadata.at("token_limit"), "70");
  EXPECT_EQ(Length(), 0u);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 70)), IsOk());
  EXPECT_THAT(harness_.Append("s", tokens.Append(70, 1)), StatusIs(absl::StatusCode::kOutOfRange));
}

TEST_P(AppenderTest, NoTokensChangeNothing) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 10);
  ASSERT_THAT(harness_.Append("s", tokens.Append(0, 3)), IsOk());
  const auto result = harness_.Append("s", tokens.Append(99, 0));
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->length, 3u);
  EXPECT_FALSE(result->repeated);
}

TEST_P(AppenderTest, ALayerThatIsNotThereIsOutOfRange) {
  SessionConfig config = SmallConfig(SmallLayer(), 100, 2);
  config.layers[1].absent = true;
  Open(config);
  OwnedChunk chunk = Tokens(config.layers[0], config.dtype, 11).Append(0, 1);
  chunk.chunk.layer = 1;
  EXPECT_THAT(harness_.Append("s", chunk), StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("absent")));
  chunk.chunk.layer = 2;
  EXPECT_THAT(harness_.Append("s", chunk), StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("has 2 layers")));
}

TEST_P(AppenderTest, WrongShapesAreRefusedByName) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 12);
  const auto expect = [&](const char* text, auto change) {
    SCOPED_TRACE(text);
    OwnedChunk chunk = tokens.Append(0, 5, 2);
    change(chunk.chunk);
    EXPECT_THAT(harness_.Append("s", chunk), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  expect("kv_heads is 3", [](Chunk& chunk) { chunk.kv_heads = 3; });
  expect("head_dim is 64", [](Chunk& chunk) { chunk.head_dim = 64; });
  expect("value_dim is 8", [](Chunk& chunk) { chunk.value_dim = 8; });
  expect("q_heads is 2", [](Chunk& chunk) { chunk.q_heads = 2; });
  expect("dtype is f32", [](Chunk& chunk) { chunk.dtype = DType::kF32; });
  expect("keys has", [](Chunk& chunk) { chunk.keys = chunk.keys.first(chunk.keys.size() - 2); });
  expect("values has", [](Chunk& chunk) { chunk.values = {}; });
  expect("queries has", [](Chunk& chunk) { chunk.queries = chunk.queries.first(2); });
  expect("queries has", [](Chunk& chunk) { chunk.query_positions = 0; });
  expect("keys has", [](Chunk& chunk) { chunk.tokens = 6; });
  expect("tokens is 16385", [](Chunk& chunk) { chunk.tokens = limits::kAppendTokensMax + 1; });
  OwnedChunk chunk = tokens.Append(0, 5, 5);
  OwnedChunk shorter = tokens.Append(0, 4);
  shorter.chunk.queries = chunk.queries;
  shorter.chunk.query_positions = 5;
  EXPECT_THAT(harness_.Append("s", shorter),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("queries has 5 positions; the chunk has 4")));
  EXPECT_EQ(Length(), 0u);
}

TEST_P(AppenderTest, BadElementsAreRefusedWithTheIndexOfTheFirst) {
  SessionConfig config = SmallConfig(SmallLayer());
  config.dtype = DType::kF32;
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 13);
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& [value, text] : {std::pair{NAN, "is NaN"}, std::pair{inf, "is inf"}, std::pair{-inf, "is -inf"},
                                    std::pair{1.1e15f, "magnitude limit"}, std::pair{-1.1e15f, "magnitude limit"}}) {
    for (const char* tensor : {"keys", "values", "queries"}) {
      SCOPED_TRACE(std::string(tensor) + " " + text);
      OwnedChunk chunk = tokens.Append(0, 5, 2);
      std::vector<std::byte>& bytes = tensor[0] == 'k' ? chunk.keys : tensor[0] == 'v' ? chunk.values : chunk.queries;
      StoreElement(bytes.data(), config.dtype, 77, value);
      StoreElement(bytes.data(), config.dtype, 90, NAN);
      EXPECT_THAT(harness_.Append("s", chunk),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           ::testing::AllOf(HasSubstr(std::string(tensor) + "[77]"), HasSubstr(text))));
    }
  }
  EXPECT_EQ(Length(), 0u);
}

TEST_P(AppenderTest, ValuesThatOverflowTheStorageTypeAreRefusedAndNothingChanges) {
  for (Format format : {Format::kF16, Format::kK8V4, Format::kK8V8}) {
    for (uint32_t length : {10u, 600u}) {
      SCOPED_TRACE(std::string(FormatName(format)) + " " + std::to_string(length));
      SessionConfig config = SmallConfig(SmallLayer(format, Source::kExact));
      config.dtype = DType::kF32;
      Open(config);
      const Tokens tokens(config.layers[0], config.dtype, 14);
      ASSERT_THAT(harness_.Append("s", tokens.Append(0, length)), IsOk());
      const MemoryInfo memory = harness_.Get(Ref("s"))->memory;
      const StoredLayer before = ReadRows(harness_, "s", config);
      OwnedChunk chunk = tokens.Append(length, 100);
      // Token 70, second KV head, dimension 3: [tokens, 2, 16].
      StoreElement(chunk.values.data(), config.dtype, (70 * 2 + 1) * 16 + 3, -1e5f);
      EXPECT_THAT(harness_.Append("s", chunk),
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("values[2259] does not fit format")));
      EXPECT_TRUE(SameBytes(ReadRows(harness_, "s", config), before));
      EXPECT_EQ(harness_.Get(Ref("s"))->memory.held_bytes(), memory.held_bytes());
      // The same positions, good this time.
      EXPECT_THAT(harness_.Append("s", tokens.Append(length, 100)), IsOk());
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(AppenderTest, KeysThatFloat16CannotHoldAreRefused) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact));
  config.dtype = DType::kF32;
  Open(config);
  OwnedChunk chunk = Tokens(config.layers[0], config.dtype, 15).Append(0, 10);
  StoreElement(chunk.keys.data(), config.dtype, 400, 1e5f);
  EXPECT_THAT(harness_.Append("s", chunk), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keys[400]")));
}

// A key accepted raw must be codable later: the limit does not depend on when it comes.
TEST_P(AppenderTest, KeysTooLongToCodeAreRefusedRawAndCodedAlike) {
  SessionConfig config = SmallConfig(SmallLayer());
  config.dtype = DType::kF32;
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 16);
  for (uint32_t length : {0u, 600u}) {
    SCOPED_TRACE(length);
    if (length > 0) {
      ASSERT_THAT(harness_.Append("s", tokens.Append(0, length)), IsOk());
    }
    OwnedChunk chunk = tokens.Append(length, 5);
    StoreElement(chunk.keys.data(), config.dtype, 3 * 64 + 32 + 7, 33000.0f);
    EXPECT_THAT(harness_.Append("s", chunk),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keys[224] begins a key of 2-norm")));
  }
}

TEST_P(AppenderTest, TheLongestKeysAllowedAreCodedWhateverTheMean) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kK6V4));
  config.dtype = DType::kF32;
  config.first_planes = 1;
  Open(config);
  const Tokens tokens(config.layers[0], config.dtype, 17);
  OwnedChunk chunk = tokens.Append(0, 600);
  // Two kinds of keys, opposite and as long as may be, in one dimension or in all.
  for (uint32_t t = 0; t < 600; ++t) {
    const float sign = t < 580 ? -1.0f : 1.0f;
    for (uint32_t i = 0; i < 64; ++i) {
      const float one = i % 32 == 0 ? 32752.0f : 0.0f;
      const float all = 32752.0f / std::sqrt(32.001f);
      StoreElement(chunk.keys.data(), config.dtype, t * 64 + i, sign * (t % 2 == 0 ? one : all));
    }
  }
  EXPECT_THAT(harness_.Append("s", chunk), IsOk());
}

TEST_P(AppenderTest, QueriesOfALayerWithoutCentroidsAreTakenAndForgotten) {
  const SessionConfig config = SmallConfig(SmallLayer());
  Open(config);
  EXPECT_THAT(harness_.Append("s", Tokens(config.layers[0], config.dtype, 18).Append(0, 10, 10)), IsOk());
  EXPECT_EQ(harness_.Get(Ref("s"))->memory.index_bytes, 0u);
}

// Scratch that staged chunks do not fit at once: pieces, and the same bytes.
TEST(AppenderScratchTest, LargeChunksAreStagedInPieces) {
  HarnessOptions options{.shares_host_memory = false};
  options.engine.scratch_bytes = size_t{48} << 10;
  Harness small(options);
  Harness large({.shares_host_memory = false});
  SessionConfig config = SmallConfig(SmallLayer());
  const Tokens tokens(config.layers[0], config.dtype, 19);
  for (Harness* harness : {&small, &large}) {
    ASSERT_THAT(harness->Open("s", config), IsOk());
    ASSERT_THAT(harness->Append("s", tokens.Append(0, 700, 40)), IsOk());
  }
  const auto a = small.Get(Ref("s"));
  EXPECT_EQ(a->layers[0].length, 700u);
  // Read page by page, for a dense answer does not fit the small scratch.
  for (uint32_t t = 0; t < 700; t += 50) EXPECT_TRUE(small.Append("s", tokens.Append(t, 50))->repeated);
  for (uint32_t t = 0; t < 700; t += 50) EXPECT_TRUE(large.Append("s", tokens.Append(t, 50))->repeated);
}

TEST(AppenderBatchTest, AppendsOfManySessionsShareOneWrite) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer());
  const Tokens tokens(config.layers[0], config.dtype, 20);
  std::vector<OwnedChunk> chunks;
  std::vector<StepRequest> requests;
  for (uint32_t i = 0; i < 8; ++i) {
    ASSERT_THAT(harness.Open(std::to_string(i), config), IsOk());
    chunks.push_back(tokens.Append(0, 20 + i));
    requests.push_back({.session = Ref(std::to_string(i)), .chunk = chunks.back().chunk, .query = std::nullopt});
  }
  const uint64_t before = harness.backend().calls();
  const auto results = harness.Step(std::move(requests));
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(results[i].append->length, 20 + i);
  EXPECT_EQ(harness.backend().calls() - before, 2u) << "one WriteTokens, one Synchronize";
}

}  // namespace
}  // namespace ctkvr::testing
