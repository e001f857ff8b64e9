// SPDX-License-Identifier: Apache-2.0
//
// The randomised Hadamard transform that spreads a key's energy evenly over its dimensions before coding.
//
// head_dim is split into blocks of descending powers of two, the binary expansion of head_dim (80 = 64 + 16). One
// round multiplies by signs and applies the orthonormal Walsh-Hadamard transform (natural order) to each block.
// A power of two takes one round; any other takes a second with new signs and the blocks in ascending order
// (16 + 64), so that every dimension mixes with every other. No dimension is added: padding is 0 bytes.
//
// Signs: dimension i of round r takes bit (r * head_dim + i) % 64 of output number (r * head_dim + i) / 64 of
// SplitMix64 started at `seed` (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195); a set bit is -1.
//
// Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <vector>

namespace ctkvr {

constexpr uint32_t RotationRounds(uint32_t head_dim) { return (head_dim & (head_dim - 1)) == 0 ? 1 : 2; }

// [RotationRounds(head_dim)][head_dim], each +1 or -1.
std::vector<float> RotationSigns(uint32_t head_dim, uint64_t seed);

// In place, x [head_dim]. `signs` from RotationSigns. Unrotate is the inverse; both keep the 2-norm.
void Rotate(float* x, uint32_t head_dim, const float* signs);
void Unrotate(float* x, uint32_t head_dim, const float* signs);

}  // namespace ctkvr
