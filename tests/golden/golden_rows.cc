// SPDX-License-Identifier: Apache-2.0

#include "tests/golden/golden_rows.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/base/check.h"

namespace ctkvr::testing {
namespace {

std::vector<std::byte> BytesOf(const std::string& hex) {
  std::vector<std::byte> bytes(hex.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
  return bytes;
}

std::vector<float> FloatsOf(const std::string& hex) {
  const std::vector<std::byte> bytes = BytesOf(hex);
  std::vector<float> floats(bytes.size() / sizeof(float));
  if (!floats.empty()) std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

Format FormatOf(const std::string& name) {
  for (Format format : kAllFormats) {
    if (name == FormatName(format)) return format;
  }
  CTKVR_CHECK(false && "unknown format in rows.json");
  return Format::kF32;
}

DType DTypeOf(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  CTKVR_CHECK(false && "unknown dtype in rows.json");
  return DType::kF32;
}

}  // namespace

std::vector<GoldenCase> ReadGoldenRows() {
  std::ifstream file(CTKVR_GOLDEN_ROWS);
  CTKVR_CHECK(file.good());
  std::vector<GoldenCase> cases;
  const nlohmann::json document = nlohmann::json::parse(file);
  for (const nlohmann::json& from : document.at("cases")) {
    GoldenCase to{.name = from.at("name"),
                  .format = FormatOf(from.at("format")),
                  .head_dim = from.at("head_dim"),
                  .value_dim = from.at("value_dim"),
                  .keys_coded = from.at("code_generation") == 1,
                  .raw_dtype = DTypeOf(from.at("raw_dtype")),
                  .rotation_seed = std::stoull(from.at("rotation_seed").get<std::string>()),
                  .mean = FloatsOf(from.at("mean")),
                  .tokens = {}};
    for (const nlohmann::json& token : from.at("tokens")) {
      to.tokens.push_back({.note = token.at("note"),
                           .key = FloatsOf(token.at("key")),
                           .value = FloatsOf(token.at("value")),
                           .key_row = BytesOf(token.at("key_row")),
                           .value_row = BytesOf(token.at("value_row")),
                           .decoded_key = FloatsOf(token.at("decoded_key")),
                           .decoded_value = FloatsOf(token.at("decoded_value")),
                           .sketch_scale = {0, token.value("sketch_scale_1", uint16_t{0}),
                                            token.value("sketch_scale_2", uint16_t{0})}});
    }
    cases.push_back(std::move(to));
  }
  return cases;
}

}  // namespace ctkvr::testing
