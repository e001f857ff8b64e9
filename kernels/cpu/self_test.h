// SPDX-License-Identifier: Apache-2.0
//
// The start-up test: a table of kernels against the portable one on fixed inputs, a few milliseconds. A processor or a
// compiler that computes something else must be found before it serves an answer.
//
// Thread-safe: pure function.

#pragma once

#include "absl/status/status.h"
#include "kernels/cpu/kernels.h"

namespace ctkvr::cpu {

// UNAVAILABLE, naming the first loop whose results differ: in any bit for the loops that must agree exactly, by more
// than their stated error for the others.
absl::Status SelfTest(const CpuKernels& kernels);

}  // namespace ctkvr::cpu
