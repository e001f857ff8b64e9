// SPDX-License-Identifier: Apache-2.0
#include "client/cli/size.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cstdlib>

#include "client/cli/output.h"
#include "server/core/limits.h"
#include "server/core/session.h"

namespace ctkvr::cli {
namespace {

// From the models' own configuration files.
constexpr std::array<ModelGeometry, 13> kModels = {{{"llama-3-8b", 32, 32, 8, 128},
                                                    {"llama-3-70b", 80, 64, 8, 128},
                                                    {"llama-3.1-405b", 126, 128, 8, 128},
                                                    {"llama-3.2-1b", 16, 32, 8, 64},
                                                    {"llama-3.2-3b", 28, 24, 8, 128},
                                                    {"mistral-7b", 32, 32, 8, 128},
                                                    {"mixtral-8x7b", 32, 32, 8, 128},
                                                    {"qwen2.5-7b", 28, 28, 4, 128},
                                                    {"qwen2.5-72b", 80, 64, 8, 128},
                                                    {"qwen3-8b", 36, 32, 8, 128},
                                                    {"qwen3-32b", 64, 64, 8, 128},
                                                    {"phi-3-mini", 32, 32, 32, 96},
                                                    {"smollm2-135m", 30, 9, 3, 64}}};

absl::StatusOr<ModelGeometry> FindGeometry(const SizeFlags& flags) {
  ModelGeometry geometry{.name = "", .layers = 0, .q_heads = 0, .kv_heads = 0, .head_dim = 0};
  for (const ModelGeometry& model : kModels) {
    if (flags.model == model.name) geometry = model;
  }
  if (!flags.model.empty() && geometry.layers == 0) {
    return absl::InvalidArgumentError("model is \"" + flags.model + "\"; known are " + KnownModelNames() +
                                      "; for others give --layers, --q-heads, --kv-heads and --head-dim");
  }
  if (flags.layers != 0) geometry.layers = flags.layers;
  if (flags.q_heads != 0) geometry.q_heads = flags.q_heads;
  if (flags.kv_heads != 0) geometry.kv_heads = flags.kv_heads;
  if (flags.head_dim != 0) geometry.head_dim = flags.head_dim;
  if (geometry.layers == 0 || geometry.q_heads == 0 || geometry.kv_heads == 0 || geometry.head_dim == 0) {
    return absl::InvalidArgumentError("give --model, or --layers, --q-heads, --kv-heads and --head-dim");
  }
  return geometry;
}

absl::StatusOr<Format> FindFormat(const std::string& name) {
  for (const Format format : kAllFormats) {
    if (name == FormatName(format)) return format;
  }
  return absl::InvalidArgumentError("format is \"" + name + "\"; it must be f32, f16, bf16, k8v8, k8v4 or k6v4");
}

absl::StatusOr<SessionConfig> MakeConfig(const SizeFlags& flags, const ModelGeometry& geometry, uint32_t tokens) {
  const auto format = FindFormat(flags.format);
  if (!format.ok()) return format.status();
  LayerConfig layer;
  layer.q_heads = geometry.q_heads;
  layer.kv_heads = geometry.kv_heads;
  layer.head_dim = geometry.head_dim;
  layer.value_dim = flags.value_dim == 0 ? geometry.head_dim : flags.value_dim;
  layer.format = *format;
  layer.softmax.scale = 1;
  if (!KeysAreCoded(*format)) layer.selection.source = Source::kExact;  // sketch reads bit planes
  const uint32_t default_tokens_per_cluster = KeysAreCoded(*format) ? limits::kTokensPerClusterDefault : 0;
  layer.tokens_per_cluster = flags.tokens_per_cluster.value_or(default_tokens_per_cluster);
  if (flags.centroids > 0) layer.query_centroids = {.centroids = flags.centroids, .list_tokens = flags.list_tokens};
  SessionConfig config;
  config.layers.assign(geometry.layers, layer);
  config.token_limit = tokens;
  config.cache_slots = flags.cache_slots;
  const absl::Status status = ValidateSessionConfig(config);
  if (!status.ok()) return status;
  return config;
}

}  // namespace

std::span<const ModelGeometry> KnownModels() { return kModels; }

std::string KnownModelNames() {
  std::string names;
  for (const ModelGeometry& model : kModels) names += (names.empty() ? "" : ", ") + std::string(model.name);
  return names;
}

absl::StatusOr<uint32_t> ParseTokens(const std::string& text) {
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text.c_str(), &end, 10);
  const std::string suffix(end);
  const bool digits = !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) != 0;
  uint64_t unit = suffix.empty() ? 1 : 0;
  if (suffix == "k" || suffix == "K") unit = 1024;
  if (suffix == "m" || suffix == "M") unit = 1024 * 1024;
  if (!digits || unit == 0 || number == 0 || number > limits::kTokenLimitMax / unit) {
    return absl::InvalidArgumentError(
        fmt::format("tokens is \"{}\"; it must be 1 to {}, or with k or m behind it (of 1,024 and 1,048,576)", text,
                    limits::kTokenLimitMax));
  }
  return static_cast<uint32_t>(number * unit);
}

absl::StatusOr<SizeReport> Size(const SizeFlags& flags) {
  const auto geometry = FindGeometry(flags);
  if (!geometry.ok()) return geometry.status();
  const auto tokens = ParseTokens(flags.tokens);
  if (!tokens.ok()) return tokens.status();
  const auto config = MakeConfig(flags, *geometry, *tokens);
  if (!config.ok()) return config.status();
  const LayerConfig& layer = config->layers.front();
  SizeReport report{.geometry = *geometry, .tokens = *tokens};
  const uint64_t numbers =
      uint64_t{*tokens} * geometry->layers * geometry->kv_heads * (layer.head_dim + layer.value_dim);
  report.f16_bytes = 2 * numbers;
  report.f32_bytes = 4 * numbers;
  report.session_bytes = Session::PlannedBytes(*config);
  report.arena_bytes = flags.sessions * report.session_bytes;
  report.slot_table_bytes = flags.sessions * Session::SlotTableBytes(*config);
  const uint64_t scratch_bytes = uint64_t{flags.lanes} * flags.scratch_mib << 20;
  report.server_bytes = report.arena_bytes + scratch_bytes + limits::kSlotTableBytesMax + limits::kProgramBytes;
  return report;
}

std::string SizeText(const SizeReport& report, const SizeFlags& flags) {
  const auto bytes = [](uint64_t count) { return Bytes(static_cast<double>(count)); };
  const ModelGeometry& geometry = report.geometry;
  const double share = static_cast<double>(report.session_bytes) / static_cast<double>(report.f32_bytes);
  Table table({"memory", "bytes", ""});
  const auto add = [&](const std::string& name, uint64_t count) { table.Add({name, Count(count), bytes(count)}); };
  add("a session's keys and values in f16", report.f16_bytes);
  add("the same in f32", report.f32_bytes);
  add("a session in " + flags.format, report.session_bytes);
  add("a token of it", report.session_bytes / report.tokens);
  add(fmt::format("arena for {} sessions", Count(flags.sessions)), report.arena_bytes);
  add("slot tables beside it, of " + bytes(limits::kSlotTableBytesMax), report.slot_table_bytes);
  add(fmt::format("server, {} lanes", flags.lanes), report.server_bytes);
  return fmt::format("{} layers, {} query heads, {} KV heads, head_dim {}; {} tokens a session\n", geometry.layers,
                     geometry.q_heads, geometry.kv_heads, geometry.head_dim, Count(report.tokens)) +
         table.ToString() +
         fmt::format(
             "a session is {} of f32\n\nctkvrd --arena_bytes={} --lanes={} --scratch_bytes={}MiB\n"
             "In a cgroup of {} bytes it takes this arena by itself.\n",
             Percent(share), report.arena_bytes, flags.lanes, flags.scratch_mib, report.server_bytes);
}

nlohmann::json SizeJson(const SizeReport& report) {
  return {{"model", report.geometry.name},
          {"layers", report.geometry.layers},
          {"q_heads", report.geometry.q_heads},
          {"kv_heads", report.geometry.kv_heads},
          {"head_dim", report.geometry.head_dim},
          {"tokens", report.tokens},
          {"f16_bytes", report.f16_bytes},
          {"f32_bytes", report.f32_bytes},
          {"session_bytes", report.session_bytes},
          {"arena_bytes", report.arena_bytes},
          {"slot_table_bytes", report.slot_table_bytes},
          {"server_bytes", report.server_bytes}};
}

}  // namespace ctkvr::cli
