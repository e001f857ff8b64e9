// SPDX-License-Identifier: Apache-2.0
//
// Proves the conversions against arithmetic from the definition of the formats, and the shape rules of the proto.
#include "ctkvr/client/tensor.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

// Value of a binary16 by its definition.
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

TEST(Tensor, EveryHalfConvertsToItsValueAndBack) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double expected = HalfValue(half);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(half))) << bits;
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(HalfToFloat(half))))) << bits;
      continue;
    }
    ASSERT_EQ(HalfToFloat(half), expected) << bits;
    ASSERT_EQ(FloatToHalf(HalfToFloat(half)), half) << bits;
  }
}

// Nearest, ties to even, checked by looking at both neighbours.
void ExpectNearestHalf(float value) {
  const uint16_t half = FloatToHalf(value);
  const double error = std::abs(HalfValue(half) - value);
  for (const int step : {-1, 1}) {
    const int magnitude = (half & 0x7fff) + step;
    if (magnitude < 0 || magnitude > 0x7bff) continue;
    const auto other = static_cast<uint16_t>((half & 0x8000) | magnitude);
    const double other_error = std::abs(HalfValue(other) - value);
    ASSERT_LE(error, other_error) << value;
    if (error == other_error) {
      ASSERT_EQ(half % 2, 0) << value;
    }
  }
}

TEST(Tensor, FloatRoundsToTheNearestHalf) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto lower = static_cast<float>(HalfValue(static_cast<uint16_t>(bits)));
    const auto upper = static_cast<float>(HalfValue(static_cast<uint16_t>(bits + 1)));
    const float middle = lower + (upper - lower) / 2;
    ExpectNearestHalf(middle);
    ExpectNearestHalf(-std::nextafter(middle, upper));
    ExpectNearestHalf(std::nextafter(middle, lower));
  }
  EXPECT_EQ(FloatToHalf(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(-std::numeric_limits<float>::max()), 0xfc00);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Tensor, BfloatIsTheRoundedUpperHalf) {
  EXPECT_EQ(BfloatToFloat(0x3f80), 1.0f);
  EXPECT_EQ(FloatToBfloat(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBfloat(1.00390625f), 0x3f80);  // a tie goes to the even one
  EXPECT_EQ(FloatToBfloat(1.01171875f), 0x3f82);
  EXPECT_TRUE(std::isnan(BfloatToFloat(FloatToBfloat(NAN))));
  EXPECT_EQ(FloatToBfloat(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Tensor, ToFloatReadsMisalignedDataAndRefusesWrongSizes) {
  std::vector<std::byte> data(9);
  const uint16_t halves[] = {0x3c00, 0xc000};  // 1, -2
  std::memcpy(data.data() + 1, halves, sizeof(halves));
  std::vector<float> out(2);
  ASSERT_THAT(ToFloat(v1::DTYPE_F16, std::span(data).subspan(1, 4), out), IsOk());
  EXPECT_EQ(out, (std::vector<float>{1, -2}));
  EXPECT_THAT(ToFloat(v1::DTYPE_F16, std::span(data).first(3), out),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 bytes")));
  EXPECT_THAT(ToFloat(v1::DTYPE_UNSPECIFIED, data, out), StatusIs(absl::StatusCode::kInvalidArgument));
}

v1::SessionOptions Options() {
  v1::SessionOptions options;
  options.mutable_geometry()->set_layers(4);
  options.mutable_geometry()->set_q_heads(8);
  options.mutable_geometry()->set_kv_heads(2);
  options.mutable_geometry()->set_head_dim(64);
  options.mutable_geometry()->set_dtype(v1::DTYPE_BF16);
  return options;
}

TEST(Tensor, ShapeTakesOverridesInOrderFieldByField) {
  v1::SessionOptions options = Options();
  v1::LayerOverride* first = options.add_layer_overrides();
  first->add_layers(1);
  first->add_layers(2);
  first->set_head_dim(128);
  first->set_value_dim(32);
  v1::LayerOverride* second = options.add_layer_overrides();
  second->add_layers(2);
  second->set_value_dim(96);
  second->set_absent(true);

  const auto plain = ShapeOfLayer(options, 0);
  ASSERT_THAT(plain, IsOk());
  EXPECT_EQ(plain->head_dim, 64u);
  EXPECT_EQ(plain->value_dim, 64u);  // 0 means head_dim
  EXPECT_EQ(plain->group_heads(), 4u);
  const auto once = ShapeOfLayer(options, 1);
  ASSERT_THAT(once, IsOk());
  EXPECT_EQ(once->value_dim, 32u);
  EXPECT_FALSE(once->absent);
  const auto twice = ShapeOfLayer(options, 2);
  ASSERT_THAT(twice, IsOk());
  EXPECT_EQ(twice->head_dim, 128u);
  EXPECT_EQ(twice->value_dim, 96u);
  EXPECT_TRUE(twice->absent);
  EXPECT_THAT(ShapeOfLayer(options, 4), StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("the session has 4")));
}

TEST(Tensor, ShapeRefusesWhatNoServerAccepts) {
  v1::SessionOptions options = Options();
  options.mutable_geometry()->set_kv_heads(3);
  EXPECT_THAT(ShapeOfLayer(options, 0), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("kv_heads is 3")));
  options = Options();
  options.mutable_geometry()->clear_dtype();
  EXPECT_THAT(ShapeOfLayer(options, 0), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dtype")));
}

TEST(Tensor, QueryCarriesItsShape) {
  const LayerShape shape{.q_heads = 8, .kv_heads = 2, .head_dim = 64, .value_dim = 64};
  const std::vector<std::byte> bytes(2 * 8 * 64 * 2);
  const auto query = MakeQuery(shape, 3, 100, 2, bytes);
  ASSERT_THAT(query, IsOk());
  EXPECT_EQ(query->layer(), 3u);
  EXPECT_EQ(query->position(), 100u);
  EXPECT_THAT(query->queries().dims(), ::testing::ElementsAre(2, 8, 64));
  EXPECT_EQ(query->queries().data().size(), bytes.size());
  EXPECT_THAT(MakeQuery(shape, 3, 100, 1, bytes), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(MakeQuery(shape, 3, 100, 0, {}), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ctkvr::client
