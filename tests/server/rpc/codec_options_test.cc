// SPDX-License-Identifier: Apache-2.0
//
// Proves that options resolve as the contract says (defaults, layer overrides in order, default scale and source), that
// what is not served or unknown is refused by name, that work is bounded before it is done, and that what a client
// gets back opens an equal session.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "server/rpc/codec.h"
#include "tests/server/rpc/messages.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::rpc {
namespace {

using ::ctkvr::testing::IsOk;
using ::ctkvr::testing::MakeOptions;
using ::ctkvr::testing::StatusIs;
using ::testing::HasSubstr;

v1::SessionOptions Bare(uint32_t layers = 3) {
  v1::SessionOptions options;
  v1::Geometry* geometry = options.mutable_geometry();
  geometry->set_layers(layers);
  geometry->set_q_heads(8);
  geometry->set_kv_heads(2);
  geometry->set_head_dim(64);
  geometry->set_dtype(v1::DTYPE_F16);
  options.set_token_limit(1000);
  return options;
}

SessionConfig Decoded(const v1::SessionOptions& options) {
  auto config = DecodeSessionOptions(options);
  EXPECT_THAT(config.status(), IsOk());
  return config.ok() ? *std::move(config) : SessionConfig();
}

TEST(DecodeSessionOptionsTest, WhatIsLeftOutTakesTheDocumentedDefault) {
  const SessionConfig config = Decoded(Bare());
  ASSERT_EQ(config.layers.size(), 3u);
  EXPECT_EQ(config.dtype, DType::kF16);
  EXPECT_EQ(config.first_planes, 2u);
  EXPECT_EQ(config.token_limit, 1000u);
  EXPECT_EQ(config.lease, std::chrono::seconds(600));
  EXPECT_EQ(config.maintenance, Maintenance::kAuto);
  EXPECT_EQ(config.rotation_seed, 0u);
  for (const LayerConfig& layer : config.layers) {
    EXPECT_EQ(layer.value_dim, 64u);
    EXPECT_EQ(layer.format, Format::kK8V4);
    EXPECT_FLOAT_EQ(layer.softmax.scale, 0.125f);
    EXPECT_EQ(layer.softmax.softcap, 0);
    EXPECT_TRUE(layer.softmax.sink_logits.empty());
    EXPECT_EQ(layer.query_centroids.centroids, 0u);
    EXPECT_EQ(layer.tokens_per_cluster, 17u);
    EXPECT_FALSE(layer.absent || layer.dense);
    EXPECT_EQ(layer.selection, Selection{.source = Source::kKeyCentroidsSketch});
  }
}

TEST(DecodeSessionOptionsTest, TheDefaultSourceFollowsFormatAndClusters) {
  for (const v1::Format format :
       {v1::FORMAT_F32, v1::FORMAT_F16, v1::FORMAT_BF16, v1::FORMAT_K8V8, v1::FORMAT_K8V4, v1::FORMAT_K6V4}) {
    SCOPED_TRACE(v1::Format_Name(format));
    const bool coded = format >= v1::FORMAT_K8V8;
    v1::SessionOptions options = Bare(1);
    options.set_format(format);
    EXPECT_EQ(Decoded(options).layers[0].selection.source, coded ? Source::kKeyCentroidsSketch : Source::kExact);
    EXPECT_EQ(Decoded(options).layers[0].tokens_per_cluster, coded ? 17u : 0u);
    options.mutable_key_clusters()->set_tokens_per_cluster(0);
    EXPECT_EQ(Decoded(options).layers[0].selection.source, coded ? Source::kSketch : Source::kExact);
    options.mutable_key_clusters()->set_tokens_per_cluster(32);
    EXPECT_EQ(Decoded(options).layers[0].selection.source, coded ? Source::kKeyCentroidsSketch : Source::kExact);
  }
}

TEST(DecodeSessionOptionsTest, TheDefaultSourceFollowsTheFormatOfTheLayer) {
  v1::SessionOptions options = Bare(2);
  v1::LayerOverride* layer = options.add_layer_overrides();
  layer->add_layers(1);
  layer->set_format(v1::FORMAT_F16);
  const SessionConfig config = Decoded(options);
  EXPECT_EQ(config.layers[0].selection.source, Source::kKeyCentroidsSketch);
  EXPECT_EQ(config.layers[1].selection.source, Source::kExact);
}

TEST(DecodeSessionOptionsTest, ASourceThatWasChosenStays) {
  v1::SessionOptions options = Bare(1);
  options.mutable_selection()->set_source(v1::SOURCE_EXACT);
  EXPECT_EQ(Decoded(options).layers[0].selection.source, Source::kExact);
}

TEST(DecodeSessionOptionsTest, EveryFieldOfSelectionIsTaken) {
  v1::SessionOptions options = Bare(1);
  v1::Selection* s = options.mutable_selection();
  s->set_source(v1::SOURCE_QUERY_CENTROIDS);
  s->set_k_tokens(1);
  s->set_top_p(0.5f);
  s->set_min_share(0.25f);
  s->set_min_score(-3);
  s->set_reduction(v1::GROUP_REDUCTION_PER_HEAD);
  s->set_sink_tokens(0);
  s->set_window_tokens(0);
  s->set_dense_below_tokens(0);
  s->set_keep_share(0.1f);
  s->set_refine_planes(0);
  s->set_candidate_tokens(9);
  s->set_probes(8);
  s->set_centroid_set("set");
  s->set_open_share(0.25f);
  const Selection expected = {.source = Source::kQueryCentroids,
                              .k_tokens = 1,
                              .top_p = 0.5f,
                              .min_share = 0.25f,
                              .min_score = -3.0f,
                              .reduction = Reduction::kPerHead,
                              .sink_tokens = 0,
                              .window_tokens = 0,
                              .dense_below_tokens = 0,
                              .keep_share = 0.1f,
                              .refine_planes = 0,
                              .candidate_tokens = 9,
                              .probes = 8,
                              .centroid_set = "set",
                              .open_share = 0.25f};
  EXPECT_EQ(Decoded(options).layers[0].selection, expected);
}

TEST(DecodeSessionOptionsTest, EveryFieldOfTheSessionIsTaken) {
  v1::SessionOptions options = Bare(1);
  options.mutable_geometry()->set_value_dim(32);
  options.mutable_geometry()->set_dtype(v1::DTYPE_BF16);
  options.set_format(v1::FORMAT_K6V4);
  options.set_first_planes(1);
  options.set_lease_seconds(7);
  options.set_maintenance(v1::MAINTENANCE_MANUAL);
  options.set_fingerprint("print");
  options.set_rotation_seed(99);
  options.set_cache_slots(40);
  options.mutable_softmax()->set_softmax_scale(0.5f);
  options.mutable_softmax()->set_logit_softcap(30);
  for (int h = 0; h < 8; ++h) options.mutable_softmax()->add_sink_logits(static_cast<float>(h));
  v1::QueryCentroidOptions* set = options.add_query_centroids();
  set->set_centroids(256);
  set->set_list_tokens(512);
  set->set_placement(v1::QueryCentroidOptions::PLACEMENT_STRIDED);
  set->set_retrieved_queries(false);
  set->set_name("set");
  const SessionConfig config = Decoded(options);
  EXPECT_EQ(config.dtype, DType::kBF16);
  EXPECT_EQ(config.first_planes, 1u);
  EXPECT_EQ(config.lease, std::chrono::seconds(7));
  EXPECT_EQ(config.maintenance, Maintenance::kManual);
  EXPECT_EQ(config.fingerprint, "print");
  EXPECT_EQ(config.rotation_seed, 99u);
  EXPECT_EQ(config.cache_slots, 40u);
  const LayerConfig& layer = config.layers[0];
  EXPECT_EQ(layer.value_dim, 32u);
  EXPECT_EQ(layer.format, Format::kK6V4);
  EXPECT_EQ(layer.softmax.scale, 0.5f);
  EXPECT_EQ(layer.softmax.softcap, 30);
  EXPECT_THAT(layer.softmax.sink_logits, ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_EQ(layer.query_centroids.centroids, 256u);
  EXPECT_EQ(layer.query_centroids.list_tokens, 512u);
  EXPECT_EQ(layer.query_centroids.name, "set");
  EXPECT_EQ(layer.query_centroids.placement, Placement::kStrided);
  EXPECT_FALSE(layer.query_centroids.retrieved_queries);
}

TEST(LayerOverrideTest, EveryFieldIsLaidOverItsLayersAlone) {
  v1::SessionOptions options = Bare(4);
  v1::LayerOverride* o = options.add_layer_overrides();
  o->add_layers(1);
  o->add_layers(3);
  o->set_dense(true);
  o->set_q_heads(16);
  o->set_kv_heads(4);
  o->set_head_dim(128);
  o->set_value_dim(96);
  o->set_format(v1::FORMAT_F32);
  o->mutable_selection()->set_k_tokens(77);
  o->mutable_softmax()->set_logit_softcap(50);
  o->add_query_centroids()->set_centroids(3);
  const SessionConfig config = Decoded(options);
  for (uint32_t i : {1u, 3u}) {
    const LayerConfig& layer = config.layers[i];
    EXPECT_TRUE(layer.dense);
    EXPECT_EQ(layer.q_heads, 16u);
    EXPECT_EQ(layer.kv_heads, 4u);
    EXPECT_EQ(layer.head_dim, 128u);
    EXPECT_EQ(layer.value_dim, 96u);
    EXPECT_EQ(layer.format, Format::kF32);
    EXPECT_EQ(layer.selection.k_tokens, 77u);
    EXPECT_EQ(layer.softmax.softcap, 50);
    EXPECT_FLOAT_EQ(layer.softmax.scale, static_cast<float>(1 / std::sqrt(128.0)));  // of this layer's head_dim
    EXPECT_EQ(layer.query_centroids.centroids, 3u);
    EXPECT_EQ(layer.query_centroids.placement, Placement::kLast);
    EXPECT_TRUE(layer.query_centroids.retrieved_queries);
    EXPECT_EQ(layer.query_centroids.adjust_tokens, 0u);
    EXPECT_EQ(layer.query_centroids.centroids_max, 0u);
  }
  for (uint32_t i : {0u, 2u}) {
    EXPECT_EQ(config.layers[i].head_dim, 64u);
    EXPECT_EQ(config.layers[i].selection.k_tokens, 256u);
    EXPECT_FALSE(config.layers[i].dense);
  }
}

TEST(LayerOverrideTest, KeyClustersAreKeptWhereTheyAreAskedFor) {
  v1::SessionOptions options = Bare(4);
  v1::LayerOverride* none = options.add_layer_overrides();
  none->add_layers(2);
  none->mutable_key_clusters();
  v1::LayerOverride* few = options.add_layer_overrides();
  few->add_layers(3);
  few->mutable_key_clusters()->set_tokens_per_cluster(8);
  const auto per_layer = [&] {
    std::vector<uint32_t> counts;
    for (const LayerConfig& layer : Decoded(options).layers) counts.push_back(layer.tokens_per_cluster);
    return counts;
  };
  EXPECT_THAT(per_layer(), ::testing::ElementsAre(17, 17, 0, 8));
  options.mutable_key_clusters()->set_tokens_per_cluster(32);
  EXPECT_THAT(per_layer(), ::testing::ElementsAre(32, 32, 0, 8));
}

TEST(LayerOverrideTest, LaterOnesWinFieldByField) {
  v1::SessionOptions options = Bare(1);
  options.mutable_selection()->set_k_tokens(1);
  options.mutable_selection()->set_probes(1);
  options.mutable_selection()->set_refine_planes(1);
  v1::LayerOverride* first = options.add_layer_overrides();
  first->add_layers(0);
  first->mutable_selection()->set_k_tokens(2);
  first->mutable_selection()->set_probes(2);
  first->mutable_softmax()->set_softmax_scale(2);
  v1::LayerOverride* second = options.add_layer_overrides();
  second->add_layers(0);
  second->mutable_selection()->set_k_tokens(3);
  const LayerConfig layer = Decoded(options).layers[0];
  EXPECT_EQ(layer.selection.k_tokens, 3u);
  EXPECT_EQ(layer.selection.probes, 2u);
  EXPECT_EQ(layer.selection.refine_planes, 1u);
  EXPECT_EQ(layer.softmax.scale, 2);
}

TEST(LayerOverrideTest, ValueDimFollowsTheHeadDimOfItsLayerWhenLeftOut) {
  v1::SessionOptions options = Bare(2);
  v1::LayerOverride* o = options.add_layer_overrides();
  o->add_layers(1);
  o->set_head_dim(256);
  EXPECT_EQ(Decoded(options).layers[0].value_dim, 64u);
  EXPECT_EQ(Decoded(options).layers[1].value_dim, 256u);
}

TEST(LayerOverrideTest, AbsentLayersAreMarked) {
  v1::SessionOptions options = Bare(2);
  v1::LayerOverride* o = options.add_layer_overrides();
  o->add_layers(0);
  o->set_absent(true);
  EXPECT_TRUE(Decoded(options).layers[0].absent);
  EXPECT_FALSE(Decoded(options).layers[1].absent);
}

struct Break {
  const char* name;
  std::function<void(v1::SessionOptions&)> apply;
  absl::StatusCode code;
  const char* text;
};
std::ostream& operator<<(std::ostream& out, const Break& b) { return out << b.name; }

class BadOptionsTest : public ::testing::TestWithParam<Break> {};

TEST_P(BadOptionsTest, AreRefused) {
  v1::SessionOptions options = Bare();
  GetParam().apply(options);
  EXPECT_THAT(DecodeSessionOptions(options).status(), StatusIs(GetParam().code, HasSubstr(GetParam().text)));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotServed = absl::StatusCode::kUnimplemented;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Invalid, BadOptionsTest,
    ::testing::Values(
        Break{"NoGeometry", [](auto& o) { o.clear_geometry(); }, kInvalid, "options.geometry is missing"},
        Break{"NoLayers", [](auto& o) { o.mutable_geometry()->set_layers(0); }, kInvalid,
              "options.geometry.layers is 0; it must be at least 1"},
        Break{"TooManyLayers", [](auto& o) { o.mutable_geometry()->set_layers(257); }, kInvalid,
              "options.geometry.layers is 257; the limit is 256"},
        Break{"MostLayers", [](auto& o) { o.mutable_geometry()->set_layers(4294967295u); }, kInvalid,
              "options.geometry.layers is 4294967295"},
        Break{"NoDType", [](auto& o) { o.mutable_geometry()->clear_dtype(); }, kInvalid,
              "options.geometry.dtype is missing"},
        Break{"Format", [](auto& o) { o.set_format(static_cast<v1::Format>(7)); }, kInvalid,
              "options.format is 7; the known values are 0 to 6"},
        Break{"Source", [](auto& o) { o.mutable_selection()->set_source(static_cast<v1::Source>(8)); }, kInvalid,
              "options.selection.source is 8"},
        Break{"Reduction", [](auto& o) { o.mutable_selection()->set_reduction(static_cast<v1::GroupReduction>(4)); },
              kInvalid, "options.selection.reduction is 4"},
        Break{"Maintenance", [](auto& o) { o.set_maintenance(static_cast<v1::Maintenance>(3)); }, kInvalid,
              "options.maintenance is 3"},
        Break{"ValueTier", [](auto& o) { o.set_value_tier(static_cast<v1::ValueTier>(3)); }, kInvalid,
              "options.value_tier is 3"},
        Break{"Admission", [](auto& o) { o.set_admission(static_cast<v1::Admission>(3)); }, kInvalid,
              "options.admission is 3"},
        Break{"Placement",
              [](auto& o) {
                o.add_query_centroids()->set_placement(static_cast<v1::QueryCentroidOptions::Placement>(4));
              },
              kInvalid, "options.query_centroids.placement is 4"},
        Break{"Fingerprint", [](auto& o) { o.set_fingerprint(std::string(257, 'x')); }, kInvalid,
              "options.fingerprint bytes is 257; the limit is 256"},
        Break{"SetName", [](auto& o) { o.add_query_centroids()->set_name(std::string(65, 'x')); }, kInvalid,
              "options.query_centroids.name bytes is 65; the limit is 64"},
        Break{"CentroidSet", [](auto& o) { o.mutable_selection()->set_centroid_set(std::string(65, 'x')); }, kInvalid,
              "options.selection.centroid_set bytes is 65; the limit is 64"},
        Break{"ZeroScale", [](auto& o) { o.mutable_softmax()->set_softmax_scale(0); }, kInvalid,
              "options.softmax.softmax_scale is 0.000000; it must be finite and above 0"},
        Break{"NegativeScale", [](auto& o) { o.mutable_softmax()->set_softmax_scale(-1); }, kInvalid, "softmax_scale"},
        Break{"NanScale", [](auto& o) { o.mutable_softmax()->set_softmax_scale(kNan); }, kInvalid,
              "softmax_scale is nan"},
        Break{"InfiniteSoftcap", [](auto& o) { o.mutable_softmax()->set_logit_softcap(kInf); }, kInvalid,
              "options.softmax.logit_softcap is inf"},
        Break{"ZeroSoftcap", [](auto& o) { o.mutable_softmax()->set_logit_softcap(0); }, kInvalid, "logit_softcap"},
        Break{"SinkLogits",
              [](auto& o) {
                for (int i = 0; i < 257; ++i) o.mutable_softmax()->add_sink_logits(0);
              },
              kInvalid, "options.softmax.sink_logits count is 257; the limit is 256"},
        Break{"OverrideNamesNoLayer", [](auto& o) { o.add_layer_overrides()->set_dense(true); }, kInvalid,
              "options.layer_overrides[0].layers is missing"},
        Break{"OverrideOfALayerThatIsNotThere", [](auto& o) { o.add_layer_overrides()->add_layers(3); }, kInvalid,
              "options.layer_overrides[0].layers[0] is 3; the limit is 2"},
        Break{"OverrideFormat",
              [](auto& o) {
                o.add_layer_overrides()->add_layers(1);
                o.mutable_layer_overrides(0)->set_format(static_cast<v1::Format>(-1));
              },
              kInvalid, "options.layer_overrides[0].format is -1"},
        Break{"TooManyLayersInAnOverride",
              [](auto& o) {
                o.add_layer_overrides();
                for (int i = 0; i < 257; ++i) o.mutable_layer_overrides(0)->add_layers(0);
              },
              kInvalid, "options.layer_overrides[0].layers count is 257; the limit is 256"},
        Break{"TooManyOverrides",
              [](auto& o) {
                for (int i = 0; i < 257; ++i) o.add_layer_overrides()->add_layers(0);
              },
              kInvalid, "options.layer_overrides count is 257; the limit is 256"}),
    [](const auto& instance) { return instance.param.name; });

INSTANTIATE_TEST_SUITE_P(
    NotServed, BadOptionsTest,
    ::testing::Values(
        Break{"TwoSets",
              [](auto& o) {
                o.add_query_centroids();
                o.add_query_centroids();
              },
              kNotServed, "more than one set"},
        Break{"ModelCentroids", [](auto& o) { o.set_model_centroids("x"); }, kNotServed, "options.model_centroids"},
        Break{"Host", [](auto& o) { o.set_value_tier(v1::VALUE_TIER_HOST); }, kNotServed, "VALUE_TIER_HOST"},
        Break{"Grow", [](auto& o) { o.set_admission(v1::ADMISSION_GROW); }, kNotServed, "ADMISSION_GROW"},
        Break{"NeedleShare", [](auto& o) { o.mutable_policies()->set_needle_share_target(0); }, kInvalid,
              "needle_share_target is 0"}),
    [](const auto& instance) { return instance.param.name; });

TEST(DecodeSessionOptionsTest, PoliciesThatAskForNothingAreFine) {
  v1::SessionOptions options = Bare();
  options.mutable_policies();
  options.set_value_tier(v1::VALUE_TIER_DEVICE);
  options.set_admission(v1::ADMISSION_AT_OPEN);
  EXPECT_THAT(DecodeSessionOptions(options).status(), IsOk());
}

// ---- There and back ----------------------------------------------------------------------------------------------

bool SameLayers(const SessionConfig& a, const SessionConfig& b) {
  if (a.layers.size() != b.layers.size()) return false;
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerConfig& x = a.layers[i];
    const LayerConfig& y = b.layers[i];
    const bool same = x.absent == y.absent && x.dense == y.dense && x.q_heads == y.q_heads &&
                      x.kv_heads == y.kv_heads && x.head_dim == y.head_dim && x.value_dim == y.value_dim &&
                      x.format == y.format && x.selection == y.selection && x.softmax.scale == y.softmax.scale &&
                      x.softmax.softcap == y.softmax.softcap && x.softmax.sink_logits == y.softmax.sink_logits &&
                      x.query_centroids == y.query_centroids && x.tokens_per_cluster == y.tokens_per_cluster;
    if (!same) return false;
  }
  return true;
}

void ExpectReopensEqual(const SessionConfig& config) {
  v1::SessionOptions options;
  EncodeSessionOptions(config, &options);
  const auto again = DecodeSessionOptions(options);
  ASSERT_THAT(again.status(), IsOk());
  EXPECT_TRUE(SameLayers(*again, config)) << options.DebugString();
  EXPECT_EQ(again->dtype, config.dtype);
  EXPECT_EQ(again->first_planes, config.first_planes);
  EXPECT_EQ(again->token_limit, config.token_limit);
  EXPECT_EQ(again->lease, config.lease);
  EXPECT_EQ(again->maintenance, config.maintenance);
  EXPECT_EQ(again->fingerprint, config.fingerprint);
  EXPECT_EQ(again->rotation_seed, config.rotation_seed);
  EXPECT_EQ(again->cache_slots, config.cache_slots);
  EXPECT_EQ(again->record, config.record);
  EXPECT_EQ(again->needle_share_target, config.needle_share_target);
}

LayerConfig RandomLayer(std::mt19937_64& random) {
  const auto coin = [&random] { return random() % 2 == 0; };
  LayerConfig layer;
  layer.absent = random() % 5 == 0;
  layer.dense = coin();
  layer.kv_heads = coin() ? 2 : 4;
  layer.q_heads = layer.kv_heads * 2;
  layer.head_dim = coin() ? 64 : 128;
  layer.value_dim = coin() ? 64 : 32;
  layer.format = kAllFormats[random() % 6];
  layer.selection.source = static_cast<Source>(random() % (kSourceCount + 1));  // auto is the last
  layer.selection.k_tokens = coin() ? 1 : 256;
  if (coin()) layer.selection.min_score = 0.0f;
  layer.selection.reduction = static_cast<Reduction>(random() % 3);
  layer.selection.centroid_set = coin() ? "set" : "";
  layer.softmax.scale = coin() ? 0.125f : 1.0f;
  layer.softmax.softcap = coin() ? 30.0f : 0.0f;
  if (coin()) layer.softmax.sink_logits.assign(layer.q_heads, coin() ? 0.0f : 2.0f);
  if (coin()) layer.query_centroids = {.centroids = 16, .list_tokens = 8, .name = "set"};
  layer.query_centroids.placement = static_cast<Placement>(random() % 3);
  layer.query_centroids.retrieved_queries = coin();
  if (coin()) layer.query_centroids.adjust_tokens = 128, layer.query_centroids.centroids_max = 20;
  layer.tokens_per_cluster = coin() ? 0 : 8;
  return layer;
}

TEST(EncodeSessionOptionsTest, RandomSessionsReopenEqual) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(ctkvr::testing::TestSeed()));
  std::mt19937_64 random = ctkvr::testing::MakeRandom(2);
  for (int round = 0; round < 2000; ++round) {
    SessionConfig config;
    for (uint64_t layers = random() % 5 + 1; layers > 0; --layers) config.layers.push_back(RandomLayer(random));
    config.dtype = static_cast<DType>(random() % 3);
    config.first_planes = static_cast<uint32_t>(random() % 2 + 1);
    config.token_limit = 77;
    config.lease = std::chrono::seconds(random() % 100 + 1);
    config.maintenance = random() % 2 == 0 ? Maintenance::kAuto : Maintenance::kManual;
    config.fingerprint = std::string("\0\xff", 2);
    config.rotation_seed = random();
    config.cache_slots = static_cast<uint32_t>(random() % 3000);
    config.record = random() % 2 == 0;
    config.needle_share_target = random() % 2 == 0 ? 0 : 0.75f;
    ExpectReopensEqual(config);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(EncodeSessionOptionsTest, EqualLayersNeedNoOverride) {
  v1::SessionOptions options;
  EncodeSessionOptions(Decoded(MakeOptions()), &options);
  EXPECT_EQ(options.layer_overrides_size(), 0);
}

TEST(EncodeSessionOptionsTest, EveryDefaultIsFilledIn) {
  v1::SessionOptions options;
  EncodeSessionOptions(Decoded(Bare()), &options);
  const v1::Selection& s = options.selection();
  EXPECT_TRUE(s.has_source() && s.has_k_tokens() && s.has_top_p() && s.has_min_share() && s.has_reduction() &&
              s.has_sink_tokens() && s.has_window_tokens() && s.has_dense_below_tokens() && s.has_keep_share() &&
              s.has_refine_planes() && s.has_candidate_tokens() && s.has_probes() && s.has_centroid_set());
  EXPECT_EQ(s.source(), v1::SOURCE_KEY_CENTROIDS_SKETCH);
  EXPECT_EQ(options.format(), v1::FORMAT_K8V4);
  EXPECT_EQ(options.geometry().value_dim(), 64u);
  EXPECT_TRUE(options.softmax().has_softmax_scale());
  EXPECT_FALSE(options.softmax().has_logit_softcap());
  EXPECT_EQ(options.lease_seconds(), 600u);
  EXPECT_EQ(options.maintenance(), v1::MAINTENANCE_AUTO);
  EXPECT_EQ(options.value_tier(), v1::VALUE_TIER_DEVICE);
  EXPECT_EQ(options.admission(), v1::ADMISSION_AT_OPEN);
}

}  // namespace
}  // namespace ctkvr::rpc
