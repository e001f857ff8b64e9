// SPDX-License-Identifier: Apache-2.0
//
// Makes a backend by name. Thread-safe.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace ctkvr {

// "cpu" (the best instruction set of this machine), "cpu:portable", "cpu:avx2", "cpu:avx512", or "auto".
// INVALID_ARGUMENT: no such name. UNAVAILABLE: this machine cannot run it, or its start-up self-test failed.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const std::string& name);

}  // namespace ctkvr
