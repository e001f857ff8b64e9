// SPDX-License-Identifier: Apache-2.0
//
// ScanKernels in plain C++: what the other instruction sets are compared with.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/cpu/kernels.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {
namespace {

void ScanPlanes(const ScanRun& run) {
  const uint32_t plane_bytes = run.head_dim / 8;
  for (uint32_t t = 0; t < run.tokens; ++t) {
    const auto* planes = reinterpret_cast<const uint8_t*>(run.planes) + size_t{t} * run.first_planes * plane_bytes;
    const float f = LoadElement(run.sketch_scales, DType::kF16, t);
    for (uint32_t r = 0; r < run.heads; ++r) {
      const uint8_t* tables = run.tables + size_t{r} * (run.head_dim / 4) * 16;
      int32_t sum = 0;
      for (uint32_t j = 0; j < run.first_planes; ++j) {
        sum *= 2;
        for (uint32_t i = 0; i < plane_bytes; ++i) {
          const uint8_t byte = planes[j * plane_bytes + i];
          sum += tables[32 * i + (byte & 15)] + tables[32 * i + 16 + (byte >> 4)];
        }
      }
      const float scaled = static_cast<float>(2 * sum + run.offset[r]) * run.scan_scale[r];
      const float product = scaled * f;
      run.estimates[r * run.stride + t] = product + run.mean_dot[r];
    }
  }
}

const std::byte* Plane(const CodedKey& key, uint32_t plane) {
  const size_t plane_bytes = key.head_dim / 8;
  return plane < key.first_planes ? key.first + plane * plane_bytes
                                  : key.rest + (plane - key.first_planes) * plane_bytes;
}

// The upper `planes` bits of each code, codes [head_dim].
void UnpackCodes(const CodedKey& key, uint32_t planes, uint8_t* codes) {
  std::memset(codes, 0, key.head_dim);
  for (uint32_t j = 0; j < planes; ++j) {
    const auto* plane = reinterpret_cast<const uint8_t*>(Plane(key, j));
    for (uint32_t i = 0; i < key.head_dim; ++i) {
      codes[i] = static_cast<uint8_t>(codes[i] << 1 | (plane[i / 8] >> (i % 8) & 1));
    }
  }
}

void RefineToken(const CodedKey& key, const RefineQuery& query, int32_t* sums) {
  uint8_t codes[kDimMax];
  UnpackCodes(key, query.planes, codes);
  for (uint32_t r = 0; r < query.heads; ++r) {
    const int8_t* row = query.rows + size_t{r} * PaddedBytes(key.head_dim);
    int32_t sum = 0;
    for (uint32_t i = 0; i < key.head_dim; ++i) sum += int32_t{row[i]} * codes[i];
    sums[r] = sum;
  }
}

void DecodeCoded(const CodedKey& key, float* decoded) {
  uint8_t codes[kDimMax];
  UnpackCodes(key, key.planes, codes);
  const int32_t middle = 1 << (key.planes - 1);
  for (uint32_t i = 0; i < key.head_dim; ++i) decoded[i] = static_cast<float>(codes[i] - middle);
  std::fill(decoded + key.head_dim, decoded + PaddedFloats(key.head_dim), 0.0f);
}

void DecodeFloat(const std::byte* key, DType dtype, uint32_t head_dim, float* decoded) {
  for (uint32_t i = 0; i < head_dim; ++i) decoded[i] = LoadElement(key, dtype, i);
  std::fill(decoded + head_dim, decoded + PaddedFloats(head_dim), 0.0f);
}

void Dots(const DotsRun& run) {
  for (uint32_t t = 0; t < run.tokens; ++t) {
    const float* key = run.keys + size_t{t} * run.padded_dim;
    for (uint32_t r = 0; r < run.heads; ++r) {
      const float* query = run.queries + size_t{r} * run.padded_dim;
      // Sixteen partial sums: they can be kept in vector registers, and their rounding errors stay small.
      float partial[kFloatPad] = {};
      for (uint32_t i = 0; i < run.padded_dim; i += kFloatPad) {
        for (uint32_t lane = 0; lane < kFloatPad; ++lane) partial[lane] += key[i + lane] * query[i + lane];
      }
      for (uint32_t width = kFloatPad / 2; width > 0; width /= 2) {
        for (uint32_t lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
      }
      run.dots[r * run.stride + t] = partial[0];
    }
  }
}

float MaxOf(const float* values, size_t count) { return *std::max_element(values, values + count); }

float Exponent(float score, const LogShare& log_share) {
  if (log_share.softcap > 0) {
    return log_share.softcap * std::tanh(log_share.scale / log_share.softcap * score) - log_share.origin;
  }
  return log_share.scale * (score - log_share.origin);
}

double SumExp(const float* scores, size_t count, const LogShare& log_share, float* terms) {
  double sum = 0;
  for (size_t t = 0; t < count; ++t) {
    const float term = std::exp(Exponent(scores[t], log_share));
    if (terms != nullptr) terms[t] = term;
    sum += term;
  }
  return sum;
}

void AddWeighted(const WeightedRowsRun& run) {
  for (uint32_t t = 0; t < run.tokens; ++t) {
    const float* row = run.rows + size_t{t} * run.padded_dim;
    for (uint32_t h = 0; h < run.heads; ++h) {
      const float weight = run.weights[h * run.weight_stride + t];
      float* sums = run.sums + size_t{h} * run.padded_dim;
      for (uint32_t i = 0; i < run.padded_dim; ++i) sums[i] += weight * row[i];
    }
  }
}

void GroupRanks(const GroupRankRun& run) {
  for (size_t t = 0; t < run.count; ++t) {
    float logs[kGroupHeadsMax] = {};
    for (uint32_t r = 0; r < run.heads; ++r) {
      logs[r] = Exponent(run.scores[r * run.stride + t], run.log_share[r]) - run.log_share[r].shift;
    }
    const float max = *std::max_element(logs, logs + run.heads);
    float sum = 0;
    for (uint32_t r = 0; run.sum && r < run.heads; ++r) sum += std::exp(logs[r] - max);
    run.ranks[t] = run.sum ? max + std::log(sum) : max;
  }
}

size_t TakeAbove(const float* values, size_t count, float threshold, size_t ties, uint32_t* indices) {
  size_t taken = 0;
  for (size_t t = 0; t < count; ++t) {
    const bool tie = values[t] == threshold && ties > 0;
    indices[taken] = static_cast<uint32_t>(t);
    taken += values[t] > threshold || tie;
    ties -= tie;
  }
  return taken;
}

size_t TakeBetween(std::span<const float> values, float lower, float upper, float* taken, size_t* above) {
  size_t count = 0, higher = 0;
  for (const float value : values) {
    taken[count] = value;
    count += value >= lower && value <= upper;
    higher += value > upper;
  }
  *above = higher;
  return count;
}

}  // namespace

const ScanKernels& PortableScanKernels() {
  static constexpr ScanKernels kKernels = {
      .scan_planes = ScanPlanes,
      .refine_token = RefineToken,
      .decode_coded = DecodeCoded,
      .decode_float = DecodeFloat,
      .dots = Dots,
      .code_dots = [](const CodeDotsRun&) { return false; },
      .max_of = MaxOf,
      .sum_exp = SumExp,
      .add_weighted = AddWeighted,
      .group_ranks = GroupRanks,
      .take_above = TakeAbove,
      .take_between = TakeBetween,
  };
  return kKernels;
}

}  // namespace ctkvr::cpu
