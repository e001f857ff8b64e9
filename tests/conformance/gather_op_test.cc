// SPDX-License-Identifier: Apache-2.0
//
// GatherRows on every backend: storage rows byte for byte, decoded rows against the oracle, overflow counted, outputs
// poisoned and guarded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

constexpr RowFormat kRowFormats[] = {RowFormat::kF32, RowFormat::kF16, RowFormat::kBF16, RowFormat::kStorage};

DType RowType(RowFormat format) {
  return format == RowFormat::kF32 ? DType::kF32 : format == RowFormat::kF16 ? DType::kF16 : DType::kBF16;
}

// Half a unit in the last place of a number of this size, and what float32 arithmetic on the way may add.
double RowBound(DType dtype, double expected, double norm) {
  const double rounding = dtype == DType::kF32 ? 0 : std::fabs(expected) * (dtype == DType::kF16 ? 0x1p-11 : 0x1p-8);
  return rounding * 1.001 + 0x1p-25 + 3e-6 * norm;
}

void ExpectRow(std::span<const std::byte> actual, const oracle::Row& expected, DType dtype) {
  const oracle::Row decoded = oracle::FromElements(actual, dtype);
  ASSERT_EQ(decoded.size(), expected.size());
  const double norm = std::sqrt(oracle::Dot(expected, expected));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(IsWithin(decoded[i], expected[i], RowBound(dtype, expected[i], norm))) << i;
  }
}

class GatherRowsConformance : public OpConformance {
 protected:
  void Check(const StoredHead& head, RowFormat row_format, const std::vector<uint32_t>& tokens, uint32_t count) {
    const HeadView view = head.view();
    const oracle::Codec codec = oracle::CodecOf(view);
    const bool storage = row_format == RowFormat::kStorage;
    const DType dtype = RowType(row_format);
    const size_t key_bytes = storage ? oracle::KeyRowAt(view, 0).size() : view.layout.head_dim * DTypeBytes(dtype);
    const size_t value_bytes = storage ? view.layout.value_row_bytes : view.layout.value_dim * DTypeBytes(dtype);
    GuardedArray<std::byte> keys(tokens.size() * key_bytes, 1), values(tokens.size() * value_bytes, 3);
    uint64_t overflow = 999;
    const GatherRowsItem item{.view = view,
                              .tokens = tokens.data(),
                              .count = &count,
                              .count_max = static_cast<uint32_t>(tokens.size()),
                              .row_format = row_format,
                              .keys = keys.data(),
                              .values = values.data(),
                              .overflow = &overflow};
    ASSERT_TRUE(backend().GatherRows(stream(), {&item, 1}).ok());
    ASSERT_TRUE(backend().Synchronize(stream()).ok());
    EXPECT_EQ(overflow, 0u);
    EXPECT_TRUE(keys.IsUntouchedFrom(count * key_bytes));
    EXPECT_TRUE(values.IsUntouchedFrom(count * value_bytes));
    for (uint32_t n = 0; n < count; ++n) {
      const auto key = keys.span().subspan(n * key_bytes, key_bytes);
      const auto value = values.span().subspan(n * value_bytes, value_bytes);
      const std::vector<std::byte> stored_value = oracle::ValueRowAt(view, tokens[n]);
      if (storage) {
        ASSERT_THAT(key, ::testing::ElementsAreArray(oracle::KeyRowAt(view, tokens[n])));
        ASSERT_THAT(value, ::testing::ElementsAreArray(stored_value));
      } else {
        ASSERT_NO_FATAL_FAILURE(ExpectRow(key, head.keys()[tokens[n]], dtype)) << "key of " << tokens[n];
        ASSERT_NO_FATAL_FAILURE(ExpectRow(value, oracle::DecodeValue(codec, stored_value), dtype)) << "value";
      }
    }
  }
};

TEST_P(GatherRowsConformance, BlocksInClusterOrderAreReadByPosition) {
  for (const uint32_t clusters : {64u, 128u}) {
    const StoredHead head({.head_dim = 64, .value_dim = 16, .tokens = 2200, .order_clusters = clusters}, clusters);
    FillValues(head, 3);
    for (const RowFormat row_format : {RowFormat::kStorage, RowFormat::kF32}) {
      ASSERT_NO_FATAL_FAILURE(Check(head, row_format, {0, 5, 99, 600, 1023, 1024, 1999, 2048, 2111, 2199}, 10));
    }
  }
}

TEST_P(GatherRowsConformance, RowsOfEveryFormatAreThoseOfTheOracle) {
  uint32_t turn = 0;
  for (const Format format : kAllFormats) {
    for (const uint32_t dim : kHeadDims) {
      for (const bool raw : {false, true}) {
        if (raw && !KeysAreCoded(format)) continue;
        const StoredHead head({.format = format,
                               .head_dim = dim,
                               .value_dim = 272 - dim,
                               .first_planes = 1 + turn % 2,
                               .tokens = 150,
                               .raw = raw,
                               .raw_dtype = static_cast<DType>(turn / 2 % 3)},
                              turn);
        FillValues(head, turn);
        for (const RowFormat row_format : kRowFormats) {
          SCOPED_TRACE(::testing::Message() << FormatName(format) << " " << dim << " as " << int(row_format));
          ASSERT_NO_FATAL_FAILURE(Check(head, row_format, {149, 0, 63, 64, 65, 64, 127, 128, 7}, 8));
        }
        ++turn;
      }
    }
  }
}

TEST_P(GatherRowsConformance, AZeroKeyDecodesToTheMean) {
  const StoredHead head({.head_dim = 80, .tokens = 3, .pattern = KeyPattern::kZero}, 5);
  const uint32_t token = 2, count = 1;
  std::vector<float> key(80);
  const GatherRowsItem item{.view = head.view(),
                            .tokens = &token,
                            .count = &count,
                            .count_max = 1,
                            .row_format = RowFormat::kF32,
                            .keys = reinterpret_cast<std::byte*>(key.data())};
  ASSERT_TRUE(backend().GatherRows(stream(), {&item, 1}).ok());
  for (uint32_t i = 0; i < 80; ++i) EXPECT_EQ(key[i], head.view().mean[i]);
}

TEST_P(GatherRowsConformance, NothingIsWrittenForACountOfZeroOrANullOutput) {
  const StoredHead head({.head_dim = 64, .value_dim = 40, .tokens = 70}, 6);
  FillValues(head, 6);
  for (const RowFormat row_format : kRowFormats) {
    ASSERT_NO_FATAL_FAILURE(Check(head, row_format, {1, 2}, 0));
    const std::vector<uint32_t> tokens = {69, 3};
    const uint32_t count = 2;
    GuardedArray<std::byte> keys(2 * 64 * 4), values(2 * 40 * 4);
    GatherRowsItem item{.view = head.view(),
                        .tokens = tokens.data(),
                        .count = &count,
                        .count_max = 2,
                        .row_format = row_format,
                        .keys = keys.data()};
    ASSERT_TRUE(backend().GatherRows(stream(), {&item, 1}).ok());
    EXPECT_FALSE(keys.IsUntouched(0));
    item.keys = nullptr;
    item.values = values.data();
    const std::vector<std::byte> before(keys.span().begin(), keys.span().end());
    ASSERT_TRUE(backend().GatherRows(stream(), {&item, 1}).ok());
    EXPECT_FALSE(values.IsUntouched(0));
    EXPECT_THAT(keys.span(), ::testing::ElementsAreArray(before));
  }
}

TEST_P(GatherRowsConformance, ElementsThatDoNotFitTheRowFormatAreCounted) {
  const StoredHead head({.format = Format::kF32, .head_dim = 24, .value_dim = 16, .tokens = 4}, 7);
  const HeadView view = head.view();
  auto set = [&](uint32_t offset, size_t index, float value) {
    StoreElement(view.pages[0] + offset, DType::kF32, index, value);
  };
  for (size_t i = 0; i < 4 * 16; ++i) set(view.layout.values_offset, i, 1.0f);
  set(view.layout.keys_offset, 24 + 3, 65520.0f);
  set(view.layout.keys_offset, 24 + 23, -1e6f);
  set(view.layout.keys_offset, 2 * 24 + 8, 65519.0f);
  set(view.layout.values_offset, 3 * 16 + 15, 3.4e38f);
  const std::vector<uint32_t> tokens = {0, 1, 2, 3};
  const uint32_t count = 4;
  const std::pair<RowFormat, uint64_t> expected[] = {
      {RowFormat::kF32, 0}, {RowFormat::kF16, 3}, {RowFormat::kBF16, 1}, {RowFormat::kStorage, 0}};
  for (const auto& [row_format, overflows] : expected) {
    GuardedArray<std::byte> keys(4 * 24 * 4), values(4 * 16 * 4);
    uint64_t overflow = 77;
    const GatherRowsItem item{.view = view,
                              .tokens = tokens.data(),
                              .count = &count,
                              .count_max = 4,
                              .row_format = row_format,
                              .keys = keys.data(),
                              .values = values.data(),
                              .overflow = &overflow};
    ASSERT_TRUE(backend().GatherRows(stream(), {&item, 1}).ok());
    EXPECT_EQ(overflow, overflows) << int(row_format);
    EXPECT_TRUE(
        keys.IsUntouchedFrom(4 * 24 * (row_format == RowFormat::kF16 || row_format == RowFormat::kBF16 ? 2 : 4)));
    if (row_format == RowFormat::kF16) {
      EXPECT_EQ(oracle::FromElements(keys.span().subspan(2 * 48, 48), DType::kF16)[8], 65504);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, GatherRowsConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
