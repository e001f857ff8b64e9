// SPDX-License-Identifier: Apache-2.0
//
// Reads rows.json, the test vectors of the storage format of rows; make_rows.py says what each field is.
// Thread-safe: no shared state.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/formats.h"

namespace ctkvr::testing {

struct GoldenToken {
  std::string note;
  std::vector<float> key;    // [head_dim]
  std::vector<float> value;  // [value_dim]
  std::vector<std::byte> key_row;
  std::vector<std::byte> value_row;
  std::vector<float> decoded_key;    // [head_dim]
  std::vector<float> decoded_value;  // [value_dim]
  uint16_t sketch_scale[3] = {};     // by first_planes, 1 and 2; 0 where keys are not coded
};

struct GoldenCase {
  std::string name;
  Format format = Format::kF32;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  bool keys_coded = false;  // code_generation 1
  DType raw_dtype = DType::kF32;
  uint64_t rotation_seed = 0;
  std::vector<float> mean;  // [head_dim] where keys are coded
  std::vector<GoldenToken> tokens;
};

std::vector<GoldenCase> ReadGoldenRows();

}  // namespace ctkvr::testing
