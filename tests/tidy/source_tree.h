// SPDX-License-Identifier: Apache-2.0
//
// The repository as the rules read it: paths, texts, and C++ texts without comments and literals.
// Thread-safe: pure functions, values.

#pragma once

#include <string>
#include <vector>

namespace ctkvr::tidy {

struct SourceFile {
  std::string path;  // from the repository's root: "server/core/lane.cc"
  std::string text;
};

// A broken rule, ready to print: "rule 1, arrows: server/core/lane.cc:12: ...". Line 0: the file as a whole.
using Findings = std::vector<std::string>;
std::string Finding(const std::string& rule, const std::string& path, size_t line, const std::string& what);

// Every text file below `root`, by path; build folders, .git and binary files are left out.
std::vector<SourceFile> LoadTree(const std::string& root);
// Names at the top level of `root`, sorted, without what a line "/name" or "/name/" of .gitignore ignores.
std::vector<std::string> TopLevelNames(const std::string& root);

bool HasPrefix(const std::string& text, const std::string& prefix);
bool HasSuffix(const std::string& text, const std::string& suffix);
bool IsHeader(const std::string& path);  // .h
bool IsCpp(const std::string& path);     // .h or .cc
std::string BaseName(const std::string& path);
std::string FolderOf(const std::string& path);  // "server/core"; "" for a file at the top

const SourceFile* FindFile(const std::vector<SourceFile>& tree, const std::string& path);
std::vector<std::string> SplitLines(const std::string& text);
// The number, from 1, of the line that holds `offset`.
size_t LineOf(const std::string& text, size_t offset);

// C++ text of the same length and lines in which comments, string and character literals are blanks.
std::string CodeOnly(const std::string& text);

}  // namespace ctkvr::tidy
