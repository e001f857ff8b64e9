// SPDX-License-Identifier: Apache-2.0
//
// Rule 1, arrows go one way: which room may include which, read from every #include. The table is in include_rules.cc.
// Thread-safe: pure functions.

#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/tidy/source_tree.h"

namespace ctkvr::tidy {

struct Include {
  std::string path;  // "server/core/lane.h", "vector"
  bool quoted = false;
  size_t line = 0;
};

std::vector<Include> ReadIncludes(const std::string& text);

// The room a path lies in ("server/core"), or "" when no room owns it.
std::string RoomOf(const std::string& path);
// The room an #include leads to, or "" for the standard library and other people's.
std::string RoomOfInclude(const std::string& include);

// Includes that the table does not allow, `..`, quoted paths that are not from the root, files in no room.
Findings CheckIncludes(const std::vector<SourceFile>& tree);
// A cycle between rooms, exceptions of the table left out; one finding a cycle found.
Findings CheckRoomCycles(const std::vector<SourceFile>& tree);
// The same over any graph: the first cycle as {a, b, a}, or nothing.
std::vector<std::string> FindCycle(const std::map<std::string, std::set<std::string>>& arrows);

}  // namespace ctkvr::tidy
