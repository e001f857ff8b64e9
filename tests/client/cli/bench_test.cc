// SPDX-License-Identifier: Apache-2.0
//
// Proves that the synthetic rows are the same for the same seed and near their centres, and that a small run against a
// real server reports what it did.
#include "client/cli/bench.h"

#include <algorithm>
#include <cmath>

#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

TEST(Bench, RowsComeFromTheirSeed) {
  std::vector<uint16_t> a(100 * 16), b(100 * 16), c(100 * 16);
  SyntheticRows(16, 4, 1).Fill(a);
  SyntheticRows(16, 4, 1).Fill(b);
  SyntheticRows(16, 4, 2).Fill(c);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

TEST(Bench, RowsAreClustered) {
  constexpr uint32_t kDim = 64, kRows = 200;
  std::vector<uint16_t> rows(kRows * kDim);
  SyntheticRows(kDim, 4, 1).Fill(rows);
  // With four centres and normal numbers of variance 1 and 0.49, two rows of one cluster are about sqrt(2 * 0.49 * 64)
  // = 8 apart, rows of different ones about 14.
  uint32_t near = 0;
  for (uint32_t i = 1; i < kRows; ++i) {
    double square = 0;
    for (uint32_t d = 0; d < kDim; ++d) {
      square += std::pow(client::HalfToFloat(rows[d]) - client::HalfToFloat(rows[i * kDim + d]), 2);
    }
    near += square < 11 * 11 ? 1 : 0;
  }
  EXPECT_GT(near, kRows / 8);
  EXPECT_LT(near, kRows / 2);
}

BenchFlags SmallFlags() {
  BenchFlags flags;
  flags.q_heads = 4;
  flags.kv_heads = 2;
  flags.head_dim = 64;
  flags.value_dim = 32;
  flags.tokens = 1500;
  flags.retrievals = 10;
  flags.in_flight = 3;
  return flags;
}

TEST(Bench, RunsOneThenSeveralInFlight) {
  const testing::TestServer server;
  const auto client = client::Client::Connect({.address = server.address()});
  ASSERT_THAT(client, IsOk());
  Progress progress(stderr, false);
  for (const char* source : {"sketch", "query_centroids", "key_centroids_sketch"}) {
    SCOPED_TRACE(source);
    BenchFlags flags = SmallFlags();
    flags.selection.source = source;
    flags.selection.centroids = 16;
    const auto result = Bench(**client, flags, &progress);
    ASSERT_THAT(result, IsOk());
    EXPECT_EQ(result->append_bytes, 1500u * 2 * (64 + 32) * 2);
    ASSERT_EQ(result->runs.size(), 2u);
    EXPECT_EQ(result->runs[0].in_flight, 1u);
    EXPECT_EQ(result->runs[1].in_flight, 3u);
    for (const BenchRun& run : result->runs) {
      EXPECT_EQ(run.latency_us.size(), 10u);
      EXPECT_TRUE(std::is_sorted(run.latency_us.begin(), run.latency_us.end()));
      // 324 rows of two heads, keys and values in two bytes a dimension.
      EXPECT_GT(run.reply_bytes, 324 * 2 * (64 + 32) * 2);
      EXPECT_GT(run.bytes_read, 0);
    }
    EXPECT_THAT(BenchTable(*result), HasSubstr("in flight"));
    EXPECT_EQ(BenchJson(*result)["runs"].size(), 2u);
  }
  const auto sessions = (*client)->ListSessions();
  ASSERT_THAT(sessions, IsOk());
  EXPECT_TRUE(sessions->empty());
}

TEST(Bench, AttentionTakesFewBytes) {
  const testing::TestServer server;
  const auto client = client::Client::Connect({.address = server.address()});
  ASSERT_THAT(client, IsOk());
  Progress progress(stderr, false);
  BenchFlags flags = SmallFlags();
  flags.selection.answer = "attention";
  flags.selection.remainder = false;
  const auto result = Bench(**client, flags, &progress);
  ASSERT_THAT(result, IsOk());
  for (const BenchRun& run : result->runs) {
    // An output of four heads in two bytes a dimension, log-sum-exps, and what every answer carries.
    EXPECT_GT(run.reply_bytes, 4 * (32 * 2 + 4));
    EXPECT_LT(run.reply_bytes, 4 * (32 * 2 + 4) + 256);
  }
}

TEST(Bench, NothingToMeasureIsRefused) {
  const testing::TestServer server;
  const auto client = client::Client::Connect({.address = server.address()});
  ASSERT_THAT(client, IsOk());
  Progress progress(stderr, false);
  BenchFlags flags = SmallFlags();
  flags.retrievals = 0;
  EXPECT_THAT(Bench(**client, flags, &progress), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ctkvr::cli
