// SPDX-License-Identifier: Apache-2.0
//
// What the metrics page tells of an engine beside its Stats: the room obs knows no engine. Thread-safe; neither
// function takes a lock of a lane.

#pragma once

#include <string>
#include <utility>

#include "server/core/engine.h"
#include "server/obs/metrics.h"
#include "server/rpc/access.h"

namespace ctkvr::rpc {

inline obs::ServerFacts EngineFacts(const Engine& engine, const std::string& version) {
  BackendInfo backend = engine.backend_info();
  const EngineOptions& options = engine.options();
  return {.version = version,
          .backend = std::move(backend.name),
          .device = std::move(backend.device),
          .lanes = options.lanes,
          .queue_items_max = uint64_t{options.lanes} * options.queue_items_max,
          .sessions_max = options.sessions_max};
}

inline obs::ServerSample SampleServer(const Engine& engine, const Access& access) {
  const EngineMemory memory = engine.memory();
  return {.arena_bytes = memory.arena_bytes,
          .arena_free_bytes = memory.arena_free_bytes,
          .arena_reserved_bytes = memory.arena_reserved_bytes,
          .arena_held_bytes = memory.arena_held_bytes,
          .arena_cleared_bytes = memory.arena_cleared_bytes,
          .slot_table_bytes = memory.slot_table_bytes,
          .draining = engine.draining(),
          .access = access.Sample(engine.tenant_usage())};
}

}  // namespace ctkvr::rpc
