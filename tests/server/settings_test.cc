// SPDX-License-Identifier: Apache-2.0
//
// Proves the table of settings: every row takes its limits and nothing beyond, files are read with types, unknown keys
// are refused with the nearest known one, and what is printed is read back to the same values.

#include "server/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "server/memory_limit.h"

namespace ctkvr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SettingsTest : public ::testing::Test {
 protected:
  ~SettingsTest() override { std::filesystem::remove(path_); }

  std::string Write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  Values Read(const std::string& text) {
    ValueTable table;
    const absl::Status status = table.ReadFile(Write(text));
    EXPECT_TRUE(status.ok()) << status << "\n" << text;
    return table.values();
  }
  std::string Refusal(const std::string& text) {
    ValueTable table;
    const absl::Status status = table.ReadFile(Write(text));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(status.message());
  }

  const std::string path_ = ::testing::TempDir() + "settings_test." + std::to_string(getpid()) + ".toml";
};

// A value of the row's type that is not its default, as a flag gives it and as the file does.
std::pair<std::string, std::string> Other(const Setting& setting) {
  if (setting.is_bool()) {
    const char* other = std::string(setting.default_text) == "true" ? "false" : "true";
    return {other, other};
  }
  if (setting.is_share()) return {"0.25", "0.25"};
  if (setting.is_size) return {"3MiB", "\"3MiB\""};
  if (std::holds_alternative<uint64_t Values::*>(setting.field)) return {"7", "7"};
  const std::string name = setting.names.empty() ? "o \"t\\her" : setting.names.back();
  return {name, setting.names.empty() ? "'" + name + "'" : "\"" + name + "\""};
}

TEST_F(SettingsTest, NamesAreDifferentAndHaveAUnitAndAHelp) {
  std::set<std::string> names;
  for (const Setting& setting : Settings()) {
    EXPECT_TRUE(names.insert(setting.name).second) << setting.name;
    EXPECT_EQ(FindSetting(setting.name), &setting);
    EXPECT_NE(std::string(setting.unit), "") << setting.name;
    EXPECT_EQ(std::string(setting.help).back(), '.') << setting.name;
  }
  EXPECT_EQ(FindSetting("lane"), nullptr);
}

// Each row has a member of its own: what is set shows in the print of that row alone.
TEST_F(SettingsTest, EveryRowIsSetByFlagAndFileAlikeAndAlone) {
  const std::string defaults = ValueTable().Print();
  for (const Setting& setting : Settings()) {
    const auto [flag, file] = Other(setting);
    ValueTable by_flag;
    ASSERT_TRUE(by_flag.Set(setting, flag, "here").ok()) << setting.name;
    ValueTable by_file;
    const absl::Status status = by_file.ReadFile(Write(std::string(setting.name) + " = " + file + "\n"));
    ASSERT_TRUE(status.ok()) << status;
    std::istringstream before(defaults);
    std::istringstream flagged(by_flag.Print());
    std::istringstream filed(by_file.Print());
    int changed = 0;
    for (std::string a, b, c; std::getline(before, a) && std::getline(flagged, b) && std::getline(filed, c);) {
      if (a.starts_with("#")) continue;
      EXPECT_EQ(b, c);
      changed += a != b ? 1 : 0;
    }
    EXPECT_EQ(changed, 1) << setting.name;
  }
}

TEST_F(SettingsTest, NumbersHoldAtTheirLimitsAndNotBeyond) {
  for (const Setting& setting : Settings()) {
    if (!std::holds_alternative<uint64_t Values::*>(setting.field)) continue;
    const uint64_t most = setting.most == Setting::kUsableMemory ? ReadMemoryLimit().bytes : setting.most;
    ValueTable table;
    EXPECT_TRUE(table.Set(setting, std::to_string(setting.least), "x").ok()) << setting.name;
    EXPECT_TRUE(table.Set(setting, std::to_string(most), "x").ok()) << setting.name;
    const absl::Status above = table.Set(setting, std::to_string(most + 1), "--x");
    EXPECT_THAT(std::string(above.message()),
                AllOf(HasSubstr("--x is \"" + std::to_string(most + 1)), HasSubstr(setting.limit())));
    if (setting.least > 1) {
      EXPECT_FALSE(table.Set(setting, std::to_string(setting.least - 1), "x").ok());
    }
    EXPECT_EQ(table.Set(setting, "0", "x").ok(), setting.zero_is_auto || setting.least == 0) << setting.name;
    EXPECT_FALSE(table.Set(setting, "-1", "x").ok()) << setting.name;
  }
}

TEST_F(SettingsTest, ARefusedValueChangesNothing) {
  ValueTable table;
  const std::string before = table.Print();
  EXPECT_FALSE(table.Set(*FindSetting("lanes"), "257", "x").ok());
  EXPECT_FALSE(table.Set(*FindSetting("log_level"), "loud", "x").ok());
  EXPECT_FALSE(table.Set(*FindSetting("access_log"), "perhaps", "x").ok());
  EXPECT_EQ(table.Print(), before);
}

TEST_F(SettingsTest, AFileIsReadWithItsTypes) {
  const Values values = Read(
      "# ours\nlanes = 3\narena_bytes = \"64MiB\"\nscratch_bytes = 2_097_152\naccess_log = false\n"
      "log_level = 'error'\nready_file = \"a\\\"b\"\n");
  EXPECT_EQ(values.lanes, 3u);
  EXPECT_EQ(values.arena_bytes, uint64_t{64} << 20);
  EXPECT_EQ(values.scratch_bytes, uint64_t{2} << 20);
  EXPECT_FALSE(values.access_log);
  EXPECT_EQ(values.log_level, "error");
  EXPECT_EQ(values.ready_file, "a\"b");
  EXPECT_EQ(values.drain_seconds, 25u);
}

TEST_F(SettingsTest, AnUnknownKeyIsRefusedWithTheNearestKnownOneAndItsLine) {
  EXPECT_THAT(Refusal("lanes = 1\nlanse = 2\n"), AllOf(HasSubstr("lanse of "), HasSubstr(":2 "), HasSubstr("lanes?")));
  EXPECT_THAT(Refusal("drain-seconds = 2\n"), HasSubstr("did you mean drain_seconds?"));
  EXPECT_THAT(Refusal("log.level = \"info\"\n"), HasSubstr("log of "));
  EXPECT_THAT(Refusal("[server]\nlanes = 2\n"), HasSubstr("server of "));
}

TEST_F(SettingsTest, AValueOfAnotherTypeIsRefused) {
  EXPECT_THAT(Refusal("lanes = \"3\"\n"), HasSubstr("must be a whole number"));
  EXPECT_THAT(Refusal("lanes = 3.0\n"), HasSubstr("must be a whole number"));
  EXPECT_THAT(Refusal("lanes = [3]\n"), HasSubstr("must be a whole number"));
  EXPECT_THAT(Refusal("access_log = \"false\"\n"), HasSubstr("must be true or false"));
  EXPECT_THAT(Refusal("access_log = 0\n"), HasSubstr("must be true or false"));
  EXPECT_THAT(Refusal("backend = 3\n"), HasSubstr("must be a string"));
  EXPECT_THAT(Refusal("arena_bytes = true\n"), HasSubstr("512MiB"));
}

TEST_F(SettingsTest, AValueOutsideItsLimitIsRefusedWithItsLine) {
  EXPECT_THAT(Refusal("\n\nlanes = 257\n"), AllOf(HasSubstr(":3 is \"257\""), HasSubstr("1 to 256")));
  EXPECT_THAT(Refusal("lanes = -1\n"), HasSubstr("\"-1\""));
}

TEST_F(SettingsTest, WhatIsNotTomlIsRefusedWithItsLine) {
  EXPECT_THAT(Refusal("lanes = 1\nlanes: 2\n"), AllOf(HasSubstr(":2 is not TOML"), HasSubstr(path_)));
  EXPECT_THAT(Refusal("lanes = 1\nlanes = 2\n"), HasSubstr("is not TOML"));
}

TEST_F(SettingsTest, AFileThatIsNotThereIsRefusedByItsName) {
  ValueTable table;
  EXPECT_THAT(std::string(table.ReadFile(path_ + ".gone").message()), HasSubstr(path_ + ".gone"));
  EXPECT_FALSE(table.ReadFile(::testing::TempDir()).ok());
}

TEST_F(SettingsTest, WhatIsPrintedIsReadBackAndSaysWhereItCameFrom) {
  ValueTable table;
  for (const Setting& setting : Settings()) {
    ASSERT_TRUE(table.Set(setting, Other(setting).first, "--" + std::string(setting.name)).ok());
  }
  const std::string printed = table.Print();
  EXPECT_THAT(printed, AllOf(HasSubstr("from: --lanes\nlanes = 7\n"), HasSubstr("scratch_bytes = \"3MiB\"\n"),
                             HasSubstr("ready_file = \"o \\\"t\\\\her\"\n")));
  ValueTable again;
  ASSERT_TRUE(again.ReadFile(Write(printed)).ok()) << printed;
  std::istringstream first(printed);
  std::istringstream second(again.Print());
  for (std::string a, b; std::getline(first, a) && std::getline(second, b);) {
    if (!a.starts_with("# ")) {
      EXPECT_EQ(a, b);
    }
  }
}

TEST_F(SettingsTest, TheNearestNameHasTheFewestLettersChanged) {
  EXPECT_EQ(NearestName("lane"), "lanes");
  EXPECT_EQ(NearestName("queue-item-max"), "queue_items_max");
  EXPECT_EQ(NearestName("confg", {"config"}), "config");
  EXPECT_EQ(NearestName("log_leval"), "log_level");
}

struct SizeCase {
  const char* text;
  uint64_t bytes;
};
class GoodSizeTest : public ::testing::TestWithParam<SizeCase> {};
TEST_P(GoodSizeTest, IsRead) {
  const auto bytes = ParseBytes(GetParam().text);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, GetParam().bytes);
}
INSTANTIATE_TEST_SUITE_P(All, GoodSizeTest,
                         ::testing::Values(SizeCase{"0", 0}, SizeCase{"1", 1}, SizeCase{"17B", 17},
                                           SizeCase{"3KiB", 3072}, SizeCase{"1.5 MiB", 1572864},
                                           SizeCase{" 2GiB ", uint64_t{2} << 30}, SizeCase{"1TiB", uint64_t{1} << 40},
                                           SizeCase{"18446744073709551615", 18446744073709551615u}));

class BadSizeTest : public ::testing::TestWithParam<const char*> {};
TEST_P(BadSizeTest, IsRefused) {
  EXPECT_THAT(std::string(ParseBytes(GetParam()).status().message()), HasSubstr("size"));
}
INSTANTIATE_TEST_SUITE_P(All, BadSizeTest,
                         ::testing::Values("", "x", "-1", "1.5", "1kb", "1GB", "1 G", "1.2.3MiB", "8388608TiB", "GiB",
                                           "18446744073709551616", "1e3", "0x10"));

TEST(SizeTest, WhatIsFormattedIsReadBackToTheSameNumber) {
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1023}, uint64_t{1024}, uint64_t{3} << 20,
                         (uint64_t{1} << 40) + 1, uint64_t{5} << 40, uint64_t{1} << 52}) {
    const auto again = ParseBytes(FormatBytes(bytes));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, bytes);
  }
}

}  // namespace
}  // namespace ctkvr
