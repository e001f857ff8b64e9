// SPDX-License-Identifier: Apache-2.0
//
// How keys and values are stored: the closed set of formats, the layout of pages and sketch blocks, and the reference
// encoder and decoder of one row. proto/README.md, section "Rows", says the same byte for byte for people who write
// clients.
//
// A page holds kPageTokens tokens of one layer and KV head, a sketch block what the first pass reads of kSketchTokens.
// Coded keys (k8, k6) are made mean-free, rotated (rotation.h) and coded uniformly with b = 8 or 6 bits a dimension:
//
//     x = Rotate(key - mean)              [head_dim]
//     s = smallest binary16 with max|x| <= s * 2^(b-1)   (0 when x is all zero; c = 2^(b-1) then)
//     c[i] = clamp(floor(x[i] / s) + 2^(b-1), 0, 2^b - 1)
//     decoded x[i] = s * (c[i] + 0.5 - 2^(b-1));   decoded key = Unrotate(decoded x) + mean
//
// and stored as bit planes: plane j holds bit b-1-j of every c[i], dimension i at byte i/8, bit i%8. So plane 0 is
// the sign of x. With it goes the sketch scale, which makes the estimate from the first P planes unbiased for the
// key itself (RaBitQ, https://arxiv.org/abs/2405.12497, equation 14 without its random dither): with u[i] the odd
// level 2 * (c[i] >> (b-P)) + 1 - 2^P,
//
//     f = round16(|x|^2 / <x, u>)         (0 when x is all zero)
//
// Values in 8 or 4 bits: groups of kValueGroup dimensions (the last may be shorter), each with
//     zero  = largest binary16 <= min,   scale = smallest binary16 with zero + scale * (2^b - 1) >= max
//     c = clamp(round((v - zero) / scale), 0, 2^b - 1)   (0 when scale is 0);   decoded v = zero + scale * c
// A value row is [groups] {scale, zero} binary16, then the codes; 4-bit codes pack two a byte, the even dimension in
// the low half.
//
// Every step is binary32 arithmetic, each operation rounded once, except that the two bounds on scales hold exactly;
// round() takes ties to even; |x|^2 and <x, u> are 16 partial sums (dimension i adds to sum i % 16, ascending i), then
// sum j += sum j + 8, += sum j + 4, + 2, + 1. So all implementations store the same bytes.
//
// Thread-safe: pure functions over caller-owned memory.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace ctkvr {

enum class Format : uint8_t { kF32, kF16, kBF16, kK8V8, kK8V4, kK6V4 };
inline constexpr Format kAllFormats[] = {Format::kF32,  Format::kF16,  Format::kBF16,
                                         Format::kK8V8, Format::kK8V4, Format::kK6V4};

const char* FormatName(Format format);  // "k8v4"
constexpr bool KeysAreCoded(Format format) { return format >= Format::kK8V8; }
constexpr uint32_t KeyPlanes(Format format) {  // 0 when keys are floats
  return !KeysAreCoded(format) ? 0 : format == Format::kK6V4 ? 6 : 8;
}
constexpr uint32_t ValueBits(Format format) {  // 0 when values are floats
  return !KeysAreCoded(format) ? 0 : format == Format::kK8V8 ? 8 : 4;
}
constexpr DType FloatType(Format format) {  // REQUIRES: !KeysAreCoded(format)
  return format == Format::kF32 ? DType::kF32 : format == Format::kF16 ? DType::kF16 : DType::kBF16;
}

// The form in which rows are gathered.
enum class RowFormat : uint8_t { kF32, kF16, kBF16, kStorage };

// 64 tokens: every array of a page is then a whole number of 64-byte lines for every head_dim that is a multiple of 8.
inline constexpr uint32_t kPageTokens = 64;
// Tokens of a sketch block, at positions that are multiples of it: so many that a scan reads one run of memory for
// long, and that key clusters of them (cluster_ops.h) may lie together in it.
inline constexpr uint32_t kSketchTokens = 1024;
// A record is padded to whole lines where the padding is at most this. At head_dim 64 a k8 record is 58 bytes: padded,
// one line a token, else 1.88 on average, for 3 % more memory. At head_dim 128 it is 114 bytes: 2.75 lines, and the 14
// that two would cost are 7 %.
inline constexpr uint32_t kRecordPaddingMax = 8;
inline constexpr uint32_t kValueGroup = 32;
// The largest head_dim and value_dim that the code below and the operations take.
inline constexpr uint32_t kDimMax = 256;
// Levels of the quantised queries of the coarse passes; see ops.h.
inline constexpr int32_t kScanQueryMax = 31;
inline constexpr int32_t kRefineQueryMax = 127;

// Offsets in bytes within a page and a sketch block. Plain data.
struct PageLayout {
  Format format = Format::kF32;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  uint32_t planes = 0;        // b, or 0 when keys are floats
  uint32_t first_planes = 0;  // P: planes of the first pass, which lie in sketch blocks
  uint32_t plane_bytes = 0;   // head_dim / 8
  uint32_t value_row_bytes = 0;
  // Sketch blocks, coded keys alone: [1024][first_planes][plane_bytes], then
  uint32_t sketch_scales_offset = 0;  // [1024] binary16
  uint32_t sketch_bytes = 0;
  // Coded keys in a page: a record holds the code scale (binary16), the other planes, and padding.
  uint32_t records_offset = 0;  // [64][record_bytes]
  uint32_t record_bytes = 0;
  // Float keys:
  uint32_t keys_offset = 0;    // [64][head_dim]
  uint32_t values_offset = 0;  // [64][value_row_bytes]
  uint32_t page_bytes = 0;

  uint32_t sketch_token_bytes() const { return first_planes * plane_bytes; }
  // Of a record, what the first `count` planes take with the scale.
  uint32_t record_bytes_of(uint32_t count) const { return kCodeScaleBytes + (count - first_planes) * plane_bytes; }
  static constexpr uint32_t kCodeScaleBytes = 2;
};

// REQUIRES: head_dim and value_dim positive multiples of 8; 1 <= first_planes <= 2 when keys are coded (else ignored).
PageLayout MakePageLayout(Format format, uint32_t head_dim, uint32_t value_dim, uint32_t first_planes);

// Bytes of one token's key or value as a storage row of the wire: planes 0 to b-1, then s; a value row as in the page.
uint32_t StorageKeyRowBytes(const PageLayout& layout);
uint32_t StorageValueRowBytes(const PageLayout& layout);

// Reference coding of one key that is mean-free and rotated already. x [head_dim].
// Writes codes [head_dim], s and f. Returns false, nothing written, when s or f exceeds binary16.
bool EncodeRotatedKey(const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, uint8_t* codes,
                      uint16_t* code_scale, uint16_t* sketch_scale);
// x [head_dim] from codes [head_dim].
void DecodeRotatedKey(const uint8_t* codes, uint32_t head_dim, uint32_t planes, uint16_t code_scale, float* x);

// codes [head_dim] to planes [planes][head_dim / 8] and back.
void PackPlanes(const uint8_t* codes, uint32_t head_dim, uint32_t planes, std::byte* packed);
void UnpackPlanes(const std::byte* packed, uint32_t head_dim, uint32_t planes, uint8_t* codes);

// One value row in its stored form (any format). value [value_dim]. Returns -1, or the first dimension that the
// storage type cannot hold, nothing written then.
int32_t EncodeValueRow(const float* value, uint32_t value_dim, Format format, std::byte* row);
void DecodeValueRow(const std::byte* row, uint32_t value_dim, Format format, float* value);

}  // namespace ctkvr
