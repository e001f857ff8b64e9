// SPDX-License-Identifier: Apache-2.0
//
// What the right answer is: brute force in float64, written from the text of kernels/formats.h, rotation.h and ops.h
// and from the comments of the protos. It uses their types but calls none of their functions, so that a mistake there
// does not agree with itself here. Slow and plain on purpose. Thread-safe: pure functions.
//
// Matrices are vectors of rows: keys [tokens][head_dim], scores [R][tokens].

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/formats.h"
#include "kernels/ops.h"

namespace ctkvr::oracle {

using Row = std::vector<double>;
using Matrix = std::vector<Row>;

// ---- Numbers -------------------------------------------------------------------------------------------------------

double FromF16(uint16_t bits);
double FromBF16(uint16_t bits);
// Elements of `dtype`, little-endian.
Row FromElements(std::span<const std::byte> elements, DType dtype);

// ---- Rotation ------------------------------------------------------------------------------------------------------

// Signs of all rounds one after another, [rounds * head_dim], each +1 or -1.
Row Signs(uint32_t head_dim, uint64_t seed);
Row Rotated(const Row& x, const Row& signs);
Row Unrotated(const Row& x, const Row& signs);

// ---- Stored rows ---------------------------------------------------------------------------------------------------

// How the rows of a layer and KV head are to be read. `mean` and `signs` are empty unless keys are coded.
struct Codec {
  Format format = Format::kF32;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  bool raw = false;  // code_generation 0: keys of a coded format still as they came
  DType raw_dtype = DType::kF32;
  Row mean;
  Row signs;
};

// Codes [head_dim] of the first `planes` planes, upper bits first. packed [planes][head_dim / 8].
std::vector<uint32_t> Codes(std::span<const std::byte> packed, uint32_t head_dim, uint32_t planes);
// A storage row of the wire (planes, then s; floats; or raw elements) to the key that the model sees.
Row DecodeKey(const Codec& codec, std::span<const std::byte> row);
Row DecodeValue(const Codec& codec, std::span<const std::byte> row);

// The same of a token in a page. Codec made from the view (its mean, its signs).
Codec CodecOf(const HeadView& view);
// Where it lies in its sketch block.
size_t SketchSlot(const HeadView& view, uint32_t token);
std::vector<std::byte> KeyRowAt(const HeadView& view, uint32_t token);
std::vector<std::byte> ValueRowAt(const HeadView& view, uint32_t token);
Row KeyAt(const HeadView& view, uint32_t token);

// What storage makes of a key and a value: encoded by the definition in float64 and decoded again. Where an element
// lies on the border of two codes, float32 code may choose the other one.
Row StoredKey(const Codec& codec, const Row& key);
Row StoredValue(const Codec& codec, const Row& value);

// ---- Scores and shares ---------------------------------------------------------------------------------------------

double Dot(const Row& a, const Row& b);
Matrix Scores(const Matrix& queries, const Matrix& keys);  // [R][tokens]

struct Softmax {
  double scale = 1;
  double softcap = 0;  // 0: none
  Row sink_logits;     // [R] or empty
};
Matrix Logits(const Matrix& scores, const Softmax& softmax);
// log of the softmax over the tokens (and the sink logit), [R][tokens].
Matrix LogShares(const Matrix& scores, const Softmax& softmax);
// Ranking value of each token: log of the sum over the heads of the shares, or the largest log share.
Row GroupRanks(const Matrix& log_shares, GroupReduction reduction);
// Mean over the heads of the shares.
Row MeanShares(const Matrix& log_shares);

// ---- Attention -----------------------------------------------------------------------------------------------------

// One part of an attention. Empty: zeros, and -infinity.
struct Attention {
  Matrix output;    // [R][value_dim]
  Row log_sum_exp;  // [R], natural
};
// Over tokens with these scores [R][tokens] and values [tokens][value_dim]; the sink logits have no part in it.
Attention Attend(const Matrix& scores, const Matrix& values, const Softmax& softmax, size_t value_dim);
// Disjoint parts as one.
Attention Merge(const std::vector<Attention>& parts);

// ---- Selection -----------------------------------------------------------------------------------------------------

// Indices of the best min(k, values) values, best first; equal values prefer the lower index.
std::vector<size_t> TopK(const Row& values, size_t k);

struct SelectOptions {
  uint32_t k = 0;
  uint32_t force_below = 0;
  uint32_t force_from = 0xffffffffu;
  Softmax softmax;
  GroupReduction reduction = GroupReduction::kSumSoftmax;
  double min_score = -std::numeric_limits<double>::infinity();
  double min_share = 0;
  double top_p = 1;
  Row terms;                             // [tokens] added to the ranks; empty: none
  std::vector<uint8_t> classes;          // [tokens]
  std::vector<uint32_t> class_quotas;    // by class
  std::vector<std::vector<bool>> signs;  // [tokens][D]; empty: nothing is redundant
  uint32_t redundant_bits = 0;
};
// Chosen entries of `tokens` (ascending positions), ascending. scores [R][tokens].
std::vector<uint32_t> Select(const Matrix& scores, const std::vector<uint32_t>& tokens, const SelectOptions& options);

// ---- Query centroids -----------------------------------------------------------------------------------------------

// Sum over the heads of the cosines of query [R][D] with each centroid [C][R][D]; a zero row counts 0.
Row CentroidCosines(const Matrix& query, const std::vector<Matrix>& centroids);
// Ascending.
std::vector<uint32_t> MergeCandidates(const std::vector<std::vector<uint32_t>>& lists,
                                      const std::vector<uint32_t>& selected, uint32_t begin, uint32_t end,
                                      uint32_t force_below, uint32_t force_from);

// ---- Coarse passes, bit for bit ------------------------------------------------------------------------------------

// E of the first `planes` of b planes: sum_i query[i] * (2 * (c[i] >> (b-p)) + 1 - 2^p), `codes` holding the upper
// p bits.
int64_t CoarseSum(std::span<const int8_t> query, const std::vector<uint32_t>& codes, uint32_t planes);
// (float(E) * query_scale) * key_scale + mean_dot, rounded after each step.
float Estimate(int64_t sum, float query_scale, float key_scale, float mean_dot);

}  // namespace ctkvr::oracle
