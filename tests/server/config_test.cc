// SPDX-License-Identifier: Apache-2.0
//
// Proves that every flag reaches the configuration, by flag and by environment, that the flag wins, that bad values are
// refused with a text that names flag, value and limit, and that help knows every flag.

#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/flags/reflection.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Sets a variable while it lives.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

class ConfigTest : public ::testing::Test {
 protected:
  Config Parse(const std::vector<std::string>& arguments) {
    const absl::FlagSaver saver;  // flags are process-wide
    auto parsed = ParseArguments(arguments);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->config : Config();
  }
  std::string Refusal(const std::vector<std::string>& arguments) {
    const absl::FlagSaver saver;
    auto parsed = ParseArguments(arguments);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(parsed.status().message());
  }
};

TEST_F(ConfigTest, DefaultsServeOnLoopbackWithAllProcessorsAndHalfTheMemory) {
  const Config config = Parse({});
  EXPECT_EQ(config.listen_address, "127.0.0.1:7420");
  EXPECT_EQ(config.metrics_address, "127.0.0.1:9464");
  EXPECT_EQ(config.backend, "auto");
  EXPECT_GE(config.engine.lanes, 1u);
  EXPECT_EQ(config.engine.arena_bytes, UsableMemoryBytes() / 2);
  EXPECT_EQ(config.engine.scratch_bytes, size_t{256} << 20);
  EXPECT_EQ(config.engine.queue_items_max, limits::kQueueItemsDefault);
  EXPECT_EQ(config.engine.sessions_max, limits::kSessionsMax);
  EXPECT_TRUE(config.engine.threads);
  EXPECT_EQ(config.log.level, obs::LogLevel::kInfo);
  EXPECT_EQ(config.log.format, obs::LogFormat::kText);
  EXPECT_TRUE(config.log.access);
  EXPECT_EQ(config.drain, std::chrono::seconds(25));
  EXPECT_EQ(config.ready_file, "");
}

TEST_F(ConfigTest, EveryFlagReachesTheConfiguration) {
  const Config config =
      Parse({"--listen_address=127.0.0.2:1", "--metrics_address", "[::1]:2", "--backend=cpu:avx2", "--lanes=3",
             "--arena_bytes=64MiB", "--scratch_bytes", "2097152", "--queue_items_max=5", "--sessions_max=6",
             "--log_level=error", "--log_format=json", "--noaccess_log", "--drain_seconds=7", "--ready_file=here"});
  EXPECT_EQ(config.listen_address, "127.0.0.2:1");
  EXPECT_EQ(config.metrics_address, "[::1]:2");
  EXPECT_EQ(config.backend, "cpu:avx2");
  EXPECT_EQ(config.engine.lanes, 3u);
  EXPECT_EQ(config.engine.arena_bytes, size_t{64} << 20);
  EXPECT_EQ(config.engine.scratch_bytes, size_t{2} << 20);
  EXPECT_EQ(config.engine.queue_items_max, 5u);
  EXPECT_EQ(config.engine.sessions_max, 6u);
  EXPECT_EQ(config.log.level, obs::LogLevel::kError);
  EXPECT_EQ(config.log.format, obs::LogFormat::kJson);
  EXPECT_FALSE(config.log.access);
  EXPECT_EQ(config.drain, std::chrono::seconds(7));
  EXPECT_EQ(config.ready_file, "here");
}

TEST_F(ConfigTest, TheEnvironmentSetsAFlag) {
  const Environment lanes("CTKVR_LANES", "9");
  const Environment access("CTKVR_ACCESS_LOG", "false");
  const Config config = Parse({});
  EXPECT_EQ(config.engine.lanes, 9u);
  EXPECT_FALSE(config.log.access);
}

TEST_F(ConfigTest, AFlagWinsOverTheEnvironment) {
  const Environment lanes("CTKVR_LANES", "9");
  EXPECT_EQ(Parse({"--lanes=4"}).engine.lanes, 4u);
}

TEST_F(ConfigTest, ABadVariableIsRefusedByItsName) {
  const Environment lanes("CTKVR_LANES", "many");
  EXPECT_THAT(Refusal({}), AllOf(HasSubstr("CTKVR_LANES"), HasSubstr("\"many\"")));
}

TEST_F(ConfigTest, AnUnknownFlagIsRefused) {
  EXPECT_THAT(Refusal({"--lane=4"}), HasSubstr("--lane=4"));
  EXPECT_THAT(Refusal({"--nolanes"}), HasSubstr("--nolanes"));
  EXPECT_THAT(Refusal({"lanes"}), HasSubstr("\"lanes\" is no flag"));
  // A flag of a library is none of ours.
  EXPECT_THAT(Refusal({"--flagfile=x"}), HasSubstr("--flagfile"));
}

TEST_F(ConfigTest, AFlagWithoutItsValueIsRefused) {
  EXPECT_THAT(Refusal({"--lanes"}), HasSubstr("--lanes has no value"));
}

TEST_F(ConfigTest, NumbersOutOfRangeAreRefusedWithTheLimit) {
  EXPECT_THAT(Refusal({"--lanes=257"}), AllOf(HasSubstr("lanes is 257"), HasSubstr("1 to 256")));
  EXPECT_THAT(Refusal({"--lanes=-1"}), HasSubstr("\"-1\""));
  EXPECT_THAT(Refusal({"--queue_items_max=0"}), HasSubstr("queue_items_max is 0"));
  EXPECT_THAT(Refusal({"--sessions_max=0"}), HasSubstr("sessions_max is 0"));
  EXPECT_THAT(Refusal({"--sessions_max=100001"}), AllOf(HasSubstr("100001"), HasSubstr("to 100000")));
  EXPECT_THAT(Refusal({"--drain_seconds=3601"}), AllOf(HasSubstr("drain_seconds is 3601"), HasSubstr("3600")));
  EXPECT_THAT(Refusal({"--arena_bytes=1KiB"}), HasSubstr("arena_bytes is 1024"));
  EXPECT_THAT(Refusal({"--arena_bytes=1024TiB"}), HasSubstr(std::to_string(UsableMemoryBytes())));
  EXPECT_THAT(Refusal({"--scratch_bytes=1"}), HasSubstr("scratch_bytes is 1"));
}

TEST_F(ConfigTest, NumbersAtTheLimitAreTaken) {
  EXPECT_EQ(Parse({"--lanes=256"}).engine.lanes, 256u);
  EXPECT_EQ(Parse({"--sessions_max=100000"}).engine.sessions_max, 100000u);
  EXPECT_EQ(Parse({"--drain_seconds=0"}).drain.count(), 0);
  EXPECT_EQ(Parse({"--drain_seconds=3600"}).drain.count(), 3600);
}

TEST_F(ConfigTest, UnknownNamesAreRefused) {
  EXPECT_THAT(Refusal({"--log_level=loud"}),
              AllOf(HasSubstr("log_level"), HasSubstr("\"loud\""), HasSubstr("warning")));
  EXPECT_THAT(Refusal({"--log_format=xml"}), AllOf(HasSubstr("log_format"), HasSubstr("\"xml\""), HasSubstr("json")));
}

TEST_F(ConfigTest, AddressesWithoutAGoodPortAreRefused) {
  for (const char* address : {"127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x", ":80", ""}) {
    EXPECT_THAT(Refusal({std::string("--listen_address=") + address}), HasSubstr("host:port")) << address;
  }
}

TEST_F(ConfigTest, PlaintextForOtherMachinesNeedsConsent) {
  EXPECT_THAT(Refusal({"--listen_address=0.0.0.0:7420"}),
              AllOf(HasSubstr("0.0.0.0:7420"), HasSubstr("--allow_plaintext"), HasSubstr("neither encrypts")));
  EXPECT_THAT(Refusal({"--metrics_address=0.0.0.0:9464"}), HasSubstr("metrics_address"));
  EXPECT_EQ(Parse({"--listen_address=0.0.0.0:7420", "--allow_plaintext"}).listen_address, "0.0.0.0:7420");
}

TEST_F(ConfigTest, NoMetricsAddressSwitchesThePageOff) { EXPECT_EQ(Parse({"--metrics_address="}).metrics_address, ""); }

TEST_F(ConfigTest, HelpAndVersionAreAskedFor) {
  const absl::FlagSaver saver;
  EXPECT_TRUE(ParseArguments({"--help"})->help);
  EXPECT_TRUE(ParseArguments({"-h"})->help);
  EXPECT_TRUE(ParseArguments({"--lanes=2", "--version"})->version);
  EXPECT_THAT(VersionText(), HasSubstr("ctkvrd "));
}

TEST_F(ConfigTest, HelpExplainsEveryFlagWithUnitDefaultAndVariable) {
  const std::string help = HelpText();
  for (const char* name :
       {"listen_address", "metrics_address", "allow_plaintext", "backend", "lanes", "arena_bytes", "scratch_bytes",
        "queue_items_max", "sessions_max", "log_level", "log_format", "access_log", "drain_seconds", "ready_file"}) {
    EXPECT_THAT(help, HasSubstr(std::string("--") + name + "  ("));
  }
  EXPECT_THAT(help, HasSubstr("(seconds; default \"25\"; CTKVR_DRAIN_SECONDS)"));
  EXPECT_THAT(help, HasSubstr("default \"256MiB\"; CTKVR_SCRATCH_BYTES"));
}

TEST(LoopbackTest, OnlyAddressesOfThisMachineCount) {
  for (const char* address : {"127.0.0.1:1", "127.255.0.9:0", "localhost:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
  for (const char* address : {"0.0.0.0:1", "10.0.0.1:1", "[::]:1", "127.example.org:1", "127.0.0.1.evil:1",
                              "localhost.evil:1", "1270.0.0.1:1", "127.0.0:1"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

struct SizeCase {
  const char* text;
  uint64_t bytes;
};
class GoodSizeTest : public ::testing::TestWithParam<SizeCase> {};
TEST_P(GoodSizeTest, IsRead) {
  ByteSize size;
  std::string error;
  ASSERT_TRUE(AbslParseFlag(absl::string_view(GetParam().text), &size, &error)) << error;
  EXPECT_EQ(size.bytes, GetParam().bytes);
}
INSTANTIATE_TEST_SUITE_P(All, GoodSizeTest,
                         ::testing::Values(SizeCase{"0", 0}, SizeCase{"1", 1}, SizeCase{"17B", 17},
                                           SizeCase{"3KiB", 3072}, SizeCase{"1.5 MiB", 1572864},
                                           SizeCase{" 2GiB ", uint64_t{2} << 30}, SizeCase{"1TiB", uint64_t{1} << 40},
                                           SizeCase{"18446744073709551615", 18446744073709551615u}));

class BadSizeTest : public ::testing::TestWithParam<const char*> {};
TEST_P(BadSizeTest, IsRefused) {
  ByteSize size;
  std::string error;
  EXPECT_FALSE(AbslParseFlag(absl::string_view(GetParam()), &size, &error));
  EXPECT_THAT(error, HasSubstr("size"));
}
INSTANTIATE_TEST_SUITE_P(All, BadSizeTest,
                         ::testing::Values("", "x", "-1", "1.5", "1kb", "1GB", "1 G", "1.2.3MiB", "8388608TiB", "GiB",
                                           "18446744073709551616", "1e3", "0x10"));

TEST(ByteSizeTest, UnparseIsReadBackToTheSameNumber) {
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1023}, uint64_t{1024}, uint64_t{3} << 20,
                         (uint64_t{1} << 40) + 1, uint64_t{5} << 40, uint64_t{1} << 52}) {
    ByteSize size;
    std::string error;
    ASSERT_TRUE(AbslParseFlag(absl::string_view(AbslUnparseFlag({bytes})), &size, &error)) << error;
    EXPECT_EQ(size.bytes, bytes);
  }
}

TEST(UsableMemoryTest, IsAtLeastWhatAnyMachineHas) { EXPECT_GT(UsableMemoryBytes(), uint64_t{64} << 20); }

}  // namespace
}  // namespace ctkvr
