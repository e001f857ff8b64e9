// SPDX-License-Identifier: Apache-2.0
//
// The façade: names, epochs and boots, limits at the door, listing, draining, lanes; and, with threads, the hazards
// that ThreadSanitizer looks for: opens of one id, work and closes from many threads, draining under load.

#include "server/core/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <set>
#include <thread>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

SessionConfig TinyConfig() { return SmallConfig(SmallLayer(Format::kF16, Source::kExact), 256); }

TEST(EngineTest, OptionsThatCannotWorkAreRefused) {
  FakeBackend backend;
  FakeClock clock;
  const auto create = [&](auto change) {
    EngineOptions options{.arena_bytes = size_t{4} << 20, .scratch_bytes = 65536, .threads = false};
    change(options);
    return Engine::Create(options, backend, clock).status();
  };
  EXPECT_THAT(create([](EngineOptions&) {}), IsOk());
  EXPECT_THAT(create([](EngineOptions& o) { o.lanes = 0; }), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(create([](EngineOptions& o) { o.queue_items_max = 0; }), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(create([](EngineOptions& o) { o.sessions_max = 0; }), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(create([](EngineOptions& o) { o.sessions_max = 100001; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the limit is 100000")));
  EXPECT_THAT(create([](EngineOptions& o) { o.truth_share = 1.5; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("truth_share is 1.5; it must be 0 to 1")));
  EXPECT_THAT(create([](EngineOptions& o) { o.truth_budget = 0; }), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(create([](EngineOptions& o) { o.arena_bytes = 1000; }), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(EngineTest, ASessionGetsTheNameAskedForOrOneOfItsOwn) {
  Harness harness;
  EXPECT_EQ(harness.Open("mine", TinyConfig())->id, "mine");
  EXPECT_EQ(harness.Open(std::string(128, 'x'), TinyConfig())->id.size(), 128u);
  EXPECT_THAT(harness.Open(std::string(129, 'x'), TinyConfig()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("bytes of session_id is 129; the limit is 128")));
  const std::string a = harness.Open("", TinyConfig())->id, b = harness.Open("", TinyConfig())->id;
  EXPECT_FALSE(a.empty());
  EXPECT_NE(a, b);
  EXPECT_THAT(harness.Get(Ref(a)), IsOk());
}

TEST(EngineTest, AnIdInUseIsRefused) {
  Harness harness;
  const uint64_t epoch = harness.Open("s", TinyConfig())->epoch;
  EXPECT_THAT(harness.Open("s", TinyConfig()), StatusIs(absl::StatusCode::kAlreadyExists));
  EXPECT_EQ(harness.Get(Ref("s"))->epoch, epoch);
}

TEST(EngineTest, AnInvalidConfigurationIsRefusedAndTheIdStaysFree) {
  Harness harness;
  SessionConfig config = TinyConfig();
  config.layers[0].selection.k_tokens = 9000;
  EXPECT_THAT(harness.Open("s", config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 0: k_tokens is 9000; the limit is 8192")));
  EXPECT_THAT(harness.Open("s", TinyConfig()), IsOk());
}

TEST(EngineTest, ARotationSeedIsDrawnWhenNoneIsGiven) {
  Harness harness;
  SessionConfig config = TinyConfig();
  config.rotation_seed = 0;
  const uint64_t a = harness.Open("a", config)->config.rotation_seed,
                 b = harness.Open("b", config)->config.rotation_seed;
  EXPECT_NE(a, 0u);
  EXPECT_NE(b, 0u);
  EXPECT_NE(a, b);
  EXPECT_EQ(harness.Get(Ref("a"))->config.rotation_seed, a);
}

TEST(EngineTest, EpochsTellSessionsOfOneIdApart) {
  Harness harness;
  const uint64_t first = harness.Open("s", TinyConfig())->epoch;
  EXPECT_NE(first, 0u);
  EXPECT_EQ(harness.Close(Ref("s", first))->epoch, first);
  const uint64_t second = harness.Open("s", TinyConfig())->epoch;
  EXPECT_NE(second, first);
  EXPECT_THAT(harness.Get(Ref("s", second)), IsOk());
  const auto stale = harness.Get(Ref("s", first));
  EXPECT_THAT(stale, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("epoch is")));
  EXPECT_EQ(GetErrorDetail(stale.status()).reason, kReasonEpochMismatch);
  EXPECT_EQ(GetErrorDetail(stale.status()).metadata.at("epoch"), std::to_string(second));
  EXPECT_THAT(harness.Close(Ref("s", first)), StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST(EngineTest, BootsDiffer) {
  Harness a, b;
  EXPECT_NE(a.engine().boot_id(), 0u);
  EXPECT_NE(a.engine().boot_id(), b.engine().boot_id());
}

TEST(EngineTest, AForeignFingerprintIsRefused) {
  Harness harness;
  ASSERT_THAT(harness.Open("s", TinyConfig()), IsOk());
  EXPECT_THAT(harness.Get(Ref("s", 0, "fp")), IsOk());
  const auto foreign = harness.Get(Ref("s", 0, "other"));
  EXPECT_THAT(foreign, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("fingerprint")));
  EXPECT_EQ(GetErrorDetail(foreign.status()).reason, kReasonFingerprintMismatch);
}

TEST(EngineTest, EveryCallOnAnUnknownOrClosedSessionIsNotFound) {
  Harness harness;
  ASSERT_THAT(harness.Open("closed", TinyConfig()), IsOk());
  EXPECT_GT(harness.Close(Ref("closed"))->freed_bytes, 0u);
  const Tokens tokens(TinyConfig().layers[0], DType::kF16, 1);
  for (const auto& [id, reason] :
       {std::pair{"closed", kReasonSessionClosed}, std::pair{"never", kReasonSessionUnknown}}) {
    const std::vector<absl::Status> statuses = {harness.Get(Ref(id)).status(),
                                                harness.Close(Ref(id)).status(),
                                                harness.KeepAlive(id).status(),
                                                harness.Truncate(id, 0).status(),
                                                harness.Maintain(id).status(),
                                                harness.Append(id, tokens.Append(0, 1)).status(),
                                                harness.Retrieve(id, tokens.Ask(0)).status()};
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound));
      EXPECT_EQ(GetErrorDetail(status).reason, reason);
    }
  }
}

TEST(EngineTest, TheSessionLimitHolds) {
  HarnessOptions options;
  options.engine.sessions_max = 2;
  Harness harness(options);
  ASSERT_THAT(harness.Open("a", TinyConfig()), IsOk());
  ASSERT_THAT(harness.Open("b", TinyConfig()), IsOk());
  const auto refused = harness.Open("c", TinyConfig());
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonSessionLimit);
  ASSERT_THAT(harness.Close(Ref("a")), IsOk());
  EXPECT_THAT(harness.Open("c", TinyConfig()), IsOk());
}

TEST(EngineTest, TooManyItemsAreRefusedEachWithTheLimit) {
  Harness harness;
  ASSERT_THAT(harness.Open("s", TinyConfig()), IsOk());
  const OwnedChunk chunk = Tokens(TinyConfig().layers[0], DType::kF16, 1).Append(0, 1);
  const auto results = harness.Step(std::vector<StepRequest>(257, {.session = Ref("s"), .chunk = chunk.chunk}));
  ASSERT_EQ(results.size(), 257u);
  EXPECT_THAT(results[256].append, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the limit is 256")));
  EXPECT_EQ(harness.Get(Ref("s"))->layers[0].length, 0u);
  EXPECT_TRUE(harness.Step({}).empty());
}

TEST(EngineTest, SessionsSpreadOverLanesAndAStepJoinsThem) {
  HarnessOptions options;
  options.engine.lanes = 3;
  Harness harness(options);
  const Tokens tokens(TinyConfig().layers[0], DType::kF16, 1);
  std::vector<OwnedChunk> chunks;
  std::vector<StepRequest> requests;
  for (uint32_t i = 0; i < 9; ++i) {
    ASSERT_THAT(harness.Open("s" + std::to_string(i), TinyConfig()), IsOk());
    chunks.push_back(tokens.Append(0, i + 1));
    requests.push_back({.session = Ref("s" + std::to_string(i)), .chunk = chunks.back().chunk});
  }
  std::vector<StepResult> results;
  int called = 0;
  harness.engine().Step(requests, {}, [&](std::vector<StepResult> values) {
    results = std::move(values);
    ++called;
  });
  // Every lane owns three of them, and the answer waits for the last.
  for (uint32_t lane = 0; lane < 3; ++lane) {
    EXPECT_EQ(called, 0);
    EXPECT_TRUE(harness.engine().RunLane(lane));
  }
  EXPECT_EQ(called, 1);
  for (uint32_t i = 0; i < 9; ++i) EXPECT_EQ(results[i].append->length, i + 1);
}

TEST(EngineTest, ListsAreByIdOverAllLanes) {
  HarnessOptions options;
  options.engine.lanes = 2;
  Harness harness(options);
  for (const char* id : {"d", "a", "c", "b", "e"}) ASSERT_THAT(harness.Open(id, TinyConfig()), IsOk());
  const auto ids = [&](const std::string& after, uint32_t limit) {
    std::vector<std::string> listed;
    const auto page = harness.List(after, limit);
    EXPECT_THAT(page, IsOk());
    for (const SessionSummary& summary : *page) listed.push_back(summary.id);
    return listed;
  };
  EXPECT_THAT(ids("", 3), ElementsAre("a", "b", "c"));
  EXPECT_THAT(ids("c", 3), ElementsAre("d", "e"));
  EXPECT_THAT(harness.List("", 0), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(harness.List("", 1001), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("1 to 1000")));
  const Tokens tokens(TinyConfig().layers[0], DType::kF16, 1);
  ASSERT_THAT(harness.Append("a", tokens.Append(0, 7)), IsOk());
  const SessionSummary summary = harness.List("", 1).value().at(0);
  const SessionInfo info = *harness.Get(Ref("a"));
  EXPECT_EQ(summary.epoch, info.epoch);
  EXPECT_EQ(summary.length_max, 7u);
  EXPECT_EQ(summary.token_limit, 256u);
  EXPECT_EQ(summary.held_bytes, info.memory.held_bytes());
  EXPECT_EQ(summary.reserved_bytes, info.memory.reserved_bytes);
  EXPECT_EQ(summary.lease_remaining_seconds, 600u);
}

TEST(EngineTest, GetTellsWhatTheSessionIsAndDid) {
  Harness harness;
  const SessionConfig config = SmallConfig(SmallLayer(), 256, 2);
  ASSERT_THAT(harness.Open("s", config), IsOk());
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(harness.Append("s", tokens.Append(0, 7)), IsOk());
  ASSERT_THAT(harness.Retrieve("s", tokens.Ask(7, 3)), IsOk());
  const SessionInfo info = *harness.Get(Ref("s"));
  EXPECT_EQ(info.appended_tokens, 7u);
  EXPECT_EQ(info.retrievals, 3u);
  EXPECT_EQ(info.layers[0].length, 7u);
  EXPECT_EQ(info.layers[1].length, 0u);
  EXPECT_EQ(info.layers[0].codec.key_row_bytes, 64u) << "raw, 32 dimensions of two bytes";
  EXPECT_EQ(info.config.layers[0].selection, config.layers[0].selection);
}

// ---- Draining ------------------------------------------------------------------------------------------------------

TEST(EngineDrainTest, ADrainingEngineOpensNothingAndServesTheRest) {
  Harness harness;
  ASSERT_THAT(harness.Open("s", TinyConfig()), IsOk());
  harness.engine().StartDraining();
  EXPECT_TRUE(harness.engine().draining());
  const auto refused = harness.Open("t", TinyConfig());
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(GetErrorDetail(refused.status()).reason, kReasonDraining);
  EXPECT_THAT(harness.Get(Ref("s")), IsOk());
}

TEST(EngineDrainTest, QueuedWorkIsFinishedThenEverythingIsUnavailable) {
  Harness harness;
  ASSERT_THAT(harness.Open("s", TinyConfig()), IsOk());
  absl::Status queued = absl::UnknownError("not answered");
  harness.engine().Get(Ref("s"), {}, [&](const auto& result) { queued = result.status(); });
  EXPECT_TRUE(harness.engine().Drain(seconds(1)));
  EXPECT_THAT(queued, IsOk());
  EXPECT_EQ(harness.engine().stats().sessions_ended[static_cast<size_t>(SessionEnd::kDrained)], 1u);
  EXPECT_EQ(harness.engine().memory().arena_reserved_bytes, 0u);
  EXPECT_THAT(harness.Get(Ref("s")), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(harness.List("", 10), StatusIs(absl::StatusCode::kUnavailable));
  const Tokens tokens(TinyConfig().layers[0], DType::kF16, 1);
  EXPECT_THAT(harness.Append("s", tokens.Append(0, 1)), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(harness.engine().Drain(seconds(1))) << "again is nothing";
}

TEST(EngineDrainTest, WorkThatIsLeftIsAnsweredUnavailable) {
  Harness harness;
  ASSERT_THAT(harness.Open("s", TinyConfig()), IsOk());
  std::vector<absl::Status> answered;
  const auto note = [&](const auto& result) { answered.push_back(result.status()); };
  harness.engine().Get(Ref("s"), {}, note);
  harness.engine().Open("t", TinyConfig(), {}, note);
  harness.engine().List("", 10, {}, note);
  const OwnedChunk chunk = Tokens(TinyConfig().layers[0], DType::kF16, 1).Append(0, 1);
  harness.engine().Step({{.session = Ref("s"), .chunk = chunk.chunk}}, {},
                        [&](const std::vector<StepResult>& results) { note(results[0].append); });
  EXPECT_FALSE(harness.engine().Drain(milliseconds(0)));
  ASSERT_EQ(answered.size(), 4u);
  for (const absl::Status& status : answered) EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable));
}

// ---- Threads -------------------------------------------------------------------------------------------------------

// An engine with real threads and waiting calls.
class Threaded {
 public:
  explicit Threaded(uint32_t lanes) {
    engine_ = *Engine::Create({.lanes = lanes,
                               .arena_bytes = size_t{64} << 20,
                               .scratch_bytes = size_t{4} << 20,
                               .queue_items_max = 4096,
                               .threads = true},
                              backend_, clock_);
  }
  Engine& engine() { return *engine_; }

  template <typename T, typename Start>
  absl::StatusOr<T> Await(Start start) {
    std::promise<absl::StatusOr<T>> promise;
    start([&](absl::StatusOr<T> value) { promise.set_value(std::move(value)); });
    return promise.get_future().get();
  }
  absl::StatusOr<SessionInfo> Open(const std::string& id, const SessionConfig& config) {
    return Await<SessionInfo>([&](auto done) { engine_->Open(id, config, {}, std::move(done)); });
  }
  absl::StatusOr<CloseResult> Close(const std::string& id) {
    return Await<CloseResult>([&](auto done) { engine_->Close(Ref(id), {}, std::move(done)); });
  }
  StepResult Step(const std::string& id, const OwnedChunk* chunk, const OwnedQuery* query) {
    std::promise<std::vector<StepResult>> promise;
    StepRequest request{.session = Ref(id)};
    if (chunk != nullptr) request.chunk = chunk->chunk;
    if (query != nullptr) request.query = query->query;
    engine_->Step({request}, {}, [&](std::vector<StepResult> results) { promise.set_value(std::move(results)); });
    return std::move(promise.get_future().get()[0]);
  }

 private:
  FakeBackend backend_;
  RealClock clock_;
  std::unique_ptr<Engine> engine_;
};

template <typename Work>
void OnThreads(int count, Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

TEST(EngineThreadsTest, OfConcurrentOpensOfOneIdOneWins) {
  Threaded threaded(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> opened{0}, refused{0};
    OnThreads(4, [&](int) {
      const auto result = threaded.Open("same", TinyConfig());
      result.ok() ? ++opened : ++refused;
      if (!result.ok()) {
        EXPECT_THAT(result, StatusIs(absl::StatusCode::kAlreadyExists));
      }
    });
    EXPECT_EQ(opened, 1);
    EXPECT_EQ(refused, 3);
    EXPECT_THAT(threaded.Close("same"), IsOk());
  }
}

TEST(EngineThreadsTest, AppendsRetrievalsAndClosesFromManyThreads) {
  Threaded threaded(2);
  const SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kQueryCentroids), 256);
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OnThreads(4, [&](int thread) {
    for (int round = 0; round < 3; ++round) {
      const std::string id = "s" + std::to_string(thread);
      ASSERT_THAT(threaded.Open(id, config), IsOk());
      for (uint32_t t = 0; t < 60; t += 20) {
        const OwnedChunk chunk = tokens.Append(t, 20, 5);
        const OwnedQuery query = tokens.Ask(t + 19);
        const StepResult result = threaded.Step(id, &chunk, &query);
        ASSERT_THAT(result.append, IsOk());
        ASSERT_THAT(result.answer, IsOk());
        EXPECT_EQ(result.append->length, t + 20);
        EXPECT_EQ(result.answer->length, t + 20);
      }
      const auto maintained = threaded.Await<MaintainResult>(
          [&](auto done) { threaded.engine().Maintain(Ref(id), {}, {}, std::move(done)); });
      ASSERT_THAT(maintained, IsOk());
      EXPECT_THAT(maintained->indexed_length, ElementsAre(60u));
      (void)threaded.engine().memory();
      (void)threaded.engine().stats().stages[0].Read();
      ASSERT_THAT(threaded.Close(id), IsOk());
    }
  });
  EXPECT_EQ(threaded.engine().memory().arena_reserved_bytes, 0u);
}

// All threads work on one session that one of them closes and opens again.
TEST(EngineThreadsTest, ASessionThatIsClosedUnderOthersAnswersEveryCall) {
  Threaded threaded(2);
  const SessionConfig config = TinyConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  ASSERT_THAT(threaded.Open("s", config), IsOk());
  OnThreads(4, [&](int thread) {
    for (int round = 0; round < 40; ++round) {
      if (thread == 0) {
        ASSERT_THAT(threaded.Close("s"), IsOk());
        ASSERT_THAT(threaded.Open("s", config), IsOk());
        continue;
      }
      const OwnedChunk chunk = tokens.Append(0, 5);
      const OwnedQuery query = tokens.Ask(4);
      const StepResult result = threaded.Step("s", &chunk, &query);
      if (!result.append.ok()) {
        EXPECT_THAT(result.append, StatusIs(absl::StatusCode::kNotFound));
      }
    }
  });
}

// One call over sessions of every lane, made by many threads at once.
TEST(EngineThreadsTest, StepsOverSeveralLanesJoinOnce) {
  Threaded threaded(3);
  const SessionConfig config = TinyConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  OnThreads(3, [&](int thread) {
    std::vector<std::string> ids;
    for (int i = 0; i < 6; ++i) {
      ids.push_back(std::to_string(thread) + "-" + std::to_string(i));
      ASSERT_THAT(threaded.Open(ids.back(), config), IsOk());
    }
    for (uint32_t t = 0; t < 10; ++t) {
      const OwnedChunk chunk = tokens.Append(t, 1);
      std::vector<StepRequest> requests;
      for (const std::string& id : ids) requests.push_back({.session = Ref(id), .chunk = chunk.chunk});
      std::promise<std::vector<StepResult>> promise;
      threaded.engine().Step(requests, {},
                             [&](std::vector<StepResult> values) { promise.set_value(std::move(values)); });
      const std::vector<StepResult> results = promise.get_future().get();
      for (const StepResult& result : results) EXPECT_EQ(result.append->length, t + 1);
      const auto listed = threaded.Await<std::vector<SessionSummary>>(
          [&](auto done) { threaded.engine().List("", 1000, {}, std::move(done)); });
      ASSERT_THAT(listed, IsOk());
      EXPECT_GE(listed->size(), 6u);
    }
  });
}

TEST(EngineThreadsTest, DrainingUnderLoadAnswersEveryCallOnce) {
  Threaded threaded(2);
  const SessionConfig config = TinyConfig();
  const Tokens tokens(config.layers[0], config.dtype, 1);
  for (int i = 0; i < 4; ++i) ASSERT_THAT(threaded.Open(std::to_string(i), config), IsOk());
  std::atomic<int> made{0}, answered{0};
  OnThreads(5, [&](int thread) {
    if (thread == 4) {
      while (made < 100) std::this_thread::yield();
      threaded.engine().Drain(seconds(20));
      return;
    }
    for (bool unavailable = false; !unavailable;) {
      const OwnedChunk chunk = tokens.Append(0, 5);
      ++made;
      const StepResult result = threaded.Step(std::to_string(thread), &chunk, nullptr);
      ++answered;
      unavailable = result.append.status().code() == absl::StatusCode::kUnavailable;
      EXPECT_TRUE(result.append.ok() || unavailable) << result.append.status();
    }
  });
  EXPECT_EQ(made, answered);
  EXPECT_EQ(threaded.engine().memory().arena_reserved_bytes, 0u);
}

TEST(EngineThreadsTest, LeasesEndWithoutACall) {
  Threaded threaded(1);
  SessionConfig config = TinyConfig();
  config.lease = seconds(1);
  ASSERT_THAT(threaded.Open("s", config), IsOk());
  // Waits for the lane's own clock; nothing is asserted of how long it takes.
  while (threaded.engine().stats().sessions_ended[static_cast<size_t>(SessionEnd::kExpired)] == 0) {
    std::this_thread::yield();
  }
  EXPECT_EQ(threaded.engine().memory().arena_reserved_bytes, 0u);
}

TEST(EngineThreadsTest, AnEngineWithOpenSessionsCanBeDestroyed) {
  Threaded threaded(2);
  for (int i = 0; i < 4; ++i) ASSERT_THAT(threaded.Open(std::to_string(i), TinyConfig()), IsOk());
}

}  // namespace
}  // namespace ctkvr::testing
