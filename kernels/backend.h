// SPDX-License-Identifier: Apache-2.0
//
// The seam: one device, its memory and its arithmetic. What an operation means stands in ops.h and attention_ops.h.
//
// Operations and copies on one stream run in order; the caller sees their results after Synchronize. Calls on
// different streams may run at the same time; one stream is used by one thread at a time. After an error the outputs
// of that call are unspecified. INTERNAL: an operation failed. UNAVAILABLE: the device is lost, for good.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_ops.h"
#include "kernels/cluster_ops.h"
#include "kernels/cluster_search_ops.h"
#include "kernels/list_ops.h"
#include "kernels/ops.h"

namespace ctkvr {

struct BackendInfo {
  std::string name;    // "cpu"
  std::string device;  // for people: processor and instruction set in use
};

// Owns device memory; frees it when destroyed. Move-only.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(std::byte* data, size_t bytes, void (*free)(std::byte*, size_t))
      : data_(data), bytes_(bytes), free_(free) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(free_, other.free_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) free_(data_, bytes_);
  }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void (*free_)(std::byte*, size_t) = nullptr;
};

// An ordered queue of work. Backends derive from it.
class Stream {
 public:
  virtual ~Stream() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Thread-safe, as Allocate and NewStream are.
  virtual BackendInfo Info() const = 0;
  // Aligned to 2 MiB where large, else to 64 bytes. Contents unspecified, but nothing of another process.
  // RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream() = 0;

  // Host to device and back. The host side must stay valid until Synchronize.
  virtual absl::Status CopyIn(Stream& stream, std::byte* to, std::span<const std::byte> from) = 0;
  virtual absl::Status CopyOut(Stream& stream, std::span<std::byte> to, const std::byte* from) = 0;
  // Zeros device memory, in the stream's order. What fails in it fails the stream: the next Synchronize says so.
  virtual void Clear(Stream& stream, std::byte* at, size_t bytes) = 0;
  // True when the device reads and writes host memory as it is, so that staging copies can be left out.
  virtual bool SharesHostMemory() const = 0;
  virtual absl::Status Synchronize(Stream& stream) = 0;

  virtual absl::Status PrepareQueries(Stream& stream, std::span<const PrepareQueriesItem> items) = 0;
  virtual absl::Status FitMean(Stream& stream, std::span<const FitMeanItem> items) = 0;
  virtual absl::Status WriteTokens(Stream& stream, std::span<const WriteTokensItem> items) = 0;
  virtual absl::Status ScanPlanes(Stream& stream, std::span<const ScanPlanesItem> items) = 0;
  virtual absl::Status RefinePlanes(Stream& stream, std::span<const RefinePlanesItem> items) = 0;
  virtual absl::Status ScoreTokens(Stream& stream, std::span<const ScoreTokensItem> items) = 0;
  virtual absl::Status SelectTokens(Stream& stream, std::span<const SelectTokensItem> items) = 0;
  virtual absl::Status WriteCentroids(Stream& stream, std::span<const WriteCentroidsItem> items) = 0;
  virtual absl::Status AssignQueries(Stream& stream, std::span<const AssignQueriesItem> items) = 0;
  virtual absl::Status AverageQueries(Stream& stream, std::span<const AverageQueriesItem> items) = 0;
  virtual absl::Status BuildLists(Stream& stream, std::span<const BuildListsItem> items) = 0;
  virtual absl::Status SelectLists(Stream& stream, std::span<const SelectListsItem> items) = 0;
  virtual absl::Status MergeCandidates(Stream& stream, std::span<const MergeCandidatesItem> items) = 0;
  virtual absl::Status GatherRows(Stream& stream, std::span<const GatherRowsItem> items) = 0;
  virtual absl::Status Attend(Stream& stream, std::span<const AttendItem> items) = 0;
  virtual absl::Status BuildClusters(Stream& stream, std::span<const BuildClustersItem> items) = 0;
  virtual absl::Status ArrangeSketch(Stream& stream, std::span<const ArrangeSketchItem> items) = 0;
  virtual absl::Status EstimateRest(Stream& stream, std::span<const EstimateRestItem> items) = 0;
  virtual absl::Status SelectClusters(Stream& stream, std::span<const SelectClustersItem> items) = 0;
  virtual absl::Status ScanClusters(Stream& stream, std::span<const ScanClustersItem> items) = 0;
};

}  // namespace ctkvr
