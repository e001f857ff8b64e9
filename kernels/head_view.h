// SPDX-License-Identifier: Apache-2.0
//
// The stored tokens of one layer and KV head, as operations see them (ops.h). Thread-safe: a value.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/formats.h"
#include "kernels/sketch_order.h"

namespace ctkvr {

struct HeadView {
  PageLayout layout;
  std::byte* const* pages = nullptr;     // [ceil(length / 64)]
  std::byte* const* sketches = nullptr;  // [ceil(length / 1024)]; coded keys only
  SketchOrder order;                     // of the sketches
  // Set while keys are not coded yet: keys lie here as [64][D] raw_dtype a page, values in `pages` as ever.
  std::byte* const* raw_pages = nullptr;
  DType raw_dtype = DType::kF32;
  const float* mean = nullptr;   // [D]; coded keys only
  const float* signs = nullptr;  // [RotationRounds(D)][D]; coded keys only
  uint32_t length = 0;           // tokens readable

  bool raw() const { return raw_pages != nullptr; }
};

}  // namespace ctkvr
