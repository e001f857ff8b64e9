// SPDX-License-Identifier: Apache-2.0
//
// FitMean and WriteTokens on every backend. What was written is read back from the page's bytes by the oracle and held
// to the inequalities that formats.h states, in float64; and all backends must have written the same bytes. Pages are
// poisoned and guarded.

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

// ---- FitMean -------------------------------------------------------------------------------------------------------

class FitMeanConformance : public OpConformance {};

TEST_P(FitMeanConformance, MeansAreTheFloat64SumsInOrder) {
  for (const uint32_t dim : kHeadDims) {
    for (const DType dtype : kDTypes) {
      const StoredHead head({.head_dim = dim, .tokens = 200, .raw = true, .raw_dtype = dtype}, dim);
      const std::pair<uint32_t, uint32_t> ranges[] = {{0, 1}, {0, 200}, {4, 130}, {63, 65}, {64, 128}, {199, 200}};
      std::vector<FitMeanItem> items;
      std::vector<GuardedArray<float>> means(std::size(ranges), GuardedArray<float>(dim, 4));
      for (size_t n = 0; n < std::size(ranges); ++n) {
        items.push_back(
            {.view = head.view(), .begin = ranges[n].first, .end = ranges[n].second, .mean = means[n].data()});
      }
      ASSERT_TRUE(backend().FitMean(stream(), items).ok());
      for (size_t n = 0; n < items.size(); ++n) {
        EXPECT_TRUE(means[n].IsUntouchedFrom(dim));
        for (uint32_t i = 0; i < dim; ++i) {
          double sum = 0;
          for (uint32_t t = items[n].begin; t < items[n].end; ++t) sum += head.keys()[t][i];
          ASSERT_EQ(means[n][i], static_cast<float>(sum / (items[n].end - items[n].begin))) << dim << " " << n;
        }
      }
    }
  }
}

// ---- WriteTokens ---------------------------------------------------------------------------------------------------

struct WriteCase {
  Format format = Format::kK8V4;
  uint32_t head_dim = 64, value_dim = 64, first_planes = 1;
  DType dtype = DType::kF32;
  bool raw = false;
  DType raw_dtype = DType::kBF16;
  uint32_t first_position = 0, count = 0;
};

// Empty pages, each poisoned and guarded, and what codes keys.
class EmptyHead {
 public:
  explicit EmptyHead(const WriteCase& c, float mean_spread = 1)
      : layout(MakePageLayout(c.format, c.head_dim, c.value_dim, c.first_planes)), raw_dtype_(c.raw_dtype) {
    for (uint32_t page = 0; page * kPageTokens < c.first_position + c.count; ++page) {
      pages.emplace_back(layout.page_bytes);
      if (c.raw) raw_pages.emplace_back(kPageTokens * c.head_dim * DTypeBytes(c.raw_dtype));
    }
    for (uint32_t block = 0; block * kSketchTokens < c.first_position + c.count; ++block) {
      sketches.emplace_back(layout.sketch_bytes);
    }
    for (auto& sketch : sketches) sketch_pointers_.push_back(sketch.data());
    for (auto& page : pages) page_pointers_.push_back(page.data());
    for (auto& page : raw_pages) raw_pointers_.push_back(page.data());
    mean = RandomFloats(c.head_dim, c.head_dim + 1);
    for (float& element : mean) element *= mean_spread;
    signs = FloatSigns(c.head_dim, c.value_dim);
  }
  HeadView view() const {
    return {.layout = layout,
            .pages = page_pointers_.data(),
            .sketches = sketch_pointers_.data(),
            .raw_pages = raw_pointers_.empty() ? nullptr : raw_pointers_.data(),
            .raw_dtype = raw_dtype_,
            .mean = mean.data(),
            .signs = signs.data(),
            .length = 0};
  }
  // Of all pages and sketch blocks, as one string.
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> all;
    for (const auto* set : {&pages, &raw_pages, &sketches}) {
      for (const auto& page : *set) all.insert(all.end(), page.data(), page.data() + page.size());
    }
    return all;
  }
  const PageLayout layout;
  std::vector<GuardedArray<std::byte>> pages, raw_pages, sketches;
  std::vector<float> mean, signs;

 private:
  const DType raw_dtype_;
  std::vector<std::byte*> page_pointers_, raw_pointers_, sketch_pointers_;
};

class WriteTokensConformance : public OpConformance {
 protected:
  struct Bad {
    int64_t key = 12345, value = 12345;
  };
  // Rows lie `gap` elements apart beyond their length, at an odd address.
  Bad Write(Backend& on, const WriteCase& c, const EmptyHead& head, const std::vector<float>& keys,
            const std::vector<float>& values, uint32_t gap = 0) {
    const Misaligned key_bytes(keys, c.dtype), value_bytes(values, c.dtype);
    Bad bad;
    const WriteTokensItem item{.view = head.view(),
                               .first_position = c.first_position,
                               .count = c.count,
                               .keys = keys.empty() ? nullptr : key_bytes.data(),
                               .values = values.empty() ? nullptr : value_bytes.data(),
                               .key_stride = (c.head_dim + gap) * DTypeBytes(c.dtype),
                               .value_stride = (c.value_dim + gap) * DTypeBytes(c.dtype),
                               .dtype = c.dtype,
                               .bad_key_element = &bad.key,
                               .bad_value_element = &bad.value};
    EXPECT_TRUE(on.WriteTokens(stream(), {&item, 1}).ok());
    for (const auto& page : head.pages) EXPECT_TRUE(page.IsUntouchedFrom(page.size()));
    for (const auto& page : head.raw_pages) EXPECT_TRUE(page.IsUntouchedFrom(page.size()));
    for (const auto& sketch : head.sketches) EXPECT_TRUE(sketch.IsUntouchedFrom(sketch.size()));
    return bad;
  }
  static void CheckCodedKey(const EmptyHead& head, uint32_t position, const oracle::Row& key) {
    const PageLayout& layout = head.layout;
    const uint32_t dim = layout.head_dim, b = layout.planes, P = layout.first_planes;
    oracle::Row x = key;
    for (uint32_t i = 0; i < dim; ++i) x[i] = static_cast<float>(key[i] - head.mean[i]);
    x = oracle::Rotated(x, {head.signs.begin(), head.signs.end()});
    const std::vector<std::byte> row = oracle::KeyRowAt(head.view(), position);
    const std::vector<uint32_t> codes = oracle::Codes(row, dim, b);
    uint16_t scale_bits, sketch_bits;
    std::memcpy(&scale_bits, row.data() + row.size() - 2, 2);
    const std::byte* sketch = head.view().sketches[position / kSketchTokens];
    std::memcpy(&sketch_bits, sketch + layout.sketch_scales_offset + position % kSketchTokens * 2, 2);
    const double s = oracle::FromF16(scale_bits), norm = std::sqrt(oracle::Dot(x, x)), slack = 2e-6 * norm;
    double max = 0, product = 0;
    for (uint32_t i = 0; i < dim; ++i) {
      max = std::max(max, std::fabs(x[i]));
      product += x[i] * (2.0 * (codes[i] >> (b - P)) + 1 - (1 << P));
      ASSERT_TRUE(IsWithin(s * (codes[i] + 0.5 - (1 << (b - 1))), x[i], s / 2 + slack)) << i;
    }
    ASSERT_LE(max, s * (1 << (b - 1)) + slack);
    if (scale_bits != 0) {
      ASSERT_GT(max, oracle::FromF16(scale_bits - 1) * (1 << (b - 1)) - slack);
    }
    ASSERT_TRUE(IsWithin(oracle::FromF16(sketch_bits) * product, norm * norm, norm * norm * 0x1p-11 * 1.02 + 1e-12));
  }
  static void CheckCodedValue(const EmptyHead& head, uint32_t position, const oracle::Row& value) {
    const std::vector<std::byte> row = oracle::ValueRowAt(head.view(), position);
    const oracle::Row decoded = oracle::DecodeValue(oracle::CodecOf(head.view()), row);
    const double levels = (1 << ValueBits(head.layout.format)) - 1;
    for (size_t begin = 0; begin < value.size(); begin += kValueGroup) {
      const size_t end = std::min(begin + kValueGroup, value.size());
      uint16_t header[2];
      std::memcpy(header, row.data() + begin / kValueGroup * 4, 4);
      const double scale = oracle::FromF16(header[0]), zero = oracle::FromF16(header[1]);
      const auto [min, max] = std::minmax_element(value.begin() + begin, value.begin() + end);
      ASSERT_LE(zero, *min);
      ASSERT_GE(zero + scale * levels, *max);
      if (header[0] != 0) {
        ASSERT_LT(zero + oracle::FromF16(header[0] - 1) * levels, *max);
      }
      for (size_t i = begin; i < end; ++i) {
        ASSERT_TRUE(IsWithin(decoded[i], value[i], scale * 0.501 + std::fabs(value[i]) * 0x1p-22)) << i;
      }
    }
  }
  void Check(const WriteCase& c, uint64_t salt) {
    SCOPED_TRACE(::testing::Message() << FormatName(c.format) << " " << c.head_dim << "/" << c.value_dim << " from "
                                      << c.first_position << " count " << c.count << " " << DTypeName(c.dtype)
                                      << (c.raw ? " raw" : ""));
    const std::vector<float> keys = RandomFloats(size_t{c.count} * c.head_dim, salt);
    const std::vector<float> values = RandomFloats(size_t{c.count} * c.value_dim, salt + 1);
    const EmptyHead head(c), portable(c);
    const Bad bad = Write(backend(), c, head, keys, values);
    ASSERT_EQ(bad.key, -1);
    ASSERT_EQ(bad.value, -1);
    const auto reference = cpu::MakeCpuBackend(*cpu::FindCpuKernels("portable"));
    Write(*reference, c, portable, keys, values);
    ASSERT_EQ(head.Bytes(), portable.Bytes());
    const std::vector<float> plain_keys = RoundedTo(keys, c.dtype), plain_values = RoundedTo(values, c.dtype);
    const bool coded = KeysAreCoded(c.format);
    const DType key_type = c.raw ? c.raw_dtype : coded ? DType::kF32 : FloatType(c.format);
    const std::vector<float> stored_keys = RoundedTo(plain_keys, key_type);
    for (uint32_t t = 0; t < c.count; ++t) {
      const uint32_t position = c.first_position + t;
      if (coded && !c.raw) {
        CheckCodedKey(head, position, RowOf(plain_keys, t, c.head_dim));
      } else {
        ASSERT_EQ(oracle::KeyAt(head.view(), position), RowOf(stored_keys, t, c.head_dim)) << t;
      }
      if (coded) {
        CheckCodedValue(head, position, RowOf(plain_values, t, c.value_dim));
      } else {
        ASSERT_EQ(oracle::FromElements(oracle::ValueRowAt(head.view(), position), FloatType(c.format)),
                  RowOf(RoundedTo(plain_values, FloatType(c.format)), t, c.value_dim));
      }
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(WriteTokensConformance, EveryFormatAndShapeFollowsItsDefinition) {
  uint32_t turn = 0;
  const std::pair<uint32_t, uint32_t> places[] = {{0, 1},   {0, 64},  {63, 2}, {5, 130},
                                                  {64, 64}, {127, 1}, {0, 0},  {1, 63}};
  for (const Format format : kAllFormats) {
    for (const uint32_t dim : kHeadDims) {
      for (const bool raw : {false, true}) {
        if (raw && !KeysAreCoded(format)) continue;
        const auto [first, count] = places[turn % std::size(places)];
        Check({.format = format,
               .head_dim = dim,
               .value_dim = 272 - dim,
               .first_planes = 1 + turn / 2 % 2,
               .dtype = kDTypes[turn % 3],
               .raw = raw,
               .raw_dtype = kDTypes[turn / 3 % 3],
               .first_position = first,
               .count = count},
              turn);
        ++turn;
      }
    }
  }
}

TEST_P(WriteTokensConformance, TokensAroundTheWrittenOnesStayAsTheyWere) {
  for (const Format format : kAllFormats) {
    const WriteCase c{.format = format, .head_dim = 72, .value_dim = 40, .first_position = 60, .count = 10};
    const EmptyHead head(c);
    const std::vector<float> keys = RandomFloats(10 * 72, 1), values = RandomFloats(10 * 40, 2);
    Write(backend(), c, head, keys, values);
    const EmptyHead untouched(c);
    for (uint32_t t = 0; t < 128; ++t) {
      const bool written = t >= 60 && t < 70;
      if (t % 64 >= 6 && t >= 70) continue;  // pages end with token 127, but only neighbours matter
      EXPECT_EQ(oracle::KeyRowAt(head.view(), t) != oracle::KeyRowAt(untouched.view(), t), written) << t;
      EXPECT_EQ(oracle::ValueRowAt(head.view(), t) != oracle::ValueRowAt(untouched.view(), t), written) << t;
    }
  }
}

// Positions of a block in cluster order that come again, after others were truncated.
TEST_P(WriteTokensConformance, InClusterOrderEveryPositionKeepsItsSlot) {
  for (const uint32_t clusters : {64u, 128u}) {
    for (const uint32_t head_dim : {24u, 64u}) {
      StoreOptions options{.head_dim = head_dim, .value_dim = 16, .first_planes = 2, .tokens = 2300};
      const StoredHead plain(options, 5);
      options.order_clusters = clusters;
      options.order_begin = 4;
      const StoredHead ordered(options, 5);
      const std::vector<float> keys = RandomFloats(size_t{600} * head_dim, 6);
      const auto scale_at = [](const HeadView& view, uint32_t token) {
        uint16_t scale;
        std::memcpy(
            &scale,
            view.sketches[token / 1024] + view.layout.sketch_scales_offset + 2 * oracle::SketchSlot(view, token), 2);
        return scale;
      };
      for (const uint32_t first : {0u, 470u, 1990u}) {
        const uint32_t count = std::min(600u, 2300 - first);
        for (const StoredHead* head : {&plain, &ordered}) {
          int64_t bad = 7;
          const WriteTokensItem item{.view = head->view(),
                                     .first_position = first,
                                     .count = count,
                                     .keys = reinterpret_cast<const std::byte*>(keys.data()),
                                     .key_stride = head_dim * sizeof(float),
                                     .dtype = DType::kF32,
                                     .bad_key_element = &bad};
          ASSERT_TRUE(backend().WriteTokens(stream(), {&item, 1}).ok());
          ASSERT_EQ(bad, -1);
        }
        for (uint32_t t = 0; t < 2300; ++t) {
          ASSERT_EQ(oracle::KeyRowAt(ordered.view(), t), oracle::KeyRowAt(plain.view(), t)) << t;
          ASSERT_EQ(scale_at(ordered.view(), t), scale_at(plain.view(), t)) << t;
        }
      }
    }
  }
}

TEST_P(WriteTokensConformance, NullKeysOrValuesAreLeftAlone) {
  for (const bool raw : {false, true}) {
    const WriteCase c{.raw = raw, .count = 3};
    const std::vector<float> rows = RandomFloats(3 * 64, 1);
    for (const bool keys_only : {true, false}) {
      const EmptyHead head(c), untouched(c);
      const Bad bad = keys_only ? Write(backend(), c, head, rows, {}) : Write(backend(), c, head, {}, rows);
      EXPECT_EQ(bad.key, -1);
      EXPECT_EQ(bad.value, -1);
      for (uint32_t t = 0; t < 3; ++t) {
        EXPECT_EQ(oracle::KeyRowAt(head.view(), t) == oracle::KeyRowAt(untouched.view(), t), !keys_only);
        EXPECT_EQ(oracle::ValueRowAt(head.view(), t) == oracle::ValueRowAt(untouched.view(), t), keys_only);
      }
    }
  }
}

TEST_P(WriteTokensConformance, StridesSkipWhatLiesBetween) {
  const WriteCase c{.head_dim = 16, .value_dim = 16, .count = 4};
  std::vector<float> rows = RandomFloats(4 * 16, 1), spaced(4 * 24, std::nanf(""));
  for (size_t i = 0; i < rows.size(); ++i) spaced[i / 16 * 24 + i % 16] = rows[i];
  const EmptyHead head(c), expected(c);
  EXPECT_EQ(Write(backend(), c, head, spaced, spaced, 8).key, -1);
  Write(backend(), c, expected, rows, rows);
  EXPECT_EQ(head.Bytes(), expected.Bytes());
}

TEST_P(WriteTokensConformance, TheFirstElementThatCannotBeStoredIsNamed) {
  struct Case {
    Format format;
    bool raw;
    float bad;
    bool key_is_bad, value_is_bad;
  };
  const Case cases[] = {{Format::kF16, false, 1e38f, true, true},       {Format::kF16, false, -65520.0f, true, true},
                        {Format::kBF16, false, 1e38f, false, false},    {Format::kBF16, false, 3.4e38f, true, true},
                        {Format::kF32, false, 3.4e38f, false, false},   {Format::kK8V4, true, 1e38f, true, true},
                        {Format::kK8V4, false, 1e38f, true, true},      {Format::kK8V8, false, 1e6f, true, false},
                        {Format::kK8V8, false, 65504.0f, false, false}, {Format::kK6V4, false, -66000.0f, false, true}};
  for (const Case& bad : cases) {
    SCOPED_TRACE(::testing::Message() << FormatName(bad.format) << " " << bad.bad << " raw " << bad.raw);
    const WriteCase c{.format = bad.format,
                      .head_dim = 80,
                      .value_dim = 48,
                      .dtype = DType::kF32,
                      .raw = bad.raw,
                      .raw_dtype = DType::kF16,
                      .first_position = 50,
                      .count = 100};
    const EmptyHead head(c, 0);
    std::vector<float> keys(100 * 80, 0.0f), values(100 * 48, 0.0f);
    keys[70 * 80 + 33] = keys[70 * 80 + 34] = keys[99 * 80] = bad.bad;
    values[20 * 48 + 47] = values[21 * 48] = bad.bad;
    const Bad found = Write(backend(), c, head, keys, values);
    const bool coded = KeysAreCoded(bad.format) && !bad.raw;
    EXPECT_EQ(found.key, !bad.key_is_bad ? -1 : coded ? 70 * 80 : 70 * 80 + 33);
    EXPECT_EQ(found.value, bad.value_is_bad ? 20 * 48 + 47 : -1);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FitMeanConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(Backends, WriteTokensConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
