// SPDX-License-Identifier: Apache-2.0
//
// What the operations of one batch read and write: scratch, inputs on their way in, outputs on their way out. Where
// the device works on host memory as it is, inputs and outputs are the caller's own arrays; elsewhere they are staged
// in scratch. Callers write the same code for both.
//
// Errors are kept, not returned one by one: allocate all, then ask exhausted() and status(), then enqueue.
// Not thread-safe: belongs to one lane.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/scratch.h"

namespace ctkvr {

// The device as a lane sees it. Plain data; what it names outlives every batch.
struct LaneDevice {
  Backend& backend;
  Stream& stream;
  Scratch& scratch;
};

// Releases its scratch when destroyed. After an error of the backend, call Settle before that.
class BatchMemory {
 public:
  explicit BatchMemory(LaneDevice device);
  BatchMemory(const BatchMemory&) = delete;
  BatchMemory& operator=(const BatchMemory&) = delete;
  ~BatchMemory();

  // Device memory [count], contents unspecified; null once scratch is exhausted.
  template <typename T>
  T* Take(size_t count) {
    return static_cast<T*>(TakeBytes(count * sizeof(T)));
  }
  // What the device reads as host[count]. `host` must stay valid until Finish.
  template <typename T>
  T* In(T* host, size_t count) {
    return static_cast<T*>(const_cast<void*>(StageIn(host, count * sizeof(T))));
  }
  // What the device writes so that it arrives in host[count] at Finish. `host` must stay valid until then.
  template <typename T>
  T* Out(T* host, size_t count) {
    return static_cast<T*>(StageOut(host, count * sizeof(T)));
  }
  // Enqueues a copy of device[count] to host[count]; both stay valid until Finish.
  template <typename T>
  void CopyOut(T* host, const T* device, size_t count) {
    EnqueueCopyOut(host, device, count * sizeof(T));
  }
  // The view with its tables, of `page_count` pages, where the device reads them. Equal tables are staged once.
  HeadView Stage(const HeadView& view, size_t page_count);

  bool shares_host_memory() const { return shares_host_memory_; }
  // Whether something did not fit. Bytes asked for since the start, aligned as scratch aligns.
  bool exhausted() const { return exhausted_; }
  uint64_t requested_bytes() const { return requested_bytes_; }
  // RESOURCE_EXHAUSTED naming the scratch's bytes and those that `what` needs.
  absl::Status ExhaustedError(const char* what) const;
  // The first error of a copy.
  const absl::Status& status() const { return status_; }

  // A place to go back to: undoes what was taken since, before anything of it was enqueued.
  struct Mark {
    size_t scratch = 0;
    size_t outputs = 0;
    uint64_t requested_bytes = 0;
  };
  Mark mark() const;
  void ResetTo(const Mark& mark);

  // Copies outputs to the host and waits for everything enqueued.
  absl::Status Finish();
  // Finish, then forgets all that was taken.
  absl::Status FinishAndReset();
  // After an error: waits until the device touches nothing of this batch any more. An error here means that nobody
  // can know what the device still does.
  absl::Status Settle();

 private:
  struct Output {
    void* host;
    const std::byte* device;
    size_t bytes;
  };
  void* TakeBytes(size_t bytes);
  const void* StageIn(const void* host, size_t bytes);
  void* StageOut(void* host, size_t bytes);
  void EnqueueCopyOut(void* host, const void* device, size_t bytes);
  std::byte* const* StageTable(std::byte* const* table, size_t count);

  LaneDevice device_;
  const bool shares_host_memory_;
  const size_t base_;
  bool exhausted_ = false;
  uint64_t requested_bytes_ = 0;
  absl::Status status_;
  std::vector<Output> outputs_;
  std::map<std::pair<std::byte* const*, size_t>, std::byte* const*> tables_;
};

// Device to device: `bytes` each, from[i] -> to[i]. Through the host where the device does not share its memory.
// Waits until done.
struct DeviceCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t bytes = 0;
};
absl::Status CopyOnDevice(LaneDevice device, const std::vector<DeviceCopy>& copies);

}  // namespace ctkvr
