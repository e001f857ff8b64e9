// SPDX-License-Identifier: Apache-2.0
//
// Proves that splitting loses, repeats and moves nothing, that no message exceeds a limit, and what the checksum
// covers.
#include "client/src/chunk.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr LayerShape kShape{.q_heads = 4, .kv_heads = 2, .head_dim = 16, .value_dim = 8, .dtype = v1::DTYPE_F16};
constexpr size_t kKeyBytes = 2 * 16 * 2, kValueBytes = 2 * 8 * 2, kQueryBytes = 4 * 16 * 2;

struct Data {
  explicit Data(uint32_t tokens, uint32_t query_positions)
      : keys(tokens * kKeyBytes), values(tokens * kValueBytes), queries(query_positions * kQueryBytes) {
    uint32_t n = 0;
    for (auto* array : {&keys, &values, &queries}) {
      for (std::byte& b : *array) b = static_cast<std::byte>(n++ * 2654435761u >> 24);
    }
  }
  ChunkView View(uint32_t tokens, uint32_t query_positions) const {
    return {.layer = 3,
            .first_position = 1000,
            .tokens = tokens,
            .keys = keys,
            .values = values,
            .query_positions = query_positions,
            .queries = queries};
  }
  std::vector<std::byte> keys, values, queries;
};

TEST(Chunk, PartsPutTogetherAreTheWhole) {
  for (uint32_t tokens : {1u, 2u, 7u, 16u}) {
    for (uint32_t query_positions = 0; query_positions <= tokens; ++query_positions) {
      for (uint32_t step = 1; step <= tokens + 1; ++step) {
        SCOPED_TRACE(std::to_string(tokens) + " " + std::to_string(query_positions) + " " + std::to_string(step));
        const Data data(tokens, query_positions);
        const ChunkView whole = data.View(tokens, query_positions);
        std::vector<std::byte> keys, values, queries;
        for (uint32_t begin = 0; begin < tokens; begin += step) {
          const ChunkView part = Part(whole, kShape, begin, std::min(begin + step, tokens));
          ASSERT_THAT(CheckChunk(part, kShape), IsOk());
          EXPECT_EQ(part.layer, 3u);
          EXPECT_EQ(part.first_position, 1000 + begin);
          keys.insert(keys.end(), part.keys.begin(), part.keys.end());
          values.insert(values.end(), part.values.begin(), part.values.end());
          queries.insert(queries.end(), part.queries.begin(), part.queries.end());
          // Queries of a part are those of its own last positions.
          const uint32_t first_query = 1000 + tokens - query_positions;
          const uint32_t end = part.first_position + part.tokens;
          EXPECT_EQ(part.query_positions, end > first_query ? std::min(end - first_query, part.tokens) : 0u);
        }
        EXPECT_EQ(keys, data.keys);
        EXPECT_EQ(values, data.values);
        EXPECT_EQ(queries, data.queries);
      }
    }
  }
}

TEST(Chunk, TagsGoWithTheirTokens) {
  const Data data(5, 0);
  const std::vector<float> weights = {0, 1, 2, 3, 4};
  const std::vector<uint32_t> classes = {9, 8, 7, 6, 5};
  ChunkView whole = data.View(5, 0);
  whole.weights = weights;
  whole.classes = classes;
  ASSERT_THAT(CheckChunk(whole, kShape), IsOk());
  const v1::Chunk message = ToMessage(Part(whole, kShape, 1, 3), kShape);
  EXPECT_THAT(message.weights(), ::testing::ElementsAre(1, 2));
  EXPECT_THAT(message.classes(), ::testing::ElementsAre(8, 7));
  whole.classes = whole.classes.first(4);
  EXPECT_THAT(CheckChunk(whole, kShape), StatusIs(absl::StatusCode::kInvalidArgument));
  whole.classes = {};
  whole.weights = whole.weights.first(4);
  EXPECT_THAT(CheckChunk(whole, kShape), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(Chunk, AMessageKeepsWithinEveryLimit) {
  const size_t token = kKeyBytes + kValueBytes;
  v1::ServerLimits limits;
  const ChunkView plain{.tokens = 20}, with_queries{.tokens = 20, .query_positions = 1};
  const std::vector<float> weights(20);
  const std::vector<uint32_t> classes(20);
  const ChunkView tagged{.tokens = 20, .weights = weights, .classes = classes};
  EXPECT_EQ(TokensPerMessage(kShape, plain, limits, 10 * token), 10u);
  EXPECT_EQ(TokensPerMessage(kShape, with_queries, limits, 10 * (token + kQueryBytes)), 10u);
  EXPECT_EQ(TokensPerMessage(kShape, tagged, limits, 10 * (token + 6)), 10u);
  EXPECT_EQ(TokensPerMessage(kShape, plain, limits, 1), 1u);  // never 0
  limits.set_append_tokens_max(4);
  EXPECT_EQ(TokensPerMessage(kShape, plain, limits, 10 * token), 4u);
  limits.set_message_bytes_max(1024 + 3 * token);
  EXPECT_EQ(TokensPerMessage(kShape, plain, limits, 10 * token), 3u);
  limits.set_message_bytes_max(5);
  EXPECT_EQ(TokensPerMessage(kShape, plain, limits, 10 * token), 1u);
}

TEST(Chunk, MessagesOfTheComputedSizeFitTheLimit) {
  const Data data(64, 64);
  v1::ServerLimits limits;
  limits.set_message_bytes_max(8192);
  const std::vector<float> weights(64, 1);
  const std::vector<uint32_t> classes(64, 255);
  ChunkView whole = data.View(64, 64);
  whole.weights = weights;
  whole.classes = classes;
  const uint32_t step = TokensPerMessage(kShape, whole, limits, 1u << 20);
  v1::AppendRequest request;
  request.mutable_session()->set_session_id(std::string(128, 'x'));
  request.mutable_session()->set_epoch(~uint64_t{0});
  request.mutable_session()->set_fingerprint(std::string(256, 'f'));
  *request.mutable_chunk() = ToMessage(Part(whole, kShape, 0, step), kShape);
  request.set_checksum(1);
  EXPECT_LE(request.ByteSizeLong(), 8192u);
}

TEST(Chunk, MessageCarriesDimsInOrder) {
  const Data data(5, 2);
  const v1::Chunk message = ToMessage(data.View(5, 2), kShape);
  EXPECT_THAT(message.keys().dims(), ::testing::ElementsAre(5, 2, 16));
  EXPECT_THAT(message.values().dims(), ::testing::ElementsAre(5, 2, 8));
  EXPECT_THAT(message.queries().dims(), ::testing::ElementsAre(2, 4, 16));
  EXPECT_EQ(message.keys().dtype(), v1::DTYPE_F16);
  EXPECT_FALSE(ToMessage(Data(5, 0).View(5, 0), kShape).has_queries());
}

TEST(Chunk, ChecksumIsThatOfTheArraysInARow) {
  const Data data(5, 2);
  std::vector<std::byte> all(data.keys);
  all.insert(all.end(), data.values.begin(), data.values.end());
  all.insert(all.end(), data.queries.begin(), data.queries.end());
  EXPECT_EQ(Checksum(data.View(5, 2)), XXH3_64bits(all.data(), all.size()));
  Data damaged(5, 2);
  damaged.queries.back() ^= std::byte{1};
  EXPECT_NE(Checksum(damaged.View(5, 2)), Checksum(data.View(5, 2)));
}

TEST(Chunk, WrongSizesAreNamed) {
  const Data data(5, 2);
  ChunkView chunk = data.View(5, 2);
  EXPECT_THAT(CheckChunk(chunk, kShape), IsOk());
  chunk.keys = chunk.keys.first(chunk.keys.size() - 1);
  EXPECT_THAT(CheckChunk(chunk, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("chunk.keys has 319")));
  chunk = data.View(5, 2);
  chunk.values = {};
  EXPECT_THAT(CheckChunk(chunk, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("chunk.values")));
  chunk = data.View(5, 6);
  EXPECT_THAT(CheckChunk(chunk, kShape),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("query_positions is 6")));
  chunk = data.View(0, 0);
  EXPECT_THAT(CheckChunk(chunk, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tokens is 0")));
}

}  // namespace
}  // namespace ctkvr::client
