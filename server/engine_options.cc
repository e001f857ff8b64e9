// SPDX-License-Identifier: Apache-2.0

#include "server/engine_options.h"

#include <algorithm>
#include <array>
#include <thread>

#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "server/memory_limit.h"

namespace ctkvr {
namespace {

constexpr std::array<const char*, 8> kEngineSettings = {"backend",       "lanes",           "arena_bytes",
                                                        "scratch_bytes", "queue_items_max", "sessions_max",
                                                        "truth_share",   "truth_budget"};

}  // namespace

EngineOptions MakeEngineOptions(const Values& values) {
  const uint32_t processors = std::clamp(std::thread::hardware_concurrency(), 1u, kLanesMax);
  const uint64_t arena_least = FindSetting("arena_bytes")->least;
  EngineOptions options;
  options.lanes = values.lanes == 0 ? processors : static_cast<uint32_t>(values.lanes);
  options.arena_bytes =
      values.arena_bytes == 0 ? std::max(ReadMemoryLimit().bytes / 2, arena_least) : values.arena_bytes;
  options.scratch_bytes = values.scratch_bytes;
  options.queue_items_max = static_cast<uint32_t>(values.queue_items_max);
  options.sessions_max = static_cast<uint32_t>(values.sessions_max);
  options.truth_share = values.truth_share;
  options.truth_budget = values.truth_budget;
  return options;
}

absl::StatusOr<Values> ReadEngineSettings(const std::map<std::string, std::string>& given) {
  ValueTable table;
  for (const auto& [name, text] : given) {
    if (std::find(kEngineSettings.begin(), kEngineSettings.end(), name) == kEngineSettings.end()) {
      return absl::InvalidArgumentError("\"" + name + "\" is no setting of an engine; those are " +
                                        absl::StrJoin(kEngineSettings, ", "));
    }
    CTKVR_RETURN_IF_ERROR(table.Set(*FindSetting(name), text, name));
  }
  return table.values();
}

}  // namespace ctkvr
