// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of the CPU backend, once for each instruction set: portable C++, AVX2 (with FMA and F16C), AVX-512
// (F, BW, DQ, VL, VBMI, VNNI, with GFNI). A table is chosen once, when the backend is made. The operations around them
// (cpu_ops.h) are the same for all.
//
// Thread-safe: pure functions. Pointers may be misaligned unless said otherwise; nothing is read or written outside the
// shapes given.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/formats.h"

namespace ctkvr::cpu {

// Consecutive keys of one page and where they go; records as in PageLayout.
struct KeyRun {
  const std::byte* keys = nullptr;  // key t at keys + t * stride, [D] of dtype
  size_t stride = 0;                // bytes
  DType dtype = DType::kF32;
  uint32_t tokens = 0;  // 1 to 64
  uint32_t head_dim = 0;
  uint32_t planes = 0;
  uint32_t first_planes = 0;
  const float* mean = nullptr;         // [D]
  const float* signs = nullptr;        // [RotationRounds(D)][D]
  std::byte* first = nullptr;          // [tokens][first_planes][D/8]
  std::byte* sketch_scales = nullptr;  // [tokens] binary16
  std::byte* records = nullptr;        // [tokens][record_bytes], padding left alone
  size_t record_bytes = 0;
};

// The same of values, coded in `bits` bits.
struct ValueRun {
  const std::byte* values = nullptr;
  size_t stride = 0;
  DType dtype = DType::kF32;
  uint32_t tokens = 0;
  uint32_t value_dim = 0;
  uint32_t bits = 0;
  std::byte* rows = nullptr;  // [tokens][row_bytes]
  uint32_t row_bytes = 0;
};

// Loops over rows: rotation, coding, decoding. R is the number of query heads, D head_dim.
struct RowKernels {
  // As Rotate and Unrotate of rotation.h.
  void (*rotate)(float* x, uint32_t head_dim, const float* signs);
  void (*unrotate)(float* x, uint32_t head_dim, const float* signs);
  // `count` elements to float32 and back. encode_* return -1, or the index of the first element that is not finite
  // in the target type.
  void (*f32_from_f16)(const std::byte* from, float* to, size_t count);
  void (*f32_from_bf16)(const std::byte* from, float* to, size_t count);
  int64_t (*f16_from_f32)(const float* from, std::byte* to, size_t count);
  int64_t (*bf16_from_f32)(const float* from, std::byte* to, size_t count);
  // One mean-free rotated key x [D] to packed planes [planes][D/8], s and f. False when s or f exceeds binary16.
  bool (*encode_key)(const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, std::byte* packed,
                     uint16_t* code_scale, uint16_t* sketch_scale);
  // One value row, as EncodeValueRow and DecodeValueRow of formats.h for 8 and 4 bits.
  int32_t (*encode_value)(const float* value, uint32_t value_dim, uint32_t bits, std::byte* row);
  void (*decode_value)(const std::byte* row, uint32_t value_dim, uint32_t bits, float* value);
  // Many rows at once, to the same bytes. They return how many from the first on are done, and stop early before what
  // they do not know: another dimension, an element that may not fit. The bytes of the rows left are unspecified.
  uint32_t (*encode_keys)(const KeyRun& run);
  uint32_t (*encode_values)(const ValueRun& run);
};

// Rows of float queries and of decoded keys are padded with zeros to a multiple of kFloatPad elements, rows of int8
// queries to one of kBytePad, so that no loop over dimensions has a tail.
inline constexpr uint32_t kFloatPad = 16;
inline constexpr uint32_t kBytePad = 64;
constexpr uint32_t PaddedFloats(uint32_t head_dim) { return (head_dim + kFloatPad - 1) / kFloatPad * kFloatPad; }
constexpr uint32_t PaddedBytes(uint32_t head_dim) { return (head_dim + kBytePad - 1) / kBytePad * kBytePad; }

// Some consecutive slots of one sketch block (sketch_scan.h takes any number of them), and the query of a first pass as
// look-up tables: four dimensions a table, entry n the sum of those query elements whose bit is set in n, less the
// least such sum. An entry is at most 4 * kScanQueryMax = 124 then, so that two of them add up in a byte.
//   E = 2 * (sum over planes j and tables i of 2^(P-1-j) * tables[r, i, nibble i of plane j]) + offset[r]
//   estimate = (float(E) * scan_scale[r]) * f + mean_dot[r]
struct ScanRun {
  const std::byte* planes = nullptr;         // [tokens][P][D/8]
  const std::byte* sketch_scales = nullptr;  // [tokens] binary16
  uint32_t tokens = 0;                       // 1 to 64
  uint32_t first_planes = 0;                 // P, 1 or 2
  uint32_t head_dim = 0;
  uint32_t heads = 0;
  const uint8_t* tables = nullptr;    // [R][D/4][16], aligned to 16 bytes
  const int32_t* offset = nullptr;    // [R]
  const float* scan_scale = nullptr;  // [R]
  const float* mean_dot = nullptr;    // [R]
  float* estimates = nullptr;         // [R, stride]
  size_t stride = 0;
};

// The planes of one coded key.
struct CodedKey {
  const std::byte* first = nullptr;  // [first_planes][D/8]
  const std::byte* rest = nullptr;   // [planes - first_planes][D/8]
  uint32_t first_planes = 0;
  uint32_t planes = 0;  // b
  uint32_t head_dim = 0;
};

struct RefineQuery {
  const int8_t* rows = nullptr;  // [R, PaddedBytes(D)], within +-kRefineQueryMax
  uint32_t heads = 0;
  uint32_t planes = 0;  // p, planes to read
};

// Inner products of every key row with every query row.
struct DotsRun {
  const float* keys = nullptr;     // [tokens, padded_dim]
  const float* queries = nullptr;  // [heads, padded_dim]
  uint32_t tokens = 0;
  uint32_t heads = 0;       // any number
  uint32_t padded_dim = 0;  // a multiple of kFloatPad
  float* dots = nullptr;    // [heads, stride]
  size_t stride = 0;
};

// The same of coded keys as they are stored, each a vector of c[i] - 2^(b-1). All keys are of one shape.
struct CodeDotsRun {
  const CodedKey* keys = nullptr;  // [tokens]
  const float* queries = nullptr;  // [heads, padded_dim]
  uint32_t tokens = 0;
  uint32_t heads = 0;  // few: every group of four reads the codes anew
  uint32_t padded_dim = 0;
  float* dots = nullptr;  // [heads, stride]
  size_t stride = 0;
};

// Rows of values and their weights, one a head.
struct WeightedRowsRun {
  const float* rows = nullptr;     // [tokens, padded_dim]
  const float* weights = nullptr;  // [heads, weight_stride]
  size_t weight_stride = 0;
  uint32_t tokens = 0;
  uint32_t heads = 0;       // any number
  uint32_t padded_dim = 0;  // a multiple of kFloatPad
  float* sums = nullptr;    // [heads, padded_dim]
};

// Scores to log shares: x(score) = scale * (score - origin), or softcap * tanh(scale / softcap * score) - origin
// where softcap > 0; the log share is x - shift.
struct LogShare {
  float scale = 1;
  float softcap = 0;
  float origin = 0;  // largest score, or largest logit where softcap > 0
  float shift = 0;
};

// The group's ranking of `count` tokens: log(sum_r exp(a_r)) or max_r(a_r), a_r the log share of scores[r, t].
struct GroupRankRun {
  const float* scores = nullptr;  // [heads, stride]
  size_t stride = 0;
  uint32_t heads = 0;  // 2 or more
  size_t count = 0;
  const LogShare* log_share = nullptr;  // [heads]
  bool sum = true;                      // else the maximum
  float* ranks = nullptr;               // [count]
};

// Loops over many tokens: scans, rerank, softmax. exp, log and tanh are within 2 ulp of the true value (tanh: within
// 2^-23 absolute), and the same for equal arguments wherever they stand in an array.
struct ScanKernels {
  void (*scan_planes)(const ScanRun& run);
  // sums[r] = sum_i query[r, i] * (c[i] >> (b-p)).
  void (*refine_token)(const CodedKey& key, const RefineQuery& query, int32_t* sums);
  // decoded[i] = c[i] - 2^(b-1), exactly; [PaddedFloats(D)]. All b planes are read.
  void (*decode_coded)(const CodedKey& key, float* decoded);
  // One float key [D] as float32 [PaddedFloats(D)].
  void (*decode_float)(const std::byte* key, DType dtype, uint32_t head_dim, float* decoded);
  void (*dots)(const DotsRun& run);
  // False, and nothing written, where there is no such loop for the shape: then decode_coded and dots do the same.
  bool (*code_dots)(const CodeDotsRun& run);
  // The largest of count >= 1 values.
  float (*max_of)(const float* values, size_t count);
  // sum_t exp(x(scores[t])), shift not used; terms [count] are those exponentials, or null.
  double (*sum_exp)(const float* scores, size_t count, const LogShare& log_share, float* terms);
  // sums[h, i] += sum_t weights[h, t] * rows[t, i].
  void (*add_weighted)(const WeightedRowsRun& run);
  void (*group_ranks)(const GroupRankRun& run);
  // Indices [0, count) of values > threshold, and of the first `ties` values == threshold, ascending; returns how many.
  // `indices` has room for count entries.
  size_t (*take_above)(const float* values, size_t count, float threshold, size_t ties, uint32_t* indices);
  // Copies the values within [lower, upper], returns how many, and counts those above `upper`. `taken` has room for
  // count entries.
  size_t (*take_between)(std::span<const float> values, float lower, float upper, float* taken, size_t* above);
};

struct CpuKernels {
  const char* name;  // "avx2"
  const RowKernels* rows;
  const ScanKernels* scan;
};

// Null where this machine, or this build, lacks the instruction set. `name`: "portable", "avx2", "avx512".
const CpuKernels* FindCpuKernels(const char* name);
const CpuKernels& BestCpuKernels();

// One a translation unit: rows_portable.cc, scan_avx2.cc, ...
const RowKernels& PortableRowKernels();
const RowKernels& Avx2RowKernels();
const RowKernels& Avx512RowKernels();
const ScanKernels& PortableScanKernels();
const ScanKernels& Avx2ScanKernels();
const ScanKernels& Avx512ScanKernels();

}  // namespace ctkvr::cpu
