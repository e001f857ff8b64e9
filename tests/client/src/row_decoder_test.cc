// SPDX-License-Identifier: Apache-2.0
//
// Proves the decoder of storage rows against tests/golden/rows.json (written by a program that shares no code with
// this one), bit for bit, and against what the format promises.
#include "ctkvr/client/row_decoder.h"

#include <cctype>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::vector<float> Floats(const std::string& hex) {
  const std::string bytes = FromHex(hex);
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

v1::Format FormatOf(const std::string& name) {
  v1::Format format{};
  std::string upper = name;
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  EXPECT_TRUE(v1::Format_Parse("FORMAT_" + upper, &format)) << name;
  return format;
}

v1::DType DTypeOf(const std::string& name) {
  return name == "f32" ? v1::DTYPE_F32 : name == "f16" ? v1::DTYPE_F16 : v1::DTYPE_BF16;
}

struct GoldenCase {
  LayerShape shape;
  v1::RowCodec codec;
};

GoldenCase Load(const nlohmann::json& entry) {
  GoldenCase out;
  out.shape = {.q_heads = 1,
               .kv_heads = 1,
               .head_dim = entry["head_dim"],
               .value_dim = entry["value_dim"],
               .dtype = DTypeOf(entry["raw_dtype"])};
  out.codec.set_format(FormatOf(entry["format"]));
  out.codec.set_code_generation(entry["code_generation"]);
  out.codec.set_rotation_seed(std::stoull(entry["rotation_seed"].get<std::string>()));
  const std::string mean = FromHex(entry["mean"]);
  if (!mean.empty()) {
    out.codec.mutable_key_mean()->set_dtype(v1::DTYPE_F32);
    out.codec.mutable_key_mean()->set_data(mean);
  }
  const nlohmann::json& token = entry["tokens"][0];
  out.codec.set_key_row_bytes(static_cast<uint32_t>(token["key_row"].get<std::string>().size() / 2));
  out.codec.set_value_row_bytes(static_cast<uint32_t>(token["value_row"].get<std::string>().size() / 2));
  return out;
}

TEST(RowDecoder, GoldenRowsDecodeToTheBit) {
  std::ifstream file(CTKVR_GOLDEN_ROWS);
  const auto golden = nlohmann::json::parse(file, nullptr, false);
  ASSERT_TRUE(golden.is_object()) << CTKVR_GOLDEN_ROWS;
  size_t tokens = 0;
  for (const nlohmann::json& entry : golden["cases"]) {
    SCOPED_TRACE(entry["name"].get<std::string>());
    const GoldenCase c = Load(entry);
    const auto decoder = RowDecoder::Create(c.codec, c.shape);
    ASSERT_THAT(decoder, IsOk());
    // All tokens in one call: rows follow one another.
    std::string key_rows, value_rows;
    std::vector<float> keys, values;
    for (const nlohmann::json& token : entry["tokens"]) {
      key_rows += FromHex(token["key_row"]);
      value_rows += FromHex(token["value_row"]);
      const auto key = Floats(token["decoded_key"]), value = Floats(token["decoded_value"]);
      keys.insert(keys.end(), key.begin(), key.end());
      values.insert(values.end(), value.begin(), value.end());
      ++tokens;
    }
    std::vector<float> got_keys(keys.size(), NAN), got_values(values.size(), NAN);
    ASSERT_THAT(decoder->DecodeKeys(0, std::as_bytes(std::span(key_rows)), got_keys), IsOk());
    ASSERT_THAT(decoder->DecodeValues(std::as_bytes(std::span(value_rows)), got_values), IsOk());
    EXPECT_EQ(got_keys, keys);
    EXPECT_EQ(got_values, values);
  }
  EXPECT_GE(tokens, 30u);
}

v1::RowCodec CodedCodec(const LayerShape& shape) {
  v1::RowCodec codec;
  codec.set_format(v1::FORMAT_K8V4);
  codec.set_code_generation(1);
  codec.set_rotation_seed(7);
  codec.set_key_row_bytes(shape.head_dim + 2);
  codec.set_value_row_bytes((shape.value_dim + 31) / 32 * 4 + shape.value_dim / 2);
  codec.mutable_key_mean()->set_dtype(v1::DTYPE_F32);
  std::vector<float> mean(size_t{shape.kv_heads} * shape.head_dim);
  for (size_t i = 0; i < mean.size(); ++i) mean[i] = static_cast<float>(i / shape.head_dim);  // the head's number
  codec.mutable_key_mean()->set_data(mean.data(), mean.size() * sizeof(float));
  return codec;
}

// The rotation keeps the 2-norm, so a row of equal codes decodes to a vector of a known length about the mean.
TEST(RowDecoder, RotationKeepsTheNormForEveryHeadDim) {
  for (uint32_t dim = 16; dim <= 256; dim += 8) {
    SCOPED_TRACE(dim);
    const LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = dim, .value_dim = 16};
    const auto decoder = RowDecoder::Create(CodedCodec(shape), shape);
    ASSERT_THAT(decoder, IsOk());
    std::string row(decoder->key_row_bytes(), '\xff');  // every code 255
    row[dim] = '\x00';
    row[dim + 1] = '\x3c';  // scale 1.0
    std::vector<float> key(dim);
    ASSERT_THAT(decoder->DecodeKeys(1, std::as_bytes(std::span(row)), key), IsOk());
    double norm = 0;
    for (const float x : key) norm += (x - 1.0) * (x - 1.0);
    EXPECT_NEAR(std::sqrt(norm), 127.5 * std::sqrt(dim), 1e-3 * std::sqrt(dim));
  }
}

TEST(RowDecoder, AZeroScaleIsTheMeanOfTheHead) {
  const LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 80, .value_dim = 16};
  const auto decoder = RowDecoder::Create(CodedCodec(shape), shape);
  ASSERT_THAT(decoder, IsOk());
  const std::string row(decoder->key_row_bytes(), '\0');
  std::vector<float> key(80, NAN);
  for (const uint32_t head : {0u, 1u}) {
    ASSERT_THAT(decoder->DecodeKeys(head, std::as_bytes(std::span(row)), key), IsOk());
    for (const float x : key) EXPECT_EQ(x, static_cast<float>(head));
  }
}

TEST(RowDecoder, CodecsThatDoNotFitAreRefused) {
  const LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 64, .value_dim = 64};
  const auto refused = [&shape](const v1::RowCodec& codec, const char* text) {
    EXPECT_THAT(RowDecoder::Create(codec, shape), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  ASSERT_THAT(RowDecoder::Create(CodedCodec(shape), shape), IsOk());
  v1::RowCodec codec = CodedCodec(shape);
  codec.set_format(v1::FORMAT_UNSPECIFIED);
  refused(codec, "format");
  codec = CodedCodec(shape);
  codec.set_key_row_bytes(65);
  refused(codec, "key_row_bytes is 65");
  codec = CodedCodec(shape);
  codec.set_value_row_bytes(0);
  refused(codec, "value_row_bytes");
  codec = CodedCodec(shape);
  codec.mutable_key_mean()->mutable_data()->pop_back();
  refused(codec, "key_mean");
  codec = CodedCodec(shape);
  codec.clear_key_mean();
  refused(codec, "key_mean");
  EXPECT_THAT(RowDecoder::Create(CodedCodec(shape), {.q_heads = 4, .kv_heads = 2, .head_dim = 60, .value_dim = 64}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("multiples of 8")));
}

TEST(RowDecoder, WrongSizesAndHeadsAreRefused) {
  const LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 64, .value_dim = 64};
  const auto decoder = RowDecoder::Create(CodedCodec(shape), shape);
  ASSERT_THAT(decoder, IsOk());
  const std::vector<std::byte> row(decoder->key_row_bytes());
  std::vector<float> key(64);
  EXPECT_THAT(decoder->DecodeKeys(2, row, key),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("kv_head is 2")));
  EXPECT_THAT(decoder->DecodeKeys(0, std::span(row).first(65), key), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(decoder->DecodeKeys(0, row, std::span(key).first(63)), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(decoder->DecodeKeys(0, {}, {}), IsOk());
  EXPECT_THAT(decoder->DecodeValues(row, key), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ctkvr::client
