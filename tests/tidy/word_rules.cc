// SPDX-License-Identifier: Apache-2.0

#include "tests/tidy/word_rules.h"

#include <algorithm>
#include <regex>

namespace ctkvr::tidy {
namespace {

const char kSpdx[] = "// SPDX-License-Identifier: Apache-2.0";

// Where a word is looked for: C++ text without comments and literals, or any text of the repository.
enum class Look { kCode, kText };

struct Word {
  std::string rule;
  std::string pattern;  // ECMAScript
  Look look;
  std::vector<std::string> where;   // path prefixes; empty: everywhere
  std::vector<std::string> except;  // path prefixes
  std::string advice;
};

// What the core keeps free of: owners in common, output, clocks, other rooms' libraries.
const std::vector<Word>& CodeWords() {
  static const auto* const words = new std::vector<Word>{
      {"rule 8, one owner",
       R"(\b(shared_ptr|make_shared|enable_shared_from_this)\b)",
       Look::kCode,
       {"kernels/", "server/core/"},
       {},
       "give it one owner: std::unique_ptr"},
      {"rule 8, one owner",
       R"(\babsl::(Mutex|MutexLock|Notification|CondVar|BlockingCounter)\b)",
       Look::kCode,
       {},
       {},
       "use std::mutex: ThreadSanitizer cannot see into Abseil's"},
      {"rule 2, the core is silent",
       R"(\bstd::(endl|cout|cerr|clog)\b)",
       Look::kCode,
       {"kernels/", "server/core/"},
       {},
       "the core does not print; return a Status"},
      {"rule 2, the core is silent",
       R"(\b(printf|fprintf|puts|getenv)\b)",
       Look::kCode,
       {"kernels/", "server/core/"},
       {"kernels/base/check.h"},
       "the core neither prints nor reads the environment"},
      {"rule 2, the core is silent",
       R"(_clock::now\b)",
       Look::kCode,
       {"kernels/", "server/core/"},
       {"server/core/clock.h"},
       "take the time from Clock"},
      {"rule 9, words", R"(\bstd::endl\b)", Look::kCode, {}, {}, "write '\\n'"},
      {"rule 6, two kinds of errors",
       R"(\bthrow\b)",
       Look::kCode,
       {"kernels/", "server/", "client/"},
       {},
       "return an absl::Status"},
      {"rule 2, gRPC at the edge",
       R"(\b(grpc|grpc_core|google::protobuf|google::rpc)::)",
       Look::kCode,
       {"kernels/", "server/"},
       {"server/embedded/", "server/rpc/"},
       "gRPC and Protobuf names belong in server/rpc, server/embedded and client"},
      {"rule 2, logs and metrics at the edge",
       R"(\b(spdlog|prometheus)::)",
       Look::kCode,
       {"kernels/", "server/"},
       {"server/obs/"},
       "logging and metrics belong in server/obs"},
      {"rule 10, proof without luck",
       R"(\bstd::random_device\b|\bs?rand\s*\()",
       Look::kCode,
       {"tests/"},
       {},
       "take the seed from CTKVR_TEST_SEED and print it"},
  };
  return *words;
}

// What no file of the repository says.
const std::vector<Word>& TextWords() {
  static const auto* const words = new std::vector<Word>{
      {"rule 9, nothing left for later", R"(\b(TODO|FIXME|XXX|HACK)\b)", Look::kText, {}, {}, "do it, or leave it out"},
      {"no path of one machine",
       R"((^|[\s"'=(`])/(work|tmp|home|root)/|\.\./shared)",
       Look::kText,
       {},
       {},
       "use a relative path, or mktemp"},
      {"no registry by name",
       R"((pypi\.org|pythonhosted\.org|npmjs\.org|deb\.debian\.org|ftp\.debian\.org|snapshot\.debian\.org|crates\.io|)"
       R"(proxy\.golang\.org|docker\.io|ghcr\.io|quay\.io|nvcr\.io|huggingface\.co|conda\.anaconda\.org))",
       Look::kText,
       {},
       {},
       "the machine's own settings name the registry"},
      {"sources by name", R"(\bfile\s*\(\s*GLOB)", Look::kText, {}, {}, "list the files"},
  };
  return *words;
}

bool HasAnyPrefix(const std::string& path, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const std::string& prefix) { return HasPrefix(path, prefix); });
}

bool Applies(const Word& word, const std::string& path) {
  if (HasPrefix(path, "tests/tidy/") || HasAnyPrefix(path, word.except)) return false;
  if (word.look == Look::kCode && !IsCpp(path)) return false;
  return word.where.empty() || HasAnyPrefix(path, word.where);
}

void CheckWord(const Word& word, const SourceFile& file, const std::string& code, Findings& findings) {
  if (!Applies(word, file.path)) return;
  const std::regex pattern(word.pattern);
  const std::vector<std::string> lines = SplitLines(word.look == Look::kCode ? code : file.text);
  for (size_t i = 0; i < lines.size(); ++i) {
    std::smatch match;
    if (!std::regex_search(lines[i], match, pattern)) continue;
    findings.push_back(Finding(word.rule, file.path, i + 1, "\"" + match.str() + "\": " + word.advice));
  }
}

}  // namespace

Findings CheckWords(const std::vector<SourceFile>& tree) {
  static const std::regex using_namespace(R"(\busing\s+namespace\b)");
  Findings findings;
  for (const SourceFile& file : tree) {
    const std::string code = IsCpp(file.path) ? CodeOnly(file.text) : "";
    for (const Word& word : CodeWords()) CheckWord(word, file, code, findings);
    for (const Word& word : TextWords()) CheckWord(word, file, code, findings);
    if (IsHeader(file.path) && std::regex_search(code, using_namespace)) {
      findings.push_back(Finding("rule 3, the header is the contract", file.path, 0,
                                 "\"using namespace\" in a header reaches every file that includes it"));
    }
  }
  return findings;
}

Findings CheckFileHeads(const std::vector<SourceFile>& tree) {
  static const std::regex other_cpp(R"(.*\.(hpp|hh|hxx|cpp|cxx|c|inc|inl|ipp))");
  const std::string rule = "rule 3, the header is the contract";
  Findings findings;
  for (const SourceFile& file : tree) {
    if (std::regex_match(file.path, other_cpp)) {
      findings.push_back(Finding(rule, file.path, 0, "C++ files are named .h or .cc"));
    }
    if (!IsCpp(file.path)) continue;
    const std::vector<std::string> lines = SplitLines(file.text);
    if (lines.empty() || lines[0] != kSpdx) {
      findings.push_back(Finding(rule, file.path, 1, std::string("the first line is not \"") + kSpdx + "\""));
    }
    if (!IsHeader(file.path)) continue;
    if (lines.size() < 3 || lines[1] != "//" || !HasPrefix(lines[2], "// ")) {
      findings.push_back(Finding(rule, file.path, 2, "no header comment: purpose, thread-safety, units, errors"));
    }
    if (std::find(lines.begin(), lines.end(), "#pragma once") == lines.end()) {
      findings.push_back(Finding(rule, file.path, 0, "no #pragma once"));
    }
  }
  return findings;
}

Findings CheckContracts(const std::vector<SourceFile>& tree) {
  static const std::vector<std::string> contracts = {"client/include/", "server/core/engine.h", "kernels/ops.h",
                                                     "kernels/formats.h"};
  Findings findings;
  for (const SourceFile& file : tree) {
    if (!IsHeader(file.path) || !HasAnyPrefix(file.path, contracts)) continue;
    size_t lines = 0;
    size_t comments = 0;
    for (const std::string& line : SplitLines(file.text)) {
      lines += line.empty() ? 0 : 1;
      comments += line.find("//") == std::string::npos ? 0 : 1;
    }
    if (3 * comments >= lines) continue;
    findings.push_back(Finding("rule 3, the header is the contract", file.path, 0,
                               std::to_string(comments) + " of " + std::to_string(lines) +
                                   " lines carry a comment; a contract needs a third"));
  }
  return findings;
}

}  // namespace ctkvr::tidy
