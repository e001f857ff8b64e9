// SPDX-License-Identifier: Apache-2.0

#include "tests/tidy/tree_rules.h"

#include <algorithm>
#include <regex>
#include <set>

namespace ctkvr::tidy {
namespace {

const char kLayoutRule[] = "layout";
const char kProofRule[] = "rule 10, prove it";
const char kReadmeRule[] = "the README keeps its word";

const std::set<std::string>& TopLevel() {
  static const auto* const names =
      new std::set<std::string>{"CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md",
                                "client",       "deploy",         "kernels",           "proto",   "server",
                                "tests"};
  return *names;
}

bool IsSource(const std::string& path) { return HasSuffix(path, ".cc"); }

bool HasFolder(const std::vector<SourceFile>& tree, const std::string& folder) {
  return std::any_of(tree.begin(), tree.end(),
                     [&](const SourceFile& file) { return HasPrefix(file.path, folder + "/"); });
}

// The text between "## <title>" and the next heading of that level, or "".
std::string Section(const std::string& markdown, const std::string& title) {
  const size_t begin = markdown.find("\n## " + title + "\n");
  if (begin == std::string::npos) return "";
  return markdown.substr(begin + 1, markdown.find("\n## ", begin + 1) - begin - 1);
}

// First words of the lines of the section's first fenced block.
std::vector<std::string> MapEntries(const std::string& section) {
  std::vector<std::string> entries;
  bool inside = false;
  for (const std::string& line : SplitLines(section)) {
    if (HasPrefix(line, "```")) {
      if (inside) break;
      inside = true;
    } else if (inside && !line.empty() && line[0] != ' ') {
      entries.push_back(line.substr(0, line.find(' ')));
    }
  }
  return entries;
}

// "server/core" for "server/core/lane.cc" and for "server/core/x/y.cc"; "proto" for "proto/x.proto".
std::string FolderTwoDeep(const std::string& path) {
  const size_t first = path.find('/');
  if (first == std::string::npos) return "";
  const size_t second = path.find('/', first + 1);
  return path.substr(0, second == std::string::npos ? first : second);
}

// Whether `text` holds `name` as a whole word of a path.
bool Holds(const std::string& text, const std::string& name) {
  static const std::string boundary = " \t\n()\"/";
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    const bool begins = at == 0 || boundary.find(text[at - 1]) != std::string::npos;
    const bool ends = end == text.size() || boundary.find(text[end]) != std::string::npos;
    if (begins && ends) return true;
  }
  return false;
}

// By its path from the root, from anywhere; by its path from a CMakeLists.txt above it; by its name without extension
// in its folder's own, where a function adds the extension.
bool IsNamedIn(const SourceFile& cmake, const std::string& source) {
  const std::string folder = FolderOf(cmake.path);
  if (Holds(cmake.text, source)) return true;
  if (!folder.empty() && !HasPrefix(source, folder + "/")) return false;
  const std::string relative = source.substr(folder.empty() ? 0 : folder.size() + 1);
  const bool is_own = relative.find('/') == std::string::npos;
  return Holds(cmake.text, relative) || (is_own && Holds(cmake.text, relative.substr(0, relative.size() - 3)));
}

}  // namespace

Findings CheckTopLevel(const std::vector<std::string>& names) {
  Findings findings;
  for (const std::string& name : names) {
    if (name[0] == '.' || TopLevel().contains(name)) continue;
    findings.push_back(Finding(kLayoutRule, name, 0, "does not belong at the top level"));
  }
  for (const std::string& name : TopLevel()) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    findings.push_back(Finding(kLayoutRule, name, 0, "is missing at the top level"));
  }
  return findings;
}

std::string MirrorOf(const std::string& source) { return "tests/" + source.substr(0, source.size() - 3) + "_test.cc"; }

Findings CheckMirrors(const std::vector<SourceFile>& tree, const std::map<std::string, std::string>& covered_by) {
  Findings findings;
  for (const SourceFile& file : tree) {
    if (!IsSource(file.path) || HasPrefix(file.path, "tests/")) continue;
    const std::string mirror = MirrorOf(file.path);
    const bool has_mirror = FindFile(tree, mirror) != nullptr;
    const bool has_line = covered_by.contains(file.path);
    if (!has_mirror && !has_line) {
      findings.push_back(Finding(kProofRule, file.path, 0, "has no mirror test " + mirror));
    } else if (has_mirror && has_line) {
      findings.push_back(Finding(kProofRule, file.path, 0, "has its mirror test; its line in CoveredBy can go"));
    }
  }
  for (const auto& [source, test] : covered_by) {
    if (FindFile(tree, source) == nullptr) {
      findings.push_back(Finding(kProofRule, source, 0, "is named in CoveredBy but is not there"));
    }
    if (FindFile(tree, test) == nullptr) {
      findings.push_back(Finding(kProofRule, test, 0, "should cover " + source + " but is not there"));
    }
  }
  return findings;
}

Findings CheckNamedInCMake(const std::vector<SourceFile>& tree) {
  Findings findings;
  for (const SourceFile& file : tree) {
    if (!IsSource(file.path)) continue;
    const bool named = std::any_of(tree.begin(), tree.end(), [&](const SourceFile& other) {
      return BaseName(other.path) == "CMakeLists.txt" && IsNamedIn(other, file.path);
    });
    if (!named)
      findings.push_back(Finding(kProofRule, file.path, 0, "is named in no CMakeLists.txt: it is never built"));
  }
  return findings;
}

Findings CheckReadmeMap(const std::vector<SourceFile>& tree) {
  const SourceFile* readme = FindFile(tree, "README.md");
  if (readme == nullptr) return {Finding(kReadmeRule, "README.md", 0, "is not there")};
  const std::vector<std::string> entries = MapEntries(Section(readme->text, "Map"));
  if (entries.empty()) return {Finding(kReadmeRule, "README.md", 0, "has no fenced map under \"## Map\"")};
  Findings findings;
  std::set<std::string> folders;
  for (const std::string& entry : entries) {
    const std::string folder = HasSuffix(entry, "/") ? entry.substr(0, entry.size() - 1) : entry;
    folders.insert(folder);
    if (!HasFolder(tree, folder) && FindFile(tree, folder) == nullptr) {
      findings.push_back(Finding(kReadmeRule, "README.md", 0, "the map names " + entry + ", which is not there"));
    }
  }
  std::set<std::string> missing;
  for (const SourceFile& file : tree) {
    if (!IsCpp(file.path) && !HasSuffix(file.path, ".proto")) continue;
    if (!folders.contains(FolderTwoDeep(file.path))) missing.insert(FolderTwoDeep(file.path));
  }
  for (const std::string& folder : missing) {
    findings.push_back(Finding(kReadmeRule, "README.md", 0, "the map does not name " + folder + "/"));
  }
  return findings;
}

Findings CheckTestsReadme(const std::vector<SourceFile>& tree) {
  static const std::regex name(R"(`([A-Za-z0-9_./]+_test\.cc)`)");
  const SourceFile* readme = FindFile(tree, "tests/README.md");
  if (readme == nullptr) return {Finding(kReadmeRule, "tests/README.md", 0, "is not there")};
  Findings findings;
  size_t named = 0;
  for (auto it = std::sregex_iterator(readme->text.begin(), readme->text.end(), name); it != std::sregex_iterator();
       ++it) {
    ++named;
    if (FindFile(tree, "tests/" + (*it)[1].str()) != nullptr) continue;
    findings.push_back(Finding(kReadmeRule, "tests/README.md",
                               LineOf(readme->text, static_cast<size_t>(it->position())),
                               "names " + (*it)[1].str() + ", which is not there"));
  }
  if (named == 0) findings.push_back(Finding(kReadmeRule, "tests/README.md", 0, "names no test"));
  return findings;
}

}  // namespace ctkvr::tidy
