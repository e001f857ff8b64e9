// SPDX-License-Identifier: Apache-2.0

#include "kernels/scratch.h"

#include <algorithm>
#include <utility>

#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

absl::StatusOr<Scratch> Scratch::Create(Backend& backend, size_t bytes) {
  CTKVR_ASSIGN_OR_RETURN(DeviceBuffer memory, backend.Allocate(bytes));
  return Scratch(std::move(memory));
}

void Scratch::Clear(Backend& backend, Stream& stream) {
  if (dirty_ > 0) backend.Clear(stream, memory_.data(), dirty_);
  dirty_ = 0;
}

void* Scratch::AllocateBytes(size_t bytes) {
  const size_t begin = RoundUp(used_, kAlignment);
  if (begin > memory_.bytes() || bytes > memory_.bytes() - begin) return nullptr;
  used_ = begin + bytes;
  high_water_ = std::max(high_water_, used_);
  dirty_ = std::max(dirty_, used_);
  return memory_.data() + begin;
}

}  // namespace ctkvr
