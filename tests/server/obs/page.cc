// SPDX-License-Identifier: Apache-2.0

#include "tests/server/obs/page.h"

#include <cstdlib>
#include <limits>
#include <sstream>

namespace ctkvr::testing {

std::map<std::string, double> ParsePage(const std::string& text) {
  std::map<std::string, double> series;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t blank = line.rfind(' ');
    if (line.empty() || line[0] == '#' || blank == std::string::npos) continue;
    series[line.substr(0, blank)] = std::strtod(line.c_str() + blank, nullptr);
  }
  return series;
}

double ValueOf(const std::string& text, const std::string& series) {
  const auto page = ParsePage(text);
  const auto found = page.find(series);
  return found == page.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

}  // namespace ctkvr::testing
