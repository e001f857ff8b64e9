// SPDX-License-Identifier: Apache-2.0
//
// Conversions between float32 and the 16-bit types, every value of 16 bits and the borders between them.

#include "kernels/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ctkvr {
namespace {

// Binary16 by its definition.
double HalfOracle(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const double fraction = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(DTypeTest, EveryFiniteBinary16IsReadAndWrittenExactly) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits >> 10 & 31) == 31) continue;
    const float value = F32FromF16(static_cast<uint16_t>(bits));
    ASSERT_EQ(value, HalfOracle(bits)) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(F16FromF32(value), bits);
  }
}

TEST(DTypeTest, Binary16RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = HalfOracle(bits);
    const double high = HalfOracle(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);  // exact: one bit more
    ASSERT_EQ(F16FromF32(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(F16FromF32(std::nextafter(middle, 1e9f)), bits + 1) << bits;
    ASSERT_EQ(F16FromF32(std::nextafter(middle, -1.0f)), bits) << bits;
    ASSERT_EQ(F16FromF32(-middle), 0x8000 | (bits % 2 == 0 ? bits : bits + 1)) << bits;
  }
}

TEST(DTypeTest, Binary16OverflowsToInfinity) {
  EXPECT_EQ(F16FromF32(65504.0f), 0x7bff);
  EXPECT_EQ(F16FromF32(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(F16FromF32(65520.0f), 0x7c00);
  EXPECT_EQ(F16FromF32(-3e38f), 0xfc00);
  EXPECT_TRUE(std::isnan(F32FromF16(F16FromF32(std::nanf("")))));
}

TEST(DTypeTest, EveryFiniteBf16IsReadAndWrittenExactly) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = F32FromBF16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(F32FromBF16(BF16FromF32(value)))) << bits;
    } else {
      ASSERT_EQ(BF16FromF32(value), bits);
    }
  }
}

TEST(DTypeTest, Bf16RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const float middle = std::bit_cast<float>(bits << 16 | 0x8000u);
    ASSERT_EQ(BF16FromF32(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(BF16FromF32(std::bit_cast<float>(bits << 16 | 0x8001u)), bits + 1) << bits;
    ASSERT_EQ(BF16FromF32(std::bit_cast<float>(bits << 16 | 0x7fffu)), bits) << bits;
  }
  EXPECT_EQ(BF16FromF32(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(BF16FromF32(1e38f), BF16FromF32(F32FromBF16(BF16FromF32(1e38f))));
}

TEST(DTypeTest, ElementsOfMisalignedArraysAreLoadedAndStored) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    std::byte buffer[3 * 4 + 1];
    for (size_t i = 0; i < 3; ++i) StoreElement(buffer + 1, dtype, i, 1.5f * static_cast<float>(i) - 2);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(LoadElement(buffer + 1, dtype, i), 1.5f * static_cast<float>(i) - 2);
  }
}

TEST(DTypeTest, SizesAndNames) {
  EXPECT_EQ(DTypeBytes(DType::kF32), 4u);
  EXPECT_EQ(DTypeBytes(DType::kF16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kBF16), 2u);
  EXPECT_STREQ(DTypeName(DType::kBF16), "bf16");
}

}  // namespace
}  // namespace ctkvr
