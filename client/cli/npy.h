// SPDX-License-Identifier: Apache-2.0
//
// Reads NumPy's .npy files of float16, little-endian, C order: the arrays of a trace. Thread-safe: pure functions.
// Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ctkvr::cli {

struct NpyHeader {
  std::string descr;  // "<f2"
  bool fortran_order = false;
  std::vector<uint64_t> shape;
  size_t data_offset = 0;  // bytes from the start of the file
};

// binary16 bits, row-major.
struct HalfArray {
  std::vector<uint64_t> shape;
  std::vector<uint16_t> data;
};

// The header at the start of `bytes`. INVALID_ARGUMENT: not such a file, cut short, or a header that says anything
// else than descr, fortran_order and shape.
absl::StatusOr<NpyHeader> ParseNpyHeader(const std::string& bytes);

// INVALID_ARGUMENT: as above; another element type or order; a size other than the shape's. Messages name the file.
absl::StatusOr<HalfArray> ParseHalfArray(const std::string& bytes, const std::string& name);

// A whole file. NOT_FOUND: it cannot be opened. INVALID_ARGUMENT: larger than `bytes_max`.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t bytes_max);

}  // namespace ctkvr::cli
