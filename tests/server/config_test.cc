// SPDX-License-Identifier: Apache-2.0
//
// Proves that every setting reaches the configuration, that a flag wins over the environment and that over the file,
// that bad values are refused with a text that names flag, value and limit, and that help knows every setting.

#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "server/core/limits.h"
#include "server/memory_limit.h"

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
    auto parsed = ParseArguments(arguments);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->config : Config();
  }
  std::string Refusal(const std::vector<std::string>& arguments) {
    auto parsed = ParseArguments(arguments);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(parsed.status().message());
  }
};

TEST_F(ConfigTest, DefaultsServeOnLoopbackWithAllProcessorsAndTheMemoryThatIsLeft) {
  const Config config = Parse({});
  EXPECT_EQ(config.listen_address, "127.0.0.1:7420");
  EXPECT_EQ(config.metrics_address, "127.0.0.1:9464");
  EXPECT_EQ(config.backend, "auto");
  EXPECT_GE(config.engine.lanes, 1u);
  const MemoryUse use{.lanes = config.engine.lanes, .scratch_bytes = config.engine.scratch_bytes};
  EXPECT_EQ(config.engine.arena_bytes, DeriveArenaBytes(ReadMemoryLimit(), use, 1).value());
  EXPECT_EQ(config.admin_address, "");
  EXPECT_EQ(config.slow_call, std::chrono::milliseconds(50));
  EXPECT_EQ(config.engine.scratch_bytes, size_t{256} << 20);
  EXPECT_EQ(config.engine.queue_items_max, limits::kQueueItemsDefault);
  EXPECT_EQ(config.engine.sessions_max, limits::kSessionsMax);
  EXPECT_TRUE(config.engine.threads);
  EXPECT_EQ(config.log.level, obs::LogLevel::kInfo);
  EXPECT_EQ(config.log.format, obs::LogFormat::kText);
  EXPECT_TRUE(config.log.access);
  EXPECT_EQ(config.drain, std::chrono::seconds(25));
  EXPECT_EQ(config.engine.truth_share, 0.01);
  EXPECT_EQ(config.engine.truth_budget, 0.02);
  EXPECT_EQ(config.ready_file, "");
}

TEST_F(ConfigTest, EveryFlagReachesTheConfiguration) {
  const Config config = Parse({"--listen_address=127.0.0.2:1",
                               "--metrics_address",
                               "[::1]:2",
                               "--backend=cpu:avx2",
                               "--lanes=3",
                               "--arena_bytes=64MiB",
                               "--scratch_bytes",
                               "2097152",
                               "--queue_items_max=5",
                               "--sessions_max=6",
                               "--log_level=error",
                               "--log_format=json",
                               "--noaccess_log",
                               "--drain_seconds=7",
                               "--ready_file=here",
                               "--admin_address=unix:/a",
                               "--slow_call_ms=8",
                               "--truth_share=1",
                               "--truth_budget=0.5",
                               "--record=records",
                               "--record_bytes=3MiB"});
  EXPECT_EQ(config.record.directory, "records");
  EXPECT_EQ(config.admin_address, "unix:/a");
  EXPECT_EQ(config.slow_call, std::chrono::milliseconds(8));
  EXPECT_EQ(config.record.bytes_max, uint64_t{3} << 20);
  EXPECT_EQ(config.engine.truth_share, 1);
  EXPECT_EQ(config.engine.truth_budget, 0.5);
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
  EXPECT_THAT(Refusal({"--lane=4"}), AllOf(HasSubstr("--lane=4"), HasSubstr("did you mean --lanes?")));
  EXPECT_THAT(Refusal({"--confg=x"}), HasSubstr("did you mean --config?"));
  EXPECT_THAT(Refusal({"--nolanes"}), HasSubstr("--nolanes"));
  EXPECT_THAT(Refusal({"lanes"}), HasSubstr("\"lanes\" is no flag"));
  EXPECT_THAT(Refusal({"--"}), HasSubstr("\"--\" is no flag"));
  EXPECT_THAT(Refusal({"--help=yes"}), HasSubstr("--help=yes"));
}

TEST_F(ConfigTest, AFlagWithoutItsValueIsRefused) {
  EXPECT_THAT(Refusal({"--lanes"}), HasSubstr("--lanes has no value"));
}

TEST_F(ConfigTest, BadValuesAreRefusedByFlagValueAndLimit) {
  EXPECT_THAT(Refusal({"--lanes=257"}), AllOf(HasSubstr("--lanes is \"257\""), HasSubstr("1 to 256")));
  EXPECT_THAT(Refusal({"--sessions_max", "100001"}), AllOf(HasSubstr("\"100001\""), HasSubstr("to 100000")));
  EXPECT_THAT(Refusal({"--arena_bytes=1024TiB"}), HasSubstr(FormatBytes(ReadMemoryLimit().bytes)));
  EXPECT_THAT(Refusal({"--log_level=loud"}), AllOf(HasSubstr("--log_level is \"loud\""), HasSubstr("warning")));
  EXPECT_THAT(Refusal({"--access_log=perhaps"}), HasSubstr("true or false"));
}

TEST_F(ConfigTest, AddressesWithoutAGoodPortAreRefused) {
  for (const char* address : {"127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x", ":80", ""}) {
    EXPECT_THAT(Refusal({std::string("--listen_address=") + address}), HasSubstr("host:port")) << address;
  }
}

TEST_F(ConfigTest, PlaintextForOtherMachinesNeedsConsent) {
  EXPECT_THAT(Refusal({"--listen_address=0.0.0.0:7420"}),
              AllOf(HasSubstr("0.0.0.0:7420"), HasSubstr("--allow_plaintext"), HasSubstr("without encryption")));
  EXPECT_THAT(Refusal({"--metrics_address=0.0.0.0:9464"}), HasSubstr("metrics_address"));
  EXPECT_THAT(Refusal({"--admin_address=0.0.0.0:7421"}), HasSubstr("admin_address is 0.0.0.0:7421"));
  EXPECT_EQ(Parse({"--listen_address=0.0.0.0:7420", "--allow_plaintext"}).listen_address, "0.0.0.0:7420");
  // With a certificate the calls are encrypted; the page of metrics is not.
  const std::vector<std::string> tls = {"--tls_certificate=a", "--tls_key=b", "--listen_address=0.0.0.0:7420"};
  EXPECT_EQ(Parse(tls).tls_certificate, "a");
  EXPECT_EQ(Parse(tls).tls_key, "b");
  EXPECT_THAT(Refusal({tls[0], tls[1], "--metrics_address=0.0.0.0:1"}), HasSubstr("metrics_address"));
}

TEST_F(ConfigTest, TokensInTheClearForOtherMachinesNeedConsentOfTheirOwn) {
  const std::vector<std::string> open = {"--access_file=a.toml", "--listen_address=0.0.0.0:7420", "--allow_plaintext"};
  EXPECT_THAT(Refusal(open), AllOf(HasSubstr("listen_address is 0.0.0.0:7420"), HasSubstr("--allow_plaintext_tokens")));
  EXPECT_THAT(Refusal({open[0], "--admin_address=0.0.0.0:7421", open[2]}), HasSubstr("admin_address is 0.0.0.0:7421"));
  EXPECT_EQ(Parse({open[0], open[1], open[2], "--allow_plaintext_tokens"}).access_file, "a.toml");
  EXPECT_EQ(Parse({open[0], open[1], "--tls_certificate=a", "--tls_key=b"}).access_file, "a.toml");
  EXPECT_EQ(Parse({open[0]}).access_file, "a.toml");
}

TEST_F(ConfigTest, NoMetricsAddressSwitchesThePageOff) { EXPECT_EQ(Parse({"--metrics_address="}).metrics_address, ""); }

TEST_F(ConfigTest, ActionsAreAskedFor) {
  EXPECT_EQ(ParseArguments({})->action, Action::kServe);
  EXPECT_EQ(ParseArguments({"--help"})->action, Action::kPrintHelp);
  EXPECT_EQ(ParseArguments({"-h", "--nonsense"})->action, Action::kPrintHelp);
  EXPECT_EQ(ParseArguments({"--lanes=2", "--version"})->action, Action::kPrintVersion);
  EXPECT_EQ(ParseArguments({"--check-config"})->action, Action::kCheckConfig);
  EXPECT_THAT(VersionText(), HasSubstr("ctkvrd "));
  const auto printed = ParseArguments({"--print_config", "--lanes=3"});
  EXPECT_EQ(printed->action, Action::kPrintConfig);
  EXPECT_THAT(printed->printed, HasSubstr("from: --lanes\nlanes = 3\n"));
}

TEST_F(ConfigTest, WhatIsDerivedIsPrinted) {
  const auto printed = ParseArguments({"--print_config", "--scratch_bytes=1MiB"});
  ASSERT_TRUE(printed.ok()) << printed.status();
  EXPECT_THAT(printed->printed, HasSubstr("# Here 0 is " + FormatBytes(printed->config.engine.arena_bytes) + ": " +
                                          Describe(ReadMemoryLimit()) + " less 1MiB of scratch"));
  EXPECT_THAT(printed->printed, HasSubstr("\narena_bytes = \"0\"\n"));
  EXPECT_THAT(printed->printed,
              HasSubstr("# Here 0 is " + std::to_string(printed->config.engine.lanes) + "\nlanes = 0\n"));
  EXPECT_THAT(ParseArguments({"--print_config", "--lanes=3", "--arena_bytes=1MiB"})->printed,
              ::testing::Not(HasSubstr("# Here 0 is")));
}

TEST_F(ConfigTest, MemoryThatCannotBeHadIsRefusedWithBothFigures) {
  const uint64_t usable = ReadMemoryLimit().bytes;
  const std::string half = FormatBytes(usable / 2 + 1);
  for (const std::string& arena : {std::string("0"), half}) {
    EXPECT_THAT(Refusal({"--lanes=2", "--scratch_bytes=" + half, "--arena_bytes=" + arena}),
                AllOf(HasSubstr("arena_bytes is " + arena), HasSubstr(FormatBytes(usable))));
  }
}

TEST_F(ConfigTest, AFlagMayBeWrittenWithHyphens) { EXPECT_EQ(Parse({"--drain-seconds=3"}).drain.count(), 3); }

TEST_F(ConfigTest, AFileIsOverruledByTheEnvironmentAndThatByAFlag) {
  const std::string path = ::testing::TempDir() + "config_test." + std::to_string(getpid()) + ".toml";
  std::ofstream(path) << "lanes = 2\nqueue_items_max = 3\nsessions_max = 4\n";
  const Environment queue("CTKVR_QUEUE_ITEMS_MAX", "30");
  const Environment sessions("CTKVR_SESSIONS_MAX", "40");
  const Config config = Parse({"--sessions_max=400", "--config", path});
  EXPECT_EQ(config.engine.lanes, 2u);
  EXPECT_EQ(config.engine.queue_items_max, 30u);
  EXPECT_EQ(config.engine.sessions_max, 400u);
  const Environment named("CTKVR_CONFIG", path.c_str());
  EXPECT_EQ(Parse({}).engine.lanes, 2u);
  EXPECT_THAT(Refusal({"--config=" + path + ".gone"}), HasSubstr(path + ".gone"));
  std::filesystem::remove(path);
}

TEST_F(ConfigTest, VariablesOfOthersAreLeftAlone) {
  const Environment service("CTKVR_SERVICE_HOST", "10.0.0.1");  // what Kubernetes makes for a service called ctkvr
  Parse({});
}

TEST_F(ConfigTest, HelpExplainsEverySettingWithUnitLimitDefaultAndVariable) {
  const std::string help = HelpText();
  for (const Setting& setting : Settings()) {
    EXPECT_THAT(help, HasSubstr(std::string("--") + setting.name + "  (" + setting.unit));
    EXPECT_THAT(help, HasSubstr("; " + setting.variable() + ")\n      " + setting.help));
  }
  EXPECT_THAT(help, HasSubstr("(seconds; 0 to 3600; default \"25\"; CTKVR_DRAIN_SECONDS)"));
  for (const char* flag : {"--config", "--check-config", "--print-config"}) EXPECT_THAT(help, HasSubstr(flag));
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

}  // namespace
}  // namespace ctkvr
