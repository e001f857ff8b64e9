// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/tensor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace ctkvr::client {
namespace {

void ApplyOverride(const v1::LayerOverride& change, LayerShape* shape) {
  if (change.absent()) shape->absent = true;
  if (change.has_q_heads()) shape->q_heads = change.q_heads();
  if (change.has_kv_heads()) shape->kv_heads = change.kv_heads();
  if (change.has_head_dim()) shape->head_dim = change.head_dim();
  if (change.has_value_dim()) shape->value_dim = change.value_dim();
}

template <typename T>
T Load(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

}  // namespace

absl::StatusOr<LayerShape> ShapeOfLayer(const v1::SessionOptions& options, uint32_t layer) {
  const v1::Geometry& geometry = options.geometry();
  if (layer >= geometry.layers()) {
    return absl::OutOfRangeError(absl::StrCat("layer is ", layer, "; the session has ", geometry.layers()));
  }
  LayerShape shape{.q_heads = geometry.q_heads(),
                   .kv_heads = geometry.kv_heads(),
                   .head_dim = geometry.head_dim(),
                   .value_dim = geometry.value_dim(),
                   .dtype = geometry.dtype()};
  for (const v1::LayerOverride& change : options.layer_overrides()) {
    if (std::find(change.layers().begin(), change.layers().end(), layer) != change.layers().end()) {
      ApplyOverride(change, &shape);
    }
  }
  if (shape.value_dim == 0) shape.value_dim = shape.head_dim;
  if (shape.q_heads == 0 || shape.kv_heads == 0 || shape.head_dim == 0 || shape.q_heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer, ": q_heads is ", shape.q_heads, ", kv_heads is ",
                                                   shape.kv_heads, ", head_dim is ", shape.head_dim,
                                                   "; all must be positive, q_heads a multiple of kv_heads"));
  }
  if (BytesOf(shape.dtype) == 0) return absl::InvalidArgumentError("geometry.dtype is not set");
  return shape;
}

size_t BytesOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    default:
      return 0;
  }
}

v1::Tensor MakeTensor(v1::DType dtype, std::span<const uint32_t> dims, std::span<const std::byte> data) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_dims()->Add(dims.begin(), dims.end());
  tensor.set_data(data.data(), data.size());
  return tensor;
}

absl::StatusOr<v1::Query> MakeQuery(const LayerShape& shape, uint32_t layer, uint32_t position, uint32_t positions,
                                    std::span<const std::byte> queries) {
  const uint64_t bytes = uint64_t{positions} * shape.q_heads * shape.head_dim * BytesOf(shape.dtype);
  if (positions == 0 || queries.size() != bytes) {
    return absl::InvalidArgumentError(absl::StrCat("queries have ", queries.size(), " bytes; ", positions,
                                                   " positions of layer ", layer, " have ", bytes,
                                                   ", and there must be at least one"));
  }
  v1::Query query;
  query.set_layer(layer);
  query.set_position(position);
  const uint32_t dims[] = {positions, shape.q_heads, shape.head_dim};
  *query.mutable_queries() = MakeTensor(shape.dtype, dims, queries);
  return query;
}

absl::Status ToFloat(v1::DType dtype, std::span<const std::byte> data, std::span<float> out) {
  const size_t element = BytesOf(dtype);
  if (element == 0) return absl::InvalidArgumentError(absl::StrCat("dtype is ", static_cast<int>(dtype)));
  if (data.size() != out.size() * element) {
    return absl::InvalidArgumentError(
        absl::StrCat("data has ", data.size(), " bytes; ", out.size(), " elements have ", out.size() * element));
  }
  if (data.empty()) return absl::OkStatus();
  if (dtype == v1::DTYPE_F32) {
    std::memcpy(out.data(), data.data(), data.size());
  } else if (dtype == v1::DTYPE_F16) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = HalfToFloat(Load<uint16_t>(data.data() + 2 * i));
  } else {
    for (size_t i = 0; i < out.size(); ++i) out[i] = BfloatToFloat(Load<uint16_t>(data.data() + 2 * i));
  }
  return absl::OkStatus();
}

float HalfToFloat(uint16_t bits) {
  // Exponent and fraction moved into place are off by the difference of the biases, 2^112; a multiplication puts that
  // right for normal and subnormal numbers alike. Infinities and NaN (exponent all ones) get theirs back afterwards.
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u);
  uint32_t out = std::bit_cast<uint32_t>(scaled);
  if (magnitude >= 0x0f800000u) out = magnitude | 0x7f800000u;
  return std::bit_cast<float>(out | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14 a binary16 is a multiple of 2^-24: adding 0.5 makes the adder round to just that.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float BfloatToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t FloatToBfloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace ctkvr::client
