// SPDX-License-Identifier: Apache-2.0
//
// Rule 9, small by number: lengths of functions and files.
// Thread-safe: pure functions.

#pragma once

#include <string>
#include <vector>

#include "tests/tidy/source_tree.h"

namespace ctkvr::tidy {

inline constexpr size_t kFunctionLinesMax = 70;
inline constexpr size_t kHeaderLinesMax = 250;
inline constexpr size_t kSourceLinesMax = 500;
inline constexpr size_t kColumnsMax = 120;  // characters

struct Function {
  std::string head;  // its first line, trimmed
  size_t first_line = 0;
  size_t lines = 0;  // signature to closing brace
};

// Function bodies of C++ text, found by counting braces: what opens after a head with parentheses at namespace or
// class level. Lambdas and blocks inside count with the function around them.
std::vector<Function> FindFunctions(const std::string& text);

Findings CheckSizes(const std::vector<SourceFile>& tree);

}  // namespace ctkvr::tidy
