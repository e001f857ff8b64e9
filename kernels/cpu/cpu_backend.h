// SPDX-License-Identifier: Apache-2.0
//
// The backend over host memory: operations run inline, in order, on the calling thread. The reference that every
// other backend is held to.

#pragma once

#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {

std::unique_ptr<Backend> MakeCpuBackend(const CpuKernels& kernels);

}  // namespace ctkvr::cpu
