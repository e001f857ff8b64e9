// SPDX-License-Identifier: Apache-2.0
//
// AssignQueries and AverageQueries on every backend against arithmetic in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

// Rows [count][heads * head_dim] binary16, each head near norm 1.
struct HalfRows {
  std::vector<std::vector<uint16_t>> rows;
  std::vector<uint16_t*> pointers;

  HalfRows(uint32_t count, uint32_t heads, uint32_t head_dim, uint64_t salt) {
    for (uint32_t n = 0; n < count; ++n) {
      for (float x : RandomFloats(size_t{heads} * head_dim, salt * 1000 + n)) {
        if (rows.size() == n) rows.emplace_back();
        rows[n].push_back(F16FromF32(x / std::sqrt(static_cast<float>(head_dim))));
      }
    }
    for (std::vector<uint16_t>& row : rows) pointers.push_back(row.data());
  }
  double Dot(uint32_t n, const HalfRows& other, uint32_t m) const {
    double dot = 0;
    for (size_t i = 0; i < rows[n].size(); ++i) dot += oracle::FromF16(rows[n][i]) * oracle::FromF16(other.rows[m][i]);
    return dot;
  }
};

class AssignQueriesConformance : public OpConformance {
 protected:
  std::vector<uint32_t> Assign(const HalfRows& queries, const HalfRows& centroids, uint32_t first, uint32_t last,
                               uint32_t heads, uint32_t head_dim) {
    GuardedArray<uint32_t> nearest(queries.rows.size());
    const AssignQueriesItem item = {.queries = queries.pointers.data(),
                                    .centroids = centroids.pointers.data(),
                                    .first = first,
                                    .last = last,
                                    .centroid_count = static_cast<uint32_t>(centroids.rows.size()),
                                    .heads = heads,
                                    .head_dim = head_dim,
                                    .nearest = nearest.data()};
    EXPECT_TRUE(backend().AssignQueries(stream(), {&item, 1}).ok());
    EXPECT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_TRUE(nearest.IsUntouchedFrom(last));
    for (uint32_t q = 0; q < first; ++q) EXPECT_TRUE(nearest.IsUntouched(q));
    return {nearest.data() + first, nearest.data() + last};
  }
};

TEST_P(AssignQueriesConformance, EveryQueryGoesToItsNearestCentroid) {
  uint32_t turn = 0;
  for (const uint32_t head_dim : {16u, 80u, 128u}) {
    for (const uint32_t count : {1u, 15u, 16u, 17u, 40u}) {
      const uint32_t heads = 1 + ++turn % 7, first = turn % 3 == 0 ? count / 2 : 0;
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " queries " << count << " heads " << heads);
      const HalfRows queries(count, heads, head_dim, turn), centroids(1 + turn * 3, heads, head_dim, 100 + turn);
      const std::vector<uint32_t> nearest = Assign(queries, centroids, first, count, heads, head_dim);
      for (uint32_t q = first; q < count; ++q) {
        double best = -1e30;
        for (uint32_t c = 0; c < centroids.rows.size(); ++c) best = std::max(best, queries.Dot(q, centroids, c));
        ASSERT_LT(nearest[q - first], centroids.rows.size());
        ASSERT_NEAR(queries.Dot(q, centroids, nearest[q - first]), best, heads * 4e-6) << "query " << q;
      }
    }
  }
}

TEST_P(AssignQueriesConformance, EqualCentroidsPreferTheFirst) {
  const HalfRows queries(20, 2, 40, 7);
  HalfRows centroids(6, 2, 40, 8);
  for (uint32_t c = 1; c < 6; ++c) std::copy(centroids.rows[0].begin(), centroids.rows[0].end(), centroids.pointers[c]);
  EXPECT_EQ(Assign(queries, centroids, 0, 20, 2, 40), std::vector<uint32_t>(20, 0));
}

class AverageQueriesConformance : public OpConformance {};

TEST_P(AverageQueriesConformance, CentroidsAreTheNormalisedSumsOfTheirQueries) {
  for (const uint32_t head_dim : {16u, 40u, 128u}) {
    const uint32_t heads = 3;
    HalfRows queries(30, heads, head_dim, head_dim), centroids(7, heads, head_dim, 200 + head_dim);
    const std::vector<std::vector<uint16_t>> before = centroids.rows;
    // Centroid 3 has none; 4 has two that cancel out; 6 lies outside the range.
    std::vector<uint32_t> nearest(30);
    for (uint32_t q = 0; q < 30; ++q) nearest[q] = std::vector<uint32_t>{0, 1, 2, 5, 6}[q % 5];
    nearest[10] = nearest[20] = 4;
    for (size_t i = 0; i < queries.rows[10].size(); ++i) queries.rows[20][i] = queries.rows[10][i] ^ 0x8000;
    const AverageQueriesItem item = {.queries = queries.pointers.data(),
                                     .nearest = nearest.data(),
                                     .query_count = 30,
                                     .centroids = centroids.pointers.data(),
                                     .first = 0,
                                     .last = 6,
                                     .heads = heads,
                                     .head_dim = head_dim};
    ASSERT_TRUE(backend().AverageQueries(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_EQ(centroids.rows[3], before[3]);
    EXPECT_EQ(centroids.rows[6], before[6]);
    EXPECT_EQ(centroids.rows[4], std::vector<uint16_t>(size_t{heads} * head_dim, 0));
    for (uint32_t c : {0u, 1u, 2u, 5u}) {
      for (uint32_t r = 0; r < heads; ++r) {
        std::vector<double> sum(head_dim);
        double squares = 0;
        for (uint32_t i = 0; i < head_dim; ++i) {
          for (uint32_t q = 0; q < 30; ++q) {
            if (nearest[q] == c) sum[i] += oracle::FromF16(queries.rows[q][r * head_dim + i]);
          }
          squares += sum[i] * sum[i];
        }
        for (uint32_t i = 0; i < head_dim; ++i) {
          ASSERT_EQ(centroids.rows[c][r * head_dim + i], F16FromF32(static_cast<float>(sum[i] / std::sqrt(squares))));
        }
      }
    }
  }
}

#define CTKVR_ON_ALL_BACKENDS(suite)                                             \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(BackendNames()), \
                           [](const auto& param) { return param.param; })
CTKVR_ON_ALL_BACKENDS(AssignQueriesConformance);
CTKVR_ON_ALL_BACKENDS(AverageQueriesConformance);

}  // namespace
}  // namespace ctkvr::testing
