// SPDX-License-Identifier: Apache-2.0
//
// The row loops of every instruction set: portable, AVX2 and AVX-512 where the machine has them, and AVX-512 emulated
// on every machine. All must give the bytes of the test vectors, and the same bytes as each other on random input at
// every width, misaligned, between guard bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/rotation.h"
#include "tests/golden/golden_rows.h"
#include "tests/testing/compare.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::cpu {

// rows_avx512.cc compiled with CTKVR_EMULATE_AVX512.
const RowKernels& EmulatedAvx512RowKernels();

namespace {

using ::testing::ElementsAreArray;
using testing::GoldenCase;
using testing::GoldenToken;
using testing::GuardedArray;

const RowKernels* FindRows(const std::string& name) {
  if (name == "avx512_emulated") return FindCpuKernels("avx2") != nullptr ? &EmulatedAvx512RowKernels() : nullptr;
  const CpuKernels* kernels = FindCpuKernels(name.c_str());
  return kernels == nullptr ? nullptr : kernels->rows;
}

class RowsTest : public ::testing::TestWithParam<std::string> {
 protected:
  const RowKernels* rows_ = FindRows(GetParam());
  const RowKernels& reference_ = PortableRowKernels();
};

std::vector<std::string> TablesPresent() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512", "avx512_emulated"}) {
    if (FindRows(name) != nullptr) names.push_back(name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Tables, RowsTest, ::testing::ValuesIn(TablesPresent()),
                         [](const auto& param) { return param.param; });

template <typename T>
std::vector<std::byte> BytesOf(const T* data, size_t count) {
  std::vector<std::byte> bytes(count * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
  return bytes;
}

// Numbers of all magnitudes: mostly normal ones, some zeros of both signs, subnormals, powers of two.
std::vector<float> MixedNumbers(std::mt19937_64& random, size_t count) {
  std::normal_distribution<float> normal(0, std::ldexp(1.0f, static_cast<int>(random() % 30) - 20));
  std::vector<float> x(count);
  for (float& element : x) {
    const uint64_t kind = random() % 16;
    element = kind == 0   ? 0.0f
              : kind == 1 ? -0.0f
              : kind == 2 ? std::ldexp(1.0f, static_cast<int>(random() % 40) - 30)
              : kind == 3 ? std::bit_cast<float>(static_cast<uint32_t>(random() % (1u << 22)))
                          : normal(random);
  }
  return x;
}

TEST_P(RowsTest, TestVectorsEncodeToTheirBytes) {
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    if (!KeysAreCoded(golden.format)) continue;
    const uint32_t dim = golden.head_dim;
    const uint32_t planes = KeyPlanes(golden.format);
    const std::vector<float> signs = RotationSigns(dim, golden.rotation_seed);
    for (const GoldenToken& token : golden.tokens) {
      SCOPED_TRACE(golden.name + ": " + token.note);
      std::vector<std::byte> value_row(token.value_row.size());
      ASSERT_EQ(rows_->encode_value(token.value.data(), golden.value_dim, ValueBits(golden.format), value_row.data()),
                -1);
      EXPECT_THAT(value_row, ElementsAreArray(token.value_row));
      std::vector<float> value(golden.value_dim);
      rows_->decode_value(value_row.data(), golden.value_dim, ValueBits(golden.format), value.data());
      EXPECT_THAT(BytesOf(value.data(), value.size()), BytesOf(token.decoded_value.data(), value.size()));
      if (!golden.keys_coded) continue;
      std::vector<float> x(dim);
      for (uint32_t i = 0; i < dim; ++i) x[i] = token.key[i] - golden.mean[i];
      rows_->rotate(x.data(), dim, signs.data());
      for (uint32_t first_planes : {1u, 2u}) {
        std::vector<std::byte> row(token.key_row.size());
        uint16_t scales[2] = {};
        ASSERT_TRUE(rows_->encode_key(x.data(), dim, planes, first_planes, row.data(), &scales[0], &scales[1]));
        std::memcpy(row.data() + row.size() - 2, &scales[0], 2);
        EXPECT_THAT(row, ElementsAreArray(token.key_row));
        EXPECT_EQ(scales[1], token.sketch_scale[first_planes]);
      }
    }
  }
}

TEST_P(RowsTest, RotationsAreTheSameBitsAtEveryWidth) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(31);
  for (uint32_t dim = 16; dim <= kDimMax; dim += 8) {
    SCOPED_TRACE(dim);
    const std::vector<float> signs = RotationSigns(dim, random());
    const std::vector<float> x = MixedNumbers(random, dim);
    for (bool forward : {true, false}) {
      GuardedArray<float> actual(dim, 4 * (random() % 16));
      std::copy(x.begin(), x.end(), actual.data());
      (forward ? rows_->rotate : rows_->unrotate)(actual.data(), dim, signs.data());
      EXPECT_TRUE(actual.IsUntouchedFrom(dim));
      std::vector<float> expected = x;
      (forward ? reference_.rotate : reference_.unrotate)(expected.data(), dim, signs.data());
      EXPECT_EQ(BytesOf(actual.data(), dim), BytesOf(expected.data(), dim)) << forward;
    }
  }
}

TEST_P(RowsTest, KeysAreCodedToTheSameBytesAtEveryWidth) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(32);
  for (int round = 0; round < 6; ++round) {
    for (uint32_t dim = 16; dim <= kDimMax; dim += 8) {
      const uint32_t planes = random() % 2 == 0 ? 8 : 6;
      const uint32_t first_planes = 1 + random() % 2;
      SCOPED_TRACE(::testing::Message() << dim << " " << planes << " " << first_planes);
      GuardedArray<float> x(dim, 4 * (random() % 16));
      const std::vector<float> numbers = round == 0 ? std::vector<float>(dim, 0.0f) : MixedNumbers(random, dim);
      std::copy(numbers.begin(), numbers.end(), x.data());
      GuardedArray<std::byte> packed(planes * dim / 8, random() % 64);
      uint16_t scales[2] = {1, 1};
      uint16_t expected_scales[2] = {2, 2};
      std::vector<std::byte> expected(packed.size());
      ASSERT_TRUE(reference_.encode_key(x.data(), dim, planes, first_planes, expected.data(), &expected_scales[0],
                                        &expected_scales[1]));
      ASSERT_TRUE(rows_->encode_key(x.data(), dim, planes, first_planes, packed.data(), &scales[0], &scales[1]));
      EXPECT_THAT(packed.span(), ElementsAreArray(expected));
      EXPECT_THAT(scales, ElementsAreArray(expected_scales));
      EXPECT_TRUE(packed.IsUntouchedFrom(packed.size()));
    }
  }
}

TEST_P(RowsTest, KeysAtTheLimitsAreTakenOrRefusedAlike) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t dim : {16u, 24u, 64u, 72u, 128u, 256u}) {
    for (uint32_t at : {0u, 9u, dim - 1}) {
      for (float peak : {65504.0f, 65519.9f, 65520.0f, 65504.0f * 128, 8384512.5f, 3e38f, infinity, -infinity,
                         std::nanf(""), -65504.0f, 1e-45f, -1e-38f}) {
        for (uint32_t first_planes : {1u, 2u}) {
          std::vector<float> x(dim, 0.0f);
          x[at] = peak;
          std::vector<std::byte> packed(dim), expected(dim);
          uint16_t scales[2] = {}, expected_scales[2] = {};
          const bool taken = rows_->encode_key(x.data(), dim, 8, first_planes, packed.data(), &scales[0], &scales[1]);
          ASSERT_EQ(taken, reference_.encode_key(x.data(), dim, 8, first_planes, expected.data(), &expected_scales[0],
                                                 &expected_scales[1]))
              << dim << " " << at << " " << peak;
          if (!taken) continue;
          EXPECT_EQ(packed, expected) << dim << " " << at << " " << peak;
          EXPECT_THAT(scales, ElementsAreArray(expected_scales));
        }
      }
    }
  }
}

TEST_P(RowsTest, ValuesAreCodedToTheSameBytesAtEveryWidth) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(33);
  for (int round = 0; round < 6; ++round) {
    for (uint32_t dim = 16; dim <= kDimMax; dim += 8) {
      for (uint32_t bits : {8u, 4u}) {
        SCOPED_TRACE(::testing::Message() << dim << " " << bits);
        GuardedArray<float> value(dim, 4 * (random() % 16));
        const std::vector<float> numbers = MixedNumbers(random, dim);
        std::copy(numbers.begin(), numbers.end(), value.data());
        if (round == 0) std::fill(value.data(), value.data() + dim, random() % 2 == 0 ? -0.0f : 0.1f);
        const uint32_t row_bytes =
            MakePageLayout(bits == 8 ? Format::kK8V8 : Format::kK8V4, 16, dim, 1).value_row_bytes;
        GuardedArray<std::byte> row(row_bytes, random() % 64);
        std::vector<std::byte> expected(row_bytes);
        ASSERT_EQ(reference_.encode_value(value.data(), dim, bits, expected.data()), -1);
        ASSERT_EQ(rows_->encode_value(value.data(), dim, bits, row.data()), -1);
        EXPECT_THAT(row.span(), ElementsAreArray(expected));
        EXPECT_TRUE(row.IsUntouchedFrom(row_bytes));
        GuardedArray<float> decoded(dim, 4 * (random() % 16));
        std::vector<float> expected_value(dim);
        rows_->decode_value(row.data(), dim, bits, decoded.data());
        reference_.decode_value(row.data(), dim, bits, expected_value.data());
        EXPECT_EQ(BytesOf(decoded.data(), dim), BytesOf(expected_value.data(), dim));
        EXPECT_TRUE(decoded.IsUntouchedFrom(dim));
      }
    }
  }
}

TEST_P(RowsTest, ValuesThatCannotBeHeldAreNamedAlike) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t dim : {16u, 40u, 64u, 72u, 256u}) {
    for (uint32_t at : {0u, 7u, 15u, dim / 2, dim - 1}) {
      for (float bad : {-65504.0f, -65505.0f, 65504.0f, 982560.0f, 982561.0f, 983000.0f, 16703520.0f, 16703522.0f,
                        3e38f, -3e38f, infinity, -infinity, std::nanf("")}) {
        for (uint32_t bits : {8u, 4u}) {
          for (float base : {0.0f, 1.0f, -60000.0f}) {
            std::vector<float> value(dim, base);
            value[at] = bad;
            value[dim - 1] = bad;
            std::vector<std::byte> row(2 * dim), expected(2 * dim);
            ASSERT_EQ(rows_->encode_value(value.data(), dim, bits, row.data()),
                      reference_.encode_value(value.data(), dim, bits, expected.data()))
                << dim << " " << at << " " << bad << " " << bits << " " << base;
            EXPECT_EQ(row, expected) << dim << " " << at << " " << bad << " " << bits << " " << base;
          }
        }
      }
    }
  }
}

// Rows at once are the reference's rows, whatever the first rows are: those a batch leaves to the row by row loop too.
class RunsTest : public RowsTest {
 protected:
  // [tokens] rows of `dim`, `gap` elements apart, in the type that workers send.
  void MakeRows(std::mt19937_64& random, DType dtype, uint32_t tokens, uint32_t dim) {
    stride_ = (dim + random() % 3) * DTypeBytes(dtype);
    sent_.assign(tokens * stride_ + 64, std::byte{0x55});
    for (uint32_t t = 0; t < tokens; ++t) {
      const std::vector<float> numbers = random() % 8 == 0 ? std::vector<float>(dim, 0.0f) : MixedNumbers(random, dim);
      for (uint32_t i = 0; i < dim; ++i) StoreElement(sent_.data() + t * stride_, dtype, i, numbers[i]);
    }
  }
  std::vector<float> RowAt(DType dtype, uint32_t token, uint32_t dim) const {
    std::vector<float> row(dim);
    for (uint32_t i = 0; i < dim; ++i) row[i] = LoadElement(sent_.data() + token * stride_, dtype, i);
    return row;
  }

  size_t stride_ = 0;
  std::vector<std::byte> sent_;
};
INSTANTIATE_TEST_SUITE_P(Tables, RunsTest, ::testing::ValuesIn(TablesPresent()),
                         [](const auto& param) { return param.param; });

TEST_P(RunsTest, KeysAreThoseOfTheReference) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(35);
  uint32_t done_in_all = 0;
  for (int round = 0; round < 120; ++round) {
    const uint32_t dims[] = {64, 128, 256, 96};
    const uint32_t dim = dims[random() % 4], planes = random() % 2 == 0 ? 8 : 6, first_planes = 1 + random() % 2;
    const uint32_t tokens = 1 + random() % kPageTokens;
    const DType dtype = std::array{DType::kF32, DType::kF16, DType::kBF16}[random() % 3];
    SCOPED_TRACE(::testing::Message() << dim << " " << planes << " " << first_planes << " " << tokens << " "
                                      << DTypeName(dtype));
    MakeRows(random, dtype, tokens, dim);
    // Equal to the first key in one round of four, so that zeros of both signs arise.
    const std::vector<float> mean = random() % 4 == 0 ? RowAt(dtype, 0, dim) : MixedNumbers(random, dim);
    const std::vector<float> signs = RotationSigns(dim, random());
    const size_t plane_bytes = dim / 8, first_bytes = first_planes * plane_bytes;
    const size_t rest_bytes = (planes - first_planes) * plane_bytes;
    const size_t record_bytes = 2 + rest_bytes + 2 * (random() % 4);
    GuardedArray<std::byte> first(tokens * first_bytes), sketch_scales(2 * tokens), records(tokens * record_bytes);
    const uint32_t done = rows_->encode_keys({.keys = sent_.data(),
                                              .stride = stride_,
                                              .dtype = dtype,
                                              .tokens = tokens,
                                              .head_dim = dim,
                                              .planes = planes,
                                              .first_planes = first_planes,
                                              .mean = mean.data(),
                                              .signs = signs.data(),
                                              .first = first.data(),
                                              .sketch_scales = sketch_scales.data(),
                                              .records = records.data(),
                                              .record_bytes = record_bytes});
    ASSERT_LE(done, tokens);
    done_in_all += done;
    for (uint32_t t = 0; t < done; ++t) {
      std::vector<float> x = RowAt(dtype, t, dim);
      for (uint32_t i = 0; i < dim; ++i) x[i] -= mean[i];
      Rotate(x.data(), dim, signs.data());
      std::vector<std::byte> packed(first_bytes + rest_bytes), actual(packed.size());
      uint16_t expected_scales[2], scales[2];
      ASSERT_TRUE(reference_.encode_key(x.data(), dim, planes, first_planes, packed.data(), &expected_scales[0],
                                        &expected_scales[1]));
      std::memcpy(actual.data(), first.data() + t * first_bytes, first_bytes);
      const std::byte* record = records.data() + t * record_bytes;
      std::memcpy(actual.data() + first_bytes, record + 2, rest_bytes);
      ASSERT_EQ(actual, packed) << t;
      std::memcpy(&scales[0], record, 2);
      std::memcpy(&scales[1], sketch_scales.data() + 2 * t, 2);
      ASSERT_THAT(scales, ElementsAreArray(expected_scales)) << t;
    }
    EXPECT_TRUE(first.IsUntouchedFrom(first.size()) && records.IsUntouchedFrom(records.size()));
    EXPECT_TRUE(sketch_scales.IsUntouchedFrom(2 * tokens));
  }
  EXPECT_TRUE(!GetParam().starts_with("avx512") || done_in_all > 500) << done_in_all;
}

TEST_P(RunsTest, ValuesAreThoseOfTheReference) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(36);
  uint32_t done_in_all = 0;
  for (int round = 0; round < 120; ++round) {
    const uint32_t dims[] = {64, 128, 256, 96};
    const uint32_t dim = dims[random() % 4], bits = random() % 2 == 0 ? 8 : 4;
    const uint32_t tokens = 1 + random() % kPageTokens;
    const DType dtype = std::array{DType::kF32, DType::kF16, DType::kBF16}[random() % 3];
    SCOPED_TRACE(::testing::Message() << dim << " " << bits << " " << tokens << " " << DTypeName(dtype));
    MakeRows(random, dtype, tokens, dim);
    const uint32_t row_bytes = MakePageLayout(bits == 8 ? Format::kK8V8 : Format::kK8V4, 16, dim, 1).value_row_bytes;
    GuardedArray<std::byte> coded(tokens * row_bytes);
    const uint32_t done = rows_->encode_values({.values = sent_.data(),
                                                .stride = stride_,
                                                .dtype = dtype,
                                                .tokens = tokens,
                                                .value_dim = dim,
                                                .bits = bits,
                                                .rows = coded.data(),
                                                .row_bytes = row_bytes});
    ASSERT_LE(done, tokens);
    done_in_all += done;
    for (uint32_t t = 0; t < done; ++t) {
      std::vector<std::byte> expected(row_bytes);
      const std::vector<float> value = RowAt(dtype, t, dim);
      ASSERT_EQ(reference_.encode_value(value.data(), dim, bits, expected.data()), -1);
      ASSERT_THAT(coded.span().subspan(t * row_bytes, row_bytes), ElementsAreArray(expected)) << t;
    }
    EXPECT_TRUE(coded.IsUntouchedFrom(coded.size()));
  }
  EXPECT_TRUE(!GetParam().starts_with("avx512") || done_in_all > 2000) << done_in_all;
}

// One element at a time that a batch must not take: no token from it on is said to be done.
TEST_P(RunsTest, RunsStopBeforeWhatCannotBeHeld) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> mean(128, 0.0f), signs = RotationSigns(128, 3);
  for (const float bad : {infinity, -infinity, std::nanf(""), 3e38f, -3e38f}) {
    for (uint32_t token : {0u, 15u, 16u, 40u}) {
      for (uint32_t at : {0u, 31u, 127u}) {
        std::vector<float> rows(kPageTokens * 128, 1.0f);
        rows[token * 128 + at] = bad;
        std::vector<std::byte> out(kPageTokens * 256), scales(kPageTokens * 4);
        EXPECT_LE(rows_->encode_keys({.keys = reinterpret_cast<const std::byte*>(rows.data()),
                                      .stride = 512,
                                      .tokens = kPageTokens,
                                      .head_dim = 128,
                                      .planes = 8,
                                      .first_planes = 2,
                                      .mean = mean.data(),
                                      .signs = signs.data(),
                                      .first = out.data(),
                                      .sketch_scales = scales.data(),
                                      .records = out.data() + kPageTokens * 32,
                                      .record_bytes = 98}),
                  token)
            << bad << " " << at;
        EXPECT_LE(rows_->encode_values({.values = reinterpret_cast<const std::byte*>(rows.data()),
                                        .stride = 512,
                                        .tokens = kPageTokens,
                                        .value_dim = 128,
                                        .bits = 4,
                                        .rows = out.data(),
                                        .row_bytes = 80}),
                  token)
            << bad << " " << at;
      }
    }
  }
}

// Every pattern of 16 bits that is finite, and float32 numbers around every rounding border.
TEST_P(RowsTest, SixteenBitFloatsConvertExactly) {
  std::vector<uint16_t> halves, brains;
  std::vector<float> from_halves, from_brains;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7c00) != 0x7c00) halves.push_back(static_cast<uint16_t>(bits));
    if ((bits & 0x7f80) != 0x7f80) brains.push_back(static_cast<uint16_t>(bits));
  }
  from_halves.resize(halves.size());
  from_brains.resize(brains.size());
  rows_->f32_from_f16(reinterpret_cast<const std::byte*>(halves.data()), from_halves.data(), halves.size());
  rows_->f32_from_bf16(reinterpret_cast<const std::byte*>(brains.data()), from_brains.data(), brains.size());
  std::vector<float> borders;
  for (size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(from_halves[i]), std::bit_cast<uint32_t>(F32FromF16(halves[i])));
    if ((halves[i] & 0x7fff) == 0x7bff) continue;
    const float middle = (from_halves[i] + F32FromF16(halves[i] + 1)) / 2;
    for (float x : {middle, std::nextafter(middle, 1e9f), std::nextafter(middle, -1e9f)}) borders.push_back(x);
  }
  for (size_t i = 0; i < brains.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(from_brains[i]), std::bit_cast<uint32_t>(F32FromBF16(brains[i])));
  }
  std::vector<uint16_t> back(halves.size());
  ASSERT_EQ(rows_->f16_from_f32(from_halves.data(), reinterpret_cast<std::byte*>(back.data()), back.size()), -1);
  EXPECT_EQ(back, halves);
  back.resize(brains.size());
  ASSERT_EQ(rows_->bf16_from_f32(from_brains.data(), reinterpret_cast<std::byte*>(back.data()), back.size()), -1);
  EXPECT_EQ(back, brains);
  back.resize(borders.size());
  ASSERT_EQ(rows_->f16_from_f32(borders.data(), reinterpret_cast<std::byte*>(back.data()), back.size()), -1);
  for (size_t i = 0; i < borders.size(); ++i) ASSERT_EQ(back[i], F16FromF32(borders[i])) << borders[i];
  ASSERT_EQ(rows_->bf16_from_f32(borders.data(), reinterpret_cast<std::byte*>(back.data()), back.size()), -1);
  for (size_t i = 0; i < borders.size(); ++i) ASSERT_EQ(back[i], BF16FromF32(borders[i])) << borders[i];
}

TEST_P(RowsTest, ConversionsOfEveryLengthStayInsideAndNameTheFirstOverflow) {
  SCOPED_TRACE(testing::TestSeed());
  std::mt19937_64 random = testing::MakeRandom(34);
  for (size_t count = 0; count <= 70; ++count) {
    SCOPED_TRACE(count);
    const std::vector<float> numbers = MixedNumbers(random, count);
    GuardedArray<float> from(count, 4 * (count % 16));
    std::copy(numbers.begin(), numbers.end(), from.data());
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const auto to_16 = dtype == DType::kF16 ? rows_->f16_from_f32 : rows_->bf16_from_f32;
      const auto to_32 = dtype == DType::kF16 ? rows_->f32_from_f16 : rows_->f32_from_bf16;
      GuardedArray<std::byte> halves(2 * count, count % 64);
      ASSERT_EQ(to_16(from.data(), halves.data(), count), -1);
      EXPECT_TRUE(halves.IsUntouchedFrom(2 * count));
      GuardedArray<float> back(count);
      to_32(halves.data(), back.data(), count);
      EXPECT_TRUE(back.IsUntouchedFrom(count));
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(back[i], LoadElement(halves.data(), dtype, i));
      for (size_t bad = 0; bad < count; ++bad) {
        std::vector<float> overflowing = numbers;
        overflowing[bad] = dtype == DType::kF16 ? -65520.0f : 3.4e38f;
        overflowing[count - 1] = std::nanf("");
        ASSERT_EQ(to_16(overflowing.data(), halves.data(), count), static_cast<int64_t>(bad));
        EXPECT_TRUE(halves.IsUntouchedFrom(2 * count));
      }
    }
  }
}

}  // namespace
}  // namespace ctkvr::cpu
