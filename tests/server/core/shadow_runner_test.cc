// SPDX-License-Identifier: Apache-2.0
//
// Exact repeats take their turn: which retrievals are sampled, one at a time, never before a live call, never over
// their budget, and never of a state that has changed.

#include "server/core/shadow_runner.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint32_t kTokens = 700;
constexpr microseconds kOperation(100);  // what an operation takes on the fake clock, where a test says so

EngineOptions Options(double share, double budget) {
  return {.lanes = 1,
          .arena_bytes = size_t{48} << 20,
          .scratch_bytes = size_t{8} << 20,
          .queue_items_max = 64,
          .sessions_max = 64,
          .truth_share = share,
          .truth_budget = budget,
          .threads = false};
}

class ShadowRunnerTest : public ::testing::Test {
 protected:
  void Make(double share, double budget, Format format = Format::kF16) {
    harness_.emplace(HarnessOptions{.on_call =
                                        [this](const char* name) {
                                          if (on_call_) on_call_(name);
                                        },
                                    .engine = Options(share, budget)});
    config_ = SmallConfig(SmallLayer(format, Source::kExact));
    tokens_.emplace(config_.layers[0], config_.dtype, 9);
    ASSERT_THAT(harness_->Open("s", config_), IsOk());
  }
  void Fill(uint32_t tokens = kTokens) { ASSERT_THAT(harness_->Append("s", tokens_->Append(0, tokens)), IsOk()); }
  // Queues a retrieval; the lane is left alone.
  void Queue(const OwnedQuery& query) {
    harness_->engine().Step({{.session = Ref("s"), .chunk = std::nullopt, .query = query.query}}, {},
                            [](const std::vector<StepResult>& results) { EXPECT_THAT(results[0].answer, IsOk()); });
  }
  uint64_t skipped(ShadowSkip skip) {
    return harness_->engine().stats().shadows_skipped[static_cast<size_t>(skip)];
  }
  uint64_t samples() { return harness_->engine().stats().truth[static_cast<size_t>(Source::kExact)].samples; }
  DurationHistogram::Snapshot slices() {
    return harness_->engine().stats().stages[static_cast<size_t>(Stage::kShadow)].Read();
  }
  uint64_t slice_count() {
    uint64_t count = 0;
    for (uint64_t bucket : slices().counts) count += bucket;
    return count;
  }

  std::function<void(const char*)> on_call_;
  std::optional<Harness> harness_;
  SessionConfig config_;
  std::optional<Tokens> tokens_;
};

TEST_F(ShadowRunnerTest, OneIsPendingAndTheOthersAreCounted) {
  Make(1, 1);
  Fill();
  const OwnedQuery query = tokens_->Ask(kTokens - 1);
  for (int i = 0; i < 3; ++i) Queue(query);
  harness_->engine().RunLane(0);
  EXPECT_TRUE(harness_->Get(Ref("s"))->shadow_pending);
  EXPECT_EQ(skipped(ShadowSkip::kBusy), 2u);
  harness_->RunAll();
  EXPECT_EQ(samples(), 1u);
  EXPECT_FALSE(harness_->Get(Ref("s"))->shadow_pending);
  EXPECT_EQ(harness_->Get(Ref("s"))->shadows_skipped, 2u);
  Queue(query);
  harness_->RunAll();
  EXPECT_EQ(samples(), 2u);
}

TEST_F(ShadowRunnerTest, WhatWasTruncatedOrClosedOrCodedIsNotRepeated) {
  const std::vector<std::pair<ShadowSkip, std::function<void()>>> cases = {
      {ShadowSkip::kChanged,
       [&] { harness_->engine().Truncate(Ref("s"), 100, {}, [](const auto& r) { EXPECT_THAT(r, IsOk()); }); }},
      {ShadowSkip::kClosed,
       [&] { harness_->engine().Close(Ref("s"), {}, [](const auto& r) { EXPECT_THAT(r, IsOk()); }); }}};
  for (const auto& [skip, change] : cases) {
    Make(1, 1);
    Fill();
    const OwnedQuery query = tokens_->Ask(kTokens - 1);
    Queue(query);
    change();
    harness_->RunAll();
    EXPECT_EQ(skipped(skip), 1u);
    EXPECT_EQ(samples(), 0u);
  }
  Make(1, 1, Format::kK8V4);
  Fill(500);
  const OwnedQuery query = tokens_->Ask(499);
  const OwnedChunk chunk = tokens_->Append(500, 100);
  Queue(query);
  harness_->engine().Step({{.session = Ref("s"), .chunk = chunk.chunk, .query = std::nullopt}}, {},
                          [](const std::vector<StepResult>& results) { EXPECT_THAT(results[0].append, IsOk()); });
  harness_->RunAll();
  EXPECT_EQ(skipped(ShadowSkip::kChanged), 1u) << "raw keys became codes";
}

TEST_F(ShadowRunnerTest, LaterTokensChangeNothing) {
  Make(1, 1);
  Fill();
  const OwnedQuery query = tokens_->Ask(kTokens - 1);
  Queue(query);
  const OwnedChunk chunk = tokens_->Append(kTokens, 100);
  harness_->engine().Step({{.session = Ref("s"), .chunk = chunk.chunk, .query = std::nullopt}}, {},
                          [](const std::vector<StepResult>& results) { EXPECT_THAT(results[0].append, IsOk()); });
  harness_->RunAll();
  const TruthInfo truth = harness_->Get(Ref("s"))->truth;
  EXPECT_EQ(truth.samples, 1u);
  EXPECT_EQ(truth.best_chosen, truth.best_tokens) << "the exact best of what the query saw";
}

TEST_F(ShadowRunnerTest, ADeviceErrorEndsTheRepeatAlone) {
  Make(1, 1);
  Fill();
  const OwnedQuery query = tokens_->Ask(kTokens - 1);
  Queue(query);
  harness_->engine().RunLane(0);  // the retrieval, and the first slice
  harness_->backend().Fail({.first = 0, .count = 1});
  harness_->RunAll();
  harness_->backend().StopFailing();
  EXPECT_EQ(skipped(ShadowSkip::kError), 1u);
  EXPECT_EQ(harness_->engine().stats().device_errors, 1u);
  EXPECT_THAT(harness_->Retrieve("s", query), IsOk());
}

TEST_F(ShadowRunnerTest, TheSampledShareDependsOnSeedAndCallsAlone) {
  const auto sampled = [&](uint64_t seed) {
    Make(0.3, 1);
    EXPECT_THAT(harness_->Close(Ref("s")), IsOk());
    config_.rotation_seed = seed;
    EXPECT_THAT(harness_->Open("s", config_), IsOk());
    Fill();
    const OwnedQuery query = tokens_->Ask(kTokens - 1);
    std::string which;
    for (int i = 0; i < 100; ++i) {
      const uint64_t before = samples();
      EXPECT_THAT(harness_->Retrieve("s", query), IsOk());
      harness_->RunAll();
      which += samples() > before ? 'x' : '.';
    }
    return which;
  };
  const std::string first = sampled(1);
  EXPECT_EQ(first, sampled(1));
  EXPECT_NE(first, sampled(2));
  const auto share = std::count(first.begin(), first.end(), 'x');
  EXPECT_GT(share, 15);
  EXPECT_LT(share, 45);
  EXPECT_EQ(skipped(ShadowSkip::kBusy), 0u);
}

TEST_F(ShadowRunnerTest, ALiveCallWaitsForOneSliceAtMost) {
  Make(1, 1);
  Fill();
  int posted = 0, answered = 0;
  bool live = true;
  // Calls arrive in the middle of every slice.
  on_call_ = [&](const char* name) {
    if (live || std::string(name) != "ScoreTokens" || posted > answered) return;
    ++posted;
    harness_->engine().Get(Ref("s"), {}, [&, slices = slice_count()](const auto& info) {
      EXPECT_THAT(info, IsOk());
      EXPECT_LE(slice_count() - slices, 1u);
      ++answered;
    });
  };
  const OwnedQuery query = tokens_->Ask(kTokens - 1);
  for (int i = 0; i < 5; ++i) {
    live = true;
    Queue(query);
    harness_->engine().RunLane(0);
    live = false;
    while (harness_->engine().RunLane(0)) continue;
  }
  EXPECT_GE(answered, 5);
  EXPECT_EQ(posted, answered);
  EXPECT_EQ(samples(), 5u);
}

TEST_F(ShadowRunnerTest, TheBudgetHoldsOverEveryStretch) {
  constexpr double kBudget = 0.02;
  Make(1, kBudget);
  Fill();
  on_call_ = [&](const char*) { harness_->clock().Advance(kOperation); };
  const OwnedQuery query = tokens_->Ask(kTokens - 1);
  std::vector<std::pair<double, double>> spent;  // seconds: now, and in slices so far
  double longest = 0;
  for (int i = 0; i < 10000; ++i) {
    if (i % 20 == 0) Queue(query);
    harness_->engine().RunLane(0);
    harness_->clock().Advance(milliseconds(1));
    const double now = std::chrono::duration<double>(harness_->clock().Now().time_since_epoch()).count();
    spent.emplace_back(now, slices().sum_seconds);
    if (i > 0) longest = std::max(longest, spent[i].second - spent[i - 1].second);
  }
  ASSERT_GT(longest, 0);
  for (size_t begin = 0; begin < spent.size(); begin += 50) {
    for (size_t end = begin + 1; end < spent.size(); end += 50) {
      const double stretch = spent[end].first - spent[begin].first;
      const double allowed = kBudget * (stretch + limits::kShadowSavingSeconds) + longest;
      ASSERT_LE(spent[end].second - spent[begin].second, allowed + 1e-9) << begin << " to " << end;
    }
  }
  // It was in want all the time: else nothing was proved.
  EXPECT_GT(spent.back().second, 0.9 * kBudget * (spent.back().first - spent.front().first));
  EXPECT_GT(skipped(ShadowSkip::kBusy), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
