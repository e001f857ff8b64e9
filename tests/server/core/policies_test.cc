// SPDX-License-Identifier: Apache-2.0
//
// How policies move K: against the formulas written out once more, at every bound; a lane under a load that comes and
// goes, on a clock of the test's own; and through the engine, where the mean is over open sessions.

#include "server/core/policies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;
using Seconds = std::chrono::duration<double>;

uint32_t TokensOf(const PolicyConfig& policies, const PolicyInputs& inputs, uint32_t visible, uint32_t k = 256,
                  uint32_t dense_below = 0) {
  Selection selection{.k_tokens = k, .dense_below_tokens = dense_below, .candidate_tokens = 2 * k};
  ApplyPolicies(policies, inputs, visible, selection);
  EXPECT_GE(selection.candidate_tokens, 2 * k);
  EXPECT_GE(selection.candidate_tokens, 2 * std::max(k, selection.k_tokens));
  EXPECT_LE(selection.candidate_tokens, 2 * std::max(k, selection.k_tokens) + 1);
  return selection.k_tokens;
}

TEST(PoliciesTest, NothingMovesWithoutAPolicy) {
  EXPECT_EQ(TokensOf({}, {.load_delta = -1, .mean_length = 10}, 5000, 300, 4000), 300u);
}

TEST(PoliciesTest, KFollowsTheRootOfTheLengthWithinItsBounds) {
  const PolicyConfig scaled{.length_scaled_k = true};
  const auto k = [&](uint32_t visible, double mean, uint32_t base = 256) {
    return TokensOf(scaled, {.load_delta = -1, .mean_length = mean}, visible, base);
  };
  EXPECT_EQ(k(4096, 4096), 256u);
  EXPECT_EQ(k(16384, 4096), 512u);
  EXPECT_EQ(k(1024, 4096), 128u);
  EXPECT_EQ(k(5000, 4096), 283u);  // 282.84
  EXPECT_EQ(k(100, 4096), 64u);    // 40
  EXPECT_EQ(k(100, 4096, 50), 50u) << "below the bound K stays, and does not rise to it";
  EXPECT_EQ(k(1u << 22, 4096), 2048u);
  EXPECT_EQ(k(16384, 4096, 3000), 3000u) << "above the bound K stays";
  EXPECT_EQ(k(1024, 4096, 3000), 1500u);
  EXPECT_EQ(k(5000, 0), 256u) << "no session holds anything";
  EXPECT_EQ(k(0, 4096), 64u);
}

TEST(PoliciesTest, KFollowsTheLoadWithinItsBounds) {
  const PolicyConfig adaptive{.load_adaptive_k = true};
  const auto k = [&](double delta, uint32_t base) { return TokensOf(adaptive, {.load_delta = delta}, 5000, base); };
  EXPECT_EQ(k(0, 1000), 1000u);
  EXPECT_EQ(k(1, 1000), 1500u);
  EXPECT_EQ(k(-1, 1000), 500u);
  EXPECT_EQ(k(0.25, 1001), 1126u);  // 1126.125
  EXPECT_EQ(k(-1, 300), 256u);
  EXPECT_EQ(k(-1, 100), 100u) << "below the bound K stays";
  EXPECT_EQ(k(1, 100), 150u);
  EXPECT_EQ(k(1, 2000), 2048u);
  EXPECT_EQ(k(1, 3000), 3000u) << "above the bound K stays";
}

TEST(PoliciesTest, TheRampFallsFromEverythingToK) {
  const PolicyConfig ramp{.ramp_tokens = 1000};
  uint32_t before = 2048;
  double share_before = 1;
  for (uint32_t visible = 2049; visible <= 3100; ++visible) {
    const uint32_t k = TokensOf(ramp, {}, visible, 256, 2048);
    const double line = 2048 - (2048.0 - 256) * std::min(1.0, (visible - 2048) / 1000.0);
    EXPECT_EQ(k, static_cast<uint32_t>(std::round(line))) << visible;
    EXPECT_LE(k, before);
    EXPECT_LT(k / 1.0 / visible, share_before);
    before = k;
    share_before = k / 1.0 / visible;
  }
  EXPECT_EQ(before, 256u);
  EXPECT_EQ(TokensOf(ramp, {}, 2048, 256, 2048), 256u) << "dense: K is not looked at";
  EXPECT_EQ(TokensOf(ramp, {}, 300, 256, 200), 256u) << "K is above the line already";
}

TEST(PoliciesTest, TheLoadIsNoughtAtTheTargetAndWithinOne) {
  LoadMeter meter;
  EXPECT_EQ(meter.delta(), 1);
  for (int i = 0; i < 100; ++i) meter.Observe(limits::kLoadTargetWait);
  EXPECT_NEAR(meter.delta(), 0, 1e-9);
  for (int i = 0; i < 100; ++i) meter.Observe(limits::kLoadTargetWait * 4);
  EXPECT_NEAR(meter.delta(), -0.75, 1e-9);
  for (int i = 0; i < 100; ++i) meter.Observe(limits::kLoadTargetWait * 1000000);
  EXPECT_GE(meter.delta(), -1);
  for (int i = 0; i < 100; ++i) meter.Observe(nanoseconds(-5));
  EXPECT_EQ(meter.delta(), 1);
}

// A lane that takes all that waits as a batch, under calls that come at a rate which jumps up and down.
class SquareWave {
 public:
  // What one call costs: some time, and more for each token.
  static Seconds Cost(uint32_t k) { return microseconds(100) + k * Seconds(0.4e-6); }
  struct Plateau {
    uint32_t k_min = UINT32_MAX, k_max = 0, served = 0, offered = 0, turns = 0;
    double Spread() const { return (k_max - k_min) / 1.0 / k_max; }
  };

  // Calls come at `rate` times what the lane serves at K = base. Watches the second half.
  Plateau Run(double rate, Seconds duration) {
    const Seconds gap = Cost(kBase) / rate;
    const Seconds begin = now_, end = now_ + duration;
    Plateau plateau;
    uint32_t last = 0;
    bool rose = false;
    for (Seconds next = begin; now_ < end;) {
      const bool watched = now_ > begin + duration / 2;
      for (; next <= now_; next += gap) {
        queue_.push_back(next);
        plateau.offered += watched;
      }
      if (queue_.empty()) {
        now_ = next;
        continue;
      }
      Seconds waited{0};
      for (Seconds arrived : queue_) waited += now_ - arrived;
      meter_.Observe(std::chrono::duration_cast<nanoseconds>(waited / queue_.size()));
      const uint32_t k = TokensOf({.load_adaptive_k = true}, {.load_delta = meter_.delta()}, 9999, kBase);
      now_ += Cost(k) * queue_.size();
      if (watched) {
        plateau.k_min = std::min(plateau.k_min, k);
        plateau.k_max = std::max(plateau.k_max, k);
        plateau.served += queue_.size();
        if (last != 0 && k + 2 < last && rose) ++plateau.turns;
        if (last != 0 && k + 2 < last) rose = false;
        if (last != 0 && k > last + 2) rose = true;
      }
      last = k;
      queue_.clear();
    }
    return plateau;
  }

 private:
  static constexpr uint32_t kBase = 1024;
  LoadMeter meter_;
  Seconds now_{1};
  std::deque<Seconds> queue_;
};

TEST(PoliciesTest, ALoadThatComesAndGoesIsServedEvenlyAndWithoutSwinging) {
  SquareWave wave;
  for (int round = 0; round < 4; ++round) {
    const SquareWave::Plateau low = wave.Run(0.4, Seconds(4)), high = wave.Run(1.3, Seconds(4));
    for (const SquareWave::Plateau& plateau : {low, high}) {
      EXPECT_LT(plateau.Spread(), 0.05);
      EXPECT_NEAR(plateau.served / 1.0 / plateau.offered, 1, 0.05);
      EXPECT_EQ(plateau.turns, 0u);
    }
    EXPECT_EQ(low.k_max, 1536u) << "time to spare";
    EXPECT_LT(high.k_max, 800u) << "1024 tokens would fall behind";
    EXPECT_GT(high.k_min, 600u) << "no more is given up than must be";
  }
}

// ---- Through the engine --------------------------------------------------------------------------------------------

class PolicyEngineTest : public ::testing::Test {
 protected:
  void Open(const std::string& id, uint32_t tokens, PolicyConfig policies = {}) {
    SessionConfig config = config_;
    config.policies = policies;
    ASSERT_THAT(harness_.Open(id, config), IsOk());
    ASSERT_THAT(harness_.Append(id, tokens_.Append(0, tokens)), IsOk());
  }
  StepRequest Ask(const std::string& id, const OwnedQuery& query) {
    return {.session = Ref(id), .chunk = std::nullopt, .query = query.query};
  }
  static LayerConfig Layer() {
    LayerConfig layer = SmallLayer(Format::kF16, Source::kExact);
    layer.selection.k_tokens = 100;
    layer.selection.candidate_tokens = 200;
    return layer;
  }

  Harness harness_;
  const SessionConfig config_ = SmallConfig(Layer());
  const Tokens tokens_{config_.layers[0], config_.dtype, 1};
};

TEST_F(PolicyEngineTest, TheMeanLengthIsThatOfOpenSessionsWhoeverSharesTheBatch) {
  Open("scaled", 900, {.length_scaled_k = true});
  Open("plain", 100);
  Open("empty", 1);
  ASSERT_THAT(harness_.Truncate("empty", 0), IsOk());
  const OwnedQuery ask = tokens_.Ask(899), other = tokens_.Ask(99);
  const auto alone = harness_.Step({Ask("scaled", ask)});
  const auto together = harness_.Step({Ask("plain", other), Ask("scaled", ask), Ask("plain", other)});
  ASSERT_THAT(alone[0].answer, IsOk());
  // Mean 500: the layer that holds nothing does not count.
  EXPECT_EQ(alone[0].answer->used.k_tokens, 134u);
  EXPECT_EQ(alone[0].answer->counts[0], 134 + alone[0].answer->always_tokens);
  ASSERT_THAT(together[1].answer, IsOk());
  EXPECT_EQ(together[1].answer->ids, alone[0].answer->ids);
  EXPECT_EQ(together[0].answer->used.k_tokens, 100u);
  ASSERT_THAT(harness_.Close(Ref("plain")), IsOk());
  EXPECT_EQ(harness_.Step({Ask("scaled", ask)})[0].answer->used.k_tokens, 100u) << "alone, it is the mean";
}

TEST_F(PolicyEngineTest, CallsThatWaitLongAreAnsweredWithFewerTokens) {
  SessionConfig config = config_;
  config.layers[0].selection.k_tokens = 400;
  config.layers[0].selection.candidate_tokens = 400;
  config.policies.load_adaptive_k = true;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 900)), IsOk());
  const OwnedQuery ask = tokens_.Ask(899);
  const auto k_after = [&](nanoseconds wait) {
    uint32_t k = 0;
    harness_.engine().Step({Ask("s", ask)}, {},
                           [&](const std::vector<StepResult>& results) { k = results[0].answer->used.k_tokens; });
    harness_.clock().Advance(wait);
    harness_.RunAll();
    return k;
  };
  EXPECT_EQ(k_after(nanoseconds(0)), 600u);
  uint32_t k = 0;
  for (int i = 0; i < 60; ++i) k = k_after(limits::kLoadTargetWait);
  EXPECT_EQ(k, 400u);
  for (int i = 0; i < 60; ++i) k = k_after(limits::kLoadTargetWait * 100);
  EXPECT_EQ(k, 256u);
}

TEST_F(PolicyEngineTest, APolicyGivesWayWhereTheRowCacheIsTooSmallForIt) {
  SessionConfig config = config_;
  config.policies.load_adaptive_k = true;
  config.cache_slots = 120;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 900)), IsOk());
  OwnedQuery ask = tokens_.Ask(899);
  const auto scores = harness_.Retrieve("s", ask);
  ASSERT_THAT(scores, IsOk());
  EXPECT_EQ(scores->used.k_tokens, 150u);
  ask.query.answer.mode = AnswerMode::kNewRows;
  const auto rows = harness_.Retrieve("s", ask);
  ASSERT_THAT(rows, IsOk());
  EXPECT_EQ(rows->used.k_tokens, 100u);
}

TEST_F(PolicyEngineTest, EachPositionOfACallHasItsOwnPlaceOnTheRamp) {
  SessionConfig config = config_;
  config.layers[0].selection.dense_below_tokens = 500;
  config.policies.ramp_tokens = 200;
  ASSERT_THAT(harness_.Open("s", config), IsOk());
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 900)), IsOk());
  const OwnedQuery ask = tokens_.Ask(499, 64);
  const auto answer = harness_.Retrieve("s", ask);
  ASSERT_THAT(answer, IsOk());
  const uint32_t sets = 2;
  for (uint32_t p = 0; p < 64; ++p) {
    const uint32_t expected = 500 + p <= 500 ? 500 : 500 - 2 * p + answer->always_tokens;
    EXPECT_EQ(answer->counts[p * sets], std::min(expected, 500 + p)) << p;
  }
  EXPECT_EQ(answer->used.k_tokens, 500u - 2 * 63);
}

}  // namespace
}  // namespace ctkvr::testing
