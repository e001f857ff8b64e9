// SPDX-License-Identifier: Apache-2.0

#include "kernels/rotation.h"

#include <bit>
#include <cmath>

namespace ctkvr {
namespace {

uint64_t SplitMix64(uint64_t seed, uint64_t number) {
  uint64_t z = seed + (number + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Strides in ascending order, the scale last: every implementation adds the same numbers in the same order, so that
// the bits agree.
void TransformBlock(float* x, uint32_t size) {
  for (uint32_t stride = 1; stride < size; stride *= 2) {
    for (uint32_t begin = 0; begin < size; begin += 2 * stride) {
      for (uint32_t i = begin; i < begin + stride; ++i) {
        const float low = x[i];
        const float high = x[i + stride];
        x[i] = low + high;
        x[i + stride] = low - high;
      }
    }
  }
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (uint32_t i = 0; i < size; ++i) x[i] *= scale;
}

void TransformBlocks(float* x, uint32_t head_dim, uint32_t round) {
  for (uint32_t rest = head_dim, begin = 0; rest != 0;) {
    const uint32_t size = round == 0 ? std::bit_floor(rest) : rest & -rest;
    TransformBlock(x + begin, size);
    begin += size;
    rest -= size;
  }
}

void MultiplySigns(float* x, uint32_t head_dim, const float* signs) {
  for (uint32_t i = 0; i < head_dim; ++i) x[i] *= signs[i];
}

}  // namespace

std::vector<float> RotationSigns(uint32_t head_dim, uint64_t seed) {
  std::vector<float> signs(size_t{RotationRounds(head_dim)} * head_dim);
  for (size_t i = 0; i < signs.size(); ++i) signs[i] = (SplitMix64(seed, i / 64) >> (i % 64) & 1) != 0 ? -1.0f : 1.0f;
  return signs;
}

void Rotate(float* x, uint32_t head_dim, const float* signs) {
  for (uint32_t round = 0; round < RotationRounds(head_dim); ++round) {
    MultiplySigns(x, head_dim, signs + size_t{round} * head_dim);
    TransformBlocks(x, head_dim, round);
  }
}

void Unrotate(float* x, uint32_t head_dim, const float* signs) {
  for (uint32_t round = RotationRounds(head_dim); round-- > 0;) {
    TransformBlocks(x, head_dim, round);
    MultiplySigns(x, head_dim, signs + size_t{round} * head_dim);
  }
}

}  // namespace ctkvr
