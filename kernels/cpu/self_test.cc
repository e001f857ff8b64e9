// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/self_test.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/ops.h"
#include "kernels/rotation.h"

namespace ctkvr::cpu {
namespace {

// A power of two, and one that needs two rounds and leaves a remainder in every vector width.
constexpr std::array<uint32_t, 2> kDims = {128, 88};
constexpr uint32_t kTokens = 37;
constexpr uint32_t kHeads = 3;

// Numbers in [-1, 1), the same everywhere.
std::vector<float> Numbers(size_t count, uint32_t seed) {
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = static_cast<float>(static_cast<int32_t>(seed >> 8) - (1 << 23)) * 0x1p-23f;
  }
  return numbers;
}

std::vector<std::byte> Bytes(size_t count, uint32_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((seed = seed * 1664525u + 1013904223u) >> 24);
  return bytes;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Sums of D products of numbers below 1 in any order, exponentials of a few units.
bool IsClose(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(a[i] - b[i]) <= 1e-4f * (1 + std::fabs(b[i])))) return false;
  }
  return true;
}

// What one table computes; compared field by field.
struct RowResults {
  std::vector<float> rotated, unrotated, from_f16, from_bf16, value8, value4;
  std::vector<std::byte> to_f16, to_bf16, planes8, planes6, row8, row4;
};

RowResults RunRows(const RowKernels& rows, uint32_t dim) {
  RowResults out;
  const std::vector<float> signs = RotationSigns(dim, 7);
  const std::vector<float> x = Numbers(dim, 1);
  out.rotated = x;
  rows.rotate(out.rotated.data(), dim, signs.data());
  out.unrotated = x;
  rows.unrotate(out.unrotated.data(), dim, signs.data());
  out.to_f16.resize(dim * 2);
  rows.f16_from_f32(x.data(), out.to_f16.data(), dim);
  out.to_bf16.resize(dim * 2);
  rows.bf16_from_f32(x.data(), out.to_bf16.data(), dim);
  out.from_f16.resize(dim);
  rows.f32_from_f16(out.to_f16.data(), out.from_f16.data(), dim);
  out.from_bf16.resize(dim);
  rows.f32_from_bf16(out.to_bf16.data(), out.from_bf16.data(), dim);
  for (uint32_t planes : {8u, 6u}) {
    std::vector<std::byte>& packed = planes == 8 ? out.planes8 : out.planes6;
    std::array<uint16_t, 2> scales{};
    packed.resize(planes * dim / 8 + sizeof(scales));
    rows.encode_key(x.data(), dim, planes, planes == 8 ? 1 : 2, packed.data(), &scales[0], &scales[1]);
    std::memcpy(packed.data() + planes * dim / 8, scales.data(), sizeof(scales));
  }
  for (uint32_t bits : {8u, 4u}) {
    std::vector<std::byte>& row = bits == 8 ? out.row8 : out.row4;
    std::vector<float>& value = bits == 8 ? out.value8 : out.value4;
    row.resize(MakePageLayout(bits == 8 ? Format::kK8V8 : Format::kK8V4, dim, dim, 1).value_row_bytes);
    rows.encode_value(x.data(), dim, bits, row.data());
    value.resize(dim);
    rows.decode_value(row.data(), dim, bits, value.data());
  }
  return out;
}

// The name of the first loop that differs, or null.
const char* CompareRows(const RowKernels& tested, const RowKernels& reference) {
  for (uint32_t dim : kDims) {
    const RowResults a = RunRows(tested, dim);
    const RowResults b = RunRows(reference, dim);
    if (!SameBits(a.rotated, b.rotated)) return "rotate";
    if (!SameBits(a.unrotated, b.unrotated)) return "unrotate";
    if (!SameBits(a.to_f16, b.to_f16)) return "f16_from_f32";
    if (!SameBits(a.to_bf16, b.to_bf16)) return "bf16_from_f32";
    if (!SameBits(a.from_f16, b.from_f16)) return "f32_from_f16";
    if (!SameBits(a.from_bf16, b.from_bf16)) return "f32_from_bf16";
    if (!SameBits(a.planes8, b.planes8) || !SameBits(a.planes6, b.planes6)) return "encode_key";
    if (!SameBits(a.row8, b.row8) || !SameBits(a.row4, b.row4)) return "encode_value";
    if (!SameBits(a.value8, b.value8) || !SameBits(a.value4, b.value4)) return "decode_value";
  }
  return nullptr;
}

struct ScanResults {
  std::vector<float> estimates, decoded, floats, dots, code_dots, weighted, ranks, max, terms;
  std::vector<double> sums;
  std::vector<int32_t> refined;
  std::vector<uint32_t> taken;
};

void RunCoarse(const ScanKernels& scan, uint32_t dim, uint32_t first_planes, ScanResults& out) {
  const std::vector<std::byte> planes = Bytes(size_t{kTokens} * 8 * dim / 8, 3);
  std::vector<std::byte> scales(kTokens * 2);
  for (uint32_t t = 0; t < kTokens; ++t) StoreElement(scales.data(), DType::kF16, t, 0.01f * static_cast<float>(t));
  // Tables are only read as bytes of at most 124, so any will do. They must lie on a line.
  const std::vector<std::byte> entries = Bytes(kHeads * dim / 4 * 16, 4);
  std::vector<uint8_t> space(entries.size() + 64);
  uint8_t* tables = space.data() + (64 - reinterpret_cast<uintptr_t>(space.data()) % 64) % 64;
  for (size_t i = 0; i < entries.size(); ++i) tables[i] = static_cast<uint8_t>(entries[i]) % (4 * kScanQueryMax + 1);
  const std::vector<int32_t> offset = {-311, 77, 5};
  const std::vector<float> scale = {0.5f, 0.013f, 1.7f};
  const std::vector<float> mean_dot = {0.3f, -4.0f, 11.0f};
  std::vector<float> estimates(size_t{kHeads} * kTokens);
  scan.scan_planes({.planes = planes.data(),
                    .sketch_scales = scales.data(),
                    .tokens = kTokens,
                    .first_planes = first_planes,
                    .head_dim = dim,
                    .heads = kHeads,
                    .tables = tables,
                    .offset = offset.data(),
                    .scan_scale = scale.data(),
                    .mean_dot = mean_dot.data(),
                    .estimates = estimates.data(),
                    .stride = kTokens});
  out.estimates.insert(out.estimates.end(), estimates.begin(), estimates.end());
  const std::vector<std::byte> bytes = Bytes(size_t{kHeads} * PaddedBytes(dim), 5);
  std::vector<int8_t> rows(bytes.size(), 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto code = static_cast<int8_t>(bytes[i]);
    if (i % PaddedBytes(dim) < dim) rows[i] = std::max<int8_t>(code, -kRefineQueryMax);
  }
  const CodedKey key{.first = planes.data(),
                     .rest = planes.data() + first_planes * dim / 8,
                     .first_planes = first_planes,
                     .planes = 8,
                     .head_dim = dim};
  std::vector<int32_t> refined(kHeads);
  for (uint32_t p = first_planes; p <= 8; ++p) {
    scan.refine_token(key, {.rows = rows.data(), .heads = kHeads, .planes = p}, refined.data());
    out.refined.insert(out.refined.end(), refined.begin(), refined.end());
  }
  std::vector<float> decoded(PaddedFloats(dim));
  scan.decode_coded(key, decoded.data());
  out.decoded.insert(out.decoded.end(), decoded.begin(), decoded.end());
  const std::vector<float> query = Numbers(decoded.size(), 11);
  float dot = 0;
  const CodeDotsRun codes{.keys = &key,
                          .queries = query.data(),
                          .tokens = 1,
                          .heads = 1,
                          .padded_dim = PaddedFloats(dim),
                          .dots = &dot,
                          .stride = 1};
  if (!scan.code_dots(codes)) {
    scan.dots({.keys = decoded.data(),
               .queries = query.data(),
               .tokens = 1,
               .heads = 1,
               .padded_dim = codes.padded_dim,
               .dots = &dot,
               .stride = 1});
  }
  out.code_dots.push_back(dot);
}

ScanResults RunScan(const ScanKernels& scan, uint32_t dim) {
  ScanResults out;
  for (uint32_t first_planes : {1u, 2u}) RunCoarse(scan, dim, first_planes, out);
  const std::vector<float> numbers = Numbers(dim, 6);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<std::byte> key(dim * 4);
    for (uint32_t i = 0; i < dim; ++i) StoreElement(key.data(), dtype, i, numbers[i]);
    std::vector<float> floats(PaddedFloats(dim));
    scan.decode_float(key.data(), dtype, dim, floats.data());
    out.floats.insert(out.floats.end(), floats.begin(), floats.end());
  }
  const uint32_t padded = PaddedFloats(dim);
  const std::vector<float> keys = Numbers(size_t{kTokens} * padded, 8);
  const std::vector<float> queries = Numbers(size_t{kHeads} * padded, 9);
  out.dots.resize(size_t{kHeads} * kTokens);
  scan.dots({.keys = keys.data(),
             .queries = queries.data(),
             .tokens = kTokens,
             .heads = kHeads,
             .padded_dim = padded,
             .dots = out.dots.data(),
             .stride = kTokens});
  out.weighted = Numbers(size_t{kHeads} * padded, 11);
  scan.add_weighted({.rows = keys.data(),
                     .weights = out.dots.data(),
                     .weight_stride = kTokens,
                     .tokens = kTokens,
                     .heads = kHeads,
                     .padded_dim = padded,
                     .sums = out.weighted.data()});
  const std::vector<float> scores = Numbers(size_t{kHeads} * kTokens, 10);
  out.max = {scan.max_of(scores.data(), scores.size())};
  const std::vector<LogShare> shares = {{.scale = 3, .origin = 1, .shift = 2},
                                        {.scale = 0.5f, .softcap = 4, .origin = 0.2f, .shift = 1},
                                        {.scale = 1, .origin = 0.9f, .shift = 0}};
  for (const LogShare& share : shares) {
    std::vector<float> terms(kTokens);
    out.sums.push_back(scan.sum_exp(scores.data(), kTokens, share, terms.data()));
    out.terms.insert(out.terms.end(), terms.begin(), terms.end());
  }
  for (bool sum : {true, false}) {
    std::vector<float> ranks(kTokens);
    scan.group_ranks({.scores = scores.data(),
                      .stride = kTokens,
                      .heads = kHeads,
                      .count = kTokens,
                      .log_share = shares.data(),
                      .sum = sum,
                      .ranks = ranks.data()});
    out.ranks.insert(out.ranks.end(), ranks.begin(), ranks.end());
  }
  out.taken.resize(kTokens);
  out.taken.resize(scan.take_above(scores.data(), kTokens, scores[5], 1, out.taken.data()));
  return out;
}

const char* CompareScan(const ScanKernels& tested, const ScanKernels& reference) {
  for (uint32_t dim : kDims) {
    const ScanResults a = RunScan(tested, dim);
    const ScanResults b = RunScan(reference, dim);
    if (!SameBits(a.estimates, b.estimates)) return "scan_planes";
    if (!SameBits(a.refined, b.refined)) return "refine_token";
    if (!SameBits(a.decoded, b.decoded)) return "decode_coded";
    if (!SameBits(a.floats, b.floats)) return "decode_float";
    if (!IsClose(a.dots, b.dots)) return "dots";
    if (!IsClose(a.weighted, b.weighted)) return "add_weighted";
    // Codes reach 2^7: as many times the error.
    for (size_t i = 0; i < a.code_dots.size(); ++i) {
      if (!(std::fabs(a.code_dots[i] - b.code_dots[i]) <= 1e-2f)) return "code_dots";
    }
    if (!SameBits(a.max, b.max)) return "max_of";
    if (!IsClose(a.terms, b.terms)) return "sum_exp";
    for (size_t i = 0; i < a.sums.size(); ++i) {
      if (!(std::fabs(a.sums[i] - b.sums[i]) <= 1e-4 * b.sums[i])) return "sum_exp";
    }
    if (!IsClose(a.ranks, b.ranks)) return "group_ranks";
    if (a.taken != b.taken) return "take_above";
  }
  return nullptr;
}

}  // namespace

absl::Status SelfTest(const CpuKernels& kernels) {
  const char* differs = CompareRows(*kernels.rows, PortableRowKernels());
  if (differs == nullptr) differs = CompareScan(*kernels.scan, PortableScanKernels());
  if (differs == nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("start-up test: loop ", differs, " of the ", kernels.name,
                                             " kernels does not compute what the portable one does"));
}

}  // namespace ctkvr::cpu
