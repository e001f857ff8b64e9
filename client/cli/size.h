// SPDX-License-Identifier: Apache-2.0
//
// ctkvr-cli size: the memory that sessions take, before there is a server. The formula is the engine's own
// (server/core/session.h), so it says what opening such a session reserves, to the byte. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace ctkvr::cli {

// The attention of a model as its configuration file has it.
struct ModelGeometry {
  const char* name;
  uint32_t layers;
  uint32_t q_heads;
  uint32_t kv_heads;
  uint32_t head_dim;
};
std::span<const ModelGeometry> KnownModels();
std::string KnownModelNames();  // "llama-3-8b, ..."

struct SizeFlags {
  std::string model;  // a name of KnownModels; numbers below that are not 0 win over it
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;  // 0: as head_dim
  std::string tokens = "128k";
  uint32_t sessions = 1;
  std::string format = "k8v4";
  std::optional<uint32_t> tokens_per_cluster;  // left out: the server's default; 0: no key clusters
  uint32_t centroids = 0;                      // query centroids a KV head
  uint32_t list_tokens = 2048;
  uint32_t cache_slots = 0;
  uint32_t lanes = 8;
  uint32_t scratch_mib = 256;
};

struct SizeReport {
  ModelGeometry geometry;
  uint32_t tokens = 0;     // a session's token limit
  uint64_t f16_bytes = 0;  // of a session's keys and values, as they come
  uint64_t f32_bytes = 0;
  uint64_t session_bytes = 0;     // reserved in the arena when it opens
  uint64_t arena_bytes = 0;       // of all sessions
  uint64_t slot_table_bytes = 0;  // of all sessions, beside the arena
  uint64_t server_bytes = 0;      // arena, lanes' scratch, slot tables, messages and program: what the process may need
};

// "128k" is 131,072; k and m are powers of 1,024. INVALID_ARGUMENT: not such a number, or above limits.h.
absl::StatusOr<uint32_t> ParseTokens(const std::string& text);

// INVALID_ARGUMENT: an unknown model, a geometry that is not whole or that the server would refuse.
absl::StatusOr<SizeReport> Size(const SizeFlags& flags);

std::string SizeText(const SizeReport& report, const SizeFlags& flags);
nlohmann::json SizeJson(const SizeReport& report);

}  // namespace ctkvr::cli
