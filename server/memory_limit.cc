// SPDX-License-Identifier: Apache-2.0

#include "server/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/core/limits.h"
#include "server/settings.h"

namespace ctkvr {
namespace {

// Of a machine that others work on too, what is theirs.
constexpr uint64_t kOthersShare = 8;

uint64_t PhysicalBytes(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/meminfo");
  std::string name;
  uint64_t kibibytes = 0;
  if (file >> name >> kibibytes && name == "MemTotal:") return kibibytes << 10;
  const auto pages = static_cast<uint64_t>(std::max(1L, sysconf(_SC_PHYS_PAGES)));
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Nothing for "max", and for a file that is not there.
std::optional<uint64_t> ReadNumber(const std::filesystem::path& path) {
  uint64_t bytes = 0;
  std::ifstream file(path);
  return file >> bytes ? std::optional(bytes) : std::nullopt;
}

// Where the limits of the process's cgroups stand, below root: its own first, then those around it. A container often
// sees the path of its host, which is not there, and its own limit where the hierarchy begins.
std::vector<std::filesystem::path> LimitFiles(const std::filesystem::path& root) {
  std::vector<std::filesystem::path> files;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool version2 = parts[0] == "0" && parts[1].empty();
    if (!version2 && std::find(controllers.begin(), controllers.end(), "memory") == controllers.end()) continue;
    const std::filesystem::path base = version2 ? "sys/fs/cgroup" : "sys/fs/cgroup/memory";
    const char* const name = version2 ? "memory.max" : "memory.limit_in_bytes";
    for (std::filesystem::path group = std::filesystem::path(parts[2]).relative_path();; group = group.parent_path()) {
      files.push_back(base / group / name);
      if (group.empty()) break;
    }
  }
  return files;
}

uint64_t OthersBytes(const MemoryLimit& limit) { return limit.cgroup_file.empty() ? limit.bytes / kOthersShare : 0; }

}  // namespace

MemoryLimit ReadMemoryLimit(const std::filesystem::path& root) {
  MemoryLimit limit{.bytes = PhysicalBytes(root), .cgroup_file = ""};
  for (const std::filesystem::path& file : LimitFiles(root)) {
    const std::optional<uint64_t> bytes = ReadNumber(root / file);
    if (bytes.has_value() && *bytes < limit.bytes) limit = {.bytes = *bytes, .cgroup_file = "/" + file.string()};
  }
  return limit;
}

uint64_t BesideArenaBytes(const MemoryUse& use) {
  return use.lanes * use.scratch_bytes + use.record_bytes + limits::kSlotTableBytesMax + limits::kProgramBytes;
}

absl::StatusOr<uint64_t> DeriveArenaBytes(const MemoryLimit& limit, const MemoryUse& use, uint64_t least) {
  const uint64_t headroom = BesideArenaBytes(use) + OthersBytes(limit);
  if (limit.bytes >= headroom + least) return limit.bytes - headroom;
  return absl::InvalidArgumentError(
      absl::StrCat("arena_bytes is 0, which takes what is left of memory; this process may use ", Describe(limit),
                   ", and needs ", FormatBytes(headroom), " beside the arena: ", DescribeHeadroom(limit, use),
                   ". Give it more memory, lower lanes or scratch_bytes, or say arena_bytes"));
}

absl::Status CheckArenaBytes(uint64_t arena_bytes, const MemoryLimit& limit, const MemoryUse& use) {
  const uint64_t scratch = use.lanes * use.scratch_bytes;
  if (scratch <= limit.bytes && arena_bytes <= limit.bytes - scratch) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("arena_bytes is ", FormatBytes(arena_bytes), " beside ",
                                                 FormatBytes(scratch), " of scratch_bytes for ", use.lanes,
                                                 " lanes; this process may use ", Describe(limit)));
}

std::string Describe(const MemoryLimit& limit) {
  const std::string origin = limit.cgroup_file.empty() ? "physical memory" : "cgroup limit, " + limit.cgroup_file;
  return absl::StrCat(FormatBytes(limit.bytes), " (", origin, ")");
}

std::string DescribeHeadroom(const MemoryLimit& limit, const MemoryUse& use) {
  std::string text = absl::StrCat(FormatBytes(use.scratch_bytes), " of scratch for each of ", use.lanes, " lanes, ",
                                  FormatBytes(limits::kSlotTableBytesMax), " for slot tables and tags, ",
                                  FormatBytes(limits::kProgramBytes), " for messages and the program");
  if (use.record_bytes > 0) absl::StrAppend(&text, ", ", FormatBytes(use.record_bytes), " for records");
  if (limit.cgroup_file.empty()) absl::StrAppend(&text, ", ", FormatBytes(OthersBytes(limit)), " for the machine");
  return text;
}

}  // namespace ctkvr
