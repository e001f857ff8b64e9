// SPDX-License-Identifier: Apache-2.0
//
// How much memory this process may use, and what of it sessions may have.
//
// Not thread-safe: for main, before threads start.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace ctkvr {

struct MemoryLimit {
  uint64_t bytes = 0;
  // The file that says so: memory.max or memory.limit_in_bytes of the process's cgroup or one above it; empty: it is
  // the machine's physical memory.
  std::string cgroup_file;
};

// The least of the machine's memory and the limits of the cgroups (version 1 or 2) that the process is in. `root` is
// where the file system that tells (proc, sys) begins.
MemoryLimit ReadMemoryLimit(const std::filesystem::path& root = "/");

// What the process uses beside the arena.
struct MemoryUse {
  uint32_t lanes = 0;
  uint64_t scratch_bytes = 0;  // a lane
  uint64_t record_bytes = 0;   // 0: nothing is recorded
};
// Scratch of the lanes, slot tables and tags (limits::kSlotTableBytesMax), records, messages and the program
// (limits::kProgramBytes): what ctkvr-cli size adds to an arena.
uint64_t BesideArenaBytes(const MemoryUse& use);

// The arena where none is asked for: the limit less headroom, which is BesideArenaBytes and, where the memory is not
// this process's own (no cgroup limits it), an eighth of it. INVALID_ARGUMENT names both figures: less is left than
// `least`.
absl::StatusOr<uint64_t> DeriveArenaBytes(const MemoryLimit& limit, const MemoryUse& use, uint64_t least);
// INVALID_ARGUMENT names both figures: arena and scratch are more than there is.
absl::Status CheckArenaBytes(uint64_t arena_bytes, const MemoryLimit& limit, const MemoryUse& use);

// "20GiB (cgroup limit, /sys/fs/cgroup/memory.max)".
std::string Describe(const MemoryLimit& limit);
// What DeriveArenaBytes did, for people: "the limit less scratch_bytes of 2 lanes, ...".
std::string DescribeHeadroom(const MemoryLimit& limit, const MemoryUse& use);

}  // namespace ctkvr
