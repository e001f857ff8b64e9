// SPDX-License-Identifier: Apache-2.0
//
// Proves that an answer's packed arrays are cut where the proto says, and that damaged ones are refused.
#include "ctkvr/client/answer.h"

#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::StatusIs;

constexpr LayerShape kShape{.q_heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 8};

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Two positions, two sets: {1, 5}, {}, {2}, {0, 3, 9}.
v1::Answer SampleAnswer() {
  v1::Answer answer;
  for (const uint32_t count : {2, 0, 1, 3}) answer.add_counts(count);
  answer.set_ids(Bytes<uint32_t>({1, 5, 2, 0, 3, 9}));
  // Two heads a set.
  answer.set_scores(Bytes<float>({10, 11, 20, 21, 30, 40, 50, 51, 52, 60, 61, 62}));
  return answer;
}

TEST(Answer, IdsScoresAndRowsAreThoseOfTheSet) {
  const auto view = AnswerView::Create(SampleAnswer(), kShape);
  ASSERT_THAT(view, IsOk());
  EXPECT_EQ(view->positions(), 2u);
  EXPECT_EQ(view->sets(), 2u);
  EXPECT_EQ(view->set_heads(), 2u);
  EXPECT_EQ(view->rows(), 6u);
  EXPECT_THAT(view->ids(0, 0), ElementsAre(1, 5));
  EXPECT_THAT(view->ids(0, 1), IsEmpty());
  EXPECT_THAT(view->ids(1, 1), ElementsAre(0, 3, 9));
  EXPECT_THAT(view->scores(0, 0, 1), ElementsAre(20, 21));
  EXPECT_THAT(view->scores(1, 0, 0), ElementsAre(30));
  EXPECT_THAT(view->scores(1, 1, 0), ElementsAre(50, 51, 52));
  EXPECT_THAT(view->scores(1, 1, 1), ElementsAre(60, 61, 62));
  EXPECT_EQ(view->first_row(1, 1), 3u);
}

TEST(Answer, PerHeadSetsHaveOneHeadEach) {
  v1::Answer answer = SampleAnswer();
  answer.mutable_used()->set_reduction(v1::GROUP_REDUCTION_PER_HEAD);
  answer.set_scores(Bytes<float>({1, 2, 3, 4, 5, 6}));
  const auto view = AnswerView::Create(answer, kShape);
  ASSERT_THAT(view, IsOk());
  EXPECT_EQ(view->positions(), 1u);
  EXPECT_EQ(view->sets(), 4u);
  EXPECT_THAT(view->scores(0, 3, 0), ElementsAre(4, 5, 6));
}

TEST(Answer, IdsAloneHaveNoScores) {
  v1::Answer answer = SampleAnswer();
  answer.clear_scores();
  const auto view = AnswerView::Create(answer, kShape);
  ASSERT_THAT(view, IsOk());
  EXPECT_THAT(view->scores(1, 1, 1), IsEmpty());
}

TEST(Answer, AttentionIsNoListOfTokens) {
  v1::Answer answer = SampleAnswer();
  answer.mutable_output();
  EXPECT_THAT(AnswerView::Create(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no ids")));
}

TEST(Answer, DamagedArraysAreRefused) {
  v1::Answer answer = SampleAnswer();
  answer.add_counts(0);
  EXPECT_THAT(AnswerView::Create(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("counts")));
  answer = SampleAnswer();
  answer.mutable_ids()->pop_back();
  EXPECT_THAT(AnswerView::Create(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ids")));
  answer = SampleAnswer();
  answer.mutable_scores()->push_back('x');
  EXPECT_THAT(AnswerView::Create(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("scores")));
  answer = SampleAnswer();
  for (uint32_t& count : *answer.mutable_counts()) count = 0xffffffffu;  // sums are not taken in 32 bits
  EXPECT_THAT(AnswerView::Create(answer, kShape), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ctkvr::client
