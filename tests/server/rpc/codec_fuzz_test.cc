// SPDX-License-Identifier: Apache-2.0
//
// Proves that no mutation of a message crashes the codec, and that none passes with sizes that contradict each other or
// exceed a limit. Seeded: CTKVR_TEST_SEED.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "server/core/limits.h"
#include "server/rpc/codec.h"
#include "tests/server/rpc/messages.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::rpc {
namespace {

using ::ctkvr::testing::IsOk;
using ::ctkvr::testing::MakeTensor;

const char* Bytes(std::span<const std::byte> span) { return reinterpret_cast<const char*>(span.data()); }

// Bytes that a view claims by its dims must be the bytes it has, and lie in the message.
void ExpectWhole(std::span<const std::byte> view, uint64_t elements, DType dtype, const std::string& data) {
  ASSERT_EQ(view.size(), elements * DTypeBytes(dtype));
  ASSERT_EQ(view.size(), data.size());
  if (view.empty()) return;
  ASSERT_EQ(Bytes(view), data.data());
}

void ExpectConsistent(const StepRequest& step, const v1::DecodeItem& item) {
  ASSERT_GE(step.session.id.size(), 1u);
  ASSERT_LE(step.session.id.size(), limits::kSessionIdBytesMax);
  if (step.chunk) {
    const Chunk& c = *step.chunk;
    ExpectWhole(c.keys, uint64_t{c.tokens} * c.kv_heads * c.head_dim, c.dtype, item.chunk().keys().data());
    ExpectWhole(c.values, uint64_t{c.tokens} * c.kv_heads * c.value_dim, c.dtype, item.chunk().values().data());
    ExpectWhole(c.queries, uint64_t{c.query_positions} * c.q_heads * c.head_dim, c.dtype,
                item.chunk().queries().data());
    ASSERT_LE(c.query_positions, c.tokens);
    ASSERT_LE(c.tokens, limits::kAppendTokensMax);
  }
  if (step.query) {
    const Query& q = *step.query;
    ExpectWhole(q.queries, uint64_t{q.positions} * q.q_heads * q.head_dim, q.dtype, item.query().queries().data());
    ASSERT_LE(q.positions, limits::kQueryPositionsMax);
  }
}

// Changes a few bytes, cuts, or repeats a part.
std::string Mutate(std::string bytes, std::mt19937_64& random) {
  for (uint64_t change = random() % 4 + 1; change > 0 && !bytes.empty(); --change) {
    const size_t at = random() % bytes.size();
    switch (random() % 4) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        break;
      case 2:
        bytes.erase(at, random() % 8 + 1);
        break;
      case 3:
        bytes.insert(at, bytes.substr(at, random() % 16));
        break;
    }
  }
  return bytes;
}

TEST(CodecFuzzTest, MutatedDecodeMessagesNeverPassWithWrongSizes) {
  const uint64_t seed = ctkvr::testing::TestSeed();
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random = ctkvr::testing::MakeRandom(1);
  v1::DecodeRequest good;
  good.add_items()->mutable_session()->set_session_id("a");
  v1::Chunk* chunk = good.mutable_items(0)->mutable_chunk();
  *chunk->mutable_keys() = MakeTensor({1, 2, 2}, 1);
  *chunk->mutable_values() = MakeTensor({1, 2, 1}, 2);
  *chunk->mutable_queries() = MakeTensor({1, 4, 2}, 3);
  *good.mutable_items(0)->mutable_query()->mutable_queries() = MakeTensor({1, 4, 2}, 4);
  good.mutable_items(0)->mutable_query()->mutable_selection()->set_centroid_set("set");
  const std::string bytes = good.SerializeAsString();
  ASSERT_THAT(DecodeDecode(good).status(), IsOk());
  int parsed = 0;
  int passed = 0;
  for (int round = 0; round < 200000; ++round) {
    v1::DecodeRequest message;
    if (!message.ParseFromString(Mutate(bytes, random))) continue;
    ++parsed;
    const auto steps = DecodeDecode(message);
    if (!steps.ok()) continue;
    ++passed;
    ASSERT_EQ(steps->size(), static_cast<size_t>(message.items_size()));
    for (size_t i = 0; i < steps->size(); ++i) {
      ExpectConsistent((*steps)[i], message.items(static_cast<int>(i)));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  // The mutations must reach both sides of the checks, or this proves nothing.
  EXPECT_GT(parsed, 1000);
  EXPECT_GT(passed, 100);
  EXPECT_GT(parsed - passed, 100);
}

// Mutated options never crash, and never decode to more layers than the limit.
TEST(CodecFuzzTest, MutatedOptionsStayWithinTheLimits) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(ctkvr::testing::TestSeed()));
  std::mt19937_64 random = ctkvr::testing::MakeRandom(3);
  v1::SessionOptions good = ctkvr::testing::MakeOptions();
  good.mutable_geometry()->set_layers(4);
  v1::LayerOverride* layer = good.add_layer_overrides();
  layer->add_layers(1);
  layer->set_head_dim(128);
  layer->mutable_softmax()->add_sink_logits(1);
  good.add_query_centroids()->set_name("set");
  good.mutable_selection()->set_top_p(0.5f);
  const std::string bytes = good.SerializeAsString();
  int passed = 0;
  int refused = 0;
  for (int round = 0; round < 100000; ++round) {
    std::string mutated = bytes;
    for (uint64_t n = random() % 3 + 1; n > 0; --n) mutated[random() % mutated.size()] = static_cast<char>(random());
    v1::SessionOptions options;
    if (!options.ParseFromString(mutated)) continue;
    const auto config = DecodeSessionOptions(options);
    config.ok() ? ++passed : ++refused;
    if (!config.ok()) continue;
    ASSERT_GE(config->layers.size(), 1u);
    ASSERT_LE(config->layers.size(), limits::kLayersMax);
    for (const LayerConfig& decoded : config->layers) {
      ASSERT_LE(decoded.softmax.sink_logits.size(), limits::kQHeadsMax);
      ASSERT_LE(decoded.query_centroids.name.size(), limits::kCentroidSetNameBytesMax);
      ASSERT_TRUE(std::isfinite(decoded.softmax.scale) && decoded.softmax.scale > 0);
    }
  }
  EXPECT_GT(passed, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace ctkvr::rpc
