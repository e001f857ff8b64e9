// SPDX-License-Identifier: Apache-2.0

#include "server/core/batch_memory.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {

BatchMemory::BatchMemory(LaneDevice device)
    : device_(device), shares_host_memory_(device.backend.SharesHostMemory()), base_(device.scratch.mark()) {}

BatchMemory::~BatchMemory() { device_.scratch.ResetTo(base_); }

void* BatchMemory::TakeBytes(size_t bytes) {
  requested_bytes_ += RoundUp(bytes, size_t{64});
  void* data = exhausted_ ? nullptr : device_.scratch.Allocate<std::byte>(bytes);
  exhausted_ = exhausted_ || data == nullptr;
  return data;
}

const void* BatchMemory::StageIn(const void* host, size_t bytes) {
  if (shares_host_memory_ || host == nullptr) return host;
  auto* staged = static_cast<std::byte*>(TakeBytes(bytes));
  if (staged == nullptr || bytes == 0) return staged;
  const absl::Status status =
      device_.backend.CopyIn(device_.stream, staged, {static_cast<const std::byte*>(host), bytes});
  if (status_.ok()) status_ = status;
  return staged;
}

void* BatchMemory::StageOut(void* host, size_t bytes) {
  if (shares_host_memory_ || host == nullptr) return host;
  void* staged = TakeBytes(bytes);
  if (staged != nullptr) outputs_.push_back({host, static_cast<std::byte*>(staged), bytes});
  return staged;
}

void BatchMemory::EnqueueCopyOut(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  const absl::Status status = device_.backend.CopyOut(device_.stream, {static_cast<std::byte*>(host), bytes},
                                                      static_cast<const std::byte*>(device));
  if (status_.ok()) status_ = status;
}

std::byte* const* BatchMemory::StageTable(std::byte* const* table, size_t count) {
  if (shares_host_memory_ || table == nullptr) return table;
  const auto [entry, fresh] = tables_.try_emplace({table, count}, nullptr);
  if (fresh) entry->second = In(table, count);
  return entry->second;
}

HeadView BatchMemory::Stage(const HeadView& view, size_t page_count) {
  HeadView staged = view;
  staged.pages = StageTable(view.pages, page_count);
  staged.raw_pages = StageTable(view.raw_pages, page_count);
  const size_t sketch_count = CeilDiv(page_count, size_t{kSketchTokens / kPageTokens});
  staged.sketches = StageTable(view.sketches, sketch_count);
  staged.order.blocks = StageTable(view.order.blocks, sketch_count);
  return staged;
}

absl::Status BatchMemory::ExhaustedError(const char* what) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      what, " needs ", requested_bytes_, " bytes of scratch; the lane has ", device_.scratch.capacity_bytes() - base_));
}

BatchMemory::Mark BatchMemory::mark() const {
  return {.scratch = device_.scratch.mark(), .outputs = outputs_.size(), .requested_bytes = requested_bytes_};
}

void BatchMemory::ResetTo(const Mark& mark) {
  device_.scratch.ResetTo(mark.scratch);
  outputs_.resize(mark.outputs);
  requested_bytes_ = mark.requested_bytes;
  exhausted_ = false;
  // Tables staged since may lie in what was given back; staging one again costs little.
  tables_.clear();
}

absl::Status BatchMemory::Finish() {
  for (const Output& output : outputs_) EnqueueCopyOut(output.host, output.device, output.bytes);
  outputs_.clear();
  CTKVR_RETURN_IF_ERROR(status_);
  return device_.backend.Synchronize(device_.stream);
}

absl::Status BatchMemory::FinishAndReset() {
  CTKVR_RETURN_IF_ERROR(Finish());
  ResetTo({.scratch = base_, .outputs = 0, .requested_bytes = 0});
  return absl::OkStatus();
}

absl::Status BatchMemory::Settle() {
  outputs_.clear();
  status_ = absl::OkStatus();
  return device_.backend.Synchronize(device_.stream);
}

namespace {

// Bytes held on the host at once while copying through it.
constexpr size_t kHopBytes = size_t{4} << 20;

// copies[begin, end) through `hop`, which holds them all.
absl::Status CopyThroughHost(LaneDevice device, const std::vector<DeviceCopy>& copies, std::pair<size_t, size_t> range,
                             std::vector<std::byte>& hop) {
  size_t offset = 0;
  for (size_t i = range.first; i < range.second; offset += copies[i++].bytes) {
    CTKVR_RETURN_IF_ERROR(
        device.backend.CopyOut(device.stream, {hop.data() + offset, copies[i].bytes}, copies[i].from));
  }
  CTKVR_RETURN_IF_ERROR(device.backend.Synchronize(device.stream));
  offset = 0;
  for (size_t i = range.first; i < range.second; offset += copies[i++].bytes) {
    CTKVR_RETURN_IF_ERROR(device.backend.CopyIn(device.stream, copies[i].to, {hop.data() + offset, copies[i].bytes}));
  }
  return device.backend.Synchronize(device.stream);
}

absl::Status CopyAllThroughHost(LaneDevice device, const std::vector<DeviceCopy>& copies, std::vector<std::byte>& hop) {
  for (size_t begin = 0; begin < copies.size();) {
    size_t end = begin;
    size_t bytes = 0;
    while (end < copies.size() && (end == begin || bytes + copies[end].bytes <= kHopBytes))
      bytes += copies[end++].bytes;
    hop.resize(std::max(hop.size(), bytes));
    CTKVR_RETURN_IF_ERROR(CopyThroughHost(device, copies, {begin, end}, hop));
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CopyOnDevice(LaneDevice device, const std::vector<DeviceCopy>& copies) {
  if (!device.backend.SharesHostMemory()) {
    std::vector<std::byte> hop;
    const absl::Status status = CopyAllThroughHost(device, copies, hop);
    // The hop must outlive copies that a failed call left behind.
    if (!status.ok()) (void)device.backend.Synchronize(device.stream);
    return status;
  }
  for (const DeviceCopy& copy : copies) {
    CTKVR_RETURN_IF_ERROR(device.backend.CopyIn(device.stream, copy.to, {copy.from, copy.bytes}));
  }
  return device.backend.Synchronize(device.stream);
}

}  // namespace ctkvr
