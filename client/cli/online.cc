// SPDX-License-Identifier: Apache-2.0
#include "client/cli/online.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "client/cli/output.h"

namespace ctkvr::cli {
namespace {

constexpr auto kPatience = std::chrono::minutes(1);
constexpr auto kPause = std::chrono::microseconds(500);  // of a lane with nothing else to do, a few slices

std::optional<double> Share(uint64_t part, uint64_t whole) {
  if (whole == 0) return std::nullopt;
  return static_cast<double>(part) / static_cast<double>(whole);
}

nlohmann::json ToJson(const OnlineShare& share) {
  const auto optional = [](std::optional<double> value) { return value ? nlohmann::json(*value) : nlohmann::json(); };
  return {{"online", optional(share.online)}, {"offline", optional(share.offline)}};
}

std::string ToText(const OnlineShare& share) {
  return fmt::format("{} online, {} here", Number(share.online, 4), Number(share.offline, 4));
}

}  // namespace

absl::StatusOr<v1::SessionInfo> AwaitTruth(const client::Session& session) {
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    auto info = session.Get();
    if (!info.ok() || !info->shadow_pending()) return info;
    if (std::chrono::steady_clock::now() > give_up) {
      return absl::DeadlineExceededError("the server does not end an exact repeat; --truth_budget 1 lets it");
    }
    std::this_thread::sleep_for(kPause);
  }
}

bool OnlineShare::agrees() const {
  if (online.has_value() != offline.has_value()) return false;
  return !online.has_value() || std::fabs(*online - *offline) <= kOnlineTolerance;
}

OnlineReport CompareOnline(const v1::SessionInfo& info, const Metrics& metrics) {
  const v1::Truth& truth = info.truth();
  OnlineReport report{.samples = truth.samples(), .skipped = info.shadows_skipped()};
  report.recall = {Share(truth.best_chosen(), truth.best_tokens()), metrics.recall()};
  report.needle_share = {Share(truth.needles_found(), truth.needles()), metrics.needle_share()};
  if (truth.samples() != 0) report.mass.online = truth.mass();
  report.mass.offline = metrics.mass();
  report.output_error = truth.output_error();
  return report;
}

nlohmann::json OnlineJson(const OnlineReport& report) {
  return {{"samples", report.samples},        {"skipped", report.skipped},
          {"recall", ToJson(report.recall)},  {"needle_share", ToJson(report.needle_share)},
          {"mass_kept", ToJson(report.mass)}, {"output_error", report.output_error},
          {"agrees", report.agrees()}};
}

std::string OnlineText(const std::string& trace, const OnlineReport& report) {
  return fmt::format(
      "{}: {} retrievals repeated by the server, {} left out; recall {}; needle share {}; mass {}; "
      "output error {:.4f}: {}\n",
      trace, Count(report.samples), Count(report.skipped), ToText(report.recall), ToText(report.needle_share),
      ToText(report.mass), report.output_error, report.agrees() ? "same within 0.01" : "DIFFERENT");
}

}  // namespace ctkvr::cli
