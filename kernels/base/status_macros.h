// SPDX-License-Identifier: Apache-2.0
//
// Early return on an error, for functions that return absl::Status or absl::StatusOr.

#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the error of `expr`, if it is one.
#define CTKVR_RETURN_IF_ERROR(expr)                          \
  do {                                                       \
    if (absl::Status ctkvr_status = (expr); !ctkvr_status.ok()) return ctkvr_status; \
  } while (false)

// Declares or assigns `lhs` from the value of `expr`, or returns its error. Expands to several statements: never the
// unbraced body of an if.
#define CTKVR_ASSIGN_OR_RETURN(lhs, expr) \
  CTKVR_ASSIGN_OR_RETURN_IMPL_(CTKVR_CONCAT_(ctkvr_result_, __LINE__), lhs, expr)
#define CTKVR_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.ok()) return std::move(result).status();  \
  lhs = *std::move(result)
#define CTKVR_CONCAT_(a, b) CTKVR_CONCAT_IMPL_(a, b)
#define CTKVR_CONCAT_IMPL_(a, b) a##b
