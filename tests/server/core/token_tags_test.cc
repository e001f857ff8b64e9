// SPDX-License-Identifier: Apache-2.0
//
// Tags go with their tokens: appended, compared with a repeat, truncated, counted; what is out of range is refused by
// name and changes nothing.

#include "server/core/token_tags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

SessionConfig Tagged() {
  SessionConfig config = SmallConfig(SmallLayer(Format::kF16, Source::kExact), 100, 2);
  config.tags = true;
  return config;
}

Chunk Of(uint32_t first, uint32_t tokens, const std::vector<float>& weights, const std::vector<uint32_t>& classes) {
  return {.first_position = first,
          .tokens = tokens,
          .keys = {},
          .values = {},
          .queries = {},
          .weights = weights,
          .classes = classes};
}

TEST(TokenTagsTest, OnesThatAreMissingAreNought) {
  TokenTags tags(Tagged());
  const std::vector<float> weights = {1, 2.5f};
  const std::vector<uint32_t> classes = {255, 0, 7};
  tags.Append(Of(0, 2, weights, {}));
  tags.Append(Of(2, 3, {}, classes));
  tags.Append(Of(5, 1, {}, {}));
  EXPECT_THAT(tags.weights(), ElementsAre(1, 2.5f, 0, 0, 0, 0));
  EXPECT_THAT(tags.classes(), ElementsAre(0, 0, 255, 0, 7, 0));
  EXPECT_THAT(tags.class_quotas(), IsEmpty());
  tags.Truncate(3);
  tags.Truncate(9);
  EXPECT_THAT(tags.weights(), ElementsAre(1, 2.5f, 0));
  EXPECT_THAT(tags.classes(), ElementsAre(0, 0, 255));
}

TEST(TokenTagsTest, ARepeatMustBringTheSame) {
  TokenTags tags(Tagged());
  const std::vector<float> weights = {0, 1, 2}, others = {0, 1, 3};
  const std::vector<uint32_t> classes = {4, 5, 6}, other_classes = {4, 5, 7};
  tags.Append(Of(0, 3, weights, classes));
  EXPECT_THAT(tags.CheckRepeat(Of(0, 3, weights, classes)), IsOk());
  EXPECT_THAT(tags.CheckRepeat(Of(2, 1, std::vector<float>{2}, std::vector<uint32_t>{6})), IsOk());
  constexpr auto kExists = absl::StatusCode::kAlreadyExists;
  EXPECT_THAT(tags.CheckRepeat(Of(0, 3, others, classes)),
              StatusIs(kExists, HasSubstr("position 2 is held already with another weight")));
  EXPECT_THAT(tags.CheckRepeat(Of(0, 3, weights, other_classes)),
              StatusIs(kExists, HasSubstr("position 2 is held already with another class")));
  EXPECT_THAT(tags.CheckRepeat(Of(0, 3, weights, {})), StatusIs(kExists, HasSubstr("position 0")));
}

TEST(TokenTagsTest, WhatIsOutOfRangeIsNamed) {
  const auto check = [](uint32_t tokens, const std::vector<float>& weights, const std::vector<uint32_t>& classes) {
    return TokenTags::Check(Of(0, tokens, weights, classes));
  };
  EXPECT_THAT(check(2, {0, 1e6f}, {0, 255}), IsOk());
  EXPECT_THAT(check(2, {}, {}), IsOk());
  EXPECT_THAT(check(2, {1}, {}), StatusIs(kInvalid, HasSubstr("weights has 1 elements")));
  EXPECT_THAT(check(2, {}, {1, 2, 3}), StatusIs(kInvalid, HasSubstr("classes has 3 elements")));
  EXPECT_THAT(check(2, {}, {1, 256}), StatusIs(kInvalid, HasSubstr("classes[1] is 256; the limit is 255")));
  for (const float weight :
       {-0.001f, 1.001e6f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_THAT(check(2, {0, weight}, {}), StatusIs(kInvalid, HasSubstr("weights[1] is"))) << weight;
  }
}

class TaggedSessionTest : public ::testing::Test {
 protected:
  // Tokens [first, first + tokens) with classes `first_class` and on.
  OwnedChunk Append(uint32_t first, uint32_t tokens, uint32_t first_class) {
    classes_.clear();
    for (uint32_t i = 0; i < tokens; ++i) classes_.push_back(first_class + i);
    OwnedChunk chunk = tokens_.Append(first, tokens);
    chunk.chunk.classes = classes_;
    return chunk;
  }
  uint64_t HostBytes() { return harness_.engine().memory().slot_table_bytes; }

  Harness harness_;
  SessionConfig config_ = Tagged();
  const Tokens tokens_{config_.layers[0], config_.dtype, 1};
  std::vector<uint32_t> classes_;
};

TEST_F(TaggedSessionTest, TagsLiveAndGoWithTheirTokens) {
  ASSERT_THAT(harness_.Open("s", config_), IsOk());
  EXPECT_EQ(HostBytes(), 2u * 100 * 5) << "admitted for both layers' limit";
  ASSERT_THAT(harness_.Append("s", Append(0, 20, 1)), IsOk());
  EXPECT_EQ(harness_.Get(Ref("s"))->memory.tag_bytes, 20u * 5);
  const auto again = harness_.Append("s", Append(0, 20, 1));
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(again->repeated);
  EXPECT_THAT(harness_.Append("s", Append(0, 20, 2)), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("class")));
  EXPECT_THAT(harness_.Append("s", Append(20, 5, 253)), StatusIs(kInvalid, HasSubstr("classes[3] is 256")));
  EXPECT_EQ(harness_.Get(Ref("s"))->layers[0].length, 20u);
  // The second layer holds none yet.
  OwnedChunk second = tokens_.Append(0, 20);
  second.chunk.layer = 1;
  ASSERT_THAT(harness_.Append("s", second), IsOk());
  ASSERT_THAT(harness_.Truncate("s", 10), IsOk());
  EXPECT_EQ(harness_.Get(Ref("s"))->memory.tag_bytes, 2u * 10 * 5);
  ASSERT_THAT(harness_.Append("s", Append(10, 10, 100)), IsOk()) << "other tags than before";
  EXPECT_THAT(harness_.Append("s", Append(10, 10, 100))->repeated, true);
  ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  EXPECT_EQ(HostBytes(), 0u);
}

TEST_F(TaggedSessionTest, ASessionWithoutTagsRefusesThem) {
  config_.tags = false;
  ASSERT_THAT(harness_.Open("s", config_), IsOk());
  EXPECT_EQ(HostBytes(), 0u);
  EXPECT_THAT(harness_.Append("s", Append(0, 20, 1)), StatusIs(kInvalid, HasSubstr("the session takes no tags")));
  ASSERT_THAT(harness_.Append("s", tokens_.Append(0, 20)), IsOk());
}

}  // namespace
}  // namespace ctkvr::testing
