// SPDX-License-Identifier: Apache-2.0

#include "tests/tidy/source_tree.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace ctkvr::tidy {
namespace {

namespace fs = std::filesystem;

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

bool IsWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Blanks [begin, end), newlines kept.
void Blank(std::string& text, size_t begin, size_t end) {
  for (size_t i = begin; i < std::min(end, text.size()); ++i) {
    if (text[i] != '\n') text[i] = ' ';
  }
}

// The end of the quoted literal that starts at `begin`.
size_t EndOfLiteral(const std::string& text, size_t begin) {
  const char quote = text[begin];
  size_t i = begin + 1;
  while (i < text.size() && text[i] != quote && text[i] != '\n') i += text[i] == '\\' ? 2 : 1;
  return std::min(i + 1, text.size());
}

// The end of the raw string whose quote is at `begin`, R before it.
size_t EndOfRawString(const std::string& text, size_t begin) {
  const size_t open = text.find('(', begin);
  if (open == std::string::npos) return text.size();
  const std::string close = ")" + text.substr(begin + 1, open - begin - 1) + "\"";
  const size_t end = text.find(close, open);
  return end == std::string::npos ? text.size() : end + close.size();
}

}  // namespace

std::string Finding(const std::string& rule, const std::string& path, size_t line, const std::string& what) {
  std::string where = path;
  if (line > 0) where += ":" + std::to_string(line);
  return rule + ": " + where + ": " + what;
}

std::vector<SourceFile> LoadTree(const std::string& root) {
  std::vector<SourceFile> tree;
  for (auto entry = fs::recursive_directory_iterator(root); entry != fs::recursive_directory_iterator(); ++entry) {
    const std::string path = fs::relative(entry->path(), root).generic_string();
    if (entry->is_directory()) {
      if (path == ".git" || path == "build" || path == ".cache") entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file() || entry->is_symlink()) continue;
    std::string text = ReadFile(entry->path());
    if (text.find('\0') == std::string::npos) tree.push_back({path, std::move(text)});
  }
  std::sort(tree.begin(), tree.end(), [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return tree;
}

std::vector<std::string> TopLevelNames(const std::string& root) {
  const std::vector<std::string> ignored = SplitLines(ReadFile(fs::path(root) / ".gitignore"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    const bool is_ignored = std::any_of(ignored.begin(), ignored.end(), [&](const std::string& line) {
      return line == name || line == "/" + name || line == "/" + name + "/";
    });
    if (!is_ignored) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool HasPrefix(const std::string& text, const std::string& prefix) { return text.starts_with(prefix); }
bool HasSuffix(const std::string& text, const std::string& suffix) { return text.ends_with(suffix); }
bool IsHeader(const std::string& path) { return HasSuffix(path, ".h"); }
bool IsCpp(const std::string& path) { return IsHeader(path) || HasSuffix(path, ".cc"); }

std::string BaseName(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string FolderOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

const SourceFile* FindFile(const std::vector<SourceFile>& tree, const std::string& path) {
  const auto found = std::find_if(tree.begin(), tree.end(), [&](const SourceFile& f) { return f.path == path; });
  return found == tree.end() ? nullptr : &*found;
}

std::vector<std::string> SplitLines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

size_t LineOf(const std::string& text, size_t offset) {
  return 1 + static_cast<size_t>(std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(offset), '\n'));
}

std::string CodeOnly(const std::string& text) {
  std::string code = text;
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (text.compare(i, 2, "//") == 0) {
      end = std::min(text.find('\n', i), text.size());
      Blank(code, i, end);
    } else if (text.compare(i, 2, "/*") == 0) {
      const size_t close = text.find("*/", i + 2);
      end = close == std::string::npos ? text.size() : close + 2;
      Blank(code, i, end);
    } else if (text[i] == '"') {
      end = i > 0 && text[i - 1] == 'R' ? EndOfRawString(text, i) : EndOfLiteral(text, i);
      Blank(code, i, end);
    } else if (text[i] == '\'' && (i == 0 || !IsWord(text[i - 1]))) {  // else a digit separator: 1'000
      end = EndOfLiteral(text, i);
      Blank(code, i, end);
    }
    i = end;
  }
  return code;
}

}  // namespace ctkvr::tidy
