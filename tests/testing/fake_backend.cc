// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/fake_backend.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/backend_registry.h"
#include "kernels/base/check.h"

namespace ctkvr::testing {
namespace {

constexpr int kPoison = 0xa5;

}  // namespace

// Work waits here until Synchronize when the fake plays a device of its own.
class FakeBackend::FakeStream final : public Stream {
 public:
  explicit FakeStream(std::unique_ptr<Stream> real_stream) : real(std::move(real_stream)) {}
  std::unique_ptr<Stream> real;
  std::deque<std::function<absl::Status()>> waiting;
};

FakeBackend::FakeBackend(FakeBackendOptions options) : options_(std::move(options)) {
  absl::StatusOr<std::unique_ptr<Backend>> real = CreateBackend(options_.real);
  CTKVR_CHECK(real.ok());
  real_ = *std::move(real);
}

FakeBackend::~FakeBackend() = default;

void FakeBackend::Fail(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  fault_ = fault;
  fail_begin_ = calls_ + fault.first;
  fail_end_ = fail_begin_ + fault.count;
  failed_call_.clear();
}

void FakeBackend::StopFailing() {
  const std::lock_guard lock(mutex_);
  fail_begin_ = fail_end_ = 0;
}

std::string FakeBackend::failed_call() const {
  const std::lock_guard lock(mutex_);
  return failed_call_;
}

BackendInfo FakeBackend::Info() const { return {.name = "fake", .device = real_->Info().device}; }

absl::StatusOr<DeviceBuffer> FakeBackend::Allocate(size_t bytes) {
  absl::StatusOr<DeviceBuffer> buffer = real_->Allocate(bytes);
  if (!buffer.ok()) return buffer;
  std::memset(buffer->data(), kPoison, bytes);
  const std::lock_guard lock(mutex_);
  allocated_.emplace_back(buffer->data(), bytes);
  return buffer;
}

size_t FakeBackend::CountIn(size_t allocation, std::span<const std::byte> bytes) const {
  const std::lock_guard lock(mutex_);
  const auto& [begin, size] = allocated_.at(allocation);
  size_t count = 0;
  const auto* at = begin;
  while ((at = static_cast<const std::byte*>(memmem(at, begin + size - at, bytes.data(), bytes.size()))) != nullptr) {
    ++at;
    ++count;
  }
  return count;
}

absl::StatusOr<std::unique_ptr<Stream>> FakeBackend::NewStream() {
  absl::StatusOr<std::unique_ptr<Stream>> real = real_->NewStream();
  if (!real.ok()) return real.status();
  return std::make_unique<FakeStream>(*std::move(real));
}

absl::Status FakeBackend::NextCall(const char* name, bool* do_work) {
  if (options_.on_call) options_.on_call(name);
  const std::lock_guard lock(mutex_);
  const uint64_t call = calls_++;
  const bool fails = call >= fail_begin_ && call < fail_end_;
  *do_work = !fails || fault_.after_work;
  if (!fails) return absl::OkStatus();
  failed_call_ = name;
  return absl::Status(fault_.code, absl::StrCat("fault in ", name));
}

void FakeBackend::ExpectOnDevice(const char* name, const void* pointer) const {
  if (options_.shares_host_memory || pointer == nullptr) return;
  const auto* at = static_cast<const std::byte*>(pointer);
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, bytes] : allocated_) {
    if (at >= begin && at < begin + bytes) return;
  }
  ADD_FAILURE() << name << " was given a pointer to host memory";
}

void FakeBackend::ExpectOnDevice(const char* name, std::initializer_list<const void*> pointers) const {
  for (const void* pointer : pointers) ExpectOnDevice(name, pointer);
}

void FakeBackend::ExpectOnDevice(const char* name, const HeadView& view) const {
  ExpectOnDevice(name, {view.pages, view.sketches, view.order.blocks, view.raw_pages, view.mean, view.signs});
}

namespace {

// Every array an item names, for the check that it lies on the device.
template <typename Item>
std::vector<const void*> PointersOf(const Item& item) {
  if constexpr (std::is_same_v<Item, PrepareQueriesItem>) {
    return {item.query, item.mean, item.signs, item.out.plain, item.out.rotated, item.out.scan, item.out.refine};
  } else if constexpr (std::is_same_v<Item, FitMeanItem>) {
    return {item.mean};
  } else if constexpr (std::is_same_v<Item, WriteTokensItem>) {
    return {item.keys, item.values, item.bad_key_element, item.bad_value_element};
  } else if constexpr (std::is_same_v<Item, ScanPlanesItem>) {
    return {item.query.scan, item.estimates};
  } else if constexpr (std::is_same_v<Item, RefinePlanesItem>) {
    return {item.query.refine, item.tokens, item.count, item.estimates};
  } else if constexpr (std::is_same_v<Item, ScoreTokensItem>) {
    return {item.query.plain, item.tokens, item.count, item.scores};
  } else if constexpr (std::is_same_v<Item, SelectTokensItem>) {
    return {item.scores, item.tokens,       item.count,         item.softmax.sink_logits,
            item.chosen, item.chosen_count, item.chosen_scores, item.workspace};
  } else if constexpr (std::is_same_v<Item, WriteCentroidsItem>) {
    return {item.queries, item.slots, item.centroids, item.norms};
  } else if constexpr (std::is_same_v<Item, AssignQueriesItem>) {
    return {item.queries, item.centroids, item.nearest};
  } else if constexpr (std::is_same_v<Item, AverageQueriesItem>) {
    return {item.queries, item.nearest, item.centroids};
  } else if constexpr (std::is_same_v<Item, BuildListsItem>) {
    return {item.centroids, item.mean_norms, item.softmax.sink_logits, item.lists, item.list_counts};
  } else if constexpr (std::is_same_v<Item, SelectListsItem>) {
    return {item.query.plain, item.centroids, item.selected};
  } else if constexpr (std::is_same_v<Item, MergeCandidatesItem>) {
    return {item.lists, item.list_counts, item.selected, item.tokens, item.count, item.workspace};
  } else if constexpr (std::is_same_v<Item, AttendItem>) {
    return {item.tokens, item.count, item.scores, item.softmax.sink_logits, item.output, item.log_sum_exp};
  } else if constexpr (std::is_same_v<Item, BuildClustersItem>) {
    return {item.block, item.workspace};
  } else if constexpr (std::is_same_v<Item, ArrangeSketchItem>) {
    return {item.block, item.sketch};
  } else if constexpr (std::is_same_v<Item, EstimateRestItem>) {
    return {item.query.plain, item.blocks,      item.tokens,     item.count,    item.mean_scores,
            item.output,      item.log_sum_exp, item.lines_read, item.workspace};
  } else if constexpr (std::is_same_v<Item, SelectClustersItem>) {
    return {item.query.plain, item.blocks, item.forced_scores, item.forced_count,
            item.scores,      item.opened, item.opened_count,  item.workspace};
  } else if constexpr (std::is_same_v<Item, ScanClustersItem>) {
    return {item.query.scan,   item.blocks, item.mean_scores, item.opened,
            item.opened_count, item.tokens, item.count,       item.estimates};
  } else {
    static_assert(std::is_same_v<Item, GatherRowsItem>, "an operation without a list of its arrays");
    return {item.tokens, item.count, item.keys, item.values, item.overflow};
  }
}

template <typename Item>
concept HasView = requires(const Item& item) {
  item.view;
};

}  // namespace

template <typename Item>
absl::Status FakeBackend::Operate(Stream& stream, const char* name, std::span<const Item> items,
                                  absl::Status (Backend::*operation)(Stream&, std::span<const Item>)) {
  auto& fake_stream = static_cast<FakeStream&>(stream);
  for (const Item& item : items) {
    for (const void* pointer : PointersOf(item)) ExpectOnDevice(name, pointer);
    if constexpr (HasView<Item>) ExpectOnDevice(name, item.view);
  }
  bool do_work = false;
  const absl::Status fault = NextCall(name, &do_work);
  if (!do_work) return fault;
  const auto work = [this, &fake_stream, operation](std::span<const Item> own) {
    const absl::Status status = (real_.get()->*operation)(*fake_stream.real, own);
    if constexpr (std::is_constructible_v<Watched, std::span<const Item>>) {
      if (watch_) watch_(Watched(own));
    }
    return status;
  };
  if (options_.shares_host_memory) {
    const absl::Status status = work(items);
    return fault.ok() ? status : fault;
  }
  fake_stream.waiting.push_back([work, copy = std::vector<Item>(items.begin(), items.end())] { return work(copy); });
  return fault;
}

absl::Status FakeBackend::CopyIn(Stream& stream, std::byte* to, std::span<const std::byte> from) {
  auto& fake_stream = static_cast<FakeStream&>(stream);
  if (!from.empty()) ExpectOnDevice("CopyIn", to);
  bool do_work = false;
  const absl::Status fault = NextCall("CopyIn", &do_work);
  if (!do_work) return fault;
  if (options_.shares_host_memory) {
    const absl::Status status = real_->CopyIn(*fake_stream.real, to, from);
    return fault.ok() ? status : fault;
  }
  fake_stream.waiting.push_back([this, &fake_stream, to, from] { return real_->CopyIn(*fake_stream.real, to, from); });
  return fault;
}

void FakeBackend::Clear(Stream& stream, std::byte* at, size_t bytes) {
  ExpectOnDevice("Clear", at);
  real_->Clear(*static_cast<FakeStream&>(stream).real, at, bytes);
}

absl::Status FakeBackend::CopyOut(Stream& stream, std::span<std::byte> to, const std::byte* from) {
  auto& fake_stream = static_cast<FakeStream&>(stream);
  if (!to.empty()) ExpectOnDevice("CopyOut", from);
  bool do_work = false;
  const absl::Status fault = NextCall("CopyOut", &do_work);
  if (!do_work) return fault;
  if (options_.shares_host_memory) {
    const absl::Status status = real_->CopyOut(*fake_stream.real, to, from);
    return fault.ok() ? status : fault;
  }
  fake_stream.waiting.push_back([this, &fake_stream, to, from] { return real_->CopyOut(*fake_stream.real, to, from); });
  return fault;
}

absl::Status FakeBackend::Synchronize(Stream& stream) {
  auto& fake_stream = static_cast<FakeStream&>(stream);
  bool do_work = false;
  const absl::Status fault = NextCall("Synchronize", &do_work);
  // A failed wait leaves nothing behind: the work was done or it was lost.
  std::deque<std::function<absl::Status()>> work;
  work.swap(fake_stream.waiting);
  if (!do_work) return fault;
  for (const auto& step : work) {
    const absl::Status status = step();
    if (!status.ok()) return status;
  }
  const absl::Status status = real_->Synchronize(*fake_stream.real);
  return fault.ok() ? status : fault;
}

absl::Status FakeBackend::PrepareQueries(Stream& stream, std::span<const PrepareQueriesItem> items) {
  return Operate(stream, "PrepareQueries", items, &Backend::PrepareQueries);
}
absl::Status FakeBackend::FitMean(Stream& stream, std::span<const FitMeanItem> items) {
  return Operate(stream, "FitMean", items, &Backend::FitMean);
}
absl::Status FakeBackend::WriteTokens(Stream& stream, std::span<const WriteTokensItem> items) {
  return Operate(stream, "WriteTokens", items, &Backend::WriteTokens);
}
absl::Status FakeBackend::ScanPlanes(Stream& stream, std::span<const ScanPlanesItem> items) {
  return Operate(stream, "ScanPlanes", items, &Backend::ScanPlanes);
}
absl::Status FakeBackend::RefinePlanes(Stream& stream, std::span<const RefinePlanesItem> items) {
  return Operate(stream, "RefinePlanes", items, &Backend::RefinePlanes);
}
absl::Status FakeBackend::ScoreTokens(Stream& stream, std::span<const ScoreTokensItem> items) {
  return Operate(stream, "ScoreTokens", items, &Backend::ScoreTokens);
}
absl::Status FakeBackend::SelectTokens(Stream& stream, std::span<const SelectTokensItem> items) {
  return Operate(stream, "SelectTokens", items, &Backend::SelectTokens);
}
absl::Status FakeBackend::WriteCentroids(Stream& stream, std::span<const WriteCentroidsItem> items) {
  return Operate(stream, "WriteCentroids", items, &Backend::WriteCentroids);
}
absl::Status FakeBackend::AssignQueries(Stream& stream, std::span<const AssignQueriesItem> items) {
  return Operate(stream, "AssignQueries", items, &Backend::AssignQueries);
}
absl::Status FakeBackend::AverageQueries(Stream& stream, std::span<const AverageQueriesItem> items) {
  return Operate(stream, "AverageQueries", items, &Backend::AverageQueries);
}
absl::Status FakeBackend::BuildLists(Stream& stream, std::span<const BuildListsItem> items) {
  return Operate(stream, "BuildLists", items, &Backend::BuildLists);
}
absl::Status FakeBackend::SelectLists(Stream& stream, std::span<const SelectListsItem> items) {
  return Operate(stream, "SelectLists", items, &Backend::SelectLists);
}
absl::Status FakeBackend::MergeCandidates(Stream& stream, std::span<const MergeCandidatesItem> items) {
  return Operate(stream, "MergeCandidates", items, &Backend::MergeCandidates);
}
absl::Status FakeBackend::GatherRows(Stream& stream, std::span<const GatherRowsItem> items) {
  return Operate(stream, "GatherRows", items, &Backend::GatherRows);
}
absl::Status FakeBackend::Attend(Stream& stream, std::span<const AttendItem> items) {
  return Operate(stream, "Attend", items, &Backend::Attend);
}
absl::Status FakeBackend::BuildClusters(Stream& stream, std::span<const BuildClustersItem> items) {
  return Operate(stream, "BuildClusters", items, &Backend::BuildClusters);
}
absl::Status FakeBackend::ArrangeSketch(Stream& stream, std::span<const ArrangeSketchItem> items) {
  return Operate(stream, "ArrangeSketch", items, &Backend::ArrangeSketch);
}
absl::Status FakeBackend::EstimateRest(Stream& stream, std::span<const EstimateRestItem> items) {
  return Operate(stream, "EstimateRest", items, &Backend::EstimateRest);
}
absl::Status FakeBackend::SelectClusters(Stream& stream, std::span<const SelectClustersItem> items) {
  return Operate(stream, "SelectClusters", items, &Backend::SelectClusters);
}
absl::Status FakeBackend::ScanClusters(Stream& stream, std::span<const ScanClustersItem> items) {
  return Operate(stream, "ScanClusters", items, &Backend::ScanClusters);
}

}  // namespace ctkvr::testing
