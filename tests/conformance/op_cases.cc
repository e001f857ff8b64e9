// SPDX-License-Identifier: Apache-2.0

#include "tests/conformance/op_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_backend.h"

namespace ctkvr::cpu {
// kernels/cpu/*_avx512.cc compiled a second time; see kernels/cpu/avx512.h.
const RowKernels& EmulatedAvx512RowKernels();
const ScanKernels& EmulatedAvx512ScanKernels();
}  // namespace ctkvr::cpu

namespace ctkvr::testing {
namespace {

// Of binary16: from 2^-6 to 2^-1 or so, never 0.
uint16_t RandomScale(std::mt19937_64& random) { return static_cast<uint16_t>(0x2400 + random() % 0x1400); }

uint64_t RowSeed(KeyPattern pattern, uint32_t token, uint64_t salt) {
  if (pattern == KeyPattern::kRandom) return salt * 1000003 + token + 1;
  if (pattern == KeyPattern::kTies) return salt * 1000003 + 1 + token * 2654435761u % 5;
  return salt * 1000003;
}

DType FloatKeyType(const StoreOptions& options) { return options.raw ? options.raw_dtype : FloatType(options.format); }

}  // namespace

const cpu::CpuKernels* KernelsByName(const std::string& name) {
  if (name != "avx512_emulated") return cpu::FindCpuKernels(name.c_str());
  if (cpu::FindCpuKernels("avx2") == nullptr) return nullptr;
  static const cpu::CpuKernels emulated = {
      .name = "avx512_emulated", .rows = &cpu::EmulatedAvx512RowKernels(), .scan = &cpu::EmulatedAvx512ScanKernels()};
  return &emulated;
}

std::vector<std::string> BackendNames() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512", "avx512_emulated"}) {
    if (KernelsByName(name) != nullptr) names.push_back(name);
  }
  return names;
}

void OpConformance::SetUp() {
  backend_ = cpu::MakeCpuBackend(*KernelsByName(GetParam()));
  auto stream = backend_->NewStream();
  ASSERT_TRUE(stream.ok());
  stream_ = *std::move(stream);
  trace_ =
      std::make_unique<::testing::ScopedTrace>(__FILE__, __LINE__, "CTKVR_TEST_SEED=" + std::to_string(TestSeed()));
}

StoredHead::StoredHead(const StoreOptions& options, uint64_t salt)
    : options_(options),
      layout_(MakePageLayout(options.format, options.head_dim, options.value_dim, options.first_planes)),
      sketch_scales_(options.tokens),
      code_scales_(options.tokens) {
  for (uint32_t page = 0; page * kPageTokens < options.tokens; ++page) {
    pages_.push_back(std::make_unique<std::byte[]>(layout_.page_bytes));
    std::memset(pages_.back().get(), 0x5a, layout_.page_bytes);
    page_pointers_.push_back(pages_.back().get());
    if (!options.raw) continue;
    raw_pages_.push_back(std::make_unique<std::byte[]>(kPageTokens * options.head_dim * DTypeBytes(options.raw_dtype)));
    raw_pointers_.push_back(raw_pages_.back().get());
  }
  if (KeysAreCoded(options.format)) {
    for (const double sign : oracle::Signs(options.head_dim, salt)) signs_.push_back(static_cast<float>(sign));
    mean_ = RandomFloats(options.head_dim, salt + 1);
  }
  const bool coded = KeysAreCoded(options.format) && !options.raw;
  for (uint32_t token = 0; token < options.tokens; ++token) {
    const uint64_t seed = RowSeed(options.pattern, token, salt);
    coded ? WriteCoded(token, seed) : WriteFloats(token, seed);
  }
  for (uint32_t token = 0; token < options.tokens; ++token) keys_.push_back(oracle::KeyAt(view(), token));
}

void StoredHead::WriteCoded(uint32_t token, uint64_t row_seed) {
  std::mt19937_64 random = MakeRandom(row_seed);
  std::vector<std::byte> planes(size_t{layout_.planes} * layout_.plane_bytes);
  for (std::byte& byte : planes) {
    byte = static_cast<std::byte>(options_.pattern == KeyPattern::kFull ? 255 : random() & 255);
  }
  const bool zero = options_.pattern == KeyPattern::kZero;
  sketch_scales_[token] = zero ? 0 : RandomScale(random);
  code_scales_[token] = zero ? 0 : RandomScale(random);
  const size_t slot = token % kPageTokens, first_bytes = size_t{layout_.first_planes} * layout_.plane_bytes;
  const size_t rest_bytes = planes.size() - first_bytes;
  std::byte* page = page_pointers_[token / kPageTokens];
  std::memcpy(page + layout_.first_planes_offset + slot * first_bytes, planes.data(), first_bytes);
  std::memcpy(page + layout_.rest_planes_offset + slot * rest_bytes, planes.data() + first_bytes, rest_bytes);
  std::memcpy(page + layout_.sketch_scales_offset + slot * 2, &sketch_scales_[token], 2);
  std::memcpy(page + layout_.code_scales_offset + slot * 2, &code_scales_[token], 2);
}

void StoredHead::WriteFloats(uint32_t token, uint64_t row_seed) {
  std::vector<float> row = RandomFloats(options_.head_dim, row_seed);
  if (options_.pattern == KeyPattern::kZero) std::fill(row.begin(), row.end(), 0.0f);
  const std::vector<std::byte> bytes = ToBytes(row, FloatKeyType(options_));
  std::byte* keys =
      options_.raw ? raw_pointers_[token / kPageTokens] : page_pointers_[token / kPageTokens] + layout_.keys_offset;
  std::memcpy(keys + token % kPageTokens * bytes.size(), bytes.data(), bytes.size());
}

HeadView StoredHead::view() const {
  return {.layout = layout_,
          .pages = page_pointers_.data(),
          .raw_pages = options_.raw ? raw_pointers_.data() : nullptr,
          .raw_dtype = options_.raw_dtype,
          .mean = mean_.empty() ? nullptr : mean_.data(),
          .signs = signs_.empty() ? nullptr : signs_.data(),
          .length = options_.tokens};
}

std::vector<uint32_t> StoredHead::CodesAt(uint32_t token, uint32_t planes) const {
  return oracle::Codes(oracle::KeyRowAt(view(), token), options_.head_dim, planes);
}

void FillValues(const StoredHead& head, uint64_t salt) {
  const HeadView view = head.view();
  std::mt19937_64 random = MakeRandom(salt);
  for (uint32_t t = 0; t < view.length; ++t) {
    std::byte* row =
        view.pages[t / kPageTokens] + view.layout.values_offset + size_t{t % kPageTokens} * view.layout.value_row_bytes;
    if (!KeysAreCoded(view.layout.format)) {
      const auto bytes = ToBytes(RandomFloats(view.layout.value_dim, salt + t), FloatType(view.layout.format));
      std::memcpy(row, bytes.data(), bytes.size());
      continue;
    }
    for (uint32_t i = 0; i < view.layout.value_row_bytes; ++i) row[i] = static_cast<std::byte>(random());
    for (uint32_t group = 0; group * kValueGroup < view.layout.value_dim; ++group) {
      const uint16_t header[] = {static_cast<uint16_t>(random() % 0x3400),
                                 static_cast<uint16_t>(random() % 0x3c00 | (random() % 2) << 15)};
      std::memcpy(row + 4 * group, header, 4);
    }
  }
}

QueryHeads::QueryHeads(const StoredHead& head, std::vector<float> plain)
    : head_dim_(head.options().head_dim),
      heads_(static_cast<uint32_t>(plain.size() / head.options().head_dim)),
      plain_(std::move(plain)) {
  const oracle::Codec codec = oracle::CodecOf(head.view());
  if (codec.signs.empty()) return;
  for (const oracle::Row& row : rows()) {
    const oracle::Row rotated = oracle::Rotated(row, codec.signs);
    double sum = 0, largest = 0;
    for (const double element : rotated) {
      rotated_.push_back(static_cast<float>(element));
      sum += element;
      largest = std::max(largest, std::abs(element));
    }
    rotated_sum_.push_back(static_cast<float>(sum));
    mean_dot_.push_back(static_cast<float>(oracle::Dot(row, codec.mean)));
    const auto quantise = [&](int levels, std::vector<int8_t>& to, std::vector<float>& scales,
                              std::vector<int32_t>& sums) {
      int32_t total = 0;
      for (const double element : rotated) {
        const double level = largest == 0 ? 0 : std::round(element / largest * levels);
        to.push_back(static_cast<int8_t>(level));
        total += to.back();
      }
      scales.push_back(static_cast<float>(largest / levels));
      sums.push_back(total);
    };
    quantise(kScanQueryMax, scan_, scan_scale_, scan_sum_);
    quantise(kRefineQueryMax, refine_, refine_scale_, refine_sum_);
  }
}

PreparedQuery QueryHeads::prepared() {
  PreparedQuery query = {.heads = heads_, .plain = plain_.data()};
  if (rotated_.empty()) return query;
  query.rotated = rotated_.data();
  query.rotated_sum = rotated_sum_.data();
  query.mean_dot = mean_dot_.data();
  query.scan = scan_.data();
  query.scan_scale = scan_scale_.data();
  query.scan_sum = scan_sum_.data();
  query.refine = refine_.data();
  query.refine_scale = refine_scale_.data();
  query.refine_sum = refine_sum_.data();
  return query;
}

oracle::Matrix QueryHeads::rows() const {
  oracle::Matrix rows;
  for (uint32_t r = 0; r < heads_; ++r) {
    rows.emplace_back(plain_.begin() + size_t{r} * head_dim_, plain_.begin() + size_t{r + 1} * head_dim_);
  }
  return rows;
}

std::vector<float> RandomFloats(size_t count, uint64_t salt) {
  std::mt19937_64 random = MakeRandom(salt);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

double ScoreBound(const StoredHead& head, const oracle::Row& query, uint32_t token) {
  const double dim = head.options().head_dim;
  const oracle::Codec codec = oracle::CodecOf(head.view());
  oracle::Row centred = head.keys()[token];
  double mean_dot = 0, spread = 0;
  if (KeysAreCoded(codec.format) && !codec.raw) {
    for (size_t i = 0; i < centred.size(); ++i) centred[i] -= codec.mean[i];
    mean_dot = std::abs(oracle::Dot(query, codec.mean));
    spread = head.CodeScaleAt(token) * std::sqrt(dim);  // half a step in every dimension is added apart
  }
  const double norms = std::sqrt(oracle::Dot(query, query)) * (std::sqrt(oracle::Dot(centred, centred)) + spread);
  return (dim / 4 + 16) * std::ldexp(norms + mean_dot, -24) + 1e-30;
}

}  // namespace ctkvr::testing
