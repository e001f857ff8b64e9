// SPDX-License-Identifier: Apache-2.0
//
// The check of elements: every bit pattern of 16 bits, the borders of 32, any length and alignment.

#include "server/core/elements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "server/core/limits.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

TEST(ElementsTest, EveryPatternOf16BitsIsJudgedByItsValue) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
      const auto half = static_cast<uint16_t>(bits);
      const float value = dtype == DType::kF16 ? F32FromF16(half) : F32FromBF16(half);
      const bool good = std::fabs(static_cast<double>(value)) <= limits::kMagnitudeMax;  // false for NaN
      std::byte bytes[2];
      std::memcpy(bytes, &half, 2);
      const auto checked = CheckElements("keys", bytes, dtype);
      ASSERT_EQ(checked.ok(), good) << bits;
      if (good) {
        ASSERT_EQ(*checked, std::fabs(value)) << bits;
      }
    }
  }
}

TEST(ElementsTest, TheFirstBadElementIsNamedWhereverItLies) {
  for (size_t offset : {0u, 1u, 3u}) {  // misaligned too
    for (size_t count : {1u, 2u, 63u, 64u, 1000u}) {
      std::vector<std::byte> bytes(offset + count * 4);
      for (size_t i = 0; i < count; ++i) StoreElement(bytes.data() + offset, DType::kF32, i, -2.5f);
      EXPECT_EQ(*CheckElements("keys", std::span(bytes).subspan(offset), DType::kF32), 2.5f);
      const size_t bad = count * 2 / 3;
      for (size_t i = bad; i < count; ++i) {
        StoreElement(bytes.data() + offset, DType::kF32, i, std::numeric_limits<float>::infinity());
      }
      EXPECT_THAT(
          CheckElements("values", std::span(bytes).subspan(offset), DType::kF32),
          StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("values[" + std::to_string(bad) + "] is inf")));
    }
  }
}

TEST(ElementsTest, TheMagnitudeLimitHolds) {
  std::vector<std::byte> bytes(8);
  StoreElement(bytes.data(), DType::kF32, 0, 0.99e15f);
  EXPECT_THAT(CheckElements("keys", bytes, DType::kF32), IsOk());
  StoreElement(bytes.data(), DType::kF32, 1, -1.01e15f);
  EXPECT_THAT(
      CheckElements("keys", bytes, DType::kF32),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keys[1] is -1.01e+15; the magnitude limit is 1e+15")));
}

TEST(ElementsTest, NoElementsAreGood) { EXPECT_EQ(*CheckElements("keys", {}, DType::kF16), 0); }

TEST(ElementsTest, KeysAreJudgedByTheirOwnNorm) {
  std::vector<std::byte> bytes(3 * 16 * 4);
  const auto check = [&] {
    return CheckKeyNorms({.keys = bytes,
                          .dtype = DType::kF32,
                          .head_dim = 16,
                          .magnitude_max = *CheckElements("keys", bytes, DType::kF32)});
  };
  // Every key as long as may be.
  for (size_t i = 0; i < 48; ++i) StoreElement(bytes.data(), DType::kF32, i, i % 2 == 0 ? 8188.0f : -8188.0f);
  EXPECT_THAT(check(), IsOk());
  StoreElement(bytes.data(), DType::kF32, 30, 8190.0f);
  EXPECT_THAT(check(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keys[16] begins a key of 2-norm")));
}

}  // namespace
}  // namespace ctkvr::testing
