// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/machine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <regex>
#include <sstream>

namespace ctkvr::bench {
namespace {

// The first line of /proc/cpuinfo that begins with `key`, its value.
std::string CpuInfo(const std::string& key) {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key)) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return "unknown";
}

std::string VectorFlags() {
  static const std::regex wanted("avx2|fma|f16c|avx512.*|avx_vnni|amx.*|sse4_2");
  std::istringstream in(CpuInfo("flags"));
  std::string found;
  for (std::string flag; in >> flag;) {
    if (std::regex_match(flag, wanted)) found += (found.empty() ? "" : " ") + flag;
  }
  return found;
}

std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  char buffer[256];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
  pclose(pipe);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

std::string Commit() {
  const std::string git = std::string("git -C '") + CTKVR_SOURCE_DIR + "' ";
  const std::string id = OutputOf(git + "rev-parse --short=12 HEAD 2>/dev/null");
  if (id.empty()) return "unknown (not a git checkout)";
  const bool changed = !OutputOf(git + "status --porcelain 2>/dev/null").empty();
  return id + (changed ? " with uncommitted changes" : "");
}

std::string CacheMegabytes(int name) {
  std::ostringstream out;
  out << static_cast<double>(sysconf(name)) / (1 << 20) << " MiB";
  return out.str();
}

}  // namespace

std::string DescribeMachine() {
  std::ostringstream out;
  out << "machine: " << CpuInfo("model name") << ", family " << CpuInfo("cpu family") << " model " << CpuInfo("model\t")
      << ", " << sysconf(_SC_NPROCESSORS_ONLN) << " cores, L2 " << CacheMegabytes(_SC_LEVEL2_CACHE_SIZE) << ", L3 "
      << CacheMegabytes(_SC_LEVEL3_CACHE_SIZE) << "\n"
      << "flags: " << VectorFlags() << "\n"
      << "compiler: g++ " << __VERSION__ << ", " << CTKVR_BUILD << "\n"
      << "commit: " << Commit();
  return out.str();
}

uint64_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  in >> total >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace ctkvr::bench
