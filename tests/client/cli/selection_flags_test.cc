// SPDX-License-Identifier: Apache-2.0
//
// Proves that every flag reaches its field, and that names no server knows are refused by the command line.
#include "client/cli/selection_flags.h"

#include <algorithm>

#include "gmock/gmock.h"

namespace ctkvr::cli {
namespace {

class SelectionFlagsTest : public ::testing::Test {
 protected:
  SelectionFlagsTest() { AddSelectionFlags(&app_, &flags_); }

  bool Parse(std::vector<std::string> arguments) {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    try {
      app_.parse(arguments);
      return true;
    } catch (const CLI::ParseError&) {
      return false;
    }
  }

  CLI::App app_;
  SelectionFlags flags_;
};

TEST_F(SelectionFlagsTest, SketchFlagsReachTheirFields) {
  ASSERT_TRUE(Parse(
      {"--format",     "k6v4", "--source",        "sketch", "--k",          "7",           "--first-planes", "1",
       "--keep-share", "0.5",  "--refine-planes", "3",      "--candidates", "99",          "--sinks",        "1",
       "--window",     "2",    "--dense-below",   "3",      "--reduction",  "max_softmax", "--seed",         "12"}));
  const v1::SessionOptions options = MakeSessionOptions(flags_);
  EXPECT_EQ(options.format(), v1::FORMAT_K6V4);
  EXPECT_EQ(options.first_planes(), 1u);
  EXPECT_EQ(options.rotation_seed(), 12u);
  EXPECT_EQ(options.maintenance(), v1::MAINTENANCE_MANUAL);
  EXPECT_EQ(options.query_centroids_size(), 0);
  const v1::Selection& selection = options.selection();
  EXPECT_EQ(selection.source(), v1::SOURCE_SKETCH);
  EXPECT_EQ(selection.reduction(), v1::GROUP_REDUCTION_MAX_SOFTMAX);
  EXPECT_EQ(selection.k_tokens(), 7u);
  EXPECT_FLOAT_EQ(selection.keep_share(), 0.5f);
  EXPECT_EQ(selection.refine_planes(), 3u);
  EXPECT_EQ(selection.candidate_tokens(), 99u);
  EXPECT_EQ(selection.sink_tokens(), 1u);
  EXPECT_EQ(selection.window_tokens(), 2u);
  EXPECT_EQ(selection.dense_below_tokens(), 3u);
  EXPECT_FALSE(selection.has_probes());
}

TEST_F(SelectionFlagsTest, PoliciesReachTheirFields) {
  ASSERT_TRUE(Parse({}));
  EXPECT_EQ(MakeSessionOptions(flags_).policies().ByteSizeLong(), 0u);
  ASSERT_TRUE(Parse({"--load-adaptive-k", "--ramp", "7"}));
  EXPECT_TRUE(MakeSessionOptions(flags_).policies().load_adaptive_k());
  EXPECT_FALSE(MakeSessionOptions(flags_).policies().length_scaled_k());
  EXPECT_EQ(MakeSessionOptions(flags_).policies().ramp_tokens(), 7u);
  ASSERT_TRUE(Parse({"--length-scaled-k", "--dedup", "0.93", "--recency-min", "0.5", "--recency-max", "1.5"}));
  const v1::Policies policies = MakeSessionOptions(flags_).policies();
  EXPECT_TRUE(policies.length_scaled_k());
  EXPECT_FLOAT_EQ(policies.dedup_similarity(), 0.93f);
  EXPECT_FLOAT_EQ(policies.recency_weight_min(), 0.5f);
  EXPECT_FLOAT_EQ(policies.recency_weight_max(), 1.5f);
}

TEST_F(SelectionFlagsTest, QueryCentroidsComeWithTheirSet) {
  ASSERT_TRUE(Parse({"--source", "query_centroids", "--centroids", "64", "--list-tokens", "128", "--probes", "2",
                     "--placement", "strided"}));
  const v1::SessionOptions options = MakeSessionOptions(flags_);
  ASSERT_EQ(options.query_centroids_size(), 1);
  EXPECT_EQ(options.query_centroids(0).centroids(), 64u);
  EXPECT_EQ(options.query_centroids(0).list_tokens(), 128u);
  EXPECT_EQ(options.query_centroids(0).placement(), v1::QueryCentroidOptions::PLACEMENT_STRIDED);
  EXPECT_EQ(options.selection().probes(), 2u);
  EXPECT_FALSE(options.selection().has_candidate_tokens());
}

TEST_F(SelectionFlagsTest, KeyCentroidsComeWithTheirClusters) {
  ASSERT_TRUE(Parse({"--source", "key_centroids_sketch", "--open-share", "0.25", "--tokens-per-cluster", "32",
                     "--candidates", "99"}));
  const v1::SessionOptions options = MakeSessionOptions(flags_);
  EXPECT_EQ(options.key_clusters().tokens_per_cluster(), 32u);
  EXPECT_EQ(options.selection().open_share(), 0.25f);
  EXPECT_EQ(options.selection().candidate_tokens(), 99u);
  EXPECT_FALSE(options.selection().has_keep_share());
  flags_.source = "key_centroids";
  EXPECT_EQ(MakeSessionOptions(flags_).key_clusters().tokens_per_cluster(), 32u);
  EXPECT_FALSE(MakeSessionOptions(flags_).selection().has_open_share());
  flags_.source = "sketch";
  EXPECT_EQ(MakeSessionOptions(flags_).key_clusters().tokens_per_cluster(), 32u);
  flags_.format = "f16";
  EXPECT_EQ(MakeSessionOptions(flags_).key_clusters().tokens_per_cluster(), 0u);
}

TEST_F(SelectionFlagsTest, TheRemainderIsAskedForWhereValuesComeAndClustersAreKept) {
  for (const char* answer : {"ids", "scores", "rows", "new_rows", "attention"}) {
    flags_.answer = answer;
    const bool values = std::string(answer) != "ids" && std::string(answer) != "scores";
    EXPECT_EQ(MakeAnswerOptions(flags_).remainder(), values) << answer;
  }
  flags_.format = "f16";
  EXPECT_FALSE(MakeAnswerOptions(flags_).remainder());
  flags_.format = "k8v4";
  ASSERT_TRUE(Parse({"--no-remainder", "--maintain"}));
  EXPECT_FALSE(MakeAnswerOptions(flags_).remainder());
  EXPECT_EQ(MakeSessionOptions(flags_).maintenance(), v1::MAINTENANCE_AUTO);
}

TEST_F(SelectionFlagsTest, EveryNameOffersAValue) {
  for (const char* format : {"f32", "f16", "bf16", "k8v8", "k8v4", "k6v4"}) {
    flags_.format = format;
    EXPECT_NE(MakeSessionOptions(flags_).format(), v1::FORMAT_UNSPECIFIED) << format;
    EXPECT_EQ(ShortName(MakeSessionOptions(flags_).format()), format);
  }
  for (const char* source :
       {"auto", "dense", "exact", "sketch", "query_centroids", "key_centroids", "key_centroids_sketch"}) {
    flags_.source = source;
    EXPECT_EQ(ShortName(MakeSessionOptions(flags_).selection().source()), source);
  }
  for (const char* answer : {"ids", "scores", "rows", "attention"}) {
    flags_.answer = answer;
    EXPECT_NE(MakeAnswerOptions(flags_).mode(), v1::ANSWER_MODE_UNSPECIFIED) << answer;
  }
  for (const char* rows : {"f32", "f16", "bf16", "storage"}) {
    flags_.row_format = rows;
    EXPECT_NE(MakeAnswerOptions(flags_).row_format(), v1::ROW_FORMAT_UNSPECIFIED) << rows;
  }
}

TEST_F(SelectionFlagsTest, UnknownNamesAndNumbersAreRefused) {
  for (const char* flag : {"--format", "--source", "--reduction", "--answer", "--row-format", "--k", "--keep-share"}) {
    EXPECT_FALSE(Parse({flag, "nonsense"})) << flag;
  }
}

}  // namespace
}  // namespace ctkvr::cli
