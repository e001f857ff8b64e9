// SPDX-License-Identifier: Apache-2.0

#include "tests/tidy/size_rules.h"

#include <algorithm>
#include <regex>

namespace ctkvr::tidy {
namespace {

const char kRule[] = "rule 9, small by number";

std::string Trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

// Preprocessor lines, with their continuations, as blanks: macros may hold unbalanced braces.
std::string WithoutPreprocessor(std::string code) {
  bool in_directive = false;
  for (size_t begin = 0; begin < code.size();) {
    const size_t end = std::min(code.find('\n', begin), code.size());
    const size_t first = code.find_first_not_of(" \t", begin);
    in_directive = in_directive || (first < end && code[first] == '#');
    const bool goes_on = end > begin && code[end - 1] == '\\';
    if (in_directive)
      std::fill(code.begin() + static_cast<ptrdiff_t>(begin), code.begin() + static_cast<ptrdiff_t>(end), ' ');
    in_directive = in_directive && goes_on;
    begin = end + 1;
  }
  return code;
}

bool OpensScope(const std::string& head) {
  static const std::regex pattern(
      R"(^(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum|extern)\b[^]*)");
  return std::regex_match(head, pattern);
}

// Reads code outside functions; bodies are skipped as soon as they are found.
class FunctionFinder {
 public:
  explicit FunctionFinder(const std::string& text) : code_(WithoutPreprocessor(CodeOnly(text))) {}

  std::vector<Function> Run() {
    for (size_t i = 0; i < code_.size(); ++i) {
      const char c = code_[i];
      if (c == '(') ++parentheses_;
      if (c == ')') --parentheses_;
      if (c == '{') i = OpenBrace(i);
      if ((c == ';' && parentheses_ == 0) || c == '}') head_begin_ = i + 1;
    }
    return std::move(functions_);
  }

 private:
  // Returns the offset to go on after.
  size_t OpenBrace(size_t at) {
    const std::string head = Trim(code_.substr(head_begin_, at - head_begin_));
    if (parentheses_ == 0 && OpensScope(head)) {
      head_begin_ = at + 1;
      return at;
    }
    const size_t close = ClosingBrace(at);
    const size_t next = std::min(code_.find_first_not_of(" \t\n", close + 1), code_.size() - 1);
    // A brace inside a head: a default argument, or a member initialiser before the body.
    const bool head_goes_on = parentheses_ > 0 || code_[next] == ',' || code_[next] == '{';
    if (head_goes_on) return close;
    if (head.find('(') != std::string::npos) AddFunction(head, close);
    head_begin_ = close + 1;
    return close;
  }

  size_t ClosingBrace(size_t at) const {
    int depth = 0;
    for (size_t i = at; i < code_.size(); ++i) {
      if (code_[i] == '{') ++depth;
      if (code_[i] == '}' && --depth == 0) return i;
    }
    return code_.size() - 1;
  }

  void AddFunction(const std::string& head, size_t close) {
    const size_t begin = code_.find_first_not_of(" \t\n", head_begin_);
    const size_t first = LineOf(code_, begin);
    functions_.push_back({head.substr(0, head.find('\n')), first, LineOf(code_, close) - first + 1});
  }

  const std::string code_;
  size_t head_begin_ = 0;
  int parentheses_ = 0;
  std::vector<Function> functions_;
};

// Characters, not bytes: continuation bytes of UTF-8 are not counted.
size_t Columns(const std::string& line) {
  return static_cast<size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

std::vector<Function> FindFunctions(const std::string& text) { return FunctionFinder(text).Run(); }

Findings CheckSizes(const std::vector<SourceFile>& tree) {
  Findings findings;
  for (const SourceFile& file : tree) {
    if (!IsCpp(file.path)) continue;
    const std::vector<std::string> lines = SplitLines(file.text);
    const size_t limit = IsHeader(file.path) ? kHeaderLinesMax : kSourceLinesMax;
    if (lines.size() > limit) {
      findings.push_back(
          Finding(kRule, file.path, 0,
                  "has " + std::to_string(lines.size()) + " lines; the limit is " + std::to_string(limit)));
    }
    for (size_t i = 0; i < lines.size(); ++i) {
      if (Columns(lines[i]) <= kColumnsMax) continue;
      findings.push_back(Finding(
          kRule, file.path, i + 1,
          "has " + std::to_string(Columns(lines[i])) + " columns; the limit is " + std::to_string(kColumnsMax)));
    }
    for (const Function& function : FindFunctions(file.text)) {
      if (function.lines <= kFunctionLinesMax) continue;
      findings.push_back(Finding(kRule, file.path, function.first_line,
                                 "`" + function.head + "` has " + std::to_string(function.lines) +
                                     " lines; the limit is " + std::to_string(kFunctionLinesMax)));
    }
  }
  return findings;
}

}  // namespace ctkvr::tidy
