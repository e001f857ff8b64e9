// SPDX-License-Identifier: Apache-2.0
//
// A backend for tests, around a real one: fails the call a test names, poisons what it allocates, and can behave like
// a device of its own, whose memory the host may not touch and whose work runs at Synchronize. Then every pointer of an
// operation is checked to lie in memory that this backend allocated, and host memory that was given up too early shows
// as a wrong answer.
//
// Thread-safe: counters are atomic; a stream belongs to one thread, as in backend.h.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/backend.h"

namespace ctkvr::testing {

struct FakeBackendOptions {
  bool shares_host_memory = true;  // false: a device of its own, see above
  std::string real = "cpu:portable";
  std::function<void(const char* name)> on_call = nullptr;  // told before each operation, "ScoreTokens"; may be empty
};

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(FakeBackendOptions options = {});
  ~FakeBackend() override;

  // Copies, operations and Synchronize since the backend was made.
  uint64_t calls() const { return calls_; }
  // Calls [first, first + count) from now on fail with `code`; 0 is the next one. The work of a failing call is done
  // all the same when `after_work`, so that its outputs change.
  struct Fault {
    uint64_t first = 0;
    uint64_t count = 1;
    absl::StatusCode code = absl::StatusCode::kInternal;
    bool after_work = false;
  };
  void Fail(const Fault& fault);
  void StopFailing();
  // Calls `watch` with the items of these operations once their work is done.
  using Watched = std::variant<std::span<const ScanPlanesItem>, std::span<const RefinePlanesItem>,
                               std::span<const ScoreTokensItem>, std::span<const SelectListsItem>,
                               std::span<const MergeCandidatesItem>, std::span<const EstimateRestItem>>;
  void Watch(std::function<void(const Watched&)> watch) { watch_ = std::move(watch); }
  // How often these bytes lie in the `allocation`-th piece of memory that was asked for.
  size_t CountIn(size_t allocation, std::span<const std::byte> bytes) const;
  // What the last failing call was, "WriteTokens"; empty: none has failed.
  std::string failed_call() const;

  BackendInfo Info() const override;
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override;
  absl::Status CopyIn(Stream& stream, std::byte* to, std::span<const std::byte> from) override;
  void Clear(Stream& stream, std::byte* at, size_t bytes) override;
  absl::Status CopyOut(Stream& stream, std::span<std::byte> to, const std::byte* from) override;
  bool SharesHostMemory() const override { return options_.shares_host_memory; }
  absl::Status Synchronize(Stream& stream) override;
  absl::Status PrepareQueries(Stream& stream, std::span<const PrepareQueriesItem> items) override;
  absl::Status FitMean(Stream& stream, std::span<const FitMeanItem> items) override;
  absl::Status WriteTokens(Stream& stream, std::span<const WriteTokensItem> items) override;
  absl::Status ScanPlanes(Stream& stream, std::span<const ScanPlanesItem> items) override;
  absl::Status RefinePlanes(Stream& stream, std::span<const RefinePlanesItem> items) override;
  absl::Status ScoreTokens(Stream& stream, std::span<const ScoreTokensItem> items) override;
  absl::Status SelectTokens(Stream& stream, std::span<const SelectTokensItem> items) override;
  absl::Status WriteCentroids(Stream& stream, std::span<const WriteCentroidsItem> items) override;
  absl::Status AssignQueries(Stream& stream, std::span<const AssignQueriesItem> items) override;
  absl::Status AverageQueries(Stream& stream, std::span<const AverageQueriesItem> items) override;
  absl::Status BuildLists(Stream& stream, std::span<const BuildListsItem> items) override;
  absl::Status SelectLists(Stream& stream, std::span<const SelectListsItem> items) override;
  absl::Status MergeCandidates(Stream& stream, std::span<const MergeCandidatesItem> items) override;
  absl::Status GatherRows(Stream& stream, std::span<const GatherRowsItem> items) override;
  absl::Status Attend(Stream& stream, std::span<const AttendItem> items) override;
  absl::Status BuildClusters(Stream& stream, std::span<const BuildClustersItem> items) override;
  absl::Status ArrangeSketch(Stream& stream, std::span<const ArrangeSketchItem> items) override;
  absl::Status EstimateRest(Stream& stream, std::span<const EstimateRestItem> items) override;
  absl::Status SelectClusters(Stream& stream, std::span<const SelectClustersItem> items) override;
  absl::Status ScanClusters(Stream& stream, std::span<const ScanClustersItem> items) override;

 private:
  class FakeStream;
  template <typename Item>
  absl::Status Operate(Stream& stream, const char* name, std::span<const Item> items,
                       absl::Status (Backend::*operation)(Stream&, std::span<const Item>));
  // Counts the call; the error it must report, or OK.
  absl::Status NextCall(const char* name, bool* do_work);
  void ExpectOnDevice(const char* name, const void* pointer) const;
  void ExpectOnDevice(const char* name, std::initializer_list<const void*> pointers) const;
  void ExpectOnDevice(const char* name, const HeadView& view) const;

  const FakeBackendOptions options_;
  std::unique_ptr<Backend> real_;
  std::function<void(const Watched&)> watch_;
  std::atomic<uint64_t> calls_{0};
  mutable std::mutex mutex_;
  uint64_t fail_begin_ = 0, fail_end_ = 0;  // guarded, as is all below
  Fault fault_;
  std::string failed_call_;
  std::vector<std::pair<const std::byte*, size_t>> allocated_;
};

}  // namespace ctkvr::testing
