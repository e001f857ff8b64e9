// SPDX-License-Identifier: Apache-2.0

#include "kernels/formats.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/half_steps.h"
#include "kernels/base/lines.h"
#include "kernels/base/math.h"

namespace ctkvr {
namespace {

// Sums of products run over this many interleaved partial sums, halved pairwise at the end: an order that vector code
// can follow exactly.
constexpr uint32_t kSumLanes = 16;

float FoldLanes(float* lanes) {
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (uint32_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Compared as integers, so that NaN counts as larger than everything.
uint32_t MaxMagnitudeBits(const float* x, uint32_t count) {
  uint32_t max = 0;
  for (uint32_t i = 0; i < count; ++i) max = std::max(max, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return max;
}

// To the nearest, ties to even, for 0 <= x < 2^22.
int32_t RoundSmall(float x) {
  constexpr float kShift = 12582912.0f;
  return static_cast<int32_t>((x + kShift) - kShift);
}

struct ValueGroup {
  uint16_t zero = 0;
  uint16_t scale = 0;
};

// Fits one group; returns -1 or the first element that cannot be held.
int32_t FitValueGroup(const float* value, uint32_t count, uint32_t levels, ValueGroup* group) {
  float min = value[0];
  float max = value[0];
  for (uint32_t i = 1; i < count; ++i) {
    min = std::min(min, value[i]);
    max = std::max(max, value[i]);
  }
  const bool finite = MaxMagnitudeBits(value, count) < 0x7f800000u;
  const uint16_t zero_bits = finite ? LargestHalfAtMost(std::max(min, -kHalfMax)) : 0;
  const float zero = F32FromF16(zero_bits);
  const double limit = zero + double{kHalfMax} * levels;
  if (!finite || min < -kHalfMax || max > limit) {
    for (uint32_t i = 0; i < count; ++i) {
      if (!(value[i] >= -kHalfMax && value[i] <= limit)) return static_cast<int32_t>(i);
    }
  }
  *group = {.zero = zero_bits, .scale = SmallestValueScale(zero, max, levels)};
  return -1;
}

void CodeValueGroup(const float* value, uint32_t count, uint32_t levels, ValueGroup group, uint8_t* codes) {
  const float zero = F32FromF16(group.zero);
  const float scale = F32FromF16(group.scale);
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t code = group.scale == 0 ? 0 : RoundSmall((value[i] - zero) / scale);
    codes[i] = static_cast<uint8_t>(std::min<int32_t>(code, static_cast<int32_t>(levels)));
  }
}

int32_t EncodeFloats(const float* value, uint32_t count, DType dtype, std::byte* row) {
  for (uint32_t i = 0; i < count; ++i) {
    std::byte element[4];
    StoreElement(element, dtype, 0, value[i]);
    const float stored = LoadElement(element, dtype, 0);
    if (MaxMagnitudeBits(&stored, 1) >= 0x7f800000u) return static_cast<int32_t>(i);
  }
  for (uint32_t i = 0; i < count; ++i) StoreElement(row, dtype, i, value[i]);
  return -1;
}

constexpr uint32_t kGroupHeaderBytes = 4;

}  // namespace

const char* FormatName(Format format) {
  switch (format) {
    case Format::kF32:
      return "f32";
    case Format::kF16:
      return "f16";
    case Format::kBF16:
      return "bf16";
    case Format::kK8V8:
      return "k8v8";
    case Format::kK8V4:
      return "k8v4";
    case Format::kK6V4:
      return "k6v4";
  }
  return "?";
}

PageLayout MakePageLayout(Format format, uint32_t head_dim, uint32_t value_dim, uint32_t first_planes) {
  CTKVR_CHECK(head_dim > 0 && head_dim % 8 == 0 && value_dim > 0 && value_dim % 8 == 0);
  PageLayout layout{.format = format, .head_dim = head_dim, .value_dim = value_dim};
  uint32_t offset = 0;
  const auto place = [&offset](uint32_t bytes_per_token) {
    const uint32_t begin = offset;
    offset += kPageTokens * bytes_per_token;
    return begin;
  };
  if (KeysAreCoded(format)) {
    CTKVR_CHECK(first_planes >= 1 && first_planes <= 2);
    layout.planes = KeyPlanes(format);
    layout.first_planes = first_planes;
    layout.plane_bytes = head_dim / 8;
    const uint32_t groups = CeilDiv(value_dim, kValueGroup);
    layout.value_row_bytes = groups * kGroupHeaderBytes + value_dim * ValueBits(format) / 8;
    layout.sketch_scales_offset = kSketchTokens * layout.sketch_token_bytes();
    layout.sketch_bytes = layout.sketch_scales_offset + kSketchTokens * static_cast<uint32_t>(sizeof(uint16_t));
    const uint32_t record_bytes = layout.record_bytes_of(layout.planes), lines = RoundUp(record_bytes, kLineBytes);
    layout.record_bytes = lines - record_bytes <= kRecordPaddingMax ? lines : record_bytes;
    layout.records_offset = place(layout.record_bytes);
  } else {
    const auto element_bytes = static_cast<uint32_t>(DTypeBytes(FloatType(format)));
    layout.value_row_bytes = value_dim * element_bytes;
    layout.keys_offset = place(head_dim * element_bytes);
  }
  layout.values_offset = place(layout.value_row_bytes);
  layout.page_bytes = offset;
  return layout;
}

uint32_t StorageKeyRowBytes(const PageLayout& layout) {
  if (KeysAreCoded(layout.format)) return layout.planes * layout.plane_bytes + sizeof(uint16_t);
  return layout.head_dim * static_cast<uint32_t>(DTypeBytes(FloatType(layout.format)));
}

uint32_t StorageValueRowBytes(const PageLayout& layout) { return layout.value_row_bytes; }

bool EncodeRotatedKey(const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, uint8_t* codes,
                      uint16_t* code_scale, uint16_t* sketch_scale) {
  const uint32_t max_bits = MaxMagnitudeBits(x, head_dim);
  const int32_t half_levels = 1 << (planes - 1);
  if (max_bits >= 0x7f800000u) return false;
  const uint16_t scale_bits = SmallestHalfScale(std::bit_cast<float>(max_bits), static_cast<float>(half_levels));
  if (scale_bits >= kHalfInfinity) return false;
  const float scale = F32FromF16(scale_bits);
  uint8_t coded[kDimMax];
  CTKVR_CHECK(head_dim <= kDimMax);
  float squares[kSumLanes] = {};
  float products[kSumLanes] = {};
  for (uint32_t i = 0; i < head_dim; ++i) {
    const float ratio = max_bits == 0 ? 0.0f : x[i] / scale;
    const auto toward_zero = static_cast<int32_t>(ratio);
    const int32_t floor = toward_zero - (ratio < static_cast<float>(toward_zero) ? 1 : 0);
    const int32_t code = std::clamp(floor + half_levels, 0, 2 * half_levels - 1);
    const int32_t level = 2 * (code >> (planes - first_planes)) + 1 - (1 << first_planes);
    coded[i] = static_cast<uint8_t>(code);
    squares[i % kSumLanes] += x[i] * x[i];
    products[i % kSumLanes] += x[i] * static_cast<float>(level);
  }
  const uint16_t sketch_bits = max_bits == 0 ? 0 : F16FromF32(FoldLanes(squares) / FoldLanes(products));
  if (sketch_bits >= kHalfInfinity) return false;
  std::memcpy(codes, coded, head_dim);
  *code_scale = scale_bits;
  *sketch_scale = sketch_bits;
  return true;
}

void DecodeRotatedKey(const uint8_t* codes, uint32_t head_dim, uint32_t planes, uint16_t code_scale, float* x) {
  const float scale = F32FromF16(code_scale);
  const float middle = 0.5f - static_cast<float>(1 << (planes - 1));
  for (uint32_t i = 0; i < head_dim; ++i) x[i] = scale * (static_cast<float>(codes[i]) + middle);
}

void PackPlanes(const uint8_t* codes, uint32_t head_dim, uint32_t planes, std::byte* packed) {
  for (uint32_t plane = 0; plane < planes; ++plane) {
    const uint32_t bit = planes - 1 - plane;
    for (uint32_t i = 0; i < head_dim; i += 8) {
      uint32_t byte = 0;
      for (uint32_t j = 0; j < 8; ++j) byte |= (codes[i + j] >> bit & 1u) << j;
      *packed++ = static_cast<std::byte>(byte);
    }
  }
}

void UnpackPlanes(const std::byte* packed, uint32_t head_dim, uint32_t planes, uint8_t* codes) {
  std::memset(codes, 0, head_dim);
  for (uint32_t plane = 0; plane < planes; ++plane) {
    for (uint32_t i = 0; i < head_dim; ++i) {
      const auto byte = static_cast<uint32_t>(packed[plane * (head_dim / 8) + i / 8]);
      codes[i] = static_cast<uint8_t>(codes[i] << 1 | (byte >> (i % 8) & 1u));
    }
  }
}

int32_t EncodeValueRow(const float* value, uint32_t value_dim, Format format, std::byte* row) {
  if (!KeysAreCoded(format)) return EncodeFloats(value, value_dim, FloatType(format), row);
  const uint32_t bits = ValueBits(format);
  const uint32_t levels = (1u << bits) - 1;
  const uint32_t groups = CeilDiv(value_dim, kValueGroup);
  CTKVR_CHECK(value_dim <= kDimMax);
  ValueGroup fitted[kDimMax / kValueGroup];
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t begin = group * kValueGroup;
    const int32_t bad = FitValueGroup(value + begin, std::min(kValueGroup, value_dim - begin), levels, &fitted[group]);
    if (bad >= 0) return static_cast<int32_t>(begin) + bad;
  }
  std::byte* packed = row + groups * kGroupHeaderBytes;
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t begin = group * kValueGroup;
    const uint32_t count = std::min(kValueGroup, value_dim - begin);
    std::memcpy(row + group * kGroupHeaderBytes, &fitted[group].scale, 2);
    std::memcpy(row + group * kGroupHeaderBytes + 2, &fitted[group].zero, 2);
    uint8_t codes[kValueGroup];
    CodeValueGroup(value + begin, count, levels, fitted[group], codes);
    if (bits == 8) {
      std::memcpy(packed + begin, codes, count);
    } else {
      for (uint32_t i = 0; i < count; i += 2) packed[(begin + i) / 2] = std::byte(codes[i] | codes[i + 1] << 4);
    }
  }
  return -1;
}

void DecodeValueRow(const std::byte* row, uint32_t value_dim, Format format, float* value) {
  if (!KeysAreCoded(format)) {
    for (uint32_t i = 0; i < value_dim; ++i) value[i] = LoadElement(row, FloatType(format), i);
    return;
  }
  const std::byte* packed = row + CeilDiv(value_dim, kValueGroup) * kGroupHeaderBytes;
  for (uint32_t i = 0; i < value_dim; ++i) {
    const std::byte* header = row + i / kValueGroup * kGroupHeaderBytes;
    const float scale = LoadElement(header, DType::kF16, 0);
    const float zero = LoadElement(header, DType::kF16, 1);
    const auto byte = static_cast<uint32_t>(packed[ValueBits(format) == 8 ? i : i / 2]);
    const uint32_t code = ValueBits(format) == 8 ? byte : byte >> (4 * (i % 2)) & 15u;
    value[i] = zero + scale * static_cast<float>(code);
  }
}

}  // namespace ctkvr
