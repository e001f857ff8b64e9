// SPDX-License-Identifier: Apache-2.0
//
// Proves the programs people run, as processes of their own against a real server: ctkvr-cli with its tables, JSON,
// exit codes and messages, and the README's example.
#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "ctkvr/client/client.h"
#include "tests/server/rpc/callers.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;

struct Finished {
  int exit = -1;
  std::string out;  // standard output; with standard error where that was asked for
};

Finished RunCommand(const std::string& command) {
  Finished finished;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return finished;
  char buffer[4096];
  for (size_t size; (size = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) finished.out.append(buffer, size);
  const int status = pclose(pipe);
  finished.exit = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return finished;
}

class MainTest : public ::testing::Test {
 protected:
  // Standard error joins the output: messages are looked for there.
  Finished Cli(const std::string& arguments) const {
    return RunCommand("CTKVR_ADDRESS=" + server_.address() + " " CTKVR_CLI_PATH " " + arguments + " 2>&1");
  }
  Finished CliJson(const std::string& arguments) const {
    return RunCommand("CTKVR_ADDRESS=" + server_.address() + " " CTKVR_CLI_PATH " --json " + arguments + " 2>&-");
  }

  testing::TestServer server_;
};

TEST_F(MainTest, InfoDescribesTheServer) {
  const Finished text = Cli("info");
  EXPECT_EQ(text.exit, 0);
  EXPECT_THAT(text.out, AllOf(HasSubstr("boot id"), HasSubstr("k8v4"), HasSubstr("query_centroids")));
  const Finished json = CliJson("info");
  EXPECT_EQ(json.exit, 0);
  const auto parsed = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_TRUE(parsed.is_object()) << json.out;
  EXPECT_EQ(parsed["limits"]["head_dim_max"], 256);
}

TEST(MainTokenTest, ATokenThatWasMadeOpensAServerWithAccessControl) {
  const auto made = nlohmann::json::parse(RunCommand(CTKVR_CLI_PATH " --json token").out, nullptr, false);
  ASSERT_TRUE(made.is_object());
  const std::string token = made["token"];
  testing::TestServerOptions options;
  options.access = [token] {
    rpc::AccessRules rules;
    rules.tenants.push_back({.name = "red", .tokens = {testing::RuleOf(token)}});
    return rules;
  };
  const testing::TestServer server(options);
  const std::string command = "CTKVR_ADDRESS=" + server.address() + " CTKVR_TOKEN='" + token + "' " CTKVR_CLI_PATH;
  EXPECT_EQ(RunCommand(command + " info 2>&1").exit, 0);
  const Finished bench = RunCommand(command + " bench --tokens 600 --retrievals 20 2>&1");  // streams
  EXPECT_EQ(bench.exit, 0) << bench.out;
  const Finished nobody = RunCommand("CTKVR_ADDRESS=" + server.address() + " " CTKVR_CLI_PATH " info 2>&1");
  EXPECT_EQ(nobody.exit, 1);
  EXPECT_THAT(nobody.out, HasSubstr("UNAUTHENTICATED"));
  const Finished text = RunCommand(CTKVR_CLI_PATH " token --expires 2027-01-01T00:00:00Z");
  EXPECT_EQ(text.exit, 0);
  EXPECT_THAT(text.out, AllOf(HasSubstr("ctkvr_"), HasSubstr("expires = 2027-01-01T00:00:00Z}")));
  EXPECT_EQ(RunCommand(CTKVR_CLI_PATH " token --expires soon 2>&1").exit, 2);
}

TEST_F(MainTest, AddressMayFollowTheSubcommand) {
  EXPECT_EQ(RunCommand(CTKVR_CLI_PATH " info --address " + server_.address() + " 2>&1").exit, 0);
}

TEST_F(MainTest, SessionsAreListedAndShown) {
  EXPECT_THAT(Cli("sessions").out, HasSubstr("no sessions"));
  const auto client = client::Client::Connect({.address = server_.address()});
  ASSERT_THAT(client, IsOk());
  v1::SessionOptions options;
  options.mutable_geometry()->set_layers(2);
  options.mutable_geometry()->set_q_heads(4);
  options.mutable_geometry()->set_kv_heads(2);
  options.mutable_geometry()->set_head_dim(64);
  options.mutable_geometry()->set_dtype(v1::DTYPE_F16);
  options.set_token_limit(1000);
  const auto session = (*client)->OpenSession(options, {.session_id = "shown"});
  ASSERT_THAT(session, IsOk());
  EXPECT_THAT(Cli("sessions").out, AllOf(HasSubstr("shown"), HasSubstr("1,000")));
  const Finished one = Cli("sessions shown");
  EXPECT_EQ(one.exit, 0);
  EXPECT_THAT(one.out, AllOf(HasSubstr("2 layers, 4 query heads"), HasSubstr("reserved for the token limit")));
  const auto list = nlohmann::json::parse(CliJson("sessions").out, nullptr, false);
  ASSERT_TRUE(list.is_object());
  ASSERT_EQ(list["sessions"].size(), 1u);
  EXPECT_EQ(list["sessions"][0]["session_id"], "shown");
  const auto shown = nlohmann::json::parse(CliJson("sessions shown").out, nullptr, false);
  ASSERT_TRUE(shown.is_object());
  EXPECT_EQ(shown["layers"].size(), 2u);
  const Finished none = Cli("sessions other");
  EXPECT_EQ(none.exit, 1);
  EXPECT_THAT(none.out, AllOf(HasSubstr("NOT_FOUND"), HasSubstr("SESSION_UNKNOWN")));
}

TEST_F(MainTest, ReplayPrintsATableAndJudges) {
  const std::string trace = std::string("replay ") + CTKVR_TRACE;
  const Finished good = Cli(trace + " --every 16 --source sketch --min-needle-share 0.95");
  EXPECT_EQ(good.exit, 0) << good.out;
  EXPECT_THAT(good.out, AllOf(HasSubstr("needle share"), HasSubstr("records-layer07"), HasSubstr("decode: 100 %")));
  const Finished bad = Cli(trace + " --every 16 --source query_centroids --min-needle-share 0.95");
  EXPECT_EQ(bad.exit, 1) << bad.out;
  EXPECT_THAT(bad.out, HasSubstr("at least 0.9500 was asked for"));
  const Finished unjudged = Cli(trace + " --every 64 --answer attention");
  EXPECT_EQ(unjudged.exit, 0) << unjudged.out;
  // A bound that nothing is held to.
  const Finished blind = Cli(trace + " --every 64 --answer attention --min-needle-share 0.95");
  EXPECT_EQ(blind.exit, 1) << blind.out;
  EXPECT_THAT(blind.out, HasSubstr("min-needle-share needs ids"));
}

TEST_F(MainTest, ReplayVerifiesExactAndPrintsJson) {
  const Finished json =
      CliJson(std::string("replay ") + CTKVR_TRACE + " --source exact --verify-exact --every 64 --steps 128");
  EXPECT_EQ(json.exit, 0);
  const auto parsed = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_TRUE(parsed.is_object()) << json.out;
  ASSERT_EQ(parsed["traces"].size(), 1u);
  const auto& trace = parsed["traces"][0];
  EXPECT_EQ(trace["verify_exact"]["sets"], 2);
  EXPECT_EQ(trace["verify_exact"]["wrong_sets"], 0);
  EXPECT_EQ(trace["source"], "exact");
  EXPECT_EQ(trace["tokens_appended"], 7081 + 128);
}

TEST_F(MainTest, BenchPrintsRuns) {
  const Finished text = Cli("bench --q-heads 4 --kv-heads 1 --head-dim 64 --tokens 1000 --retrievals 5 --in-flight 2");
  EXPECT_EQ(text.exit, 0) << text.out;
  EXPECT_THAT(text.out, AllOf(HasSubstr("in flight"), HasSubstr("p99 ms")));
}

TEST_F(MainTest, WrongCommandLinesAreRefusedWithTwo) {
  for (const char* arguments : {"", "nonsense", "replay", "info --nonsense", "bench --tokens many",
                                "replay x --source telepathy", "replay x --every 0", "replay x --min-needle-share 2"}) {
    const Finished finished = Cli(arguments);
    EXPECT_EQ(finished.exit, 2) << arguments << ": " << finished.out;
  }
  EXPECT_EQ(Cli("--help").exit, 0);
  EXPECT_THAT(Cli("replay --help").out, HasSubstr("--verify-exact"));
}

TEST_F(MainTest, FailuresAreSaidAndExitWithOne) {
  const Finished nobody = RunCommand(CTKVR_CLI_PATH " info --address 127.0.0.1:1 2>&1");
  EXPECT_EQ(nobody.exit, 1);
  EXPECT_THAT(nobody.out, AllOf(HasSubstr("ctkvr-cli: UNAVAILABLE"), HasSubstr("127.0.0.1:1")));
  const Finished missing = Cli("replay no/such/trace");
  EXPECT_EQ(missing.exit, 1);
  EXPECT_THAT(missing.out, HasSubstr("no/such/trace"));
}

TEST_F(MainTest, TheReadmesExampleRuns) {
  const Finished example = RunCommand(CTKVR_QUICKSTART_PATH " " + server_.address() + " 2>&1");
  EXPECT_EQ(example.exit, 0) << example.out;
  EXPECT_THAT(example.out,
              AllOf(HasSubstr("KV head 0: 324 of 8192 tokens matter"), HasSubstr("KV head 1: 324 of 8192")));
}

}  // namespace
}  // namespace ctkvr::cli
