// SPDX-License-Identifier: Apache-2.0
//
// Proves that the file holds what a script needs, replaces an old one whole, leaves nothing behind when it cannot be
// written, and is not written at all without a path.

#include "server/obs/ready_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "nlohmann/json.hpp"

namespace ctkvr::obs {
namespace {

class ReadyFileTest : public ::testing::Test {
 protected:
  ReadyFileTest() : folder_(::testing::TempDir() + "ready_file_test." + std::to_string(getpid())) {
    std::filesystem::create_directory(folder_);
  }
  ~ReadyFileTest() override { std::filesystem::remove_all(folder_); }
  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }
  const std::string folder_;
};

TEST_F(ReadyFileTest, HoldsAddressesBootIdAndProcess) {
  const std::string path = folder_ + "/ready.json";
  ASSERT_TRUE(WriteReadyFile(path, {"127.0.0.1:1", "127.0.0.1:2", 18446744073709551615u}).ok());
  const auto content = nlohmann::json::parse(std::ifstream(path));
  EXPECT_EQ(content.at("listen_address"), "127.0.0.1:1");
  EXPECT_EQ(content.at("metrics_address"), "127.0.0.1:2");
  EXPECT_EQ(content.at("boot_id"), "18446744073709551615");
  EXPECT_EQ(content.at("pid"), getpid());
  EXPECT_EQ(FilesInFolder(), 1u);
}

TEST_F(ReadyFileTest, ReplacesAnOldFile) {
  const std::string path = folder_ + "/ready.json";
  std::ofstream(path) << std::string(10000, 'x');
  ASSERT_TRUE(WriteReadyFile(path, {"127.0.0.1:1", "", 1}).ok());
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path)).at("metrics_address"), "");
}

TEST_F(ReadyFileTest, AFolderThatIsNotThereIsAnErrorThatNamesThePath) {
  const std::string path = folder_ + "/nowhere/ready.json";
  const absl::Status status = WriteReadyFile(path, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path));
}

TEST_F(ReadyFileTest, ATargetThatCannotBeReplacedLeavesNoDraft) {
  const std::string path = folder_ + "/taken";
  std::filesystem::create_directory(path);
  EXPECT_FALSE(WriteReadyFile(path, {}).ok());
  EXPECT_EQ(FilesInFolder(), 1u);
}

TEST_F(ReadyFileTest, NoPathWritesNothing) {
  ASSERT_TRUE(WriteReadyFile("", {}).ok());
  EXPECT_EQ(FilesInFolder(), 0u);
}

}  // namespace
}  // namespace ctkvr::obs
