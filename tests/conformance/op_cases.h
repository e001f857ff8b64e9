// SPDX-License-Identifier: Apache-2.0
//
// What the conformance cases of the searching operations share: the backends under test, stored keys and prepared
// queries made without the code under test, and the shapes at the borders. Not thread-safe.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/kernels.h"
#include "tests/testing/compare.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_kv.h"

namespace ctkvr::testing {

// Every instruction set that this machine runs, and AVX-512 emulated.
std::vector<std::string> BackendNames();
// Null where this machine lacks the instruction set.
const cpu::CpuKernels* KernelsByName(const std::string& name);

// A test of one operation on one backend.
class OpConformance : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;
  Backend& backend() { return *backend_; }
  Stream& stream() { return *stream_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<::testing::ScopedTrace> trace_;
};

// Powers of two, sums of two and of three, whole and broken vectors.
inline constexpr uint32_t kHeadDims[] = {16, 24, 40, 64, 80, 96, 112, 128, 144, 192, 248, 256};

enum class KeyPattern {
  kRandom,  // every code as likely as any other
  kTies,    // five distinct tokens
  kEqual,   // every token the same
  kZero,    // scales 0: the key is the mean
  kFull,    // all codes at their largest
};

struct StoreOptions {
  Format format = Format::kK8V4;
  uint32_t head_dim = 64;
  uint32_t value_dim = 64;
  uint32_t first_planes = 1;
  uint32_t tokens = 0;
  bool raw = false;  // keys of a coded format still as they came
  DType raw_dtype = DType::kF32;
  KeyPattern pattern = KeyPattern::kRandom;
  // Clusters of made-up members, in whose order the sketch blocks lie, but for every third; 0: all in position order.
  uint32_t order_clusters = 0;
  uint32_t order_begin = 0;
};

// Pages and sketch blocks of one KV head, filled byte by byte after formats.h. Each is a heap block of its own, so that
// reading beyond one shows under AddressSanitizer.
class StoredHead {
 public:
  StoredHead(const StoreOptions& options, uint64_t salt);

  HeadView view() const;
  const StoreOptions& options() const { return options_; }
  // Decoded keys [tokens][head_dim].
  const oracle::Matrix& keys() const { return keys_; }
  // Codes of the first `planes` planes of a token, and its two scales.
  std::vector<uint32_t> CodesAt(uint32_t token, uint32_t planes) const;
  float SketchScaleAt(uint32_t token) const { return static_cast<float>(oracle::FromF16(sketch_scales_[token])); }
  float CodeScaleAt(uint32_t token) const { return static_cast<float>(oracle::FromF16(code_scales_[token])); }

 private:
  void MakeOrder(uint32_t index, uint64_t salt);
  void WriteCoded(uint32_t token, uint64_t row_seed);
  void WriteFloats(uint32_t token, uint64_t row_seed);

  StoreOptions options_;
  PageLayout layout_;
  std::vector<std::unique_ptr<std::byte[]>> pages_, raw_pages_, sketches_;
  std::vector<std::unique_ptr<std::byte[]>> orders_;
  std::vector<std::byte*> page_pointers_, raw_pointers_, sketch_pointers_, order_pointers_;
  SketchOrder order_;
  std::vector<uint32_t> slots_;  // [1024] a sketch block
  std::vector<float> mean_, signs_;
  std::vector<uint16_t> sketch_scales_, code_scales_;
  oracle::Matrix keys_;
};

// StoredHead leaves values as poison: random codes with scales within bounds, or random floats, go there.
void FillValues(const StoredHead& head, uint64_t salt);

// A query with everything that PrepareQueries would add, by the definitions of ops.h.
class QueryHeads {
 public:
  // plain [heads, head_dim].
  QueryHeads(const StoredHead& head, std::vector<float> plain);

  PreparedQuery prepared();
  oracle::Matrix rows() const;  // [R][D]
  uint32_t heads() const { return heads_; }
  std::span<const int8_t> scan(uint32_t r) const { return {scan_.data() + size_t{r} * head_dim_, head_dim_}; }
  std::span<const int8_t> refine(uint32_t r) const { return {refine_.data() + size_t{r} * head_dim_, head_dim_}; }
  float scan_scale(uint32_t r) const { return scan_scale_[r]; }
  float refine_scale(uint32_t r) const { return refine_scale_[r]; }
  float mean_dot(uint32_t r) const { return mean_dot_[r]; }

 private:
  uint32_t head_dim_ = 0;
  uint32_t heads_ = 0;
  std::vector<float> plain_, rotated_, rotated_sum_, mean_dot_, scan_scale_, refine_scale_;
  std::vector<int8_t> scan_, refine_;
  std::vector<int32_t> scan_sum_, refine_sum_;
};

std::vector<float> RandomFloats(size_t count, uint64_t salt);

// What float32 arithmetic in any order may differ from the true score by.
double ScoreBound(const StoredHead& head, const oracle::Row& query, uint32_t token);

}  // namespace ctkvr::testing
