// SPDX-License-Identifier: Apache-2.0
//
// The start-up test passes for the tables of this machine and names the loop of a table that computes something else.

#include "kernels/cpu/self_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ctkvr::cpu {
namespace {

using ::testing::HasSubstr;

TEST(SelfTestTest, TablesOfThisMachinePass) {
  for (const char* name : {"portable", "avx2", "avx512"}) {
    const CpuKernels* kernels = FindCpuKernels(name);
    if (kernels == nullptr) continue;
    const absl::Status status = SelfTest(*kernels);
    EXPECT_TRUE(status.ok()) << status;
  }
}

void ExpectRefused(const RowKernels& rows, const ScanKernels& scan, const std::string& loop) {
  const absl::Status status = SelfTest({.name = "broken", .rows = &rows, .scan = &scan});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << loop;
  EXPECT_THAT(std::string(status.message()), HasSubstr("loop " + loop + " of the broken kernels"));
}

TEST(SelfTestTest, ABrokenRowLoopIsNamed) {
  const ScanKernels& scan = PortableScanKernels();
  RowKernels rows = PortableRowKernels();
  rows.rotate = [](float* x, uint32_t head_dim, const float* signs) {
    PortableRowKernels().rotate(x, head_dim, signs);
    x[head_dim - 1] *= 1 + 0x1p-23f;
  };
  ExpectRefused(rows, scan, "rotate");
  rows = PortableRowKernels();
  rows.unrotate = rows.rotate;
  ExpectRefused(rows, scan, "unrotate");
  rows = PortableRowKernels();
  std::swap(rows.f16_from_f32, rows.bf16_from_f32);
  ExpectRefused(rows, scan, "f16_from_f32");
  rows = PortableRowKernels();
  rows.f32_from_bf16 = rows.f32_from_f16;
  ExpectRefused(rows, scan, "f32_from_bf16");
  rows = PortableRowKernels();
  rows.encode_key = [](const float* x, uint32_t head_dim, uint32_t planes, uint32_t first_planes, std::byte* packed,
                       uint16_t* code_scale, uint16_t* sketch_scale) {
    const bool ok =
        PortableRowKernels().encode_key(x, head_dim, planes, first_planes, packed, code_scale, sketch_scale);
    if (first_planes == 2) ++*sketch_scale;
    return ok;
  };
  ExpectRefused(rows, scan, "encode_key");
  rows = PortableRowKernels();
  rows.encode_value = [](const float* value, uint32_t value_dim, uint32_t bits, std::byte* row) {
    const int32_t bad = PortableRowKernels().encode_value(value, value_dim, bits, row);
    if (bits == 4) row[20] ^= std::byte{1};
    return bad;
  };
  ExpectRefused(rows, scan, "encode_value");
  rows = PortableRowKernels();
  rows.decode_value = [](const std::byte* row, uint32_t value_dim, uint32_t bits, float* value) {
    PortableRowKernels().decode_value(row, value_dim, bits, value);
    if (bits == 8) value[value_dim - 1] += 0.01f;
  };
  ExpectRefused(rows, scan, "decode_value");
}

TEST(SelfTestTest, ABrokenScanLoopIsNamed) {
  const RowKernels& rows = PortableRowKernels();
  ScanKernels scan = PortableScanKernels();
  scan.scan_planes = [](const ScanRun& run) {
    PortableScanKernels().scan_planes(run);
    if (run.first_planes == 2) run.estimates[run.tokens - 1] *= 1.001f;
  };
  ExpectRefused(rows, scan, "scan_planes");
  scan = PortableScanKernels();
  scan.refine_token = [](const CodedKey& key, const RefineQuery& query, int32_t* sums) {
    PortableScanKernels().refine_token(key, query, sums);
    if (query.planes == 7) ++sums[query.heads - 1];
  };
  ExpectRefused(rows, scan, "refine_token");
  scan = PortableScanKernels();
  scan.dots = [](const DotsRun& run) {
    PortableScanKernels().dots(run);
    run.dots[run.tokens - 1] += 0.01f;
  };
  ExpectRefused(rows, scan, "dots");
  scan = PortableScanKernels();
  scan.sum_exp = [](const float* scores, size_t count, const LogShare& log_share, float* terms) {
    return PortableScanKernels().sum_exp(scores, count - 1, log_share, terms);
  };
  ExpectRefused(rows, scan, "sum_exp");
  scan.sum_exp = [](const float* scores, size_t count, const LogShare& log_share, float* terms) {
    const double sum = PortableScanKernels().sum_exp(scores, count, log_share, terms);
    if (terms != nullptr) terms[count - 1] *= 1.01f;
    return sum;
  };
  ExpectRefused(rows, scan, "sum_exp");
  scan = PortableScanKernels();
  scan.add_weighted = [](const WeightedRowsRun& run) {
    PortableScanKernels().add_weighted(run);
    run.sums[run.heads * run.padded_dim - 1] += 0.01f;
  };
  ExpectRefused(rows, scan, "add_weighted");
}

}  // namespace
}  // namespace ctkvr::cpu
