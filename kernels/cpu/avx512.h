// SPDX-License-Identifier: Apache-2.0
//
// The AVX-512 intrinsics for rows_avx512.cc and scan_avx512.cc. They come from the compiler; or, when
// CTKVR_EMULATE_AVX512 is defined, from SIMDe, which emulates them with what the machine has. Tests compile those
// sources a second time that way, so their arithmetic is tested on every machine.
//
// An emulated translation unit is compiled with -mavx2 -mfma -mf16c -Wno-psabi but without -mavx512*, and its table is
// named Emulated... so that both can be linked into one program. An intrinsic that SIMDe lacks does not compile there:
// then add it to avx512_emulation.h. Thread-safe: pure functions.

#pragma once

// GCC's own headers start some results undefined on purpose and then warn about it (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#ifdef CTKVR_EMULATE_AVX512
#include "kernels/cpu/avx512_emulation.h"
#define Avx512RowKernels EmulatedAvx512RowKernels
#define Avx512ScanKernels EmulatedAvx512ScanKernels
#endif
