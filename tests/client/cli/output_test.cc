// SPDX-License-Identifier: Apache-2.0
//
// Proves what people see: columns, units, quantiles, progress on a terminal and in a log.
#include "client/cli/output.h"

#include <algorithm>

#include "ctkvr/v1/cache.pb.h"
#include "gmock/gmock.h"

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;

TEST(Output, ColumnsLineUp) {
  Table table({"name", "n"});
  table.Add({"a", "1,000"});
  table.Add({"longer", "7"});
  table.Add({"last"});
  EXPECT_EQ(table.ToString(), "name        n\na       1,000\nlonger      7\nlast\n");
  Table left({"key", "value"}, Align::kLeft);
  left.Add({"longer key", "x"});
  EXPECT_EQ(left.ToString(), "key         value\nlonger key  x\n");
}

TEST(Output, NumbersHaveUnitsAndNothingIsADash) {
  EXPECT_EQ(Number(0.98765, 4), "0.9877");
  EXPECT_EQ(Number(std::nullopt, 4), "-");
  EXPECT_EQ(Percent(0.1234), "12.3 %");
  EXPECT_EQ(Percent(std::nullopt), "-");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(Bytes(3.0 * 1024 * 1024 * 1024), "3.0 GiB");
  EXPECT_EQ(Count(0), "0");
  EXPECT_EQ(Count(999), "999");
  EXPECT_EQ(Count(1000), "1,000");
  EXPECT_EQ(Count(1234567), "1,234,567");
}

TEST(Output, QuantilesAreValuesOfTheList) {
  EXPECT_EQ(Quantile({}, 0.5), 0);
  EXPECT_EQ(Quantile({5}, 0.99), 5);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 0.5), 2);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 0.51), 3);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 0), 1);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 1), 4);
}

TEST(Output, JsonKeepsNamesAndDefaults) {
  v1::SessionMemory memory;
  memory.set_held_bytes(uint64_t{1} << 40);
  const nlohmann::json json = ToJson(memory);
  EXPECT_EQ(json["held_bytes"], "1099511627776");
  EXPECT_EQ(json["raw_bytes"], "0");
}

std::string Progressed(bool terminal) {
  std::FILE* file = std::tmpfile();
  Progress progress(file, terminal);
  progress.Start("work", 1000);
  for (uint64_t i = 1; i <= 1000; ++i) progress.Update(i);
  progress.Finish();
  std::string text(static_cast<size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  std::fclose(file);
  return text;
}

TEST(Output, ALogGetsALineForEachTenth) {
  const std::string text = Progressed(false);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10);
  EXPECT_THAT(text, HasSubstr("work: 10 %\n"));
  EXPECT_THAT(text, HasSubstr("work: 100 %\n"));
  EXPECT_EQ(text.find('\r'), std::string::npos);
}

TEST(Output, ATerminalGetsOneLineThatIsWipedAtTheEnd) {
  const std::string text = Progressed(true);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_THAT(text, HasSubstr("[##############################] 100 %"));
  EXPECT_EQ(text.back(), '\r');
  EXPECT_LE(std::count(text.begin(), text.end(), '\r'), 104);
}

TEST(Output, ProgressOfNothingIsSilent) {
  Progress progress(stderr, false);
  progress.Start("work", 0);
  ::testing::internal::CaptureStderr();
  progress.Update(0);
  progress.Finish();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace ctkvr::cli
