// SPDX-License-Identifier: Apache-2.0
//
// Policies and tags of session options: every field is taken, what a session resolved opens an equal one, and quotas
// are counted before they are copied.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/rpc/codec.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::rpc {
namespace {

using ::ctkvr::testing::IsOk;
using ::ctkvr::testing::StatusIs;
using ::testing::HasSubstr;

v1::SessionOptions Bare() {
  v1::SessionOptions options;
  v1::Geometry* geometry = options.mutable_geometry();
  geometry->set_layers(1);
  geometry->set_q_heads(8);
  geometry->set_kv_heads(2);
  geometry->set_head_dim(64);
  geometry->set_dtype(v1::DTYPE_F16);
  options.set_token_limit(1000);
  return options;
}

void ExpectDecoded(const v1::SessionOptions& options, const PolicyConfig& policies, bool tags) {
  const auto config = DecodeSessionOptions(options);
  ASSERT_THAT(config.status(), IsOk());
  EXPECT_EQ(config->policies, policies);
  EXPECT_EQ(config->tags, tags);
  v1::SessionOptions resolved;
  EncodeSessionOptions(*config, &resolved);
  const auto again = DecodeSessionOptions(resolved);
  ASSERT_THAT(again.status(), IsOk());
  EXPECT_EQ(again->policies, policies) << resolved.DebugString();
  EXPECT_EQ(again->tags, tags);
}

TEST(CodecPoliciesTest, NoneIsSetUnlessAskedFor) { ExpectDecoded(Bare(), PolicyConfig(), false); }

TEST(CodecPoliciesTest, EachIsTakenAndComesBack) {
  const auto expect = [](auto set, const auto& configure) {
    v1::SessionOptions options = Bare();
    set(*options.mutable_policies());
    PolicyConfig expected;
    configure(expected);
    EXPECT_FALSE(expected == PolicyConfig());
    ExpectDecoded(options, expected, false);
  };
  expect([](auto& m) { m.set_load_adaptive_k(true); }, [](auto& c) { c.load_adaptive_k = true; });
  expect([](auto& m) { m.set_length_scaled_k(true); }, [](auto& c) { c.length_scaled_k = true; });
  expect([](auto& m) { m.set_ramp_tokens(7); }, [](auto& c) { c.ramp_tokens = 7; });
  expect([](auto& m) { m.set_dedup_similarity(0.93f); }, [](auto& c) { c.dedup_similarity = 0.93f; });
  expect([](auto& m) { m.set_recency_weight_min(0.5f); }, [](auto& c) { c.recency_weight_min = 0.5f; });
  expect([](auto& m) { m.set_recency_weight_max(1.5f); }, [](auto& c) { c.recency_weight_max = 1.5f; });
  // Nought is not left out: it is refused by its range.
  expect([](auto& m) { m.set_recency_weight_min(0); }, [](auto& c) { c.recency_weight_min = 0; });
  expect([](auto& m) { m.set_tag_weight_boost(0.3f); }, [](auto& c) { c.tag_weight_boost = 0.3f; });
  expect(
      [](auto& m) {
        for (uint32_t n : {3u, 1u}) {
          m.add_class_quotas()->set_token_class(n);
          m.mutable_class_quotas()->rbegin()->set_tokens(10 * n);
        }
      },
      [](auto& c) {
        c.class_quotas = {{.token_class = 3, .tokens = 30}, {.token_class = 1, .tokens = 10}};
      });
  v1::SessionOptions tagged = Bare();
  tagged.set_tags(true);
  ExpectDecoded(tagged, PolicyConfig(), true);
}

TEST(CodecPoliciesTest, MoreQuotasThanTheLimitAreRefused) {
  v1::SessionOptions options = Bare();
  for (int i = 0; i < 16; ++i) options.mutable_policies()->add_class_quotas();
  EXPECT_THAT(DecodeSessionOptions(options).status(), IsOk());
  options.mutable_policies()->add_class_quotas();
  EXPECT_THAT(DecodeSessionOptions(options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("options.policies.class_quotas count is 17; the limit is 16")));
}

}  // namespace
}  // namespace ctkvr::rpc
