// SPDX-License-Identifier: Apache-2.0
//
// What a figure has to be read with: processor, instruction sets, compiler, build, commit. Thread-safe.

#pragma once

#include <cstdint>
#include <string>

namespace ctkvr::bench {

// Several lines, "machine: ...", "compiler: ...", "commit: ..."; the last without a newline.
std::string DescribeMachine();

// Bytes of this process that lie in memory now (resident set).
uint64_t ResidentBytes();

}  // namespace ctkvr::bench
