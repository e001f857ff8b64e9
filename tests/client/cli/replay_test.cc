// SPDX-License-Identifier: Apache-2.0
//
// Proves the whole way, from a trace through the client, gRPC and a real server to the table: source `exact` equals
// brute force over the stored keys in every format and reduction, and the repository's trace keeps its needles.
#include "client/cli/replay.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "server/obs/recorder.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

Trace RandomTrace(uint32_t kv_heads, uint32_t group_heads, uint32_t head_dim, uint32_t value_dim, uint32_t tokens) {
  auto random = testing::MakeRandom(head_dim * 1000 + group_heads);
  std::normal_distribution<float> normal;
  Trace trace{.name = "random",
              .q_heads = kv_heads * group_heads,
              .kv_heads = kv_heads,
              .head_dim = head_dim,
              .value_dim = value_dim,
              .tokens = tokens,
              .prompt_tokens = tokens - 12,
              .query_first_position = tokens - 40,
              .scale = 0.2f,
              .queries = {},
              .keys = {},
              .values = {}};
  trace.queries.resize(40 * size_t{trace.q_heads} * head_dim);
  trace.keys.resize(size_t{tokens} * kv_heads * head_dim);
  trace.values.resize(size_t{tokens} * kv_heads * value_dim);
  for (auto* array : {&trace.queries, &trace.keys, &trace.values}) {
    for (uint16_t& x : *array) x = client::FloatToHalf(normal(random));
  }
  return trace;
}

class ReplayTest : public ::testing::Test {
 protected:
  ReplayTest() : progress_(stderr, false) {
    auto client = client::Client::Connect({.address = server_.address()});
    EXPECT_THAT(client, IsOk());
    client_ = *std::move(client);
  }
  absl::StatusOr<ReplayResult> Run(const Trace& trace, const ReplayFlags& flags) {
    return Replay(*client_, trace, flags, &progress_);
  }

  testing::TestServer server_;
  std::unique_ptr<client::Client> client_;
  Progress progress_;
};

TEST_F(ReplayTest, ExactIsBruteForceInEveryFormatAndReduction) {
  SCOPED_TRACE(testing::TestSeed());
  for (const char* format : {"f32", "f16", "bf16", "k8v8", "k8v4", "k6v4"}) {
    for (const char* reduction : {"sum_softmax", "max_softmax", "per_head"}) {
      SCOPED_TRACE(std::string(format) + " " + reduction);
      const Trace trace = RandomTrace(2, 3, 80, 72, 700);
      ReplayFlags flags;
      flags.selection.format = format;
      flags.selection.reduction = reduction;
      flags.selection.source = "exact";
      flags.selection.k_tokens = 50;
      flags.verify_exact = true;
      const auto result = Run(trace, flags);
      ASSERT_THAT(result, IsOk());
      EXPECT_TRUE(result->verify->good()) << result->verify->first;
      EXPECT_EQ(result->verify->sets, 12u * (reduction == std::string("per_head") ? 6 : 2));
      EXPECT_EQ(result->source, v1::SOURCE_EXACT);
      EXPECT_EQ(result->retrievals, 12u);
      EXPECT_EQ(result->appended_tokens, 700u);
      EXPECT_GT(*result->metrics.recall(), 0.85);
      EXPECT_DOUBLE_EQ(*result->metrics.tokens_chosen(), 50 + 68);
    }
  }
}

TEST_F(ReplayTest, KeysNotCodedYetAreVerifiedToo) {
  SCOPED_TRACE(testing::TestSeed());
  ReplayFlags flags;
  flags.selection.source = "exact";
  flags.verify_exact = true;
  const auto result = Run(RandomTrace(1, 1, 64, 64, 300), flags);  // below the tokens a mean is taken of
  ASSERT_THAT(result, IsOk());
  EXPECT_TRUE(result->verify->good()) << result->verify->first;
  EXPECT_GT(result->memory.raw_bytes(), 0u);
}

TEST_F(ReplayTest, EveryAndStepsThinOutRetrievalsNotAppends) {
  ReplayFlags flags;
  flags.every = 3;
  flags.steps = 8;
  flags.selection.answer = "ids";
  const auto result = Run(RandomTrace(1, 2, 64, 64, 700), flags);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->retrievals, 3u);
  EXPECT_EQ(result->appended_tokens, 696u);
  EXPECT_EQ(result->latency_us.size(), 3u);
}

TEST_F(ReplayTest, HeldDecodedTokensAreAlwaysIncluded) {
  ReplayFlags flags;
  flags.hold_decoded = true;
  const auto result = Run(RandomTrace(1, 2, 64, 64, 700), flags);
  ASSERT_THAT(result, IsOk());
  // k 256, sinks 4, window 64 and, on average over 12 steps, 6.5 decoded tokens.
  EXPECT_DOUBLE_EQ(*result->metrics.tokens_chosen(), 256 + 4 + 64 + 6.5);
}

TEST_F(ReplayTest, DenseChoosesEverything) {
  ReplayFlags flags;
  flags.selection.dense_below_tokens = 100000;
  const auto result = Run(RandomTrace(1, 2, 64, 64, 600), flags);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->source, v1::SOURCE_DENSE);
  EXPECT_NEAR(*result->metrics.mass(), 1, 1e-9);
}

TEST_F(ReplayTest, TheRepositorysTraceKeepsItsNeedles) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  ReplayFlags flags;
  flags.every = 4;
  // Of all traces the one whose needles stand out least from their clusters; 0.972 on every step.
  flags.steps = 400;  // decoded tokens are a tail here, and a long one is searched by the sketch
  const auto clusters = Run(*trace, flags);
  flags.steps = 0;
  ASSERT_THAT(clusters, IsOk());
  EXPECT_EQ(clusters->source, v1::SOURCE_KEY_CENTROIDS_SKETCH);
  EXPECT_GE(*clusters->metrics.needle_share(), 0.95);
  flags.selection.source = "sketch";
  const auto sketch = Run(*trace, flags);
  ASSERT_THAT(sketch, IsOk());
  EXPECT_GT(sketch->metrics.needles(), 50u);
  EXPECT_GE(*sketch->metrics.needle_share(), 0.99);
  flags.selection.source = "query_centroids";
  const auto centroids = Run(*trace, flags);
  ASSERT_THAT(centroids, IsOk());
  // The article's index misses look-ups on this text: reference figure 0.58 over the whole layer. A replay that finds
  // them all does not measure what it says.
  EXPECT_EQ(centroids->metrics.needles(), sketch->metrics.needles());
  EXPECT_LT(*centroids->metrics.needle_share(), 0.75);
  EXPECT_GT(*centroids->metrics.needle_share(), 0.4);

  const std::vector<ReplayResult> results{*sketch, *centroids};
  const double total = *TotalNeedleShare(results);
  EXPECT_LT(total, *sketch->metrics.needle_share());
  EXPECT_THAT(ReplayTable(results), HasSubstr("records-layer07"));
  EXPECT_THAT(ReplayTable(results), HasSubstr("\nall"));
  const nlohmann::json json = ReplayJson(results);
  EXPECT_EQ(json["traces"].size(), 2u);
  EXPECT_DOUBLE_EQ(json["total"]["needle_share"].get<double>(), total);
}

TEST_F(ReplayTest, TheServersOwnFiguresAreThoseOfTheTrace) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  testing::TestServerOptions options;
  options.engine.truth_share = 1;
  options.engine.truth_budget = 1;
  testing::TestServer server(options);
  const auto client = client::Client::Connect({.address = server.address()});
  ASSERT_THAT(client, IsOk());
  ReplayFlags flags;
  flags.every = 4;
  flags.online = true;
  EXPECT_THAT(Replay(**client, *trace, flags, &progress_), StatusIs(absl::StatusCode::kFailedPrecondition));
  flags.hold_decoded = true;
  for (const char* source : {"sketch", "query_centroids"}) {
    flags.selection.source = source;
    const auto result = Replay(**client, *trace, flags, &progress_);
    ASSERT_THAT(result, IsOk());
    EXPECT_EQ(result->online->samples, result->retrievals);
    EXPECT_EQ(result->online->skipped, 0u);
    EXPECT_TRUE(result->online->agrees()) << OnlineText(source, *result->online);
    EXPECT_GT(*result->metrics.recall(), 0.1);
  }
  EXPECT_THAT(Run(*trace, flags), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("repeated nothing")));
}

TEST_F(ReplayTest, ATargetTurnsAWeakSettingIntoOneThatFindsTheNeedles) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  testing::TestServerOptions options;
  options.engine.truth_share = 1;
  options.engine.truth_budget = 1;
  testing::TestServer server(options);
  const auto client = client::Client::Connect({.address = server.address()});
  ASSERT_THAT(client, IsOk());
  ReplayFlags flags;
  flags.online = true;
  flags.hold_decoded = true;
  flags.selection.source = "query_centroids";
  flags.every = 2;
  const auto weak = Replay(**client, *trace, flags, &progress_);
  ASSERT_THAT(weak, IsOk());
  EXPECT_LT(*weak->metrics.needle_share(), 0.75);
  flags.selection.needle_share_target = 0.99f;
  const auto held = Replay(**client, *trace, flags, &progress_);
  ASSERT_THAT(held, IsOk());
  // The look-ups that were missed on the way stay missed.
  EXPECT_GT(*held->metrics.needle_share(), *weak->metrics.needle_share());
  EXPECT_GE(held->strength, 3u) << "at least the sketch";
  EXPECT_EQ(held->source, held->strength == 3 ? v1::SOURCE_SKETCH : v1::SOURCE_EXACT);
}

// What a recorded session answered, line by line.
std::string RecordedAnswers(const std::filesystem::path& session) {
  std::ifstream file(session / "layer00" / "answers.jsonl");
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(ReplayTest, ARecordReplaysToTheSameAnswers) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  const std::filesystem::path directory = std::filesystem::path(::testing::TempDir()) / "replay_records";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directory(directory);
  ReplayFlags flags;
  flags.record = true;
  flags.steps = 64;
  flags.selection.answer = "attention";  // what was chosen is known to the record alone
  std::filesystem::path folder = CTKVR_TRACE, recorded;
  std::vector<std::string> answers;
  for (int round = 0; round < 2; ++round) {
    obs::Log log(obs::LogOptions{.level = obs::LogLevel::kOff});
    auto recorder = obs::Recorder::Create({.directory = directory.string(), .bytes_max = 64 << 20}, log);
    ASSERT_THAT(recorder, IsOk());
    {
      testing::TestServerOptions options;
      options.engine.observer = recorder->get();
      testing::TestServer server(options);
      const auto client = client::Client::Connect({.address = server.address()});
      ASSERT_THAT(client, IsOk());
      const auto replayed = LoadTrace(folder.string());
      ASSERT_THAT(replayed, IsOk());
      ASSERT_THAT(Replay(**client, *replayed, flags, &progress_), IsOk());
    }
    recorder->reset();
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.path() != recorded) folder = entry.path();
    }
    recorded = folder;
    answers.push_back(RecordedAnswers(folder));
    folder /= "layer00";
  }
  EXPECT_EQ(std::count(answers[0].begin(), answers[0].end(), '\n'), 64);
  EXPECT_EQ(answers[1], answers[0]);
  const auto again = LoadTrace(folder.string());
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->prompt_tokens, trace->prompt_tokens);
  EXPECT_EQ(again->query_first_position, trace->query_first_position);
  EXPECT_EQ(again->tokens, trace->prompt_tokens + 64);
  EXPECT_TRUE(std::equal(again->keys.begin(), again->keys.end(), trace->keys.begin()));
  EXPECT_TRUE(std::equal(again->values.begin(), again->values.end(), trace->values.begin()));
  EXPECT_TRUE(std::equal(again->queries.begin(), again->queries.end(), trace->queries.begin()));
  EXPECT_THAT(Run(*trace, flags), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("without --record")));
  std::filesystem::remove_all(directory);
}

TEST_F(ReplayTest, AttentionIsTimedAndNotCompared) {
  ReplayFlags flags;
  flags.selection.answer = "attention";
  const auto result = Run(RandomTrace(2, 2, 64, 32, 700), flags);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->retrievals, 12u);
  EXPECT_EQ(result->latency_us.size(), 12u);
  EXPECT_GT(result->bytes_read, 0u);
  EXPECT_EQ(result->source, v1::SOURCE_KEY_CENTROIDS_SKETCH);
  EXPECT_EQ(result->metrics.recall(), std::nullopt);
  EXPECT_EQ(result->metrics.tokens_chosen(), std::nullopt);
  EXPECT_THAT(ReplayTable({*result}), HasSubstr("random"));
}

TEST_F(ReplayTest, NewRowsChooseTheSameTokensForFewerBytes) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  ReplayFlags flags;
  flags.steps = 64;
  const auto rows = Run(*trace, flags);
  flags.selection.answer = "new_rows";
  const auto new_rows = Run(*trace, flags);
  ASSERT_THAT(rows, IsOk());
  ASSERT_THAT(new_rows, IsOk());
  EXPECT_EQ(new_rows->metrics.recall(), rows->metrics.recall());
  EXPECT_EQ(new_rows->metrics.mass(), rows->metrics.mass());
  EXPECT_EQ(new_rows->metrics.needles_found(), rows->metrics.needles_found());
  EXPECT_LT(new_rows->reply_bytes, rows->reply_bytes / 4);
  EXPECT_GT(new_rows->memory.slot_table_bytes(), 0u);
}

TEST_F(ReplayTest, FlagsThatContradictEachOtherAreRefused) {
  ReplayFlags flags;
  flags.selection.source = "exact";
  flags.selection.answer = "attention";
  flags.verify_exact = true;
  EXPECT_THAT(Run(RandomTrace(1, 1, 64, 64, 100), flags), StatusIs(absl::StatusCode::kFailedPrecondition));
  flags = {};
  flags.verify_exact = true;
  EXPECT_THAT(Run(RandomTrace(1, 1, 64, 64, 100), flags), StatusIs(absl::StatusCode::kFailedPrecondition));
  flags = {};
  flags.every = 0;
  EXPECT_THAT(Run(RandomTrace(1, 1, 64, 64, 100), flags), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(ReplayTest, TheServersRefusalIsTheResult) {
  ReplayFlags flags;
  flags.selection.k_tokens = 1u << 30;
  EXPECT_THAT(Run(RandomTrace(1, 1, 64, 64, 100), flags),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("k_tokens")));
  const auto sessions = client_->ListSessions();
  ASSERT_THAT(sessions, IsOk());
  EXPECT_TRUE(sessions->empty());
}

}  // namespace
}  // namespace ctkvr::cli
