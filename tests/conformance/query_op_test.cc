// SPDX-License-Identifier: Apache-2.0
//
// PrepareQueries and WriteCentroids on every backend: numbers against the oracle, codes exactly what the rotated
// numbers give, and the same bits from all backends. Outputs are poisoned and guarded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "tests/conformance/op_cases.h"
#include "tests/conformance/row_cases.h"

namespace ctkvr::testing {
namespace {

// ---- PrepareQueries ------------------------------------------------------------------------------------------------

// Outputs of one item, each guarded.
struct PreparedArrays {
  PreparedArrays(uint32_t heads, uint32_t dim)
      : heads_(heads),
        plain(heads * dim, 4),
        rotated(heads * dim, 8),
        rotated_sum(heads),
        mean_dot(heads),
        scan(heads * dim, 1),
        refine(heads * dim, 3),
        scan_scale(heads),
        refine_scale(heads),
        scan_sum(heads),
        refine_sum(heads) {}
  PreparedQuery view() {
    return {.heads = heads_,
            .plain = plain.data(),
            .rotated = rotated.data(),
            .rotated_sum = rotated_sum.data(),
            .mean_dot = mean_dot.data(),
            .scan = scan.data(),
            .scan_scale = scan_scale.data(),
            .scan_sum = scan_sum.data(),
            .refine = refine.data(),
            .refine_scale = refine_scale.data(),
            .refine_sum = refine_sum.data()};
  }
  template <typename Visit>
  void ForEach(Visit visit) {
    visit(plain), visit(rotated), visit(rotated_sum), visit(mean_dot), visit(scan), visit(refine);
    visit(scan_scale), visit(refine_scale), visit(scan_sum), visit(refine_sum);
  }
  std::vector<std::byte> Bytes() {
    std::vector<std::byte> all;
    ForEach([&](auto& array) {
      const auto bytes = std::as_bytes(array.span());
      all.insert(all.end(), bytes.begin(), bytes.end());
    });
    return all;
  }
  const uint32_t heads_;
  GuardedArray<float> plain, rotated, rotated_sum, mean_dot;
  GuardedArray<int8_t> scan, refine;
  GuardedArray<float> scan_scale, refine_scale;
  GuardedArray<int32_t> scan_sum, refine_sum;
};

class PrepareQueriesConformance : public OpConformance {
 protected:
  // Codes follow from the rotated numbers returned, each step float32.
  void CheckCodes(std::span<const float> rotated, std::span<const int8_t> codes, float scale, int32_t sum, int max) {
    float largest = 0;
    for (const float element : rotated) largest = std::max(largest, std::fabs(element));
    ASSERT_EQ(scale, largest / static_cast<float>(max));
    int32_t total = 0;
    for (size_t i = 0; i < rotated.size(); ++i) {
      const float level = scale == 0 ? 0.0f : std::nearbyint(rotated[i] / scale);
      ASSERT_EQ(codes[i], std::clamp(level, -static_cast<float>(max), static_cast<float>(max))) << i;
      total += codes[i];
    }
    ASSERT_EQ(sum, total);
  }
  void Check(const std::vector<float>& query, uint32_t heads, uint32_t dim, DType dtype, uint64_t salt) {
    const std::vector<float> mean = RandomFloats(dim, salt), signs = FloatSigns(dim, salt);
    const Misaligned bytes(query, dtype);
    PreparedArrays out(heads, dim);
    const PrepareQueriesItem item{.query = bytes.data(),
                                  .dtype = dtype,
                                  .head_dim = dim,
                                  .mean = mean.data(),
                                  .signs = signs.data(),
                                  .out = out.view()};
    ASSERT_TRUE(backend().PrepareQueries(stream(), {&item, 1}).ok());
    out.ForEach([](auto& array) { EXPECT_TRUE(array.IsUntouchedFrom(array.size())); });
    const std::vector<float> plain = RoundedTo(query, dtype);
    const oracle::Row wide_mean(mean.begin(), mean.end()), wide_signs(signs.begin(), signs.end());
    for (uint32_t r = 0; r < heads; ++r) {
      const oracle::Row row = RowOf(plain, r, dim), rotated = oracle::Rotated(row, wide_signs);
      const double norm = std::sqrt(oracle::Dot(row, row));
      const std::span<const float> actual(out.rotated.data() + r * dim, dim);
      double sum = 0;
      for (uint32_t i = 0; i < dim; ++i) {
        ASSERT_EQ(out.plain[r * dim + i], row[i]);
        ASSERT_TRUE(IsWithin(actual[i], rotated[i], 2e-6 * norm + 1e-42)) << i;
        sum += actual[i];
      }
      EXPECT_TRUE(IsWithin(out.rotated_sum[r], sum, 1e-5 * norm + 1e-42));
      EXPECT_TRUE(IsWithin(out.mean_dot[r], oracle::Dot(row, wide_mean), 1e-5 * norm + 1e-42));
      CheckCodes(actual, out.scan.span().subspan(r * dim, dim), out.scan_scale[r], out.scan_sum[r], kScanQueryMax);
      CheckCodes(actual, out.refine.span().subspan(r * dim, dim), out.refine_scale[r], out.refine_sum[r],
                 kRefineQueryMax);
    }
    // Coarse passes promise equal bits everywhere, so what they start from must be equal too.
    PreparedArrays portable(heads, dim);
    PrepareQueriesItem again = item;
    again.out = portable.view();
    const auto reference = cpu::MakeCpuBackend(*cpu::FindCpuKernels("portable"));
    ASSERT_TRUE(reference->PrepareQueries(stream(), {&again, 1}).ok());
    EXPECT_EQ(out.Bytes(), portable.Bytes());
  }
};

TEST_P(PrepareQueriesConformance, EveryShapeFollowsItsDefinition) {
  uint32_t turn = 0;
  for (const uint32_t dim : kHeadDims) {
    for (const DType dtype : kDTypes) {
      const uint32_t heads = 1 + turn++ % kGroupHeadsMax;
      SCOPED_TRACE(::testing::Message() << dim << " " << DTypeName(dtype) << " " << heads);
      Check(RandomFloats(size_t{heads} * dim, turn), heads, dim, dtype, turn);
    }
  }
}

TEST_P(PrepareQueriesConformance, ZeroTinyAndHugeQueriesStayFinite) {
  std::vector<float> query(4 * 64, 0.0f);
  for (uint32_t i = 0; i < 64; ++i) {
    query[64 + i] = std::ldexp(static_cast<float>(i) - 31, -149);
    query[128 + i] = i == 5 ? 1e15f : 0;
    query[192 + i] = 1e-30f;
  }
  Check(query, 4, 64, DType::kF32, 3);
}

TEST_P(PrepareQueriesConformance, WithoutSignsOnlyThePlainQueryIsWritten) {
  const std::vector<float> query = RandomFloats(3 * 40, 5);
  const Misaligned bytes(query, DType::kBF16);
  PreparedArrays out(3, 40);
  const PrepareQueriesItem item{.query = bytes.data(), .dtype = DType::kBF16, .head_dim = 40, .out = out.view()};
  ASSERT_TRUE(backend().PrepareQueries(stream(), {&item, 1}).ok());
  EXPECT_THAT(out.plain.span(), ::testing::ElementsAreArray(RoundedTo(query, DType::kBF16)));
  out.ForEach([&](auto& array) {
    if (static_cast<void*>(&array) != &out.plain) {
      EXPECT_TRUE(array.IsUntouchedFrom(0));
    }
  });
}

// ---- WriteCentroids ------------------------------------------------------------------------------------------------

class WriteCentroidsConformance : public OpConformance {};

TEST_P(WriteCentroidsConformance, HeadsAreNormalisedIntoTheirSlots) {
  uint32_t turn = 0;
  for (const uint32_t dim : kHeadDims) {
    for (const DType dtype : kDTypes) {
      const uint32_t heads = 1 + turn++ % kGroupHeadsMax, size = heads * dim;
      SCOPED_TRACE(::testing::Message() << dim << " " << DTypeName(dtype) << " " << heads);
      std::vector<float> queries = RandomFloats(3 * size_t{size}, turn);
      std::fill_n(queries.begin() + size, dim, 0.0f);  // query 1, head 0
      for (uint32_t i = 0; i < dim; ++i) queries[2 * size + i] *= dtype == DType::kF16 ? 1e-3f : 1e-25f;
      if (dtype != DType::kF16) queries[size - 1] = 1e30f;
      const Misaligned bytes(queries, dtype);
      std::vector<GuardedArray<uint16_t>> centroids(5, GuardedArray<uint16_t>(size, 2));
      std::vector<uint16_t*> pointers;
      for (auto& centroid : centroids) pointers.push_back(centroid.data());
      GuardedArray<float> norms(5 * heads, 4);
      const uint32_t slots[] = {4, 0, 2};
      const WriteCentroidsItem item{.queries = bytes.data(),
                                    .stride = size * DTypeBytes(dtype),
                                    .dtype = dtype,
                                    .heads = heads,
                                    .head_dim = dim,
                                    .count = 3,
                                    .slots = slots,
                                    .centroids = pointers.data(),
                                    .norms = norms.data()};
      ASSERT_TRUE(backend().WriteCentroids(stream(), {&item, 1}).ok());
      EXPECT_TRUE(norms.IsUntouchedFrom(norms.size()));
      for (const uint32_t empty : {1u, 3u}) {
        EXPECT_TRUE(centroids[empty].IsUntouchedFrom(0));
        for (uint32_t r = 0; r < heads; ++r) EXPECT_TRUE(norms.IsUntouched(empty * heads + r));
      }
      const std::vector<float> plain = RoundedTo(queries, dtype);
      for (uint32_t n = 0; n < 3; ++n) {
        EXPECT_TRUE(centroids[slots[n]].IsUntouchedFrom(size));
        for (uint32_t r = 0; r < heads; ++r) {
          const oracle::Row row = RowOf(plain, n * heads + r, dim);
          const double norm = std::sqrt(oracle::Dot(row, row));
          ASSERT_EQ(norms[slots[n] * heads + r], static_cast<float>(norm));
          for (uint32_t i = 0; i < dim; ++i) {
            const double unit = norm == 0 ? 0 : row[i] / norm;
            ASSERT_TRUE(IsWithin(oracle::FromF16(centroids[slots[n]][r * dim + i]), unit,
                                 std::fabs(unit) * 0x1.001p-11 + 0x1.001p-25));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PrepareQueriesConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(Backends, WriteCentroidsConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
