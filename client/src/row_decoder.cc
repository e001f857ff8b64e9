// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/row_decoder.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace ctkvr::client {
namespace {

constexpr uint32_t kValueGroup = 32;  // dimensions that share a scale and a zero point
constexpr size_t kValueGroupHeaderBytes = 4;

struct FormatFacts {
  uint32_t planes = 0;
  uint32_t value_bits = 0;
  v1::DType element = v1::DTYPE_UNSPECIFIED;  // of float formats
};

absl::StatusOr<FormatFacts> FactsOf(v1::Format format) {
  switch (format) {
    case v1::FORMAT_F32:
      return FormatFacts{.element = v1::DTYPE_F32};
    case v1::FORMAT_F16:
      return FormatFacts{.element = v1::DTYPE_F16};
    case v1::FORMAT_BF16:
      return FormatFacts{.element = v1::DTYPE_BF16};
    case v1::FORMAT_K8V8:
      return FormatFacts{.planes = 8, .value_bits = 8};
    case v1::FORMAT_K8V4:
      return FormatFacts{.planes = 8, .value_bits = 4};
    case v1::FORMAT_K6V4:
      return FormatFacts{.planes = 6, .value_bits = 4};
    default:
      return absl::InvalidArgumentError(absl::StrCat("codec.format is ", static_cast<int>(format)));
  }
}

float LoadHalf(const std::byte* data) {
  uint16_t bits;
  std::memcpy(&bits, data, sizeof(bits));
  return HalfToFloat(bits);
}

uint64_t SplitMix64(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

bool IsPowerOfTwo(uint32_t n) { return (n & (n - 1)) == 0; }

// Walsh-Hadamard transform of natural order over x [size], not normalised. Its own inverse but for a factor.
void Transform(float* x, uint32_t size) {
  for (uint32_t half = 1; half < size; half *= 2) {
    for (uint32_t begin = 0; begin < size; begin += 2 * half) {
      for (uint32_t i = begin; i < begin + half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

// Calls use(first dimension, size) for each block of the binary expansion of dim, large blocks first or last.
template <typename Use>
void ForEachBlock(uint32_t dim, bool descending, Use use) {
  uint32_t begin = 0;
  for (uint32_t step = 0; step < 32; ++step) {
    const uint32_t size = 1u << (descending ? 31 - step : step);
    if ((dim & size) == 0) continue;
    use(begin, size);
    begin += size;
  }
}

// [rounds, dim]: the rotation's signs, each divided by the square root of its block's size in that round, so that the
// inverse needs one multiplication a dimension and round.
std::vector<float> ScaledSigns(uint32_t dim, uint64_t seed) {
  const uint32_t rounds = IsPowerOfTwo(dim) ? 1 : 2;
  std::vector<float> signs(size_t{rounds} * dim);
  uint64_t word = 0;
  for (size_t i = 0; i < signs.size(); ++i) {
    if (i % 64 == 0) word = SplitMix64(&seed);
    signs[i] = (word >> (i % 64)) & 1 ? -1.0f : 1.0f;
  }
  for (uint32_t round = 0; round < rounds; ++round) {
    float* row = signs.data() + size_t{round} * dim;
    ForEachBlock(dim, round == 0, [row](uint32_t begin, uint32_t size) {
      const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
      for (uint32_t i = begin; i < begin + size; ++i) row[i] *= scale;
    });
  }
  return signs;
}

size_t CodedValueRowBytes(uint32_t value_dim, uint32_t bits) {
  const uint32_t groups = (value_dim + kValueGroup - 1) / kValueGroup;
  return groups * kValueGroupHeaderBytes + (size_t{value_dim} * bits + 7) / 8;
}

absl::Status CheckRowBytes(const char* name, uint32_t given, size_t expected) {
  if (given == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("codec.", name, " is ", given, "; the format and the layer's shape give ", expected));
}

absl::Status CheckSizes(size_t rows_bytes, size_t row_bytes, size_t out, size_t dim) {
  if (rows_bytes % row_bytes == 0 && out == rows_bytes / row_bytes * dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rows have ", rows_bytes, " bytes and out ", out,
                                                 " elements; a row has ", row_bytes, " bytes and ", dim, " elements"));
}

}  // namespace

absl::StatusOr<RowDecoder> RowDecoder::Create(const v1::RowCodec& codec, const LayerShape& shape) {
  const auto facts = FactsOf(codec.format());
  if (!facts.ok()) return facts.status();
  const size_t raw_element = BytesOf(shape.dtype);
  const bool dims_good =
      shape.head_dim > 0 && shape.value_dim > 0 && shape.head_dim % 8 == 0 && shape.value_dim % 8 == 0;
  if (!dims_good || raw_element == 0) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim is ", shape.head_dim, " and value_dim ", shape.value_dim,
                                                   "; both must be positive multiples of 8, and dtype be set"));
  }
  RowDecoder decoder;
  decoder.shape_ = shape;
  decoder.code_generation_ = codec.code_generation();
  decoder.value_bits_ = facts->value_bits;
  decoder.value_dtype_ = facts->element;
  const bool coded = facts->planes > 0 && codec.code_generation() > 0;
  decoder.planes_ = coded ? facts->planes : 0;
  decoder.key_dtype_ = facts->planes > 0 ? shape.dtype : facts->element;
  decoder.key_row_bytes_ =
      coded ? size_t{shape.head_dim} / 8 * facts->planes + 2 : size_t{shape.head_dim} * BytesOf(decoder.key_dtype_);
  decoder.value_row_bytes_ = facts->value_bits > 0 ? CodedValueRowBytes(shape.value_dim, facts->value_bits)
                                                   : size_t{shape.value_dim} * BytesOf(facts->element);
  if (auto s = CheckRowBytes("key_row_bytes", codec.key_row_bytes(), decoder.key_row_bytes_); !s.ok()) return s;
  if (auto s = CheckRowBytes("value_row_bytes", codec.value_row_bytes(), decoder.value_row_bytes_); !s.ok()) return s;
  if (!coded) return decoder;
  decoder.mean_.resize(size_t{shape.kv_heads} * shape.head_dim);
  const std::string& mean = codec.key_mean().data();
  if (codec.key_mean().dtype() != v1::DTYPE_F32) return absl::InvalidArgumentError("codec.key_mean is not F32");
  if (auto s = ToFloat(v1::DTYPE_F32, std::as_bytes(std::span(mean)), decoder.mean_); !s.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("codec.key_mean: ", s.message()));
  }
  decoder.signs_ = ScaledSigns(shape.head_dim, codec.rotation_seed());
  return decoder;
}

absl::Status RowDecoder::DecodeKeys(uint32_t kv_head, std::span<const std::byte> rows, std::span<float> out) const {
  if (kv_head >= shape_.kv_heads) {
    return absl::InvalidArgumentError(absl::StrCat("kv_head is ", kv_head, "; the layer has ", shape_.kv_heads));
  }
  if (auto s = CheckSizes(rows.size(), key_row_bytes_, out.size(), shape_.head_dim); !s.ok()) return s;
  if (planes_ == 0) return ToFloat(key_dtype_, rows, out);
  const float* mean = mean_.data() + size_t{kv_head} * shape_.head_dim;
  for (size_t row = 0; row * key_row_bytes_ < rows.size(); ++row) {
    DecodeCodedKey(rows.data() + row * key_row_bytes_, mean, out.data() + row * shape_.head_dim);
  }
  return absl::OkStatus();
}

void RowDecoder::DecodeCodedKey(const std::byte* row, const float* mean, float* out) const {
  const uint32_t dim = shape_.head_dim;
  const size_t plane_bytes = dim / 8;
  const float scale = LoadHalf(row + plane_bytes * planes_);
  const float centre = 0.5f - static_cast<float>(1u << (planes_ - 1));
  for (uint32_t i = 0; i < dim; ++i) {
    uint32_t code = 0;
    for (uint32_t plane = 0; plane < planes_; ++plane) {
      code = 2 * code + ((std::to_integer<uint32_t>(row[plane * plane_bytes + i / 8]) >> (i % 8)) & 1u);
    }
    out[i] = scale * (static_cast<float>(code) + centre);
  }
  for (uint32_t round = IsPowerOfTwo(dim) ? 1 : 2; round-- > 0;) {
    ForEachBlock(dim, round == 0, [out](uint32_t begin, uint32_t size) { Transform(out + begin, size); });
    const float* signs = signs_.data() + size_t{round} * dim;
    for (uint32_t i = 0; i < dim; ++i) out[i] *= signs[i];
  }
  for (uint32_t i = 0; i < dim; ++i) out[i] += mean[i];
}

absl::Status RowDecoder::DecodeValues(std::span<const std::byte> rows, std::span<float> out) const {
  if (auto s = CheckSizes(rows.size(), value_row_bytes_, out.size(), shape_.value_dim); !s.ok()) return s;
  if (value_bits_ == 0) return ToFloat(value_dtype_, rows, out);
  for (size_t row = 0; row * value_row_bytes_ < rows.size(); ++row) {
    DecodeCodedValue(rows.data() + row * value_row_bytes_, out.data() + row * shape_.value_dim);
  }
  return absl::OkStatus();
}

void RowDecoder::DecodeCodedValue(const std::byte* row, float* out) const {
  const uint32_t groups = (shape_.value_dim + kValueGroup - 1) / kValueGroup;
  const std::byte* codes = row + groups * kValueGroupHeaderBytes;
  for (uint32_t i = 0; i < shape_.value_dim; ++i) {
    const std::byte* header = row + i / kValueGroup * kValueGroupHeaderBytes;
    const uint32_t code = value_bits_ == 8 ? std::to_integer<uint32_t>(codes[i])
                                           : (std::to_integer<uint32_t>(codes[i / 2]) >> (4 * (i % 2))) & 15u;
    out[i] = LoadHalf(header + 2) + LoadHalf(header) * static_cast<float>(code);
  }
}

}  // namespace ctkvr::client
