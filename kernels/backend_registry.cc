// SPDX-License-Identifier: Apache-2.0

#include "kernels/backend_registry.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/self_test.h"

namespace ctkvr {
namespace {

constexpr char kCpuPrefix[] = "cpu:";

absl::StatusOr<std::unique_ptr<Backend>> CreateCpu(const cpu::CpuKernels& kernels) {
  CTKVR_RETURN_IF_ERROR(cpu::SelfTest(kernels));
  return cpu::MakeCpuBackend(kernels);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const std::string& name) {
  if (name == "auto" || name == "cpu") return CreateCpu(cpu::BestCpuKernels());
  for (const char* instructions : {"portable", "avx2", "avx512"}) {
    if (name != absl::StrCat(kCpuPrefix, instructions)) continue;
    const cpu::CpuKernels* kernels = cpu::FindCpuKernels(instructions);
    if (kernels == nullptr) {
      return absl::UnavailableError(absl::StrCat("backend is \"", name, "\"; this machine lacks its instructions"));
    }
    return CreateCpu(*kernels);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("backend is \"", name, "\"; it must be auto, cpu, cpu:portable, cpu:avx2 or cpu:avx512"));
}

}  // namespace ctkvr
