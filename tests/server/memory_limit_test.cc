// SPDX-License-Identifier: Apache-2.0
//
// Proves where the memory limit is read from, in file systems made for it (cgroups of both versions, containers,
// neither), and what of it sessions get.

#include "server/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kMebi = uint64_t{1} << 20;
constexpr uint64_t kGibi = uint64_t{1} << 30;

class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() : root_(::testing::TempDir() + "memory_limit_test." + std::to_string(getpid())) {
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1 kB\n");  // 16 GiB
  }
  ~MemoryLimitTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void ExpectLimit(uint64_t bytes, const std::string& file) {
    const MemoryLimit limit = ReadMemoryLimit(root_);
    EXPECT_EQ(limit.bytes, bytes);
    EXPECT_EQ(limit.cgroup_file, file);
  }

  const std::filesystem::path root_;
};

TEST_F(MemoryLimitTest, WithoutACgroupItIsTheMachines) { ExpectLimit(16 * kGibi, ""); }

TEST_F(MemoryLimitTest, InAContainerOfVersion2ItStandsAtTheTop) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "4294967296\n");
  ExpectLimit(4 * kGibi, "/sys/fs/cgroup/memory.max");
}

TEST_F(MemoryLimitTest, OfNestedGroupsTheLeastCounts) {
  Write("proc/self/cgroup", "0::/system.slice/ctkvrd.service\n");
  Write("sys/fs/cgroup/system.slice/ctkvrd.service/memory.max", "8589934592\n");
  ExpectLimit(8 * kGibi, "/sys/fs/cgroup/system.slice/ctkvrd.service/memory.max");
  Write("sys/fs/cgroup/system.slice/memory.max", "2147483648\n");
  ExpectLimit(2 * kGibi, "/sys/fs/cgroup/system.slice/memory.max");
}

TEST_F(MemoryLimitTest, Version1HasItsOwnHierarchyAndFile) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n1:name=systemd:/x\n");
  Write("sys/fs/cgroup/memory/other/memory.limit_in_bytes", "1048576\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "3221225472\n");
  ExpectLimit(3 * kGibi, "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes");
}

// The path is the host's, which the container does not see.
TEST_F(MemoryLimitTest, InAContainerOfVersion1ItStandsAtTheTop) {
  Write("proc/self/cgroup", "4:memory:/docker/abc\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3221225472\n");
  ExpectLimit(3 * kGibi, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
}

TEST_F(MemoryLimitTest, NoLimitAndOneAboveTheMachinesAreNone) {
  Write("proc/self/cgroup", "4:memory:/\n0::/a\n");
  Write("sys/fs/cgroup/a/memory.max", "max\n");
  Write("sys/fs/cgroup/memory.max", "17179869185\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  ExpectLimit(16 * kGibi, "");
}

TEST_F(MemoryLimitTest, FilesThatMakeNoSenseAreNone) {
  Write("proc/self/cgroup", "\n0\n0:\nmemory\n0::/\n");
  Write("sys/fs/cgroup/memory.max", "");
  ExpectLimit(16 * kGibi, "");
}

TEST_F(MemoryLimitTest, ThisMachineHasSome) { EXPECT_GT(ReadMemoryLimit().bytes, 64 * kMebi); }

TEST_F(MemoryLimitTest, TheArenaIsWhatACgroupLeaves) {
  const MemoryLimit limit{.bytes = 52 * kGibi, .cgroup_file = "/sys/fs/cgroup/memory.max"};
  const MemoryUse use{.lanes = 8, .scratch_bytes = 256 * kMebi};
  const auto arena = DeriveArenaBytes(limit, use, kMebi);
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(*arena, 48 * kGibi);
  EXPECT_EQ(*arena + BesideArenaBytes(use), limit.bytes);
  const auto recording = DeriveArenaBytes(limit, {.lanes = 8, .scratch_bytes = 256 * kMebi, .record_bytes = kGibi}, 1);
  ASSERT_TRUE(recording.ok());
  EXPECT_EQ(*recording, 47 * kGibi);
}

TEST_F(MemoryLimitTest, OfAMachineThatIsSharedAnEighthIsLeft) {
  const auto arena =
      DeriveArenaBytes({.bytes = 16 * kGibi, .cgroup_file = ""}, {.lanes = 4, .scratch_bytes = kGibi}, 1);
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ(*arena, (16 - 2 - 4 - 2) * kGibi);
}

TEST_F(MemoryLimitTest, WhatCannotBeHadIsRefusedWithBothFigures) {
  const MemoryUse use{.lanes = 2, .scratch_bytes = 256 * kMebi};
  const MemoryLimit least{.bytes = 2560 * kMebi + kMebi, .cgroup_file = "/f"};
  EXPECT_EQ(DeriveArenaBytes(least, use, kMebi).value(), kMebi);
  const auto refused = DeriveArenaBytes({.bytes = least.bytes - 1, .cgroup_file = "/f"}, use, kMebi);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr(std::to_string(least.bytes - 1) + " (cgroup limit, /f)"), HasSubstr("2560MiB"),
                    HasSubstr("256MiB of scratch for each of 2 lanes")));
}

TEST_F(MemoryLimitTest, AnArenaThatIsAskedForMustFitBesideScratch) {
  const MemoryLimit limit{.bytes = 4 * kGibi, .cgroup_file = ""};
  const MemoryUse use{.lanes = 4, .scratch_bytes = 256 * kMebi};
  EXPECT_TRUE(CheckArenaBytes(3 * kGibi, limit, use).ok());
  const absl::Status refused = CheckArenaBytes(3 * kGibi + 1, limit, use);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("arena_bytes is 3221225473"), HasSubstr("1GiB of scratch_bytes for 4 lanes"),
                    HasSubstr("4GiB (physical memory)")));
  EXPECT_FALSE(CheckArenaBytes(1, limit, {.lanes = 5, .scratch_bytes = kGibi}).ok());
}

}  // namespace
}  // namespace ctkvr
