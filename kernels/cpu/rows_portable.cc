// SPDX-License-Identifier: Apache-2.0
//
// The reference row loops: formats.h and rotation.h as they are.

#include <cmath>
#include <cstring>

#include "kernels/cpu/kernels.h"
#include "kernels/rotation.h"

namespace ctkvr::cpu {
namespace {

template <DType kDType>
void FloatsFrom(const std::byte* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = LoadElement(from, kDType, i);
}

template <DType kDType>
int64_t FloatsTo(const float* from, std::byte* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    StoreElement(to, kDType, i, from[i]);
    if (!std::isfinite(LoadElement(to, kDType, i))) return static_cast<int64_t>(i);
  }
  return -1;
}

bool EncodeKey(const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, std::byte* packed,
               uint16_t* code_scale, uint16_t* sketch_scale) {
  uint8_t codes[kDimMax];
  if (!EncodeRotatedKey(x, head_dim, planes, first_planes, codes, code_scale, sketch_scale)) return false;
  PackPlanes(codes, head_dim, planes, packed);
  return true;
}

Format ValueFormat(uint32_t bits) { return bits == 8 ? Format::kK8V8 : Format::kK8V4; }

int32_t EncodeValue(const float* value, uint32_t value_dim, uint32_t bits, std::byte* row) {
  return EncodeValueRow(value, value_dim, ValueFormat(bits), row);
}

void DecodeValue(const std::byte* row, uint32_t value_dim, uint32_t bits, float* value) {
  DecodeValueRow(row, value_dim, ValueFormat(bits), value);
}

constexpr RowKernels kTable{
    .rotate = Rotate,
    .unrotate = Unrotate,
    .f32_from_f16 = FloatsFrom<DType::kF16>,
    .f32_from_bf16 = FloatsFrom<DType::kBF16>,
    .f16_from_f32 = FloatsTo<DType::kF16>,
    .bf16_from_f32 = FloatsTo<DType::kBF16>,
    .encode_key = EncodeKey,
    .encode_value = EncodeValue,
    .decode_value = DecodeValue,
    .encode_keys = [](const KeyRun&) { return uint32_t{0}; },
    .encode_values = [](const ValueRun&) { return uint32_t{0}; },
};

}  // namespace

const RowKernels& PortableRowKernels() { return kTable; }

}  // namespace ctkvr::cpu
