// SPDX-License-Identifier: Apache-2.0
//
// Words that may not stand where they stand, and what every C++ file begins with. The table is in word_rules.cc.
// Thread-safe: pure functions.

#pragma once

#include <string>
#include <vector>

#include "tests/tidy/source_tree.h"

namespace ctkvr::tidy {

// tests/tidy is left out: the table has to name the words.
Findings CheckWords(const std::vector<SourceFile>& tree);

// SPDX line first, a header comment under it, #pragma once in headers, extensions .h and .cc alone.
Findings CheckFileHeads(const std::vector<SourceFile>& tree);

// Headers that are contracts for others (client/include, engine.h, ops.h, formats.h): at least a third of the lines
// that are not empty carry a comment.
Findings CheckContracts(const std::vector<SourceFile>& tree);

}  // namespace ctkvr::tidy
