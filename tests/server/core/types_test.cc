// SPDX-License-Identifier: Apache-2.0
//
// Every limit of limits.h that a session or a selection must keep: at the limit, and one past it, with a message that
// names field, value and limit.

#include "server/core/types.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

struct Case {
  const char* name;
  std::function<void(SessionConfig&)> good;  // at the limit
  std::function<void(SessionConfig&)> bad;   // past it
  const char* message;
};

LayerConfig& L(SessionConfig& config) { return config.layers[1]; }
Selection& S(SessionConfig& config) { return config.layers[1].selection; }
void WithCentroids(SessionConfig& c) { L(c).query_centroids = {.centroids = 8, .list_tokens = 8, .name = "set"}; }
void WithAdjustment(SessionConfig& c) {
  WithCentroids(c);
  L(c).query_centroids.adjust_tokens = 128;
  L(c).query_centroids.centroids_max = 12;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

const std::vector<Case>& SessionCases() {
  static const std::vector<Case> cases = {
      {"layers", [](auto& c) { c.layers.resize(256, c.layers[0]); }, [](auto& c) { c.layers.resize(257, c.layers[0]); },
       "layers is 257; the limit is 256"},
      {"no layers", [](auto&) {}, [](auto& c) { c.layers.clear(); }, "layers is 0; the least is 1"},
      {"all absent", [](auto& c) { c.layers[0].absent = true; },
       [](auto& c) { c.layers[0].absent = c.layers[1].absent = true; }, "every layer is absent"},
      {"token_limit", [](auto& c) { c.token_limit = 4u << 20; }, [](auto& c) { c.token_limit = (4u << 20) + 1; },
       "token_limit is 4194305; the limit is 4194304"},
      {"no tokens", [](auto& c) { c.token_limit = 1; }, [](auto& c) { c.token_limit = 0; },
       "token_limit is 0; the least is 1"},
      {"first_planes", [](auto& c) { c.first_planes = 1; }, [](auto& c) { c.first_planes = 3; },
       "first_planes is 3; the limit is 2"},
      {"no first planes", [](auto& c) { c.first_planes = 2; }, [](auto& c) { c.first_planes = 0; },
       "first_planes is 0; the least is 1"},
      {"lease", [](auto& c) { c.lease = std::chrono::seconds(86400); },
       [](auto& c) { c.lease = std::chrono::seconds(86401); }, "lease_seconds is 86401; the limit is 86400"},
      {"no lease", [](auto& c) { c.lease = std::chrono::seconds(1); },
       [](auto& c) { c.lease = std::chrono::seconds(0); }, "lease_seconds is 0; the least is 1"},
      {"fingerprint", [](auto& c) { c.fingerprint.assign(256, 'x'); }, [](auto& c) { c.fingerprint.assign(257, 'x'); },
       "bytes of fingerprint is 257; the limit is 256"},
  };
  return cases;
}

const std::vector<Case>& LayerCases() {
  static const std::vector<Case> cases = {
      {"q_heads", [](auto& c) { L(c).q_heads = 256, L(c).kv_heads = 128; },
       [](auto& c) { L(c).q_heads = 257, L(c).kv_heads = 1; }, "layer 1: q_heads is 257; the limit is 256"},
      {"kv_heads", [](auto& c) { L(c).q_heads = L(c).kv_heads = 128; },
       [](auto& c) { L(c).q_heads = L(c).kv_heads = 129; }, "kv_heads is 129; the limit is 128"},
      {"no kv_heads", [](auto&) {}, [](auto& c) { L(c).kv_heads = 0; }, "kv_heads is 0; the least is 1"},
      {"multiple", [](auto&) {}, [](auto& c) { L(c).q_heads = 5; },
       "q_heads is 5; it must be a multiple of kv_heads, 2"},
      {"group", [](auto& c) { L(c).q_heads = 32; }, [](auto& c) { L(c).q_heads = 34; },
       "q_heads / kv_heads is 17; the limit is 16"},
      {"head_dim", [](auto& c) { L(c).head_dim = 256; }, [](auto& c) { L(c).head_dim = 264; },
       "head_dim is 264; the limit is 256"},
      {"small head_dim", [](auto& c) { L(c).head_dim = 16; }, [](auto& c) { L(c).head_dim = 8; },
       "head_dim is 8; the least is 16"},
      {"head_dim multiple", [](auto& c) { L(c).head_dim = 80; }, [](auto& c) { L(c).head_dim = 36; },
       "head_dim is 36; it must be a multiple of 8"},
      {"value_dim", [](auto& c) { L(c).value_dim = 256; }, [](auto& c) { L(c).value_dim = 0; },
       "value_dim is 0; the least is 16"},
      {"value_dim multiple", [](auto&) {}, [](auto& c) { L(c).value_dim = 20; },
       "value_dim is 20; it must be a multiple"},
      {"scale", [](auto& c) { L(c).softmax.scale = 1e4f; }, [](auto& c) { L(c).softmax.scale = 1.1e4f; },
       "softmax_scale is 11000"},
      {"no scale", [](auto& c) { L(c).softmax.scale = 1e-30f; }, [](auto& c) { L(c).softmax.scale = 0; },
       "softmax_scale is 0; it must be above 0"},
      {"scale NaN", [](auto&) {}, [](auto& c) { L(c).softmax.scale = kNan; }, "softmax_scale is nan"},
      {"softcap", [](auto& c) { L(c).softmax.softcap = 50; }, [](auto& c) { L(c).softmax.softcap = -1; },
       "logit_softcap is -1"},
      {"softcap inf", [](auto&) {}, [](auto& c) { L(c).softmax.softcap = kInf; }, "logit_softcap is inf"},
      {"sinks",
       [](auto& c) {
         L(c).softmax.sink_logits = {1, 2, 3, 1e6f};
       },
       [](auto& c) {
         L(c).softmax.sink_logits = {1, 2, 3};
       },
       "sink_logits has 3 elements; it must have none or q_heads, 4"},
      {"sink",
       [](auto& c) {
         L(c).softmax.sink_logits = {1, 2, -1e6f, 4};
       },
       [](auto& c) {
         L(c).softmax.sink_logits = {1, 2, -1.1e6f, 4};
       },
       "sink_logits[2] is -1.1e+06"},
      {"sink NaN", [](auto&) {},
       [](auto& c) {
         L(c).softmax.sink_logits = {1, kNan, 3, 4};
       },
       "sink_logits[1] is nan"},
      {"centroids", [](auto& c) { WithCentroids(c), L(c).query_centroids.centroids = 8192; },
       [](auto& c) { WithCentroids(c), L(c).query_centroids.centroids = 8193; },
       "query_centroids.centroids is 8193; the limit is 8192"},
      {"lists", [](auto& c) { WithCentroids(c), L(c).query_centroids.list_tokens = 8192; },
       [](auto& c) { WithCentroids(c), L(c).query_centroids.list_tokens = 8193; },
       "query_centroids.list_tokens is 8193; the limit is 8192"},
      {"no lists", [](auto& c) { WithCentroids(c); },
       [](auto& c) { WithCentroids(c), L(c).query_centroids.list_tokens = 0; },
       "query_centroids.list_tokens is 0; the least is 1"},
  };
  return cases;
}

const std::vector<Case>& CentroidCases() {
  static const std::vector<Case> cases = {
      {"adjustment", [](auto& c) { WithAdjustment(c), L(c).query_centroids.adjust_tokens = 16; },
       [](auto& c) { WithAdjustment(c), L(c).query_centroids.adjust_tokens = 15; },
       "query_centroids.adjust_tokens is 15; the least is 16"},
      {"fewest centroids at most", [](auto& c) { WithAdjustment(c), L(c).query_centroids.centroids_max = 8; },
       [](auto& c) { WithAdjustment(c), L(c).query_centroids.centroids_max = 7; },
       "query_centroids.centroids_max is 7; the least is 8"},
      {"most centroids at most", [](auto& c) { WithAdjustment(c), L(c).query_centroids.centroids_max = 8192; },
       [](auto& c) { WithAdjustment(c), L(c).query_centroids.centroids_max = 8193; },
       "query_centroids.centroids_max is 8193; the limit is 8192"},
      {"no adjustment", [](auto& c) { WithCentroids(c), L(c).query_centroids.centroids_max = 0; },
       [](auto& c) { WithCentroids(c), L(c).query_centroids.centroids_max = 8; },
       "query_centroids.centroids_max is 8; the limit is 0"},
      {"adjusted to retrievals", [](auto& c) { WithAdjustment(c); },
       [](auto& c) { WithAdjustment(c), L(c).query_centroids.retrieved_queries = false; },
       "query_centroids.adjust_tokens is 128; it must be 0 where retrieved_queries is false"},
      {"set name", [](auto& c) { WithCentroids(c), L(c).query_centroids.name.assign(64, 'n'); },
       [](auto& c) { WithCentroids(c), L(c).query_centroids.name.assign(65, 'n'); },
       "bytes of query_centroids.name is 65; the limit is 64"},
  };
  return cases;
}

void Clustered(SessionConfig& config) {
  L(config).format = Format::kF16;
  L(config).tokens_per_cluster = 16;
  S(config).source = Source::kKeyCentroids;
}

const std::vector<Case>& SelectionCases() {
  static const std::vector<Case> cases = {
      {"k", [](auto& c) { S(c).k_tokens = S(c).candidate_tokens = 8192; },
       [](auto& c) { S(c).k_tokens = S(c).candidate_tokens = 8193; }, "k_tokens is 8193; the limit is 8192"},
      {"no k", [](auto& c) { S(c).k_tokens = 1; }, [](auto& c) { S(c).k_tokens = 0; }, "k_tokens is 0; the least is 1"},
      {"top_p", [](auto& c) { S(c).top_p = 1e-6f; }, [](auto& c) { S(c).top_p = 0; }, "top_p is 0; it must be above 0"},
      {"top_p high", [](auto&) {}, [](auto& c) { S(c).top_p = 1.5f; }, "top_p is 1.5"},
      {"top_p NaN", [](auto&) {}, [](auto& c) { S(c).top_p = kNan; }, "top_p is nan"},
      {"min_share", [](auto& c) { S(c).min_share = 1; }, [](auto& c) { S(c).min_share = 1.01f; }, "min_share is 1.01"},
      {"min_share low", [](auto&) {}, [](auto& c) { S(c).min_share = -0.1f; }, "min_share is -0.1"},
      {"min_score", [](auto& c) { S(c).min_score = -5.0f; }, [](auto& c) { S(c).min_score = kInf; },
       "min_score is inf"},
      {"sinks", [](auto& c) { S(c).sink_tokens = 8192; }, [](auto& c) { S(c).sink_tokens = 8193; },
       "sink_tokens is 8193; the limit is 8192"},
      {"window", [](auto& c) { S(c).window_tokens = 8192; }, [](auto& c) { S(c).window_tokens = 8193; },
       "window_tokens is 8193; the limit is 8192"},
      {"dense_below", [](auto& c) { S(c).dense_below_tokens = 4u << 20; },
       [](auto& c) { S(c).dense_below_tokens = (4u << 20) + 1; }, "dense_below_tokens is 4194305"},
      {"keep_share", [](auto& c) { S(c).keep_share = 1; }, [](auto& c) { S(c).keep_share = 1.2f; },
       "keep_share is 1.2"},
      {"keep_share low", [](auto& c) { S(c).keep_share = 1e-6f; }, [](auto& c) { S(c).keep_share = 0; },
       "keep_share is 0"},
      {"open_share", [](auto& c) { S(c).open_share = 1; }, [](auto& c) { S(c).open_share = 1.2f; },
       "open_share is 1.2; it must be above 0 and at most 1"},
      {"open_share low", [](auto& c) { S(c).open_share = 1e-6f; }, [](auto& c) { S(c).open_share = 0; },
       "open_share is 0"},
      {"no clusters", [](auto& c) { L(c).tokens_per_cluster = 16, S(c).source = Source::kKeyCentroids; },
       [](auto& c) { S(c).source = Source::kKeyCentroids; },
       "source is key_centroids; the layer keeps no key clusters"},
      {"no clusters to scan", [](auto& c) { L(c).tokens_per_cluster = 16, S(c).source = Source::kKeyCentroidsSketch; },
       [](auto& c) { S(c).source = Source::kKeyCentroidsSketch; },
       "source is key_centroids_sketch; the layer keeps no key clusters"},
      {"clusters of floats", [](auto& c) { Clustered(c), S(c).source = Source::kKeyCentroids; },
       [](auto& c) { Clustered(c), S(c).source = Source::kKeyCentroidsSketch; },
       "source is key_centroids_sketch; format f16 has no bit planes"},
      {"members below k", [](auto& c) { Clustered(c), S(c).candidate_tokens = S(c).k_tokens; },
       [](auto& c) { Clustered(c), S(c).candidate_tokens = S(c).k_tokens - 1; },
       "candidate_tokens is 15; the least is k_tokens, 16"},
      {"refine below first", [](auto& c) { S(c).refine_planes = 2; }, [](auto& c) { S(c).refine_planes = 1; },
       "refine_planes is 1; it must be 0 or from 2 to 8"},
      {"refine", [](auto& c) { S(c).refine_planes = 8; }, [](auto& c) { S(c).refine_planes = 9; },
       "refine_planes is 9; it must be 0 or from 2 to 8"},
      {"refine of k6", [](auto& c) { L(c).format = Format::kK6V4, S(c).refine_planes = 6; },
       [](auto& c) { L(c).format = Format::kK6V4, S(c).refine_planes = 7; },
       "refine_planes is 7; it must be 0 or from 2 to 6"},
      {"no refinement", [](auto& c) { S(c).refine_planes = 0; }, [](auto& c) { S(c).refine_planes = 1000; },
       "refine_planes is 1000"},
      {"candidates", [](auto& c) { S(c).candidate_tokens = 65536; }, [](auto& c) { S(c).candidate_tokens = 65537; },
       "candidate_tokens is 65537; the limit is 65536"},
      {"candidates below k", [](auto& c) { S(c).candidate_tokens = S(c).k_tokens; },
       [](auto& c) { S(c).candidate_tokens = S(c).k_tokens - 1; }, "candidate_tokens is 15; the least is k_tokens, 16"},
      {"probes", [](auto& c) { S(c).probes = 8192; }, [](auto& c) { S(c).probes = 8193; },
       "probes is 8193; the limit is 8192"},
      {"no probes", [](auto& c) { S(c).probes = 1; }, [](auto& c) { S(c).probes = 0; }, "probes is 0; the least is 1"},
      {"sketch of floats", [](auto& c) { L(c).format = Format::kF16, S(c).source = Source::kExact; },
       [](auto& c) { L(c).format = Format::kF16; }, "source is sketch; format f16 has no bit planes"},
      {"no centroids", [](auto& c) { WithCentroids(c), S(c).source = Source::kQueryCentroids; },
       [](auto& c) { S(c).source = Source::kQueryCentroids; }, "the layer keeps no query centroids"},
      {"set", [](auto& c) { WithCentroids(c), S(c).centroid_set = "set"; },
       [](auto& c) { WithCentroids(c), S(c).centroid_set = "other"; }, "centroid_set is \"other\""},
      {"set of none", [](auto&) {}, [](auto& c) { S(c).centroid_set = "set"; }, "centroid_set is \"set\""},
  };
  return cases;
}

class TypesTest : public ::testing::Test {
 protected:
  void Check(const std::vector<Case>& cases) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      SessionConfig good = SmallConfig(SmallLayer(), 1024, 2), bad = good;
      c.good(good);
      EXPECT_THAT(ValidateSessionConfig(good), IsOk());
      c.bad(bad);
      EXPECT_THAT(ValidateSessionConfig(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
    }
  }
};

TEST_F(TypesTest, SessionsKeepEveryLimit) { Check(SessionCases()); }
TEST_F(TypesTest, LayersKeepEveryLimit) { Check(LayerCases()); }

TEST_F(TypesTest, QueryCentroidsKeepEveryLimit) { Check(CentroidCases()); }
TEST_F(TypesTest, SelectionsKeepEveryLimit) { Check(SelectionCases()); }

TEST_F(TypesTest, AnAbsentLayerIsNotLookedAt) {
  SessionConfig config = SmallConfig(SmallLayer(), 1024, 2);
  config.layers[1] = LayerConfig{.absent = true};
  EXPECT_THAT(ValidateSessionConfig(config), IsOk());
}

TEST_F(TypesTest, SketchSettingsDoNotMatterToOtherSources) {
  const LayerConfig layer = SmallLayer(Format::kF16, Source::kExact);
  Selection selection = layer.selection;
  selection.candidate_tokens = 1;
  selection.refine_planes = 77;
  EXPECT_THAT(ValidateSelection(selection, layer, 2), IsOk());
}

TEST_F(TypesTest, AnOverrideChangesWhatItNamesAndNothingElse) {
  const Selection base = SmallLayer().selection;
  EXPECT_EQ(Resolve(base, {}), base);
  SelectionOverride all;
  all.source = Source::kExact;
  all.k_tokens = 1;
  all.top_p = 0.5f;
  all.min_share = 0.25f;
  all.min_score = 3.0f;
  all.reduction = Reduction::kPerHead;
  all.sink_tokens = 2;
  all.window_tokens = 3;
  all.dense_below_tokens = 5;
  all.keep_share = 0.125f;
  all.refine_planes = 6;
  all.candidate_tokens = 7;
  all.probes = 9;
  all.centroid_set = "name";
  all.open_share = 0.75f;
  const Selection expected{.source = Source::kExact,
                           .k_tokens = 1,
                           .top_p = 0.5f,
                           .min_share = 0.25f,
                           .min_score = 3.0f,
                           .reduction = Reduction::kPerHead,
                           .sink_tokens = 2,
                           .window_tokens = 3,
                           .dense_below_tokens = 5,
                           .keep_share = 0.125f,
                           .refine_planes = 6,
                           .candidate_tokens = 7,
                           .probes = 9,
                           .centroid_set = "name",
                           .open_share = 0.75f};
  EXPECT_EQ(Resolve(base, all), expected);
  SelectionOverride one;
  one.probes = 11;
  Selection changed = base;
  changed.probes = 11;
  EXPECT_EQ(Resolve(base, one), changed);
}

TEST_F(TypesTest, SourcesHaveTheNamesOfTheProto) {
  EXPECT_STREQ(SourceName(Source::kDense), "dense");
  EXPECT_STREQ(SourceName(Source::kExact), "exact");
  EXPECT_STREQ(SourceName(Source::kSketch), "sketch");
  EXPECT_STREQ(SourceName(Source::kQueryCentroids), "query_centroids");
  EXPECT_STREQ(SourceName(Source::kKeyCentroids), "key_centroids");
  EXPECT_STREQ(SourceName(Source::kKeyCentroidsSketch), "key_centroids_sketch");
}

}  // namespace
}  // namespace ctkvr::testing
