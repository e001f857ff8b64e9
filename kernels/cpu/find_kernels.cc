// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {
namespace {

// The compiler's test also asks whether the operating system saves the wider registers.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni");
}

}  // namespace

const CpuKernels* FindCpuKernels(const char* name) {
  // Nothing of a translation unit for a newer instruction set may run before the machine is known to have it.
  const std::string_view wanted = name;
  if (wanted == "portable") {
    static const CpuKernels kPortable{"portable", &PortableRowKernels(), &PortableScanKernels()};
    return &kPortable;
  }
  if (wanted == "avx2" && HasAvx2()) {
    static const CpuKernels kAvx2{"avx2", &Avx2RowKernels(), &Avx2ScanKernels()};
    return &kAvx2;
  }
  if (wanted == "avx512" && HasAvx512()) {
    static const CpuKernels kAvx512{"avx512", &Avx512RowKernels(), &Avx512ScanKernels()};
    return &kAvx512;
  }
  return nullptr;
}

const CpuKernels& BestCpuKernels() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const CpuKernels* kernels = FindCpuKernels(name)) return *kernels;
  }
  return *FindCpuKernels("portable");
}

}  // namespace ctkvr::cpu
