// SPDX-License-Identifier: Apache-2.0
//
// A stack of device bytes for one lane, for what lives no longer than one batch. Not thread-safe.

#pragma once

#include <cstddef>
#include <limits>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace ctkvr {

class Scratch {
 public:
  static absl::StatusOr<Scratch> Create(Backend& backend, size_t bytes);

  // `count` elements of T, aligned to 64 bytes, or null when they do not fit. Contents unspecified.
  template <typename T>
  T* Allocate(size_t count) {
    if (count > std::numeric_limits<size_t>::max() / sizeof(T)) return nullptr;
    return static_cast<T*>(AllocateBytes(count * sizeof(T)));
  }
  // Zeros what was ever used since the last time. REQUIRES: nothing of it is in use.
  void Clear(Backend& backend, Stream& stream);
  size_t mark() const { return used_; }
  void ResetTo(size_t mark) { used_ = mark; }
  size_t high_water_bytes() const { return high_water_; }
  size_t capacity_bytes() const { return memory_.bytes(); }

 private:
  explicit Scratch(DeviceBuffer memory) : memory_(std::move(memory)) {}
  void* AllocateBytes(size_t bytes);

  DeviceBuffer memory_;
  size_t used_ = 0;
  size_t high_water_ = 0;
  size_t dirty_ = 0;
};

}  // namespace ctkvr
