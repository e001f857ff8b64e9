// SPDX-License-Identifier: Apache-2.0
//
// The reference encoder and decoder of rows: against the test vectors, which another implementation made, and against
// the definitions of formats.h evaluated in float64.

#include "kernels/formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/rotation.h"
#include "tests/golden/golden_rows.h"
#include "tests/testing/compare.h"
#include "tests/testing/random_kv.h"

namespace ctkvr {
namespace {

using ::testing::ElementsAreArray;
using testing::GoldenCase;
using testing::GoldenToken;
using testing::GuardedArray;

std::vector<float> RotatedKey(const GoldenCase& golden, const GoldenToken& token) {
  std::vector<float> x(golden.head_dim);
  for (uint32_t i = 0; i < golden.head_dim; ++i) x[i] = token.key[i] - golden.mean[i];
  Rotate(x.data(), golden.head_dim, RotationSigns(golden.head_dim, golden.rotation_seed).data());
  return x;
}

std::vector<uint32_t> BitsOf(const std::vector<float>& floats) {
  std::vector<uint32_t> bits(floats.size());
  std::memcpy(bits.data(), floats.data(), floats.size() * sizeof(float));
  return bits;
}

TEST(FormatsTest, KeysOfTheTestVectorsEncodeToTheirBytes) {
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    if (!golden.keys_coded) continue;
    const uint32_t planes = KeyPlanes(golden.format);
    for (const GoldenToken& token : golden.tokens) {
      SCOPED_TRACE(golden.name + ": " + token.note);
      const std::vector<float> x = RotatedKey(golden, token);
      for (uint32_t first_planes : {1u, 2u}) {
        std::vector<uint8_t> codes(golden.head_dim);
        uint16_t code_scale = 0xdead;
        uint16_t sketch_scale = 0xdead;
        ASSERT_TRUE(EncodeRotatedKey(x.data(), golden.head_dim, planes, first_planes, codes.data(), &code_scale,
                                     &sketch_scale));
        std::vector<std::byte> row(planes * golden.head_dim / 8 + 2);
        PackPlanes(codes.data(), golden.head_dim, planes, row.data());
        std::memcpy(row.data() + row.size() - 2, &code_scale, 2);
        EXPECT_THAT(row, ElementsAreArray(token.key_row));
        EXPECT_EQ(sketch_scale, token.sketch_scale[first_planes]);
      }
    }
  }
}

TEST(FormatsTest, KeysOfTheTestVectorsDecodeToTheirFloats) {
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    if (!golden.keys_coded) continue;
    const uint32_t planes = KeyPlanes(golden.format);
    const std::vector<float> signs = RotationSigns(golden.head_dim, golden.rotation_seed);
    for (const GoldenToken& token : golden.tokens) {
      SCOPED_TRACE(golden.name + ": " + token.note);
      std::vector<uint8_t> codes(golden.head_dim);
      UnpackPlanes(token.key_row.data(), golden.head_dim, planes, codes.data());
      uint16_t scale = 0;
      std::memcpy(&scale, token.key_row.data() + token.key_row.size() - 2, 2);
      std::vector<float> key(golden.head_dim);
      DecodeRotatedKey(codes.data(), golden.head_dim, planes, scale, key.data());
      Unrotate(key.data(), golden.head_dim, signs.data());
      for (uint32_t i = 0; i < golden.head_dim; ++i) key[i] += golden.mean[i];
      EXPECT_THAT(BitsOf(key), ElementsAreArray(BitsOf(token.decoded_key)));
    }
  }
}

TEST(FormatsTest, ValuesOfTheTestVectorsEncodeAndDecodeExactly) {
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    for (const GoldenToken& token : golden.tokens) {
      SCOPED_TRACE(golden.name + ": " + token.note);
      GuardedArray<std::byte> row(token.value_row.size(), 1);
      ASSERT_EQ(EncodeValueRow(token.value.data(), golden.value_dim, golden.format, row.data()), -1);
      EXPECT_THAT(row.span(), ElementsAreArray(token.value_row));
      EXPECT_TRUE(row.IsUntouchedFrom(row.size()));
      GuardedArray<float> value(golden.value_dim);
      DecodeValueRow(row.data(), golden.value_dim, golden.format, value.data());
      EXPECT_THAT(BitsOf({value.span().begin(), value.span().end()}), ElementsAreArray(BitsOf(token.decoded_value)));
      EXPECT_TRUE(value.IsUntouchedFrom(value.size()));
    }
  }
}

TEST(FormatsTest, RowBytesAreThoseOfTheTestVectors) {
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    SCOPED_TRACE(golden.name);
    const PageLayout layout = MakePageLayout(golden.format, golden.head_dim, golden.value_dim, 1);
    if (golden.keys_coded || !KeysAreCoded(golden.format)) {
      EXPECT_EQ(StorageKeyRowBytes(layout), golden.tokens[0].key_row.size());
    }
    EXPECT_EQ(StorageValueRowBytes(layout), golden.tokens[0].value_row.size());
  }
}

// The largest key of a row decides s: nothing smaller would do, and every element decodes to within half a step.
TEST(FormatsTest, CodeScaleIsTheSmallestThatHolds) {
  std::mt19937_64 random = testing::MakeRandom(1);
  SCOPED_TRACE(testing::TestSeed());
  for (int round = 0; round < 400; ++round) {
    const uint32_t dim = 16 + 8 * (random() % 31);
    const uint32_t planes = random() % 2 == 0 ? 8 : 6;
    std::normal_distribution<float> normal(0, std::ldexp(1.0f, static_cast<int>(random() % 40) - 28));
    std::vector<float> x(dim);
    double max = 0;
    for (float& element : x) max = std::max<double>(max, std::fabs(element = normal(random)));
    std::vector<uint8_t> codes(dim);
    uint16_t scale_bits = 0;
    uint16_t sketch_bits = 0;
    ASSERT_TRUE(EncodeRotatedKey(x.data(), dim, planes, 1, codes.data(), &scale_bits, &sketch_bits));
    const double levels = 1 << (planes - 1);
    const double scale = F32FromF16(scale_bits);
    EXPECT_LE(max, scale * levels);
    EXPECT_GT(max, F32FromF16(scale_bits - 1) * levels);
    std::vector<float> decoded(dim);
    DecodeRotatedKey(codes.data(), dim, planes, scale_bits, decoded.data());
    for (uint32_t i = 0; i < dim; ++i) EXPECT_TRUE(testing::IsWithin(decoded[i], x[i], 0.5001 * scale)) << i;
  }
}

// f * <x, u> = |x|^2 is what makes the estimate from the first planes unbiased.
TEST(FormatsTest, SketchScaleMakesTheEstimateOfTheKeyItselfExact) {
  std::mt19937_64 random = testing::MakeRandom(2);
  SCOPED_TRACE(testing::TestSeed());
  std::normal_distribution<float> normal(0, 2);
  for (uint32_t first_planes : {1u, 2u}) {
    for (uint32_t dim : {16u, 64u, 80u, 128u, 256u}) {
      std::vector<float> x(dim);
      for (float& element : x) element = normal(random);
      std::vector<uint8_t> codes(dim);
      uint16_t scale = 0;
      uint16_t sketch = 0;
      ASSERT_TRUE(EncodeRotatedKey(x.data(), dim, 8, first_planes, codes.data(), &scale, &sketch));
      double square = 0;
      double product = 0;
      for (uint32_t i = 0; i < dim; ++i) {
        const int level = 2 * (codes[i] >> (8 - first_planes)) + 1 - (1 << first_planes);
        EXPECT_EQ(level > 0, x[i] >= 0);
        square += double{x[i]} * x[i];
        product += double{x[i]} * level;
      }
      EXPECT_TRUE(testing::IsWithin(F32FromF16(sketch) * product, square, square * 0x1p-11 * 1.01));
    }
  }
}

TEST(FormatsTest, AKeyOfZerosHasZeroScalesAndMiddleCodes) {
  const std::vector<float> x(64, 0.0f);
  std::vector<uint8_t> codes(64, 7);
  uint16_t scale = 1;
  uint16_t sketch = 1;
  ASSERT_TRUE(EncodeRotatedKey(x.data(), 64, 6, 2, codes.data(), &scale, &sketch));
  EXPECT_EQ(scale, 0);
  EXPECT_EQ(sketch, 0);
  EXPECT_THAT(codes, ::testing::Each(32));
  std::vector<float> decoded(64, 5.0f);
  DecodeRotatedKey(codes.data(), 64, 6, scale, decoded.data());
  EXPECT_THAT(decoded, ::testing::Each(0.0f));
}

TEST(FormatsTest, AKeyWhoseScalesOverflowIsRefusedAndNothingWritten) {
  const float infinity = std::numeric_limits<float>::infinity();
  // s overflows; f overflows though s does not; not finite at all.
  for (float bad : {65504.0f * 130, 65504.0f * 100, infinity, -infinity, std::nanf("")}) {
    SCOPED_TRACE(bad);
    std::vector<float> x(64, bad);
    std::vector<uint8_t> codes(64, 7);
    uint16_t scale = 0xabcd;
    uint16_t sketch = 0xabcd;
    EXPECT_FALSE(EncodeRotatedKey(x.data(), 64, 8, 1, codes.data(), &scale, &sketch));
    EXPECT_THAT(codes, ::testing::Each(7));
    EXPECT_EQ(scale, 0xabcd);
    EXPECT_EQ(sketch, 0xabcd);
  }
  std::vector<float> x(64, 0.0f);
  x[5] = 65504.0f;  // f = |x| * |x| / |x|
  std::vector<uint8_t> codes(64);
  uint16_t scale = 0;
  uint16_t sketch = 0;
  ASSERT_TRUE(EncodeRotatedKey(x.data(), 64, 8, 1, codes.data(), &scale, &sketch));
  EXPECT_EQ(sketch, 0x7bff);
  x[5] = 65520.0f;
  EXPECT_FALSE(EncodeRotatedKey(x.data(), 64, 8, 1, codes.data(), &scale, &sketch));
}

TEST(FormatsTest, PlanesKeepEveryBitInItsPlace) {
  std::mt19937_64 random = testing::MakeRandom(3);
  SCOPED_TRACE(testing::TestSeed());
  for (uint32_t planes : {6u, 8u}) {
    for (uint32_t dim : {16u, 24u, 72u, 128u, 256u}) {
      std::vector<uint8_t> codes(dim);
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random() % (1u << planes));
      GuardedArray<std::byte> packed(planes * dim / 8, 1);
      PackPlanes(codes.data(), dim, planes, packed.data());
      EXPECT_TRUE(packed.IsUntouchedFrom(packed.size()));
      for (uint32_t j = 0; j < planes; ++j) {
        for (uint32_t i = 0; i < dim; ++i) {
          const auto byte = static_cast<uint32_t>(packed[j * (dim / 8) + i / 8]);
          ASSERT_EQ(byte >> (i % 8) & 1, codes[i] >> (planes - 1 - j) & 1u) << "plane " << j << " dimension " << i;
        }
      }
      std::vector<uint8_t> back(dim, 0xff);
      UnpackPlanes(packed.data(), dim, planes, back.data());
      EXPECT_EQ(back, codes);
    }
  }
}

class ValueRowTest : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(CodedFormats, ValueRowTest, ::testing::Values(Format::kK8V8, Format::kK8V4),
                         [](const auto& param) { return std::string(FormatName(param.param)); });

TEST_P(ValueRowTest, EveryGroupHasTheTightestBounds) {
  std::mt19937_64 random = testing::MakeRandom(4);
  SCOPED_TRACE(testing::TestSeed());
  const double levels = (1 << ValueBits(GetParam())) - 1;
  for (int round = 0; round < 300; ++round) {
    const uint32_t dim = 16 + 8 * (random() % 31);
    std::normal_distribution<float> normal(static_cast<float>(random() % 5) - 2.0f,
                                           std::ldexp(1.0f, static_cast<int>(random() % 30) - 20));
    std::vector<float> value(dim);
    for (float& element : value) element = normal(random);
    std::vector<std::byte> row(MakePageLayout(GetParam(), 16, dim, 1).value_row_bytes);
    ASSERT_EQ(EncodeValueRow(value.data(), dim, GetParam(), row.data()), -1);
    std::vector<float> decoded(dim);
    DecodeValueRow(row.data(), dim, GetParam(), decoded.data());
    for (uint32_t begin = 0; begin < dim; begin += kValueGroup) {
      const uint32_t end = std::min(begin + kValueGroup, dim);
      const double max = *std::max_element(value.begin() + begin, value.begin() + end);
      const double min = *std::min_element(value.begin() + begin, value.begin() + end);
      const std::byte* header = row.data() + begin / kValueGroup * 4;
      uint16_t scale_bits = 0;
      std::memcpy(&scale_bits, header, 2);
      const double scale = F32FromF16(scale_bits);
      const double zero = LoadElement(header, DType::kF16, 1);
      EXPECT_LE(zero, min);
      EXPECT_GE(zero + scale * levels, max);
      if (scale_bits != 0) {
        EXPECT_LT(zero + F32FromF16(scale_bits - 1) * levels, max);
      }
      for (uint32_t i = begin; i < end; ++i) {
        EXPECT_TRUE(testing::IsWithin(decoded[i], value[i], 0.5001 * scale + std::fabs(value[i]) * 0x1p-22)) << i;
      }
    }
  }
}

TEST_P(ValueRowTest, ZerosAndBinary16ConstantsComeBackExactly) {
  for (float constant : {0.0f, -0.0f, 1.0f, -0.3330078125f, 65504.0f, -65504.0f, 0x1p-24f, -0x1p-24f}) {
    SCOPED_TRACE(constant);
    const std::vector<float> value(40, constant);
    std::vector<std::byte> row(MakePageLayout(GetParam(), 16, 40, 1).value_row_bytes);
    ASSERT_EQ(EncodeValueRow(value.data(), 40, GetParam(), row.data()), -1);
    std::vector<float> decoded(40, 9.0f);
    DecodeValueRow(row.data(), 40, GetParam(), decoded.data());
    EXPECT_THAT(decoded, ::testing::Each(constant));
  }
}

TEST_P(ValueRowTest, TheFirstElementThatCannotBeHeldIsNamedAndNothingWritten) {
  const float levels = GetParam() == Format::kK8V8 ? 255 : 15;
  struct Case {
    uint32_t index;
    float value;
  };
  for (const Case& bad : {Case{0, -65505.0f}, Case{31, 66000.0f * levels}, Case{32, -1e30f}, Case{39, 3e38f},
                          Case{17, std::numeric_limits<float>::infinity()}, Case{38, std::nanf("")}}) {
    SCOPED_TRACE(bad.index);
    std::vector<float> value(40, 1.0f);
    value[bad.index] = bad.value;
    GuardedArray<std::byte> row(MakePageLayout(GetParam(), 16, 40, 1).value_row_bytes);
    EXPECT_EQ(EncodeValueRow(value.data(), 40, GetParam(), row.data()), static_cast<int32_t>(bad.index));
    EXPECT_TRUE(row.IsUntouchedFrom(0));
  }
  // A later group's overflow does not hide an earlier one's; within a group the first counts.
  std::vector<float> value(72, 1.0f);
  value[40] = value[50] = value[70] = -1e6f;
  std::vector<std::byte> row(MakePageLayout(GetParam(), 16, 72, 1).value_row_bytes);
  EXPECT_EQ(EncodeValueRow(value.data(), 72, GetParam(), row.data()), 40);
}

TEST_P(ValueRowTest, ALargeRangeThatAScaleCanSpanIsHeld) {
  const float levels = GetParam() == Format::kK8V8 ? 255 : 15;
  std::vector<float> value(32, -65504.0f);
  value[9] = 65504.0f * (levels - 1);
  std::vector<std::byte> row(MakePageLayout(GetParam(), 16, 32, 1).value_row_bytes);
  ASSERT_EQ(EncodeValueRow(value.data(), 32, GetParam(), row.data()), -1);
  std::vector<float> decoded(32);
  DecodeValueRow(row.data(), 32, GetParam(), decoded.data());
  EXPECT_EQ(decoded[9], value[9]);
  EXPECT_EQ(decoded[8], value[8]);
}

TEST(FormatsTest, FloatValuesThatOverflowTheirTypeAreNamed) {
  std::vector<float> value(16, 1.0f);
  std::vector<std::byte> row(64, std::byte{0x55});
  value[3] = 65520.0f;
  EXPECT_EQ(EncodeValueRow(value.data(), 16, Format::kF16, row.data()), 3);
  EXPECT_THAT(row, ::testing::Each(std::byte{0x55}));
  EXPECT_EQ(EncodeValueRow(value.data(), 16, Format::kBF16, row.data()), -1);
  value[4] = std::numeric_limits<float>::max();
  EXPECT_EQ(EncodeValueRow(value.data(), 16, Format::kBF16, row.data()), 4);
  EXPECT_EQ(EncodeValueRow(value.data(), 16, Format::kF32, row.data()), -1);
}

TEST(PageLayoutTest, ArraysFollowEachOtherWithoutGapsOnWholeLines) {
  for (Format format : kAllFormats) {
    for (uint32_t dim = 16; dim <= 256; dim += 8) {
      for (uint32_t first_planes : {1u, 2u}) {
        const PageLayout layout = MakePageLayout(format, dim, 272 - dim, first_planes);
        SCOPED_TRACE(FormatName(format));
        if (KeysAreCoded(format)) {
          EXPECT_EQ(layout.sketch_scales_offset, 1024 * first_planes * dim / 8);
          EXPECT_EQ(layout.sketch_bytes, layout.sketch_scales_offset + 2048);
          const uint32_t bytes = 2 + (KeyPlanes(format) - first_planes) * dim / 8;
          const bool pads = bytes % 64 >= 56;
          EXPECT_EQ(layout.record_bytes, pads ? bytes / 64 * 64 + 64 : bytes) << dim;
          EXPECT_EQ(layout.record_bytes_of(layout.planes), bytes);
          EXPECT_EQ(layout.record_bytes_of(first_planes), 2u);
          EXPECT_EQ(layout.records_offset, 0u);
          EXPECT_EQ(layout.values_offset, 64 * layout.record_bytes);
        } else {
          EXPECT_EQ(layout.keys_offset, 0u);
          EXPECT_EQ(layout.values_offset, 64 * dim * DTypeBytes(FloatType(format)));
        }
        EXPECT_EQ(layout.page_bytes, layout.values_offset + 64 * layout.value_row_bytes);
        for (uint32_t offset :
             {layout.sketch_scales_offset, layout.sketch_bytes, layout.values_offset, layout.page_bytes}) {
          EXPECT_EQ(offset % 64, 0u);
        }
      }
    }
  }
}

TEST(PageLayoutTest, BytesATokenAtHeadDim128AreTheDocumentedShareOfFloat32) {
  const double full = 1024.0 * 2 * 128 * 4;
  const auto share = [full](Format format) {
    const PageLayout layout = MakePageLayout(format, 128, 128, 1);
    return (16 * layout.page_bytes + layout.sketch_bytes) / full;
  };
  EXPECT_LE(share(Format::kK8V4), 0.21);
  EXPECT_LE(share(Format::kK6V4), 0.18);
}

TEST(PageLayoutTest, ARecordIsOneLineWhereLittlePaddingMakesItOne) {
  EXPECT_EQ(MakePageLayout(Format::kK8V4, 64, 64, 1).record_bytes, 64u);
  EXPECT_EQ(MakePageLayout(Format::kK6V4, 64, 64, 1).record_bytes, 42u);
  EXPECT_EQ(MakePageLayout(Format::kK8V4, 128, 128, 1).record_bytes, 114u);
  EXPECT_EQ(MakePageLayout(Format::kK8V4, 16, 16, 1).record_bytes, 16u);
}

TEST(PageLayoutDeathTest, DimensionsThatAreNoMultipleOf8End) {
  EXPECT_DEATH(MakePageLayout(Format::kF16, 20, 16, 1), "check failed");
  EXPECT_DEATH(MakePageLayout(Format::kK8V4, 16, 16, 3), "check failed");
}

}  // namespace
}  // namespace ctkvr
