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
    for (uint32_t block = 0; block * kSketchTokens < options.tokens; ++block) {
      sketches_.push_back(std::make_unique<std::byte[]>(layout_.sketch_bytes));
      std::memset(sketches_.back().get(), 0x5a, layout_.sketch_bytes);
      sketch_pointers_.push_back(sketches_.back().get());
      MakeOrder(block, salt + 7 * block);
    }
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

// Some tokens after the first and before the last that could be in clusters are in none, and clusters may be empty.
void StoredHead::MakeOrder(uint32_t index, uint64_t salt) {
  const size_t base = slots_.size();
  for (uint32_t slot = 0; slot < kSketchTokens; ++slot) slots_.push_back(slot);
  order_pointers_.push_back(nullptr);
  if (options_.order_clusters == 0) return;
  const bool packed = options_.order_clusters <= 64;
  const uint32_t ends_bytes = 2 * options_.order_clusters;
  order_ = {.begin = options_.order_begin,
            .clusters = options_.order_clusters,
            .ends_offset = 0,
            .places_offset = ends_bytes,
            .members_offset = packed ? 0 : ends_bytes + 2 * kSketchTokens};
  if (index % 3 == 1) return;
  std::mt19937_64 random = MakeRandom(salt);
  const uint32_t begin = index * kSketchTokens;
  const uint32_t first = options_.order_begin > begin ? options_.order_begin - begin : 0;
  const uint32_t last = index % 3 == 2 ? kSketchTokens : first + 100 + random() % (kSketchTokens - first - 99);
  std::vector<std::vector<uint32_t>> clusters(options_.order_clusters);
  std::vector<uint16_t> places, ends;
  std::vector<uint8_t> members(kSketchTokens, 0xee);
  for (uint32_t offset = first; offset < last; ++offset) {
    members[offset] = static_cast<uint8_t>(random() % options_.order_clusters / (1 + random() % 3));
    clusters[members[offset]].push_back(offset);
  }
  for (uint32_t offset = 0; offset < first; ++offset) places.push_back(static_cast<uint16_t>(offset));
  for (const std::vector<uint32_t>& cluster : clusters) {
    for (const uint32_t offset : cluster) {
      slots_[base + offset] = static_cast<uint32_t>(places.size());
      places.push_back(static_cast<uint16_t>(offset));
    }
    ends.push_back(static_cast<uint16_t>(places.size()));
  }
  for (uint32_t offset = last; offset < kSketchTokens; ++offset) places.push_back(static_cast<uint16_t>(offset));
  for (uint32_t offset = first; packed && offset < last; ++offset) {
    places[offset] = static_cast<uint16_t>(places[offset] | members[offset] << 10);
  }
  orders_.push_back(std::make_unique<std::byte[]>(ends_bytes + 2 * kSketchTokens + (packed ? 0 : kSketchTokens)));
  order_pointers_.back() = orders_.back().get();
  std::memcpy(order_pointers_.back(), ends.data(), ends_bytes);
  std::memcpy(order_pointers_.back() + order_.places_offset, places.data(), 2 * kSketchTokens);
  if (!packed) std::memcpy(order_pointers_.back() + order_.members_offset, members.data(), kSketchTokens);
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
  const size_t slot = slots_[token], first_bytes = size_t{layout_.first_planes} * layout_.plane_bytes;
  std::byte* sketch = sketch_pointers_[token / kSketchTokens];
  std::memcpy(sketch + slot * first_bytes, planes.data(), first_bytes);
  std::memcpy(sketch + layout_.sketch_scales_offset + slot * 2, &sketch_scales_[token], 2);
  std::byte* record =
      page_pointers_[token / kPageTokens] + layout_.records_offset + size_t{token % kPageTokens} * layout_.record_bytes;
  std::memcpy(record, &code_scales_[token], 2);
  std::memcpy(record + 2, planes.data() + first_bytes, planes.size() - first_bytes);
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
  SketchOrder order = order_;
  if (options_.order_clusters > 0 && !order_pointers_.empty()) order.blocks = order_pointers_.data();
  return {.layout = layout_,
          .pages = page_pointers_.data(),
          .sketches = sketch_pointers_.empty() ? nullptr : sketch_pointers_.data(),
          .order = order,
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
