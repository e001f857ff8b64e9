// SPDX-License-Identifier: Apache-2.0
//
// Memory, copies and the order of work of the CPU backend. What the operations compute is tests/conformance's matter.

#include "kernels/cpu/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace ctkvr::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

std::unique_ptr<Backend> MakeBackend() { return MakeCpuBackend(*FindCpuKernels("portable")); }

size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  size_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

TEST(CpuBackendTest, BuffersAreAlignedAndWritableToTheLastByte) {
  const auto backend = MakeBackend();
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{4097}, kHugePage - 1, kHugePage,
                       kHugePage + 1, 3 * kHugePage + 12345}) {
    SCOPED_TRACE(bytes);
    auto buffer = backend->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->bytes(), bytes);
    ASSERT_NE(buffer->data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % (bytes >= kHugePage ? kHugePage : 64), 0u);
    std::memset(buffer->data(), 0x5a, bytes);
    if (bytes > 0) {
      EXPECT_EQ(buffer->data()[bytes - 1], std::byte{0x5a});
    }
  }
}

TEST(CpuBackendTest, MemoryIsNotTouchedBeforeItIsUsed) {
  const auto backend = MakeBackend();
  constexpr size_t kBytes = size_t{256} << 20;
  const size_t before = ResidentBytes();
  const auto buffer = backend->Allocate(kBytes);
  ASSERT_TRUE(buffer.ok());
  EXPECT_LT(ResidentBytes(), before + kBytes / 4);
}

TEST(CpuBackendTest, FreedMemoryGoesBackToTheSystem) {
  const auto backend = MakeBackend();
  constexpr size_t kBytes = size_t{64} << 20;
  const size_t before = ResidentBytes();
  {
    const auto buffer = backend->Allocate(kBytes);
    ASSERT_TRUE(buffer.ok());
    std::memset(buffer->data(), 1, kBytes);
    EXPECT_GE(ResidentBytes(), before + kBytes / 2);
  }
  EXPECT_LT(ResidentBytes(), before + kBytes / 2);
}

TEST(CpuBackendTest, SizesThatCannotBeHadAreExhaustedAndNamed) {
  const auto backend = MakeBackend();
  for (size_t bytes : {size_t{1} << 52, ~size_t{0}, ~size_t{0} - kHugePage}) {
    const auto buffer = backend->Allocate(bytes);
    ASSERT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted) << bytes;
    EXPECT_THAT(std::string(buffer.status().message()), ::testing::HasSubstr(std::to_string(bytes)));
  }
}

TEST(CpuBackendTest, BuffersMoveWithoutBeingFreedTwice) {
  const auto backend = MakeBackend();
  DeviceBuffer first = *backend->Allocate(100);
  std::byte* const data = first.data();
  DeviceBuffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  DeviceBuffer third = *backend->Allocate(200);
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.bytes(), 100u);
}

TEST(CpuBackendTest, CopiesCarryEveryByteAndEmptyOnesNothing) {
  const auto backend = MakeBackend();
  const auto stream = *backend->NewStream();
  const DeviceBuffer device = *backend->Allocate(1000);
  std::vector<std::byte> from(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = std::byte(i * 7);
  ASSERT_TRUE(backend->CopyIn(*stream, device.data(), from).ok());
  std::vector<std::byte> to(1000);
  ASSERT_TRUE(backend->CopyOut(*stream, to, device.data()).ok());
  ASSERT_TRUE(backend->Synchronize(*stream).ok());
  EXPECT_EQ(to, from);
  EXPECT_TRUE(backend->CopyIn(*stream, device.data(), {}).ok());
  EXPECT_TRUE(backend->CopyOut(*stream, {}, device.data()).ok());
  EXPECT_TRUE(backend->SharesHostMemory());
}

TEST(CpuBackendTest, AllItemsOfACallRun) {
  const auto backend = MakeBackend();
  const auto stream = *backend->NewStream();
  const float keys[2][16] = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, {3}};
  std::vector<float> page(64 * 16);
  std::memcpy(page.data(), keys, sizeof(keys));
  std::byte* const pages[] = {reinterpret_cast<std::byte*>(page.data())};
  std::vector<float> means(3 * 16, -1.0f);
  std::vector<FitMeanItem> items(3);
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].view.layout = MakePageLayout(Format::kK8V4, 16, 16, 1);
    items[i].view.raw_pages = pages;
    items[i].view.length = 2;
    items[i].begin = i == 2 ? 1 : 0;
    items[i].end = i == 0 ? 1 : 2;
    items[i].mean = means.data() + i * 16;
  }
  ASSERT_TRUE(backend->FitMean(*stream, items).ok());
  EXPECT_EQ(means[0], 1);
  EXPECT_EQ(means[16], 2);
  EXPECT_EQ(means[32], 3);
  EXPECT_EQ(means[31], 8);
  EXPECT_EQ(means[47], 0);
}

TEST(CpuBackendTest, InfoNamesProcessorAndInstructionSet) {
  const BackendInfo info = MakeBackend()->Info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_THAT(info.device, ::testing::EndsWith(", portable"));
  EXPECT_GT(info.device.size(), std::string(", portable").size());
}

TEST(CpuBackendTest, StreamsOfSeveralThreadsRunAtOnce) {
  const auto backend = MakeBackend();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      const auto stream = *backend->NewStream();
      for (int round = 0; round < 50; ++round) {
        const DeviceBuffer buffer = *backend->Allocate(4096);
        const std::vector<std::byte> from(4096, std::byte(round));
        ASSERT_TRUE(backend->CopyIn(*stream, buffer.data(), from).ok());
        ASSERT_EQ(buffer.data()[4095], std::byte(round));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ctkvr::cpu
