// SPDX-License-Identifier: Apache-2.0

#include "server/obs/ready_file.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "nlohmann/json.hpp"

namespace ctkvr::obs {

absl::Status WriteReadyFile(const std::string& path, const ReadyFacts& facts) {
  if (path.empty()) return absl::OkStatus();
  const nlohmann::json content = {{"listen_address", facts.listen_address},
                                  {"metrics_address", facts.metrics_address},
                                  {"boot_id", std::to_string(facts.boot_id)},  // 64 bits do not fit a JSON number
                                  {"pid", getpid()}};
  const std::string draft = path + "." + std::to_string(getpid());
  std::ofstream file(draft);
  file << content.dump() << "\n";
  file.close();
  if (file && std::rename(draft.c_str(), path.c_str()) == 0) return absl::OkStatus();
  std::remove(draft.c_str());
  return absl::UnavailableError("ready_file is " + path + "; cannot write there");
}

}  // namespace ctkvr::obs
