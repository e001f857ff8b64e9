// SPDX-License-Identifier: Apache-2.0
//
// CTKVR_CHECK: ends the process when an invariant of ours does not hold. For programmer errors only; what a caller
// can get wrong is an absl::Status.

#pragma once

#include <cstdio>
#include <cstdlib>

#define CTKVR_CHECK(condition)                                                                  \
  do {                                                                                          \
    if (!(condition)) [[unlikely]] {                                                            \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);        \
      std::abort();                                                                             \
    }                                                                                           \
  } while (false)
