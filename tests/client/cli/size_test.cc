// SPDX-License-Identifier: Apache-2.0
//
// Proves that `size` tells what a server reserves for such a session, to the byte; that known figures come out; and
// that wrong flags are refused by name.
#include "client/cli/size.h"

#include "ctkvr/client/client.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;

constexpr uint64_t kGibi = uint64_t{1} << 30;

SizeFlags Small() {
  SizeFlags flags;
  flags.layers = 3;
  flags.q_heads = 4;
  flags.kv_heads = 2;
  flags.head_dim = 64;
  flags.tokens = "3000";
  return flags;
}

v1::SessionOptions SmallOptions() {
  v1::SessionOptions options;
  options.mutable_geometry()->set_layers(3);
  options.mutable_geometry()->set_q_heads(4);
  options.mutable_geometry()->set_kv_heads(2);
  options.mutable_geometry()->set_head_dim(64);
  options.mutable_geometry()->set_dtype(v1::DTYPE_F16);
  options.set_token_limit(3000);
  return options;
}

// What a real server reserves.
v1::SessionMemory Reserved(const v1::SessionOptions& options) {
  const testing::TestServer server;
  const auto client = client::Client::Connect({.address = server.address()});
  EXPECT_THAT(client, IsOk());
  const auto session = (*client)->OpenSession(options, {.session_id = "a"});
  EXPECT_THAT(session, IsOk());
  const auto info = (*client)->GetSession("a");
  EXPECT_THAT(info, IsOk());
  return info->memory();
}

TEST(SizeTest, ASessionWithoutFurtherOptionsTakesWhatIsSaid) {
  const auto report = Size(Small());
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(report->session_bytes, Reserved(SmallOptions()).reserved_bytes());
}

TEST(SizeTest, ASessionWithEveryOptionTakesWhatIsSaid) {
  SizeFlags flags = Small();
  flags.format = "k6v4";
  flags.tokens_per_cluster = 16;
  flags.centroids = 100;
  flags.list_tokens = 300;
  flags.cache_slots = 200;
  v1::SessionOptions options = SmallOptions();
  options.set_format(v1::FORMAT_K6V4);
  options.mutable_key_clusters()->set_tokens_per_cluster(16);
  options.add_query_centroids()->set_centroids(100);
  options.mutable_query_centroids(0)->set_list_tokens(300);
  options.set_cache_slots(200);
  const auto report = Size(flags);
  ASSERT_THAT(report, IsOk());
  const v1::SessionMemory memory = Reserved(options);
  EXPECT_EQ(report->session_bytes, memory.reserved_bytes());
  EXPECT_EQ(report->slot_table_bytes, memory.slot_table_bytes());
}

// The article's example, and what the formats make of it.
TEST(SizeTest, Llama8BAt96KIs12GibibytesInF16And24InF32) {
  SizeFlags flags;
  flags.model = "llama-3-8b";
  flags.tokens = "96k";
  auto report = Size(flags);
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(report->tokens, 98304u);
  EXPECT_EQ(report->f16_bytes, 12 * kGibi);
  EXPECT_EQ(report->f32_bytes, 24 * kGibi);
  // Keys and values in k8v4 take 212 bytes of 1,024 a token and KV head, key clusters of 17 tokens 264 / 17 + 2 more;
  // what else a session holds is less than a hundredth.
  const double held = 98304.0 * 32 * 8 * (212 + 264.0 / 17 + 2);
  EXPECT_GE(static_cast<double>(report->session_bytes), 0.99 * held);
  EXPECT_LT(static_cast<double>(report->session_bytes), 1.01 * held);
  flags.format = "f16";
  report = Size(flags);
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(report->session_bytes, 12 * kGibi);
}

TEST(SizeTest, TheServerNeedsArenaScratchAndTwoGibibytesAsItsDefaultArenaLeaves) {
  SizeFlags flags = Small();
  flags.sessions = 32;
  flags.cache_slots = 100;
  flags.lanes = 4;
  flags.scratch_mib = 64;
  const auto report = Size(flags);
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(report->arena_bytes, 32 * report->session_bytes);
  EXPECT_EQ(report->server_bytes, report->arena_bytes + (uint64_t{256} << 20) + 2 * kGibi);
  EXPECT_GT(report->slot_table_bytes, 0u);
  EXPECT_THAT(SizeText(*report, flags), AllOf(HasSubstr("32 sessions"), HasSubstr("--lanes=4 --scratch_bytes=64MiB")));
  EXPECT_EQ(SizeJson(*report)["arena_bytes"], report->arena_bytes);
}

TEST(SizeTest, EveryKnownModelIsOneThatTheServerTakes) {
  for (const ModelGeometry& model : KnownModels()) {
    SizeFlags flags;
    flags.model = model.name;
    EXPECT_THAT(Size(flags), IsOk()) << model.name;
  }
}

TEST(SizeTest, NumbersGivenWinOverTheModel) {
  SizeFlags flags;
  flags.model = "llama-3-8b";
  flags.layers = 16;
  const auto report = Size(flags);
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(report->geometry.layers, 16u);
  EXPECT_EQ(report->geometry.kv_heads, 8u);
}

TEST(SizeTest, WrongFlagsAreRefusedByName) {
  const auto refusal = [](SizeFlags flags) { return std::string(Size(flags).status().message()); };
  SizeFlags flags;
  EXPECT_THAT(refusal(flags), HasSubstr("--model"));
  flags.model = "llama-9";
  EXPECT_THAT(refusal(flags), AllOf(HasSubstr("\"llama-9\""), HasSubstr("llama-3-8b"), HasSubstr("--kv-heads")));
  flags = Small();
  flags.format = "k9";
  EXPECT_THAT(refusal(flags), AllOf(HasSubstr("\"k9\""), HasSubstr("k8v4")));
  flags = Small();
  flags.head_dim = 65;
  EXPECT_THAT(refusal(flags), HasSubstr("head_dim"));
}

TEST(ParseTokensTest, ReadsUnitsAndHoldsTheLimit) {
  EXPECT_EQ(*ParseTokens("1"), 1u);
  EXPECT_EQ(*ParseTokens("128k"), 131072u);
  EXPECT_EQ(*ParseTokens("4M"), 4u << 20);
  for (const char* text : {"", "0", "-1", "k", "1.5k", "12 k", "128kk", "4194305", "5m", "99999999999999999999k"}) {
    EXPECT_THAT(std::string(ParseTokens(text).status().message()), HasSubstr("4194304")) << text;
  }
}

}  // namespace
}  // namespace ctkvr::cli
