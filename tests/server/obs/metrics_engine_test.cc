// SPDX-License-Identifier: Apache-2.0
//
// Proves that each number the engine counts moves its series on the page and no other, that histograms are cumulative,
// and that the server's memory and facts are read anew at each scrape.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "server/obs/metrics.h"
#include "tests/server/obs/page.h"

namespace ctkvr::obs {
namespace {

using ::ctkvr::testing::ParsePage;
using ::ctkvr::testing::ValueOf;

struct Case {
  const char* series;
  std::function<void(Stats&, ServerSample&)> move;
  double moved_to;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.series; }

class EngineSeriesTest : public ::testing::TestWithParam<Case> {};

TEST_P(EngineSeriesTest, MovesAloneByWhatItCounts) {
  Stats stats;
  ServerSample sample;
  const Metrics metrics(stats, [&sample] { return sample; }, {});
  std::map<std::string, double> before = ParsePage(metrics.Text());
  ASSERT_TRUE(before.contains(GetParam().series));
  GetParam().move(stats, sample);
  std::map<std::string, double> after = ParsePage(metrics.Text());
  EXPECT_EQ(after[GetParam().series], GetParam().moved_to);
  after.erase(GetParam().series);
  before.erase(GetParam().series);
  EXPECT_EQ(after, before);
}

INSTANTIATE_TEST_SUITE_P(
    All, EngineSeriesTest,
    ::testing::Values(
        Case{"ctkvr_sessions", [](Stats& s, ServerSample&) { s.sessions = 3; }, 3},
        Case{"ctkvr_sessions_opened_total", [](Stats& s, ServerSample&) { s.sessions_opened = 4; }, 4},
        Case{"ctkvr_sessions_ended_total{end=\"closed\"}", [](Stats& s, ServerSample&) { s.sessions_ended[0] = 5; }, 5},
        Case{"ctkvr_sessions_ended_total{end=\"expired\"}", [](Stats& s, ServerSample&) { s.sessions_ended[1] = 6; },
             6},
        Case{"ctkvr_sessions_ended_total{end=\"drained\"}", [](Stats& s, ServerSample&) { s.sessions_ended[2] = 7; },
             7},
        Case{"ctkvr_sessions_failed_total", [](Stats& s, ServerSample&) { s.sessions_failed = 8; }, 8},
        Case{"ctkvr_device_errors_total", [](Stats& s, ServerSample&) { s.device_errors = 2; }, 2},
        Case{"ctkvr_device_lost", [](Stats& s, ServerSample&) { s.device_lost = true; }, 1},
        Case{"ctkvr_held_tokens", [](Stats& s, ServerSample&) { s.tokens_held = 9; }, 9},
        Case{"ctkvr_appended_tokens_total", [](Stats& s, ServerSample&) { s.appended_tokens = 10; }, 10},
        Case{"ctkvr_repeated_appends_total", [](Stats& s, ServerSample&) { s.repeated_appends = 11; }, 11},
        Case{"ctkvr_appended_bytes_total", [](Stats& s, ServerSample&) { s.append_bytes = 12; }, 12},
        Case{"ctkvr_retrievals_total{source=\"sketch\"}",
             [](Stats& s, ServerSample&) { s.retrievals[static_cast<size_t>(Source::kSketch)] = 13; }, 13},
        Case{"ctkvr_retrievals_total{source=\"dense\"}",
             [](Stats& s, ServerSample&) { s.retrievals[static_cast<size_t>(Source::kDense)] = 14; }, 14},
        Case{"ctkvr_chosen_tokens_total", [](Stats& s, ServerSample&) { s.chosen_tokens = 15; }, 15},
        Case{"ctkvr_scanned_bytes_total", [](Stats& s, ServerSample&) { s.bytes_read = 16; }, 16},
        Case{"ctkvr_row_bytes_total", [](Stats& s, ServerSample&) { s.row_bytes = 17; }, 17},
        Case{"ctkvr_batches_total", [](Stats& s, ServerSample&) { s.batches = 18; }, 18},
        Case{"ctkvr_batch_items_total", [](Stats& s, ServerSample&) { s.batch_items = 19; }, 19},
        Case{"ctkvr_maintenance_steps_total", [](Stats& s, ServerSample&) { s.maintenance_steps = 20; }, 20},
        Case{"ctkvr_queue_items", [](Stats& s, ServerSample&) { s.queued_items = 21; }, 21},
        Case{"ctkvr_queue_rejections_total", [](Stats& s, ServerSample&) { s.queue_rejections = 22; }, 22},
        Case{"ctkvr_expired_calls_total{point=\"queue\"}", [](Stats& s, ServerSample&) { s.expired_in_queue = 23; },
             23},
        Case{"ctkvr_expired_calls_total{point=\"flight\"}", [](Stats& s, ServerSample&) { s.expired_in_flight = 24; },
             24},
        Case{"ctkvr_arena_bytes", [](Stats&, ServerSample& m) { m.arena_bytes = 25; }, 25},
        Case{"ctkvr_arena_free_bytes", [](Stats&, ServerSample& m) { m.arena_free_bytes = 26; }, 26},
        Case{"ctkvr_arena_reserved_bytes", [](Stats&, ServerSample& m) { m.arena_reserved_bytes = 27; }, 27},
        Case{"ctkvr_arena_held_bytes", [](Stats&, ServerSample& m) { m.arena_held_bytes = 28; }, 28},
        Case{"ctkvr_slot_table_bytes", [](Stats&, ServerSample& m) { m.slot_table_bytes = 29; }, 29},
        Case{"ctkvr_truth_samples_total{source=\"exact\"}", [](Stats& s, ServerSample&) { s.truth[1].samples = 31; },
             31},
        Case{"ctkvr_truth_needles_total{source=\"sketch\"}", [](Stats& s, ServerSample&) { s.truth[2].needles = 32; },
             32},
        Case{"ctkvr_truth_needles_found_total{source=\"sketch\"}",
             [](Stats& s, ServerSample&) { s.truth[2].needles_found = 33; }, 33},
        Case{"ctkvr_truth_best_tokens_total{source=\"sketch\"}",
             [](Stats& s, ServerSample&) { s.truth[2].best_tokens = 34; }, 34},
        Case{"ctkvr_truth_best_chosen_total{source=\"sketch\"}",
             [](Stats& s, ServerSample&) { s.truth[2].best_chosen = 35; }, 35},
        Case{"ctkvr_truth_heads_total{source=\"sketch\"}", [](Stats& s, ServerSample&) { s.truth[2].heads = 36; }, 36},
        Case{"ctkvr_truth_mass_total{source=\"query_centroids\"}",
             [](Stats& s, ServerSample&) { s.truth[3].mass = 0.5; }, 0.5},
        Case{"ctkvr_truth_output_error_total{source=\"sketch\"}",
             [](Stats& s, ServerSample&) { s.truth[2].output_error = 0.25; }, 0.25},
        Case{"ctkvr_quality_steps_total{step=\"4\"}", [](Stats& s, ServerSample&) { s.quality_steps[3] = 39; }, 39},
        Case{"ctkvr_shadows_skipped_total{reason=\"busy\"}", [](Stats& s, ServerSample&) { s.shadows_skipped[0] = 37; },
             37},
        Case{"ctkvr_shadows_skipped_total{reason=\"error\"}",
             [](Stats& s, ServerSample&) { s.shadows_skipped[4] = 38; }, 38},
        Case{"ctkvr_arena_cleared_bytes_total", [](Stats&, ServerSample& m) { m.arena_cleared_bytes = 40; }, 40},
        Case{"ctkvr_access_refusals_total{reason=\"no_token\"}",
             [](Stats&, ServerSample& m) { m.access.refusals[0] = 41; }, 41},
        Case{"ctkvr_access_refusals_total{reason=\"not_admin\"}",
             [](Stats&, ServerSample& m) { m.access.refusals[4] = 42; }, 42},
        Case{"ctkvr_draining", [](Stats&, ServerSample& m) { m.draining = true; }, 1}));

TEST(EngineCollectorTest, EveryStageHasAHistogramThatIsCumulative) {
  Stats stats;
  const Metrics metrics(stats, [] { return ServerSample{}; }, {});
  for (size_t i = 0; i < kStageCount; ++i) {
    const std::string stage = StageName(static_cast<Stage>(i));
    stats.stages[i].Observe(std::chrono::microseconds(3));
    stats.stages[i].Observe(std::chrono::milliseconds(3));
    stats.stages[i].Observe(std::chrono::minutes(1));
    const std::string text = metrics.Text();
    const std::string bucket = "ctkvr_stage_seconds_bucket{stage=\"" + stage + "\",le=\"";
    EXPECT_EQ(ValueOf(text, bucket + "1e-06\"}"), 0) << stage;
    EXPECT_EQ(ValueOf(text, bucket + "5e-06\"}"), 1) << stage;
    EXPECT_EQ(ValueOf(text, bucket + "0.005\"}"), 2) << stage;
    EXPECT_EQ(ValueOf(text, bucket + "5\"}"), 2) << stage;
    EXPECT_EQ(ValueOf(text, bucket + "+Inf\"}"), 3) << stage;
    EXPECT_EQ(ValueOf(text, "ctkvr_stage_seconds_count{stage=\"" + stage + "\"}"), 3) << stage;
    EXPECT_NEAR(ValueOf(text, "ctkvr_stage_seconds_sum{stage=\"" + stage + "\"}"), 60.003003, 1e-9) << stage;
  }
}

TEST(EngineCollectorTest, TenantsHaveTheirSeriesWhileTheyAreNamed) {
  Stats stats;
  ServerSample sample;
  const Metrics metrics(stats, [&sample] { return sample; }, {});
  sample.access.tenants.push_back(
      {.name = "red",
       .usage = {.memory_bytes = 1, .sessions = 2, .queued_calls = 3, .refusals = {4, 5, 6}},
       .calls = 7,
       .rate_refusals = 8});
  const std::string text = metrics.Text();
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_reserved_bytes{tenant=\"red\"}"), 1);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_sessions{tenant=\"red\"}"), 2);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_queue_items{tenant=\"red\"}"), 3);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_refusals_total{tenant=\"red\",quota=\"memory\"}"), 4);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_refusals_total{tenant=\"red\",quota=\"sessions\"}"), 5);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_refusals_total{tenant=\"red\",quota=\"queue\"}"), 6);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_calls_total{tenant=\"red\"}"), 7);
  EXPECT_EQ(ValueOf(text, "ctkvr_tenant_refusals_total{tenant=\"red\",quota=\"rate\"}"), 8);
  sample.access.tenants.clear();
  EXPECT_EQ(metrics.Text().find("tenant=\"red\""), std::string::npos);
}

TEST(EngineCollectorTest, FactsStandOnThePage) {
  Stats stats;
  const Metrics metrics(stats, [] { return ServerSample{}; },
                        {.version = "1.2.3",
                         .backend = "cpu",
                         .device = "a \"quoted\" device",
                         .lanes = 3,
                         .queue_items_max = 3072,
                         .sessions_max = 99});
  const std::string text = metrics.Text();
  EXPECT_EQ(ValueOf(text, "ctkvr_build_info{version=\"1.2.3\",backend=\"cpu\",device=\"a \\\"quoted\\\" device\"}"), 1);
  EXPECT_EQ(ValueOf(text, "ctkvr_lanes"), 3);
  EXPECT_EQ(ValueOf(text, "ctkvr_queue_items_max"), 3072);
  EXPECT_EQ(ValueOf(text, "ctkvr_sessions_max"), 99);
}

TEST(EngineCollectorTest, TheStartTimeIsNow) {
  Stats stats;
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  };
  const double before = seconds();
  const Metrics metrics(stats, [] { return ServerSample{}; }, {});
  const double after = seconds();
  const double start = ValueOf(metrics.Text(), "ctkvr_start_time_seconds");
  // The page rounds to a whole number of digits, far below a second.
  EXPECT_GE(start, std::floor(before));
  EXPECT_LE(start, std::ceil(after));
}

}  // namespace
}  // namespace ctkvr::obs
