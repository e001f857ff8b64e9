// SPDX-License-Identifier: Apache-2.0
//
// Figures of the server beside our own: what counts as the same.
#include "client/cli/online.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;

TEST(OnlineShareTest, SharesAgreeWithinTheTolerance) {
  EXPECT_TRUE((OnlineShare{0.995, 0.99}).agrees());
  EXPECT_TRUE((OnlineShare{std::nullopt, std::nullopt}).agrees());
  EXPECT_FALSE((OnlineShare{0.97, 0.99}).agrees());
  EXPECT_FALSE((OnlineShare{0.99, 0.97}).agrees());
  EXPECT_FALSE((OnlineShare{std::nullopt, 0.97}).agrees());
  EXPECT_FALSE((OnlineShare{0.97, std::nullopt}).agrees());
}

TEST(OnlineReportTest, SharesAreOfTheSessionsSums) {
  v1::SessionInfo info;
  info.set_shadows_skipped(3);
  v1::Truth& truth = *info.mutable_truth();
  truth.set_samples(10);
  truth.set_needles(20);
  truth.set_needles_found(15);
  truth.set_best_tokens(200);
  truth.set_best_chosen(100);
  truth.set_mass(0.9);
  const OnlineReport report = CompareOnline(info, Metrics(2));
  EXPECT_EQ(report.samples, 10u);
  EXPECT_EQ(report.skipped, 3u);
  EXPECT_DOUBLE_EQ(*report.needle_share.online, 0.75);
  EXPECT_DOUBLE_EQ(*report.recall.online, 0.5);
  EXPECT_DOUBLE_EQ(*report.mass.online, 0.9);
  EXPECT_FALSE(report.agrees()) << "nothing was computed here";
  EXPECT_THAT(OnlineText("t", report), HasSubstr("recall 0.5000 online, - here"));
  EXPECT_THAT(OnlineText("t", report), HasSubstr("DIFFERENT"));
  EXPECT_EQ(OnlineJson(report)["needle_share"]["online"], 0.75);
  EXPECT_TRUE(OnlineJson(report)["needle_share"]["offline"].is_null());
  EXPECT_TRUE(CompareOnline({}, Metrics(2)).agrees()) << "nothing anywhere";
}

}  // namespace
}  // namespace ctkvr::cli
