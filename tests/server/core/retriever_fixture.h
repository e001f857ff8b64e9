// SPDX-License-Identifier: Apache-2.0
//
// One session with one layer, and its answers held to brute force over the rows that a client would fetch. The
// parameter says whether the backend shares host memory.

#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {

inline constexpr uint32_t kLength = 700;

class RetrieverTest : public ::testing::TestWithParam<bool> {
 protected:
  RetrieverTest() : harness_({.shares_host_memory = GetParam()}) {}

  // A session "s" of one layer with `length` tokens.
  void Fill(const SessionConfig& config, uint32_t length = kLength, uint32_t query_positions = 0) {
    config_ = config;
    tokens_.emplace(config.layers[0], config.dtype, 77);
    ASSERT_THAT(harness_.Open("s", config), IsOk());
    ASSERT_THAT(harness_.Append("s", tokens_->Append(0, length, query_positions)), IsOk());
    stored_ = ReadLayer(harness_, "s", config);
  }
  const LayerConfig& layer() const { return config_.layers[0]; }
  uint32_t set_heads(const Answer& answer) const {
    return answer.used.reduction == Reduction::kPerHead ? 1 : layer().group_heads();
  }
  // The answer against brute force over everything visible.
  void ExpectExact(const OwnedQuery& query, const Answer& answer) {
    const std::vector<AnswerSet> sets = SplitAnswer(answer, set_heads(answer));
    const size_t per_position = sets.size() / query.query.positions;
    for (uint32_t p = 0; p < query.query.positions; ++p) {
      const std::vector<AnswerSet> own(sets.begin() + p * per_position, sets.begin() + (p + 1) * per_position);
      AnswerCheck check{.layer = &layer(),
                       .selection = answer.used,
                       .position = query.query.position + p,
                       .local_sinks = query.query.local_sinks,
                       .local_begin = query.query.local_begin,
                       .candidates = {}};
      EXPECT_TRUE(IsExactAnswer(own, stored_, tokens_->Queries(query.query.position + p), check)) << "position " << p;
    }
  }

  Harness harness_;
  SessionConfig config_;
  std::optional<Tokens> tokens_;
  StoredLayer stored_;
};

}  // namespace ctkvr::testing
