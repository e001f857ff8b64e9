// SPDX-License-Identifier: Apache-2.0
//
// Rules on the tree as a whole: what lies at the top, mirror tests, sources named in CMake, documents that keep their
// word. Thread-safe: pure functions.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/tidy/source_tree.h"

namespace ctkvr::tidy {

// Exactly the names of the map, dot files aside.
Findings CheckTopLevel(const std::vector<std::string>& names);

// The test that mirrors a source: "server/core/lane.cc" -> "tests/server/core/lane_test.cc".
std::string MirrorOf(const std::string& source);
// Every .cc outside tests has its mirror, or a line in `covered_by`: source -> the test that covers it. Lines that are
// not needed, and tests that are not there, are findings too.
Findings CheckMirrors(const std::vector<SourceFile>& tree, const std::map<std::string, std::string>& covered_by);
// The table of this repository.
const std::map<std::string, std::string>& CoveredBy();

// Every .cc is named in a CMakeLists.txt: of its folder, of one above it, or anywhere by its path from the root.
Findings CheckNamedInCMake(const std::vector<SourceFile>& tree);

// Paths that the fenced map under "## Map" of README.md names exist, and every folder that holds C++ or proto files
// (two levels deep) is named.
Findings CheckReadmeMap(const std::vector<SourceFile>& tree);

// Every `path_test.cc` that tests/README.md names in backticks exists.
Findings CheckTestsReadme(const std::vector<SourceFile>& tree);

}  // namespace ctkvr::tidy
