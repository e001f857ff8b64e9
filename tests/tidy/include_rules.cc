// SPDX-License-Identifier: Apache-2.0

#include "tests/tidy/include_rules.h"

#include <algorithm>
#include <regex>

namespace ctkvr::tidy {
namespace {

const char kRule[] = "rule 1, arrows go one way";

// Other people's headers, by prefix. "std" stands for <name> without slash and dot; "posix" for the system's.
const char kStd[] = "std";
const char kPosix[] = "posix";

struct Room {
  std::string name;
  std::vector<std::string> paths;   // prefixes of the files that live here
  std::vector<std::string> ours;    // prefixes of ours they may include
  std::vector<std::string> others;  // prefixes of other people's
};

// A room's files are those of the first line whose prefix matches, so narrower lines come first.
const std::vector<Room>& Rooms() {
  static const auto* const rooms = new std::vector<Room>{
      {"kernels/base", {"kernels/base/"}, {"kernels/base/"}, {kStd, "fp16.h"}},
      // Read by device compilers too: nothing but the standard library.
      {"kernels",
       {"kernels/ops.h", "kernels/attention_ops.h", "kernels/formats.h", "kernels/head_view.h", "kernels/list_ops.h",
        "kernels/packed_list.h", "kernels/rank_policy.h", "kernels/sketch_order.h"},
       {"kernels/base/dtype.h", "kernels/formats.h", "kernels/head_view.h", "kernels/ops.h", "kernels/packed_list.h",
        "kernels/rank_policy.h", "kernels/sketch_order.h"},
       {kStd}},
      {"kernels/cpu", {"kernels/cpu/"}, {"kernels/"}, {kStd, kPosix, "absl/", "immintrin.h", "fp16.h", "simde/"}},
      {"kernels", {"kernels/"}, {"kernels/base/", "kernels/*.h"}, {kStd, "absl/"}},
      {"server/core", {"server/core/"}, {"kernels/base/", "kernels/*.h", "server/core/"}, {kStd, "absl/", "xxhash.h"}},
      {"server/obs",
       {"server/obs/"},
       {"kernels/base/", "kernels/*.h", "server/core/", "server/obs/"},
       {kStd, kPosix, "absl/", "spdlog/", "fmt/", "nlohmann/", "prometheus/"}},
      {"server/rpc/codec",
       {"server/rpc/codec", "server/rpc/field_path.h"},
       {"kernels/base/", "kernels/*.h", "server/core/", "server/rpc/codec", "server/rpc/field_path.h", "ctkvr/v1/",
        "google/rpc/"},
       {kStd, "absl/", "google/protobuf/", "xxhash.h"}},
      {"server/rpc",
       {"server/rpc/"},
       {"kernels/base/", "kernels/*.h", "server/core/", "server/obs/", "server/rpc/", "ctkvr/v1/", "google/rpc/"},
       {kStd, kPosix, "absl/", "grpc/", "grpcpp/", "google/protobuf/", "xxhash.h"}},
      {"server/embedded",
       {"server/embedded/"},
       {"kernels/backend.h", "kernels/backend_registry.h", "kernels/base/", "server/core/", "server/embedded/",
        "server/engine_options.h", "server/rpc/codec", "ctkvr/v1/"},
       {kStd, "absl/", "google/protobuf/"}},
      {"server/settings",
       {"server/engine_options", "server/memory_limit", "server/settings"},
       {"kernels/base/", "server/core/", "server/engine_options.h", "server/memory_limit.h", "server/settings.h"},
       {kStd, kPosix, "absl/"}},
      {"server",
       {"server/"},
       {"kernels/backend.h", "kernels/backend_registry.h", "kernels/base/", "server/"},
       {kStd, kPosix, "absl/", "nlohmann/"}},
      {"client/examples", {"client/examples/"}, {"ctkvr/client/"}, {kStd, "absl/"}},
      {"client/cli",
       {"client/cli/"},
       {"client/cli/", "ctkvr/client/", "ctkvr/v1/"},
       {kStd, kPosix, "absl/", "CLI/", "nlohmann/", "fmt/", "fp16.h", "google/protobuf/"}},
      {"client/python",
       {"client/python/"},
       {"server/embedded/", "server/rpc/codec_status.h"},
       {kStd, kPosix, "nanobind/"}},
      {"client",
       {"client/include/", "client/src/"},
       {"client/include/", "client/src/", "ctkvr/client/", "ctkvr/v1/", "google/rpc/"},
       {kStd, kPosix, "absl/", "grpc/", "grpcpp/", "google/protobuf/", "xxhash.h", "fp16.h"}},
  };
  return *rooms;
}

// What one file may include beyond its room's line, and why.
struct Exception {
  std::string file;
  std::string include;  // prefix
};
const std::vector<Exception>& Exceptions() {
  static const auto* const exceptions = new std::vector<Exception>{
      {"kernels/backend_registry.cc", "kernels/cpu/"},    // the one place that names implementations
      {"kernels/base/half_steps.h", "immintrin.h"},       // one conversion, by instruction where there is one
      {"kernels/base/status_macros.h", "absl/status/"},   // the macros are about absl::Status
      {"client/cli/credentials.cc", "grpcpp/security/"},  // the CLI's way in; all else goes through the client
      {"client/cli/size.cc", "server/core/"},             // the formula of a session's memory: there is one
      {"server/settings.cc", "toml++/"},                  // the places that know what files are made of
      {"server/access_file.cc", "toml++/"},
      {"server/rpc/access.cc", "openssl/"},  // digests of tokens
      {"client/cli/token.cc", "openssl/"},   // a token and its digest
  };
  return *exceptions;
}

bool IsPosix(const std::string& include) {
  static const std::regex pattern(R"((sys|arpa|netinet|linux)/.*|[a-z]+\.h)");
  return std::regex_match(include, pattern) && include != "xxhash.h" && include != "fp16.h" && include != "immintrin.h";
}

// "kernels/*.h" is a header right in that folder; anything else is a prefix.
bool Matches(const std::string& include, const std::string& pattern) {
  const size_t star = pattern.find('*');
  if (star == std::string::npos) return HasPrefix(include, pattern);
  const std::string folder = pattern.substr(0, star);
  return HasPrefix(include, folder) && HasSuffix(include, ".h") &&
         include.find('/', folder.size()) == std::string::npos;
}

bool IsExcepted(const std::string& file, const std::string& include) {
  return std::any_of(Exceptions().begin(), Exceptions().end(), [&](const Exception& exception) {
    return exception.file == file && HasPrefix(include, exception.include);
  });
}

const Room* FindRoom(const std::string& path) {
  for (const Room& room : Rooms()) {
    for (const std::string& prefix : room.paths) {
      if (HasPrefix(path, prefix)) return &room;
    }
  }
  return nullptr;
}

bool MayInclude(const Room& room, const std::string& include) {
  const auto matches = [&](const std::string& pattern) { return Matches(include, pattern); };
  if (!RoomOfInclude(include).empty()) return std::any_of(room.ours.begin(), room.ours.end(), matches);
  return std::any_of(room.others.begin(), room.others.end(), [&](const std::string& pattern) {
    if (pattern == kStd) return include.find_first_of("/.") == std::string::npos;
    if (pattern == kPosix) return IsPosix(include);
    return Matches(include, pattern);
  });
}

bool IsPublicName(const std::string& include) {
  return HasPrefix(include, "ctkvr/") || HasPrefix(include, "google/rpc/");
}

// What is wrong with an include wherever it stands.
std::string PathFault(const std::vector<SourceFile>& tree, const Include& include) {
  if (include.path.find("..") != std::string::npos) return "goes up a folder; include from the repository's root";
  if (!include.quoted || IsPublicName(include.path)) return "";
  if (RoomOfInclude(include.path).empty() && !HasPrefix(include.path, "tests/")) {
    // Other people's headers are quoted as well; they have no file here.
    if (include.path.find('/') != std::string::npos || HasSuffix(include.path, "16.h") || include.path == "xxhash.h") {
      return "";
    }
    return "is not a path from the repository's root";
  }
  return FindFile(tree, include.path) == nullptr ? "does not exist" : "";
}

}  // namespace

std::vector<Include> ReadIncludes(const std::string& text) {
  static const std::regex pattern(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
  std::vector<Include> includes;
  const std::vector<std::string> lines = SplitLines(text);
  const std::vector<std::string> code = SplitLines(CodeOnly(text));
  for (size_t i = 0; i < lines.size(); ++i) {
    std::smatch match;
    if (code[i].find('#') == std::string::npos || !std::regex_match(lines[i], match, pattern)) continue;
    includes.push_back({match[2], match[1] == "\"", i + 1});
  }
  return includes;
}

std::string RoomOf(const std::string& path) {
  if (HasPrefix(path, "tests/")) return "tests";
  const Room* room = FindRoom(path);
  return room == nullptr ? "" : room->name;
}

std::string RoomOfInclude(const std::string& include) {
  if (HasPrefix(include, "ctkvr/client/")) return "client";
  if (IsPublicName(include)) return "proto";
  return RoomOf(include);
}

Findings CheckIncludes(const std::vector<SourceFile>& tree) {
  Findings findings;
  for (const SourceFile& file : tree) {
    if (!IsCpp(file.path)) continue;
    const Room* room = FindRoom(file.path);
    const bool is_test = HasPrefix(file.path, "tests/");
    if (room == nullptr && !is_test) {
      findings.push_back(Finding(kRule, file.path, 0, "lies in no room of the table in tests/tidy/include_rules.cc"));
      continue;
    }
    for (const Include& include : ReadIncludes(file.text)) {
      if (const std::string fault = PathFault(tree, include); !fault.empty()) {
        findings.push_back(Finding(kRule, file.path, include.line, "\"" + include.path + "\" " + fault));
      } else if (!is_test && !MayInclude(*room, include.path) && !IsExcepted(file.path, include.path)) {
        findings.push_back(
            Finding(kRule, file.path, include.line, room->name + " may not include \"" + include.path + "\""));
      }
    }
  }
  return findings;
}

std::vector<std::string> FindCycle(const std::map<std::string, std::set<std::string>>& arrows) {
  // Leaves that lead nowhere are taken off until nothing changes; what stays lies on a cycle or leads to one.
  std::map<std::string, std::set<std::string>> left = arrows;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = left.begin(); it != left.end();) {
      std::erase_if(it->second, [&](const std::string& to) { return !left.contains(to); });
      if (it->second.empty()) {
        it = left.erase(it);
        changed = true;
      } else {
        ++it;
      }
    }
  }
  if (left.empty()) return {};
  std::vector<std::string> walk = {left.begin()->first};
  while (true) {
    const std::string& next = *left.at(walk.back()).begin();
    const auto seen = std::find(walk.begin(), walk.end(), next);
    if (seen != walk.end()) {
      std::vector<std::string> cycle(seen, walk.end());
      cycle.push_back(cycle.front());
      return cycle;
    }
    walk.push_back(next);
  }
}

Findings CheckRoomCycles(const std::vector<SourceFile>& tree) {
  std::map<std::string, std::set<std::string>> arrows;
  for (const SourceFile& file : tree) {
    const std::string from = RoomOf(file.path);
    if (!IsCpp(file.path) || from.empty()) continue;
    for (const Include& include : ReadIncludes(file.text)) {
      const std::string to = RoomOfInclude(include.path);
      if (!to.empty() && to != from && !IsExcepted(file.path, include.path)) arrows[from].insert(to);
    }
  }
  const std::vector<std::string> cycle = FindCycle(arrows);
  if (cycle.empty()) return {};
  std::string text;
  for (const std::string& room : cycle) text += (text.empty() ? "" : " -> ") + room;
  return {Finding(kRule, cycle.front(), 0, "a cycle between rooms: " + text)};
}

}  // namespace ctkvr::tidy
