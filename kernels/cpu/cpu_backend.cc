// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/lines.h"
#include "kernels/base/math.h"
#include "kernels/cpu/cpu_ops.h"

namespace ctkvr::cpu {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

void FreeSmall(std::byte* data, size_t) { std::free(data); }

void FreeLarge(std::byte* data, size_t bytes) { munmap(data, RoundUp(bytes, kHugePageBytes)); }

// Maps one huge page more than asked for and gives the unaligned ends back. Pages are not touched: memory that is
// never used costs nothing, and the first writer decides on which node a page lies.
std::byte* MapAligned(size_t bytes) {
  const size_t rounded = RoundUp(bytes, kHugePageBytes);
  const size_t mapped_bytes = rounded + kHugePageBytes;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(mapped);
  const size_t head = RoundUp(address, uintptr_t{kHugePageBytes}) - address;
  auto* data = static_cast<std::byte*>(mapped) + head;
  if (head > 0) munmap(mapped, head);
  if (head < kHugePageBytes) munmap(data + rounded, kHugePageBytes - head);
  // Refused where huge pages are off: slower, not wrong.
  (void)madvise(data, rounded, MADV_HUGEPAGE);
  return data;
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

// Work runs inline, so there is nothing to keep.
class CpuStream final : public Stream {};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuKernels& kernels)
      : kernels_(kernels), device_(absl::StrCat(ProcessorName(), ", ", kernels.name)) {}

  BackendInfo Info() const override { return {.name = "cpu", .device = device_}; }

  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override {
    const bool fits = bytes <= std::numeric_limits<size_t>::max() - 2 * kHugePageBytes;
    const bool large = bytes >= kHugePageBytes;
    std::byte* data = nullptr;
    if (fits && large) data = MapAligned(bytes);
    if (fits && !large) {
      data = static_cast<std::byte*>(std::aligned_alloc(kLineBytes, RoundUp(bytes + (bytes == 0), size_t{kLineBytes})));
    }
    if (data == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("the host cannot allocate ", bytes, " bytes"));
    }
    return DeviceBuffer(data, bytes, large ? FreeLarge : FreeSmall);
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override { return std::make_unique<CpuStream>(); }

  absl::Status CopyIn(Stream&, std::byte* to, std::span<const std::byte> from) override {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  }
  absl::Status CopyOut(Stream&, std::span<std::byte> to, const std::byte* from) override {
    if (!to.empty()) std::memcpy(to.data(), from, to.size());
    return absl::OkStatus();
  }
  void Clear(Stream&, std::byte* at, size_t bytes) override { std::memset(at, 0, bytes); }
  bool SharesHostMemory() const override { return true; }
  absl::Status Synchronize(Stream&) override { return absl::OkStatus(); }

  absl::Status PrepareQueries(Stream&, std::span<const PrepareQueriesItem> items) override {
    return ForEach(items, PrepareQuery);
  }
  absl::Status FitMean(Stream&, std::span<const FitMeanItem> items) override { return ForEach(items, cpu::FitMean); }
  absl::Status WriteTokens(Stream&, std::span<const WriteTokensItem> items) override {
    return ForEach(items, cpu::WriteTokens);
  }
  absl::Status ScanPlanes(Stream&, std::span<const ScanPlanesItem> items) override {
    return ForEach(items, cpu::ScanPlanes);
  }
  absl::Status RefinePlanes(Stream&, std::span<const RefinePlanesItem> items) override {
    return ForEach(items, cpu::RefinePlanes);
  }
  absl::Status ScoreTokens(Stream&, std::span<const ScoreTokensItem> items) override {
    return ForEach(items, cpu::ScoreTokens);
  }
  absl::Status SelectTokens(Stream&, std::span<const SelectTokensItem> items) override {
    return ForEach(items, cpu::SelectTokens);
  }
  absl::Status WriteCentroids(Stream&, std::span<const WriteCentroidsItem> items) override {
    return ForEach(items, cpu::WriteCentroids);
  }
  absl::Status AssignQueries(Stream&, std::span<const AssignQueriesItem> items) override {
    return ForEach(items, cpu::AssignQueries);
  }
  absl::Status AverageQueries(Stream&, std::span<const AverageQueriesItem> items) override {
    return ForEach(items, cpu::AverageQueries);
  }
  absl::Status BuildLists(Stream&, std::span<const BuildListsItem> items) override {
    return ForEach(items, cpu::BuildLists);
  }
  absl::Status SelectLists(Stream&, std::span<const SelectListsItem> items) override {
    return ForEach(items, cpu::SelectLists);
  }
  absl::Status MergeCandidates(Stream&, std::span<const MergeCandidatesItem> items) override {
    return ForEach(items, cpu::MergeCandidates);
  }
  absl::Status GatherRows(Stream&, std::span<const GatherRowsItem> items) override {
    return ForEach(items, cpu::GatherRows);
  }
  absl::Status Attend(Stream&, std::span<const AttendItem> items) override { return ForEach(items, cpu::Attend); }
  absl::Status BuildClusters(Stream&, std::span<const BuildClustersItem> items) override {
    return ForEach(items, cpu::BuildClusters);
  }
  absl::Status ArrangeSketch(Stream&, std::span<const ArrangeSketchItem> items) override {
    return ForEach(items, cpu::ArrangeSketch);
  }
  absl::Status EstimateRest(Stream&, std::span<const EstimateRestItem> items) override {
    return ForEach(items, cpu::EstimateRest);
  }
  absl::Status SelectClusters(Stream&, std::span<const SelectClustersItem> items) override {
    return ForEach(items, cpu::SelectClusters);
  }
  absl::Status ScanClusters(Stream&, std::span<const ScanClustersItem> items) override {
    return ForEach(items, cpu::ScanClusters);
  }

 private:
  template <typename Item>
  absl::Status ForEach(std::span<const Item> items, void (*operation)(const CpuKernels&, const Item&)) const {
    for (const Item& item : items) operation(kernels_, item);
    return absl::OkStatus();
  }

  const CpuKernels& kernels_;
  const std::string device_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const CpuKernels& kernels) { return std::make_unique<CpuBackend>(kernels); }

}  // namespace ctkvr::cpu
