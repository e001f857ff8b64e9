// SPDX-License-Identifier: Apache-2.0
//
// Every backend call of every kind of work fails once, with its work done or not, on a backend that shares host memory
// and on one that does not. Afterwards the session answers as before, byte for byte, counts the same memory, and the
// same call made again brings it to the state of a session that met no fault. A device that cannot be waited for fails
// the session, and no other.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

HarnessOptions SmallHarness(bool shares) {
  HarnessOptions options{.shares_host_memory = shares};
  options.engine.arena_bytes = size_t{16} << 20;
  options.engine.scratch_bytes = size_t{1} << 20;
  return options;
}

SessionConfig FaultConfig() {
  LayerConfig layer = SmallLayer(Format::kK8V4, Source::kQueryCentroids);
  layer.query_centroids = {.centroids = 3, .list_tokens = 32, .name = ""};
  layer.selection.probes = 2;
  return SmallConfig(layer);
}

// Everything a client can see of "s".
struct Seen {
  std::vector<uint32_t> lengths;
  uint64_t held_bytes = 0, reserved_bytes = 0, arena_held_bytes = 0, arena_reserved_bytes = 0;
  std::string answers;
  std::string rows;
  bool operator==(const Seen&) const = default;
};

struct Scenario {
  std::string name;
  std::function<void(Harness&, const Tokens&)> prepare;  // may be empty
  std::function<absl::Status(Harness&, const Tokens&)> work;
};

class FaultTest : public ::testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  bool shares() const { return std::get<0>(GetParam()); }
  bool after_work() const { return std::get<1>(GetParam()); }

  Seen Look(Harness& harness, const Tokens& tokens) {
    Seen seen;
    const auto info = harness.Get(Ref("s"));
    if (info.ok()) {
      seen.lengths = {info->layers[0].length, info->layers[0].indexed_length, info->layers[0].query_centroids,
                      info->layers[0].codec.code_generation};
      seen.held_bytes = info->memory.held_bytes();
      seen.reserved_bytes = info->memory.reserved_bytes;
      const StoredLayer stored = ReadRows(harness, "s", FaultConfig());
      seen.rows = stored.key_bytes + stored.value_bytes;
      for (Source source : {Source::kExact, Source::kSketch, Source::kQueryCentroids}) {
        OwnedQuery query = tokens.Ask(2000);
        query.query.selection.source = source;
        const auto answer = harness.Retrieve("s", query);
        EXPECT_THAT(answer, IsOk());
        if (answer.ok()) seen.answers += answer->ids + answer->scores;
      }
    }
    seen.arena_held_bytes = harness.engine().memory().arena_held_bytes;
    seen.arena_reserved_bytes = harness.engine().memory().arena_reserved_bytes;
    return seen;
  }

  // Runs the scenario with its nth backend call failing. Returns whether there was an nth call.
  bool RunWithFault(const Scenario& scenario, uint64_t nth, const Seen& expected) {
    Harness harness(SmallHarness(shares()));
    const Tokens tokens(FaultConfig().layers[0], FaultConfig().dtype, 1);
    if (scenario.prepare) scenario.prepare(harness, tokens);
    const Seen before = Look(harness, tokens);
    harness.backend().Fail({.first = nth, .count = 1, .after_work = after_work()});
    const absl::Status status = scenario.work(harness, tokens);
    const std::string failed_call = harness.backend().failed_call();
    harness.backend().StopFailing();
    if (failed_call.empty()) return false;
    SCOPED_TRACE("call " + std::to_string(nth) + " failed: " + failed_call);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal, HasSubstr("fault in")));
    Seen after = Look(harness, tokens);
    // The ring is taken at the first queries, and stays.
    EXPECT_LE(after.held_bytes - before.held_bytes, RingBytes());
    after.arena_held_bytes -= after.held_bytes - before.held_bytes;
    after.held_bytes = before.held_bytes;
    EXPECT_EQ(after.lengths, before.lengths);
    EXPECT_TRUE(after == before);
    EXPECT_THAT(scenario.work(harness, tokens), IsOk());
    EXPECT_TRUE(Look(harness, tokens) == expected);
    if (harness.Get(Ref("s")).ok()) {
      EXPECT_THAT(harness.Close(Ref("s")), IsOk());
    }
    EXPECT_EQ(harness.engine().memory().arena_reserved_bytes, 0u);
    EXPECT_EQ(harness.engine().memory().arena_held_bytes, 0u);
    EXPECT_TRUE(harness.engine().healthy());
    return true;
  }

  void RunWithEveryFault(const Scenario& scenario) {
    SCOPED_TRACE(scenario.name);
    Harness harness(SmallHarness(shares()));
    const Tokens tokens(FaultConfig().layers[0], FaultConfig().dtype, 1);
    if (scenario.prepare) scenario.prepare(harness, tokens);
    const uint64_t calls_before = harness.backend().calls();
    ASSERT_THAT(scenario.work(harness, tokens), IsOk());
    const uint64_t calls = harness.backend().calls() - calls_before;
    const Seen expected = Look(harness, tokens);
    uint64_t nth = 0;
    while (!HasFailure() && RunWithFault(scenario, nth, expected)) ++nth;
    EXPECT_EQ(nth, calls);
    EXPECT_GT(calls, 0u);
  }

  // 3 + 64 slots of two query heads, with norms, for two KV heads, in whole blocks.
  static uint64_t RingBytes() { return 2 * (23 * 3 * 128 + 576); }
};
INSTANTIATE_TEST_SUITE_P(Faults, FaultTest, ::testing::Combine(::testing::Bool(), ::testing::Bool()),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) ? "SharedWithHost" : "OfItsOwn") +
                                  (std::get<1>(param.param) ? "AfterWork" : "BeforeWork");
                         });

void OpenSession(Harness& harness) { ASSERT_THAT(harness.Open("s", FaultConfig()), IsOk()); }
void OpenAndFill(Harness& harness, const Tokens& tokens, uint32_t length, uint32_t queries) {
  OpenSession(harness);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, length, queries)), IsOk());
}

TEST_P(FaultTest, OpenFailsWhole) {
  RunWithEveryFault(
      {"open", nullptr, [](Harness& harness, const Tokens&) { return harness.Open("s", FaultConfig()).status(); }});
}

TEST_P(FaultTest, AppendFailsWhole) {
  const auto append = [](uint32_t first, uint32_t count, uint32_t queries) {
    return [=](Harness& harness, const Tokens& tokens) {
      return harness.Append("s", tokens.Append(first, count, queries)).status();
    };
  };
  RunWithEveryFault({"first tokens", [](Harness& harness, const Tokens&) { OpenSession(harness); }, append(0, 70, 5)});
  RunWithEveryFault({"raw tokens", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 90, 5); }, append(90, 70, 5)});
  RunWithEveryFault(
      {"becoming coded", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 500, 5); }, append(500, 90, 5)});
  RunWithEveryFault(
      {"becoming coded at once", [](Harness& harness, const Tokens&) { OpenSession(harness); }, append(0, 600, 5)});
  RunWithEveryFault(
      {"coded tokens", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 600, 5); }, append(600, 70, 5)});
  RunWithEveryFault(
      {"a repeat, raw", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 90, 5); }, append(30, 60, 0)});
  RunWithEveryFault(
      {"a repeat, coded", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 600, 5); }, append(30, 60, 0)});
}

// The index that is built afterwards too is that of a session that met no fault: drafts do not push queries out.
TEST_P(FaultTest, TheRingKeepsTheNewestQueries) {
  const auto prepare = [](Harness& harness, const Tokens& tokens) {
    OpenAndFill(harness, tokens, 600, 200);
    ASSERT_THAT(harness.Maintain("s"), IsOk());
  };
  for (uint64_t nth = 0;; ++nth) {
    Harness harness(SmallHarness(shares()));
    const Tokens tokens(FaultConfig().layers[0], FaultConfig().dtype, 1);
    prepare(harness, tokens);
    harness.backend().Fail({.first = nth, .count = 1, .after_work = after_work()});
    const auto failed = harness.Append("s", tokens.Append(600, 8, 8, 9));
    harness.backend().StopFailing();
    if (failed.ok()) break;
    ASSERT_THAT(harness.Append("s", tokens.Append(600, 8)), IsOk());
    ASSERT_THAT(harness.Maintain("s"), IsOk());
    const auto answer = harness.Retrieve("s", tokens.Ask(608));
    Harness other(SmallHarness(shares()));
    prepare(other, tokens);
    ASSERT_THAT(other.Append("s", tokens.Append(600, 8)), IsOk());
    ASSERT_THAT(other.Maintain("s"), IsOk());
    EXPECT_EQ(answer->ids, other.Retrieve("s", tokens.Ask(608))->ids) << "call " << nth;
  }
}

TEST_P(FaultTest, RetrieveFailsWhole) {
  for (Source source : {Source::kDense, Source::kExact, Source::kSketch, Source::kQueryCentroids}) {
    for (AnswerMode mode : {AnswerMode::kRows, AnswerMode::kAttention}) {
      RunWithEveryFault({std::string(SourceName(source)) + (mode == AnswerMode::kRows ? ", rows" : ", attention"),
                         [](Harness& harness, const Tokens& tokens) {
                           OpenAndFill(harness, tokens, 600, 5);
                           ASSERT_THAT(harness.Maintain("s"), IsOk());
                         },
                         [source, mode](Harness& harness, const Tokens& tokens) {
                           OwnedQuery query = tokens.Ask(600);
                           query.query.selection.source = source;
                           query.query.answer = {.mode = mode, .row_format = RowFormat::kF16};
                           return harness.Retrieve("s", query).status();
                         }});
    }
  }
}

TEST_P(FaultTest, TruncateFailsWhole) {
  RunWithEveryFault({"truncate",
                     [](Harness& harness, const Tokens& tokens) {
                       OpenAndFill(harness, tokens, 590, 2);
                       ASSERT_THAT(harness.Append("s", tokens.Append(590, 10)), IsOk());
                       ASSERT_THAT(harness.Maintain("s"), IsOk());
                     },
                     [](Harness& harness, const Tokens&) { return harness.Truncate("s", 595).status(); }});
}

TEST_P(FaultTest, MaintainFailsWhole) {
  RunWithEveryFault({"first index", [](Harness& h, const Tokens& t) { OpenAndFill(h, t, 600, 5); },
                     [](Harness& harness, const Tokens&) { return harness.Maintain("s").status(); }});
  RunWithEveryFault({"next index",
                     [](Harness& harness, const Tokens& tokens) {
                       OpenAndFill(harness, tokens, 600, 5);
                       ASSERT_THAT(harness.Maintain("s"), IsOk());
                       ASSERT_THAT(harness.Append("s", tokens.Append(600, 30, 5)), IsOk());
                     },
                     [](Harness& harness, const Tokens&) { return harness.Maintain("s").status(); }});
}

TEST(FaultOutcomeTest, ADeviceThatCannotBeWaitedForFailsTheSessionAndNoOther) {
  Harness harness;
  const SessionConfig config = FaultConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  for (const char* id : {"s", "t"}) {
    ASSERT_THAT(harness.Open(id, config), IsOk());
    ASSERT_THAT(harness.Append(id, tokens.Append(0, 600, 5)), IsOk());
  }
  // WriteTokens goes well; the wait for it does not, nor the second.
  harness.backend().Fail({.first = 1, .count = 2});
  EXPECT_THAT(harness.Append("s", tokens.Append(600, 10)), StatusIs(absl::StatusCode::kInternal));
  const auto refused = {harness.Append("s", tokens.Append(600, 10)).status(),
                        harness.Retrieve("s", tokens.Ask(600)).status(), harness.Truncate("s", 5).status(),
                        harness.Maintain("s").status()};
  for (const absl::Status& status : refused) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition));
    EXPECT_EQ(GetErrorDetail(status).reason, kReasonSessionFailed);
  }
  EXPECT_EQ(harness.engine().stats().sessions_failed, 1u);
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].length, 600u);
  EXPECT_THAT(harness.KeepAlive("s"), IsOk());
  EXPECT_THAT(harness.Append("t", tokens.Append(600, 10)), IsOk());
  EXPECT_THAT(harness.Close(Ref("s")), IsOk());
  EXPECT_THAT(harness.Close(Ref("t")), IsOk());
  EXPECT_EQ(harness.engine().memory().arena_held_bytes, 0u);
}

TEST(FaultOutcomeTest, ALostDeviceIsUnavailableAndTheEngineSaysSo) {
  Harness harness;
  const SessionConfig config = FaultConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 20)), IsOk());
  EXPECT_TRUE(harness.engine().healthy());
  harness.backend().Fail({.first = 0, .count = 1u << 30, .code = absl::StatusCode::kUnavailable});
  EXPECT_THAT(harness.Retrieve("s", tokens.Ask(20)), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_FALSE(harness.engine().healthy());
  EXPECT_THAT(harness.Append("s", tokens.Append(20, 1)), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(harness.Open("t", config), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_GE(harness.engine().stats().device_errors, 3u);
}

// Many sessions in one batch: a fault in the shared operation is everybody's, and leaves everybody whole.
TEST(FaultOutcomeTest, AFaultInASharedOperationLeavesEverySessionWhole) {
  const SessionConfig config = FaultConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  for (uint64_t nth = 0; nth < 8; ++nth) {
    Harness harness;
    std::vector<OwnedChunk> chunks;
    const auto requests = [&] {
      std::vector<StepRequest> made;
      for (size_t i = 0; i < chunks.size(); ++i) {
        made.push_back({.session = Ref(std::to_string(i)), .chunk = chunks[i].chunk, .query = std::nullopt});
      }
      return made;
    };
    for (uint32_t i = 0; i < 4; ++i) {
      ASSERT_THAT(harness.Open(std::to_string(i), config), IsOk());
      // Some become coded with this append, some do not.
      ASSERT_THAT(harness.Append(std::to_string(i), tokens.Append(0, 400 + 40 * i)), IsOk());
      chunks.push_back(tokens.Append(400 + 40 * i, 60, 3));
    }
    harness.backend().Fail({.first = nth, .count = 1, .after_work = true});
    const auto failed = harness.Step(requests());
    harness.backend().StopFailing();
    for (uint32_t i = 0; i < 4; ++i) {
      if (failed[i].append.ok()) continue;
      EXPECT_EQ(harness.Get(Ref(std::to_string(i)))->layers[0].length, 400 + 40 * i);
    }
    const auto again = harness.Step(requests());
    for (uint32_t i = 0; i < 4; ++i) {
      ASSERT_THAT(again[i].append, IsOk());
      EXPECT_EQ(again[i].append->length, 460 + 40 * i);
    }
  }
}

}  // namespace
}  // namespace ctkvr::testing
