// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "kernels/base/check.h"

namespace ctkvr::oracle {
namespace {

double Infinity() { return std::numeric_limits<double>::infinity(); }

uint16_t U16At(std::span<const std::byte> bytes, size_t at) {
  return static_cast<uint16_t>(static_cast<unsigned>(bytes[at]) | static_cast<unsigned>(bytes[at + 1]) << 8);
}

// All non-negative finite binary16 numbers, ascending: index = bits.
const std::vector<double>& Halves() {
  static const std::vector<double> halves = [] {
    std::vector<double> all;
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) all.push_back(FromF16(static_cast<uint16_t>(bits)));
    return all;
  }();
  return halves;
}

double SmallestHalfAtLeast(double x) {
  const auto found = std::lower_bound(Halves().begin(), Halves().end(), x);
  CTKVR_CHECK(found != Halves().end());
  return *found;
}

double LargestHalfAtMost(double x) {
  if (x < 0) return -SmallestHalfAtLeast(-x);
  return *(std::upper_bound(Halves().begin(), Halves().end(), x) - 1);
}

double RoundedToFloatType(double x, Format format) {
  if (format == Format::kF32) return static_cast<float>(x);
  const bool half = format == Format::kF16;
  // Spacing of the type at x: 2^(exponent - mantissa bits), not below that of its subnormals.
  const int exponent = x == 0 ? -1000 : std::ilogb(x);
  const double step = std::ldexp(1, std::max(exponent, half ? -14 : -126) - (half ? 10 : 7));
  return std::nearbyint(x / step) * step;
}

// The orthonormal Walsh-Hadamard transform in natural order: element (i, j) is (-1)^(ones of i & j) / sqrt(n).
void Hadamard(Row& x, size_t begin, size_t size) {
  Row out(size, 0.0);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j) out[i] += std::popcount(i & j) % 2 == 0 ? x[begin + j] : -x[begin + j];
  }
  for (size_t i = 0; i < size; ++i) x[begin + i] = out[i] / std::sqrt(static_cast<double>(size));
}

// Sizes of the blocks of one round: powers of two whose sum is head_dim.
std::vector<size_t> Blocks(size_t head_dim, bool ascending) {
  std::vector<size_t> blocks;
  for (size_t bit = size_t{1} << 20; bit > 0; bit /= 2) {
    if ((head_dim & bit) != 0) blocks.push_back(bit);
  }
  if (ascending) std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

void TransformBlocks(Row& x, bool ascending) {
  size_t begin = 0;
  for (const size_t size : Blocks(x.size(), ascending)) {
    Hadamard(x, begin, size);
    begin += size;
  }
}

uint32_t PlanesOf(Format format) { return format == Format::kK6V4 ? 6 : 8; }
bool IsCoded(Format format) { return format == Format::kK8V8 || format == Format::kK8V4 || format == Format::kK6V4; }
uint32_t ValueBitsOf(Format format) { return format == Format::kK8V8 ? 8 : 4; }
DType DTypeOf(Format format) {
  return format == Format::kF32 ? DType::kF32 : format == Format::kF16 ? DType::kF16 : DType::kBF16;
}
size_t BytesOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

void Append(std::vector<std::byte>& to, const std::byte* from, size_t bytes) {
  to.insert(to.end(), from, from + bytes);
}

}  // namespace

double FromF16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 31  ? (mantissa == 0 ? Infinity() : std::nan(""))
                           : exponent == 0 ? std::ldexp(mantissa, -24)
                                           : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

double FromBF16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

Row FromElements(std::span<const std::byte> elements, DType dtype) {
  Row out;
  for (size_t at = 0; at < elements.size(); at += BytesOf(dtype)) {
    const uint16_t low = U16At(elements, at);
    if (dtype == DType::kF16) {
      out.push_back(FromF16(low));
    } else if (dtype == DType::kBF16) {
      out.push_back(FromBF16(low));
    } else {
      out.push_back(std::bit_cast<float>(static_cast<uint32_t>(U16At(elements, at + 2)) << 16 | low));
    }
  }
  return out;
}

Row Signs(uint32_t head_dim, uint64_t seed) {
  const uint32_t rounds = std::has_single_bit(head_dim) ? 1 : 2;
  std::vector<uint64_t> outputs;
  for (uint32_t n = 0; n <= rounds * head_dim / 64; ++n) {
    seed += 0x9e3779b97f4a7c15u;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    outputs.push_back(z ^ (z >> 31));
  }
  Row signs;
  for (uint32_t i = 0; i < rounds * head_dim; ++i) signs.push_back((outputs[i / 64] >> (i % 64) & 1) != 0 ? -1 : 1);
  return signs;
}

Row Rotated(const Row& x, const Row& signs) {
  Row out = x;
  for (size_t round = 0; round * x.size() < signs.size(); ++round) {
    for (size_t i = 0; i < x.size(); ++i) out[i] *= signs[round * x.size() + i];
    TransformBlocks(out, round == 1);
  }
  return out;
}

Row Unrotated(const Row& x, const Row& signs) {
  Row out = x;
  for (size_t round = signs.size() / x.size(); round-- > 0;) {
    TransformBlocks(out, round == 1);  // its own inverse
    for (size_t i = 0; i < x.size(); ++i) out[i] *= signs[round * x.size() + i];
  }
  return out;
}

std::vector<uint32_t> Codes(std::span<const std::byte> packed, uint32_t head_dim, uint32_t planes) {
  std::vector<uint32_t> codes(head_dim, 0);
  for (uint32_t j = 0; j < planes; ++j) {
    for (uint32_t i = 0; i < head_dim; ++i) {
      const auto byte = static_cast<uint32_t>(packed[j * (head_dim / 8) + i / 8]);
      codes[i] += (byte >> (i % 8) & 1) << (planes - 1 - j);
    }
  }
  return codes;
}

Row DecodeKey(const Codec& codec, std::span<const std::byte> row) {
  if (codec.raw) return FromElements(row, codec.raw_dtype);
  if (!IsCoded(codec.format)) return FromElements(row, DTypeOf(codec.format));
  const uint32_t planes = PlanesOf(codec.format);
  const std::vector<uint32_t> codes = Codes(row, codec.head_dim, planes);
  const double scale = FromF16(U16At(row, size_t{planes} * codec.head_dim / 8));
  Row x;
  for (const uint32_t code : codes) x.push_back(scale * (code + 0.5 - std::ldexp(1, static_cast<int>(planes) - 1)));
  Row key = Unrotated(x, codec.signs);
  for (size_t i = 0; i < key.size(); ++i) key[i] += codec.mean[i];
  return key;
}

Row DecodeValue(const Codec& codec, std::span<const std::byte> row) {
  if (!IsCoded(codec.format)) return FromElements(row, DTypeOf(codec.format));
  const uint32_t groups = (codec.value_dim + 31) / 32, bits = ValueBitsOf(codec.format);
  Row value;
  for (uint32_t i = 0; i < codec.value_dim; ++i) {
    const double scale = FromF16(U16At(row, size_t{i / 32} * 4)), zero = FromF16(U16At(row, size_t{i / 32} * 4 + 2));
    const auto byte = static_cast<uint32_t>(row[size_t{groups} * 4 + size_t{i} * bits / 8]);
    const uint32_t code = bits == 8 ? byte : i % 2 == 0 ? byte & 15 : byte >> 4;
    value.push_back(zero + scale * code);
  }
  return value;
}

Codec CodecOf(const HeadView& view) {
  Codec codec{.format = view.layout.format,
              .head_dim = view.layout.head_dim,
              .value_dim = view.layout.value_dim,
              .raw = view.raw_pages != nullptr,
              .raw_dtype = view.raw_dtype,
              .mean = {},
              .signs = {}};
  const uint32_t head_dim = view.layout.head_dim;
  if (view.mean != nullptr) codec.mean.assign(view.mean, view.mean + head_dim);
  if (view.signs != nullptr) {
    codec.signs.assign(view.signs, view.signs + (std::has_single_bit(head_dim) ? 1 : 2) * size_t{head_dim});
  }
  return codec;
}

size_t SketchSlot(const HeadView& view, uint32_t token) {
  const std::byte* block = view.order.blocks == nullptr ? nullptr : view.order.blocks[token / 1024];
  for (size_t slot = 0; block != nullptr && slot < 1024; ++slot) {
    const std::byte* place = block + view.order.places_offset + 2 * slot;
    if (static_cast<uint32_t>(place[0]) + static_cast<uint32_t>(place[1]) % 4 * 256 == token % 1024) return slot;
  }
  return token % 1024;
}

std::vector<std::byte> KeyRowAt(const HeadView& view, uint32_t token) {
  const PageLayout& layout = view.layout;
  const size_t slot = token % 64;
  std::vector<std::byte> row;
  if (view.raw_pages != nullptr) {
    const size_t bytes = layout.head_dim * BytesOf(view.raw_dtype);
    Append(row, view.raw_pages[token / 64] + slot * bytes, bytes);
    return row;
  }
  const std::byte* page = view.pages[token / 64];
  if (!IsCoded(layout.format)) {
    const size_t bytes = layout.head_dim * BytesOf(DTypeOf(layout.format));
    Append(row, page + layout.keys_offset + slot * bytes, bytes);
    return row;
  }
  const size_t plane_bytes = layout.head_dim / 8, first_bytes = layout.first_planes * plane_bytes;
  const std::byte* record = page + layout.records_offset + slot * layout.record_bytes;
  Append(row, view.sketches[token / 1024] + SketchSlot(view, token) * first_bytes, first_bytes);
  Append(row, record + 2, PlanesOf(layout.format) * plane_bytes - first_bytes);
  Append(row, record, 2);
  return row;
}

std::vector<std::byte> ValueRowAt(const HeadView& view, uint32_t token) {
  std::vector<std::byte> row;
  const size_t bytes = view.layout.value_row_bytes;
  Append(row, view.pages[token / 64] + view.layout.values_offset + token % 64 * bytes, bytes);
  return row;
}

Row KeyAt(const HeadView& view, uint32_t token) { return DecodeKey(CodecOf(view), KeyRowAt(view, token)); }

Row StoredKey(const Codec& codec, const Row& key) {
  Row out;
  if (codec.raw || !IsCoded(codec.format)) {
    const Format as = !codec.raw                       ? codec.format
                      : codec.raw_dtype == DType::kF32 ? Format::kF32
                      : codec.raw_dtype == DType::kF16 ? Format::kF16
                                                       : Format::kBF16;
    for (const double element : key) out.push_back(RoundedToFloatType(element, as));
    return out;
  }
  Row x;
  for (size_t i = 0; i < key.size(); ++i) x.push_back(key[i] - codec.mean[i]);
  x = Rotated(x, codec.signs);
  const double half = std::ldexp(1, static_cast<int>(PlanesOf(codec.format)) - 1);
  double largest = 0;
  for (const double element : x) largest = std::max(largest, std::abs(element));
  const double scale = SmallestHalfAtLeast(largest / half);
  for (const double element : x) {
    const double code = scale == 0 ? half : std::clamp(std::floor(element / scale) + half, 0.0, 2 * half - 1);
    out.push_back(scale * (code + 0.5 - half));
  }
  out = Unrotated(out, codec.signs);
  for (size_t i = 0; i < out.size(); ++i) out[i] += codec.mean[i];
  return out;
}

Row StoredValue(const Codec& codec, const Row& value) {
  Row out;
  if (!IsCoded(codec.format)) {
    for (const double element : value) out.push_back(RoundedToFloatType(element, codec.format));
    return out;
  }
  const double levels = std::ldexp(1, static_cast<int>(ValueBitsOf(codec.format))) - 1;
  for (size_t begin = 0; begin < value.size(); begin += 32) {
    const size_t end = std::min(begin + 32, value.size());
    const auto [low, high] = std::minmax_element(value.begin() + begin, value.begin() + end);
    const double zero = LargestHalfAtMost(*low), scale = SmallestHalfAtLeast((*high - zero) / levels);
    for (size_t i = begin; i < end; ++i) {
      const double code = scale == 0 ? 0 : std::clamp(std::round((value[i] - zero) / scale), 0.0, levels);
      out.push_back(zero + scale * code);
    }
  }
  return out;
}

double Dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

Matrix Scores(const Matrix& queries, const Matrix& keys) {
  Matrix scores;
  for (const Row& query : queries) {
    Row row;
    for (const Row& key : keys) row.push_back(Dot(query, key));
    scores.push_back(std::move(row));
  }
  return scores;
}

Matrix Logits(const Matrix& scores, const Softmax& softmax) {
  Matrix logits = scores;
  for (Row& row : logits) {
    for (double& value : row) {
      value *= softmax.scale;
      if (softmax.softcap > 0) value = softmax.softcap * std::tanh(value / softmax.softcap);
    }
  }
  return logits;
}

Matrix LogShares(const Matrix& scores, const Softmax& softmax) {
  Matrix shares = Logits(scores, softmax);
  for (size_t r = 0; r < shares.size(); ++r) {
    double max = softmax.sink_logits.empty() ? -Infinity() : softmax.sink_logits[r];
    for (const double logit : shares[r]) max = std::max(max, logit);
    double sum = softmax.sink_logits.empty() ? 0 : std::exp(softmax.sink_logits[r] - max);
    for (const double logit : shares[r]) sum += std::exp(logit - max);
    // Taken away one after the other: max may be so large that log(sum) would be lost beside it.
    for (double& logit : shares[r]) logit = (logit - max) - std::log(sum);
  }
  return shares;
}

Row GroupRanks(const Matrix& log_shares, GroupReduction reduction) {
  Row ranks;
  for (size_t t = 0; !log_shares.empty() && t < log_shares[0].size(); ++t) {
    double max = -Infinity(), sum = 0;
    for (const Row& row : log_shares) max = std::max(max, row[t]);
    for (const Row& row : log_shares) sum += std::exp(row[t] - max);
    ranks.push_back(reduction == GroupReduction::kMaxSoftmax ? max : max + std::log(sum));
  }
  return ranks;
}

Attention Attend(const Matrix& scores, const Matrix& values, const Softmax& softmax, size_t value_dim) {
  Attention attention;
  for (const Row& logits : Logits(scores, softmax)) {
    double max = -Infinity(), sum = 0;
    for (const double logit : logits) max = std::max(max, logit);
    Row output(value_dim, 0.0);
    for (size_t t = 0; t < logits.size(); ++t) {
      const double weight = std::exp(logits[t] - max);
      sum += weight;
      for (size_t i = 0; i < value_dim; ++i) output[i] += weight * values[t][i];
    }
    for (double& element : output) element /= logits.empty() ? 1 : sum;
    attention.output.push_back(output);
    attention.log_sum_exp.push_back(logits.empty() ? -Infinity() : max + std::log(sum));
  }
  return attention;
}

Attention Merge(const std::vector<Attention>& parts) {
  Attention merged = parts.front();
  for (size_t r = 0; r < merged.log_sum_exp.size(); ++r) {
    double max = -Infinity(), sum = 0;
    for (const Attention& part : parts) max = std::max(max, part.log_sum_exp[r]);
    std::fill(merged.output[r].begin(), merged.output[r].end(), 0.0);
    if (max == -Infinity()) continue;
    for (const Attention& part : parts) sum += std::exp(part.log_sum_exp[r] - max);
    for (const Attention& part : parts) {
      const double share = std::exp(part.log_sum_exp[r] - max) / sum;
      for (size_t i = 0; i < merged.output[r].size(); ++i) merged.output[r][i] += share * part.output[r][i];
    }
    merged.log_sum_exp[r] = max + std::log(sum);
  }
  return merged;
}

Row MeanShares(const Matrix& log_shares) {
  Row shares;
  for (size_t t = 0; !log_shares.empty() && t < log_shares[0].size(); ++t) {
    double sum = 0;
    for (const Row& row : log_shares) sum += std::exp(row[t]);
    shares.push_back(sum / static_cast<double>(log_shares.size()));
  }
  return shares;
}

std::vector<size_t> TopK(const Row& values, size_t k) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(std::min(k, order.size()));
  return order;
}

namespace {

// The best k of `ranks`, those that fill a quota first. `places` says where each stands among the options' classes.
std::vector<size_t> BestWithQuotas(const Row& ranks, const std::vector<size_t>& places, const SelectOptions& options) {
  const std::vector<size_t> order = TopK(ranks, ranks.size());
  std::vector<size_t> best;
  std::vector<bool> taken(ranks.size());
  const auto take = [&](size_t i) {
    if (taken[i] || best.size() >= options.k) return;
    taken[i] = true;
    best.push_back(i);
  };
  for (size_t c = 0; c < options.class_quotas.size(); ++c) {
    uint32_t filled = 0;
    for (const size_t i : order) {
      if (options.classes[places[i]] != c || filled == options.class_quotas[c]) continue;
      ++filled;
      take(i);
    }
  }
  for (const size_t i : order) take(i);
  std::sort(best.begin(), best.end(),
            [&](size_t a, size_t b) { return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b; });
  return best;
}

}  // namespace

std::vector<uint32_t> Select(const Matrix& scores, const std::vector<uint32_t>& tokens, const SelectOptions& options) {
  const Matrix log_shares = LogShares(scores, options.softmax);
  Row ranks = scores.size() == 1 && options.terms.empty() ? scores[0] : GroupRanks(log_shares, options.reduction);
  for (size_t i = 0; i < options.terms.size(); ++i) ranks[i] += options.terms[i];
  const Row shares = MeanShares(log_shares);
  std::vector<uint32_t> chosen;
  std::vector<size_t> others;
  Row other_ranks;
  double reached = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < options.force_below || tokens[i] >= options.force_from) {
      chosen.push_back(tokens[i]);
      reached += shares[i];
    } else {
      others.push_back(i);
      other_ranks.push_back(ranks[i]);
    }
  }
  std::vector<size_t> kept;
  for (const size_t best : BestWithQuotas(other_ranks, others, options)) {
    const size_t i = others[best];
    const bool redundant = !options.signs.empty() && std::any_of(kept.begin(), kept.end(), [&](size_t earlier) {
      uint32_t differing = 0;
      for (size_t d = 0; d < options.signs[i].size(); ++d)
        differing += options.signs[i][d] != options.signs[earlier][d];
      return differing <= options.redundant_bits;
    });
    if (redundant) continue;
    kept.push_back(i);
    double score = -Infinity();
    for (const Row& row : scores) score = std::max(score, row[i]);
    if (score < options.min_score || shares[i] < options.min_share) continue;
    if (options.top_p < 1 && reached >= options.top_p) break;
    reached += shares[i];
    chosen.push_back(tokens[i]);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

Row CentroidCosines(const Matrix& query, const std::vector<Matrix>& centroids) {
  Row cosines;
  for (const Matrix& centroid : centroids) {
    double sum = 0;
    for (size_t r = 0; r < query.size(); ++r) {
      const double norms = std::sqrt(Dot(query[r], query[r])) * std::sqrt(Dot(centroid[r], centroid[r]));
      if (norms > 0) sum += Dot(query[r], centroid[r]) / norms;
    }
    cosines.push_back(sum);
  }
  return cosines;
}

std::vector<uint32_t> MergeCandidates(const std::vector<std::vector<uint32_t>>& lists,
                                      const std::vector<uint32_t>& selected, uint32_t begin, uint32_t end,
                                      uint32_t force_below, uint32_t force_from) {
  std::vector<uint32_t> merged;
  for (uint32_t position = begin; position < end; ++position) {
    bool in = position < force_below || position >= force_from;
    for (size_t s = 0; !in && s < selected.size(); ++s) {
      const std::vector<uint32_t>& list = lists[selected[s]];
      in = std::find(list.begin(), list.end(), position) != list.end();
    }
    if (in) merged.push_back(position);
  }
  return merged;
}

int64_t CoarseSum(std::span<const int8_t> query, const std::vector<uint32_t>& codes, uint32_t planes) {
  int64_t sum = 0;
  for (size_t i = 0; i < codes.size(); ++i) sum += query[i] * (2 * int64_t{codes[i]} + 1 - (int64_t{1} << planes));
  return sum;
}

float Estimate(int64_t sum, float query_scale, float key_scale, float mean_dot) {
  // volatile: each step is rounded to float32, whatever the compiler may do.
  volatile float value = static_cast<float>(sum);
  value = value * query_scale;
  value = value * key_scale;
  value = value + mean_dot;
  return value;
}

}  // namespace ctkvr::oracle
