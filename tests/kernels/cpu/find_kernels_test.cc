// SPDX-License-Identifier: Apache-2.0
//
// The tables found are those that the processor, by its own word, can run.

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {
namespace {

std::set<std::string> ProcessorFlags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
  }
  return {};
}

bool Has(const std::set<std::string>& flags, std::initializer_list<const char*> wanted) {
  for (const char* flag : wanted) {
    if (!flags.contains(flag)) return false;
  }
  return true;
}

TEST(FindKernelsTest, TablesAreThereExactlyWhereTheProcessorHasEveryFeature) {
  const std::set<std::string> flags = ProcessorFlags();
  const bool avx2 = Has(flags, {"avx2", "fma", "f16c"});
  const bool avx512 =
      avx2 && Has(flags, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "gfni"});
  EXPECT_EQ(FindCpuKernels("avx2") != nullptr, avx2);
  EXPECT_EQ(FindCpuKernels("avx512") != nullptr, avx512);
  EXPECT_STREQ(BestCpuKernels().name, avx512 ? "avx512" : avx2 ? "avx2" : "portable");
}

TEST(FindKernelsTest, TheTableFoundIsTheOneAskedFor) {
  ASSERT_NE(FindCpuKernels("portable"), nullptr);
  EXPECT_EQ(FindCpuKernels("portable")->rows, &PortableRowKernels());
  EXPECT_EQ(FindCpuKernels("portable")->scan, &PortableScanKernels());
  if (const CpuKernels* avx2 = FindCpuKernels("avx2")) {
    EXPECT_EQ(avx2->rows, &Avx2RowKernels());
    EXPECT_EQ(avx2->scan, &Avx2ScanKernels());
  }
  if (const CpuKernels* avx512 = FindCpuKernels("avx512")) {
    EXPECT_EQ(avx512->rows, &Avx512RowKernels());
    EXPECT_EQ(avx512->scan, &Avx512ScanKernels());
  }
}

TEST(FindKernelsTest, UnknownNamesFindNothing) {
  for (const char* name : {"", "sse2", "AVX2", "avx2 ", "avx5122"}) EXPECT_EQ(FindCpuKernels(name), nullptr) << name;
}

}  // namespace
}  // namespace ctkvr::cpu
