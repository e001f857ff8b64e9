// SPDX-License-Identifier: Apache-2.0
//
// Policies that move the ranking, through the engine against the oracle over the rows that a client would fetch: what
// is chosen, and that scores stay inner products. On a backend that shares host memory and on one that does not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "server/core/policies.h"
#include "tests/server/core/retriever_fixture.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

class RankingPoliciesTest : public RetrieverTest {
 protected:
  // Session "s" with tags: weights and classes by position.
  void FillTagged(const SessionConfig& config) {
    config_ = config;
    tokens_.emplace(config.layers[0], config.dtype, 77);
    ASSERT_THAT(harness_.Open("s", config), IsOk());
    OwnedChunk chunk = tokens_->Append(0, kLength);
    for (uint32_t t = 0; t < kLength; ++t) {
      weights_.push_back(static_cast<float>(t * 7 % 11));
      classes_.push_back(t % 10 == 3 ? 2 : t % 7);
    }
    chunk.chunk.weights = weights_;
    chunk.chunk.classes = classes_;
    ASSERT_THAT(harness_.Append("s", chunk), IsOk());
    stored_ = ReadLayer(harness_, "s", config);
  }

  // What the oracle chooses for a KV head when all tokens are scored.
  std::vector<uint32_t> Expected(uint32_t kv_head, uint32_t position) const {
    const PolicyConfig& policies = config_.policies;
    const oracle::Matrix queries = tokens_->Queries(position);
    oracle::Matrix scores;
    for (uint32_t r = 0; r < layer().group_heads(); ++r) {
      oracle::Row& row = scores.emplace_back();
      for (const oracle::Row& key : stored_.keys[kv_head]) {
        double score = 0;
        for (size_t d = 0; d < key.size(); ++d) score += key[d] * queries[kv_head * layer().group_heads() + r][d];
        row.push_back(score);
      }
    }
    oracle::SelectOptions options;
    options.k = layer().selection.k_tokens;
    options.force_below = layer().selection.sink_tokens;
    options.force_from = kLength - layer().selection.window_tokens;
    options.softmax.scale = layer().softmax.scale;
    std::vector<uint32_t> tokens;
    for (uint32_t t = 0; t < kLength; ++t) {
      tokens.push_back(t);
      const double rise = (policies.recency_weight_max - double{policies.recency_weight_min}) / (kLength - 1);
      double term = std::log(policies.recency_weight_min + rise * t);
      if (policies.tag_weight_boost > 0) term += std::log(1 + double{policies.tag_weight_boost} * weights_[t]);
      options.terms.push_back(term);
      if (!policies.class_quotas.empty()) options.classes.push_back(static_cast<uint8_t>(classes_[t]));
    }
    for (const ClassQuota& quota : policies.class_quotas) {
      options.class_quotas.resize(std::max<size_t>(options.class_quotas.size(), quota.token_class + 1));
      options.class_quotas[quota.token_class] = quota.tokens;
    }
    return oracle::Select(scores, tokens, options);
  }

  void ExpectChosenByOracle() {
    const OwnedQuery query = tokens_->Ask(kLength - 1);
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    const std::vector<AnswerSet> sets = SplitAnswer(*answer, layer().group_heads());
    AnswerCheck check{.layer = &layer(),
                      .selection = answer->used,
                      .position = kLength - 1,
                      .local_begin = std::nullopt,
                      .candidates = {}};
    EXPECT_TRUE(IsSoundAnswer(sets, stored_, tokens_->Queries(kLength - 1), check)) << "scores stay inner products";
    for (uint32_t h = 0; h < 2; ++h) EXPECT_EQ(sets[h].ids, Expected(h, kLength - 1)) << "KV head " << h;
  }

  std::vector<float> weights_;
  std::vector<uint32_t> classes_;
};
INSTANTIATE_TEST_SUITE_P(Memory, RankingPoliciesTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "SharedWithHost" : "OfItsOwn"; });

SessionConfig Tagged(Source source = Source::kExact) {
  SessionConfig config = SmallConfig(SmallLayer(Format::kK8V4, source));
  config.tags = true;
  return config;
}

TEST_P(RankingPoliciesTest, RecencyAndWeightsAreTermsOfTheRanking) {
  SessionConfig config = Tagged();
  config.policies.recency_weight_min = 0.5f;
  config.policies.recency_weight_max = 1.5f;
  config.policies.tag_weight_boost = 0.3f;
  FillTagged(config);
  ExpectChosenByOracle();
}

TEST_P(RankingPoliciesTest, QuotasComeFirst) {
  SessionConfig config = Tagged();
  config.policies.class_quotas = {{.token_class = 2, .tokens = 9}, {.token_class = 0, .tokens = 3}};
  FillTagged(config);
  ExpectChosenByOracle();
}

TEST_P(RankingPoliciesTest, AQuotaIsKeptByEveryPassOfTheSketch) {
  SessionConfig config = Tagged(Source::kSketch);
  config.layers[0].selection.candidate_tokens = 16;
  config.layers[0].selection.keep_share = 0.05f;
  config.policies.class_quotas = {{.token_class = 2, .tokens = 14}};
  FillTagged(config);
  const auto answer = harness_.Retrieve("s", tokens_->Ask(kLength - 1));
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->source, Source::kSketch);
  for (const AnswerSet& set : SplitAnswer(*answer, layer().group_heads())) {
    const auto members = std::count_if(set.ids.begin(), set.ids.end(),
                                       [&](uint32_t t) { return classes_[t] == 2 && t >= 4 && t < kLength - 8; });
    EXPECT_GE(members, 14);
  }
}

TEST_P(RankingPoliciesTest, RedundantCandidatesAreNotScored) {
  SessionConfig config = SmallConfig(SmallLayer());
  Fill(config);
  const OwnedQuery query = tokens_->Ask(kLength - 1);
  const auto plain = harness_.Retrieve("s", query);
  ASSERT_THAT(plain, IsOk());
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  config.policies.dedup_similarity = 1;
  Fill(config);
  const auto equal_only = harness_.Retrieve("s", query);
  ASSERT_THAT(equal_only, IsOk());
  EXPECT_EQ(equal_only->ids, plain->ids) << "no two keys have one sign plane";
  EXPECT_EQ(equal_only->bytes_read, plain->bytes_read);
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  config.policies.dedup_similarity = 0.6f;  // 12 of 32 bits
  Fill(config);
  const auto answer = harness_.Retrieve("s", query);
  ASSERT_THAT(answer, IsOk());
  EXPECT_LT(answer->bytes_read, plain->bytes_read);
  const size_t row_bytes = stored_.codec.key_row_bytes;
  const std::vector<AnswerSet> sets = SplitAnswer(*answer, 2);
  for (uint32_t h = 0; h < 2; ++h) {
    std::vector<uint32_t> planes;
    for (const uint32_t t : sets[h].ids) {
      if (t < 4 || t >= kLength - 8) continue;  // always included
      uint32_t plane = 0;
      std::memcpy(&plane, stored_.key_bytes.data() + (size_t{h} * kLength + t) * row_bytes, sizeof(plane));
      for (const uint32_t other : planes) EXPECT_GT(std::popcount(plane ^ other), 12);
      planes.push_back(plane);
    }
    EXPECT_GE(planes.size(), 1u);
  }
}

// ---- What is refused -----------------------------------------------------------------------------------------------

TEST(RankingPoliciesLimitsTest, EachIsNamedAtItsBorder) {
  const auto expect = [](const char* text, auto change) {
    SessionConfig config = Tagged();
    change(config);
    EXPECT_THAT(ValidateSessionConfig(config), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  const auto accept = [](auto change) {
    SessionConfig config = Tagged();
    change(config);
    EXPECT_THAT(ValidateSessionConfig(config), IsOk());
  };
  accept([](auto& c) { c.policies.dedup_similarity = 0.5f; });
  accept([](auto& c) { c.policies.dedup_similarity = 1; });
  expect("dedup_similarity is 0.49", [](auto& c) { c.policies.dedup_similarity = 0.49f; });
  expect("dedup_similarity is 1.01", [](auto& c) { c.policies.dedup_similarity = 1.01f; });
  expect("dedup_similarity is nan", [](auto& c) { c.policies.dedup_similarity = NAN; });
  expect("format f16 has no sign plane", [](auto& c) {
    c.layers[0] = SmallLayer(Format::kF16, Source::kExact);
    c.policies.dedup_similarity = 0.9f;
  });
  accept([](auto& c) { c.policies.recency_weight_min = c.policies.recency_weight_max = 0.01f; });
  accept([](auto& c) { c.policies.recency_weight_max = 100; });
  expect("recency_weight_min is 0.009", [](auto& c) { c.policies.recency_weight_min = 0.009f; });
  expect("recency_weight_max is 0.9", [](auto& c) { c.policies.recency_weight_max = 0.9f; });
  expect("recency_weight_max is 101", [](auto& c) { c.policies.recency_weight_max = 101; });
  accept([](auto& c) { c.policies.tag_weight_boost = 100; });
  expect("tag_weight_boost is -0.1", [](auto& c) { c.policies.tag_weight_boost = -0.1f; });
  expect("tag_weight_boost is 100.1", [](auto& c) { c.policies.tag_weight_boost = 100.1f; });
  expect("tag_weight_boost is set; the session takes no tags", [](auto& c) {
    c.policies.tag_weight_boost = 1;
    c.tags = false;
  });
  expect("class_quotas is set; the session takes no tags", [](auto& c) {
    c.policies.class_quotas = {{.token_class = 1, .tokens = 1}};
    c.tags = false;
  });
  accept([](auto& c) {
    for (uint32_t i = 0; i < 16; ++i) c.policies.class_quotas.push_back({.token_class = 240 + i, .tokens = 8192});
  });
  expect("class_quotas count is 17", [](auto& c) { c.policies.class_quotas.resize(17); });
  expect("class_quotas.token_class is 256", [](auto& c) { c.policies.class_quotas = {{256, 1}}; });
  expect("class_quotas.tokens is 0", [](auto& c) { c.policies.class_quotas = {{1, 0}}; });
  expect("class_quotas.tokens is 8193", [](auto& c) { c.policies.class_quotas = {{1, 8193}}; });
  expect("class_quotas has class 1 twice", [](auto& c) { c.policies.class_quotas = {{1, 2}, {1, 3}}; });
  expect("ramp_tokens is 4194305", [](auto& c) { c.policies.ramp_tokens = (4u << 20) + 1; });
}

TEST(RankingPoliciesLimitsTest, SimilarityBecomesBits) {
  EXPECT_EQ(RedundantBits(0.93f, 64), 4u);
  EXPECT_EQ(RedundantBits(0.93f, 128), 8u);
  EXPECT_EQ(RedundantBits(0.9375f, 64), 4u);
  EXPECT_EQ(RedundantBits(0.875f, 64), 8u);
  EXPECT_EQ(RedundantBits(0.9f, 80), 8u) << "0.1f of 80 is 8, whatever float32 makes of it";
  EXPECT_EQ(RedundantBits(1, 256), 0u);
  EXPECT_EQ(RedundantBits(0.5f, 16), 8u);
}

}  // namespace
}  // namespace ctkvr::testing
