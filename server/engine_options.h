// SPDX-License-Identifier: Apache-2.0
//
// The engine's part of the settings, for ctkvrd and for engines inside other programs. Thread-safe: pure functions.

#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "server/core/engine.h"
#include "server/settings.h"

namespace ctkvr {

// Resolved: lanes and arena_bytes are never 0. No observer. An arena that is not asked for is half of the memory that
// this process may use: it has other uses for the rest. ctkvrd has none (memory_limit.h).
EngineOptions MakeEngineOptions(const Values& values);

// The values of settings given by name, defaults for all others. INVALID_ARGUMENT: a name that is none of the engine's
// settings, or `backend`; a value outside its limits.
absl::StatusOr<Values> ReadEngineSettings(const std::map<std::string, std::string>& given);

}  // namespace ctkvr
