// SPDX-License-Identifier: Apache-2.0
//
// Proves that nothing of a closed session is left where another tenant's session is: every block that it takes is
// zeroed first, indexes and clusters included, scratch is zeroed with the session's end, and one tenant alone pays for
// none of it. Raw device memory is read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

constexpr uint32_t kTokens = 1024;
constexpr size_t kScratch = 1;  // the arena is asked for first, then the only lane's scratch

SessionConfig Config() {
  LayerConfig layer = SmallLayer();
  layer.query_centroids = {.centroids = 32, .list_tokens = 64};
  layer.tokens_per_cluster = 16;
  return SmallConfig(layer, kTokens);
}

class TenantMemoryTest : public ::testing::Test {
 protected:
  static HarnessOptions Options() {
    HarnessOptions options{.shares_host_memory = false};
    options.engine.arena_bytes = size_t{16} << 20;
    return options;
  }
  TenantMemoryTest() : harness_(Options()) {}

  absl::Status Open(TenantId tenant, const std::string& id) {
    return harness_
        .Await<SessionInfo>(
            [&](auto done) { harness_.engine().Open(id, Config(), {.tenant = tenant}, std::move(done)); })
        .status();
  }
  // All that it may hold, queries beside it, and what maintenance makes of them.
  void Fill(TenantId tenant, const std::string& id) {
    const Tokens tokens(Config().layers[0], Config().dtype, tenant);
    const OwnedChunk chunk = tokens.Append(0, kTokens, 64);
    StepRequest request{.session = Ref(id)};
    request.chunk = chunk.chunk;
    ASSERT_THAT(harness_.Step({request}, {.tenant = tenant})[0].append, IsOk());
    ASSERT_THAT(harness_.Await<MaintainResult>(
                    [&](auto done) { harness_.engine().Maintain(Ref(id), {}, {.tenant = tenant}, std::move(done)); }),
                IsOk());
  }
  // Rows as they are stored.
  std::string Rows(TenantId tenant, const std::string& id) {
    const Tokens tokens(Config().layers[0], Config().dtype, tenant);
    OwnedQuery query = tokens.Ask(kTokens - 1);
    query.query.answer.mode = AnswerMode::kRows;
    query.query.answer.row_format = RowFormat::kStorage;
    StepRequest request{.session = Ref(id)};
    request.query = query.query;
    auto answer = std::move(harness_.Step({request}, {.tenant = tenant})[0].answer);
    EXPECT_THAT(answer, IsOk());
    return answer->values;
  }
  uint64_t Held(TenantId tenant, const std::string& id) {
    return harness_
        .Await<SessionInfo>([&](auto done) { harness_.engine().Get(Ref(id), {.tenant = tenant}, std::move(done)); })
        ->memory.held_bytes();
  }
  void Close(TenantId tenant, const std::string& id) {
    ASSERT_THAT(harness_.Await<CloseResult>(
                    [&](auto done) { harness_.engine().Close(Ref(id), {.tenant = tenant}, std::move(done)); }),
                IsOk());
  }
  // Sessions of the tenant until the arena is full, each filled; then all are closed.
  void UseTheWholeArena(TenantId tenant) {
    int count = 0;
    while (Open(tenant, std::to_string(count)).ok()) {
      ASSERT_NO_FATAL_FAILURE(Fill(tenant, std::to_string(count)));
      ++count;
    }
    ASSERT_GT(count, 0);
    while (count > 0) Close(tenant, std::to_string(--count));
  }
  uint64_t Cleared() { return harness_.engine().memory().arena_cleared_bytes; }

  Harness harness_;
};

TEST_F(TenantMemoryTest, EveryBlockOfTheNextTenantsSessionIsZeroedFirst) {
  ASSERT_NO_FATAL_FAILURE(UseTheWholeArena(1));
  EXPECT_EQ(Cleared(), 0u) << "one tenant pays nothing";
  ASSERT_THAT(Open(1, "s"), IsOk());
  Fill(1, "s");
  EXPECT_EQ(Cleared(), 0u);
  Close(1, "s");
  ASSERT_THAT(Open(2, "s"), IsOk());
  const OwnedChunk chunk = Tokens(Config().layers[0], Config().dtype, 2).Append(0, 100);
  StepRequest request{.session = Ref("s")};
  request.chunk = chunk.chunk;
  ASSERT_THAT(harness_.Step({request}, {.tenant = 2})[0].append, IsOk());
  const uint64_t before = Held(2, "s");
  ASSERT_GT(before, 0u);
  EXPECT_GE(Cleared(), before) << "blocks of the means' time are given back already";
}

TEST_F(TenantMemoryTest, NoRowOfAClosedSessionIsLeftInTheNextTenantsMemory) {
  ASSERT_THAT(Open(1, "s"), IsOk());
  ASSERT_THAT(Open(2, "t"), IsOk()) << "on the same lane";
  Fill(1, "s");
  const std::string rows = Rows(1, "s");
  const size_t row_bytes = 16;
  ASSERT_GE(rows.size(), row_bytes);
  const auto row = std::as_bytes(std::span(rows)).first(row_bytes);
  EXPECT_GT(harness_.backend().CountIn(kScratch, row), 0u) << "scratch holds what was gathered";
  EXPECT_GT(harness_.backend().CountIn(0, row), 0u);
  Close(1, "s");
  EXPECT_EQ(harness_.backend().CountIn(kScratch, row), 0u);
  Close(2, "t");
  ASSERT_NO_FATAL_FAILURE(UseTheWholeArena(2));
  EXPECT_EQ(harness_.backend().CountIn(0, row), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
