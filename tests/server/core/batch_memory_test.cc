// SPDX-License-Identifier: Apache-2.0
//
// Staging: host arrays as they are where memory is shared, copies in and out elsewhere; exhaustion, going back, faults.

#include "server/core/batch_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "tests/testing/fake_backend.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

using ::testing::HasSubstr;

struct Device {
  explicit Device(bool shares, size_t scratch_bytes = 4096)
      : backend({.shares_host_memory = shares}),
        stream(*backend.NewStream()),
        scratch(*Scratch::Create(backend, scratch_bytes)) {}
  LaneDevice lane() { return {.backend = backend, .stream = *stream, .scratch = scratch}; }

  FakeBackend backend;
  std::unique_ptr<Stream> stream;
  Scratch scratch;
};

TEST(BatchMemoryTest, SharedMemoryIsUsedAsItIs) {
  Device device(true);
  BatchMemory memory(device.lane());
  int value = 5;
  EXPECT_EQ(memory.In(&value, 1), &value);
  EXPECT_EQ(memory.Out(&value, 1), &value);
  EXPECT_EQ(device.scratch.mark(), 0u);
  EXPECT_EQ(device.backend.calls(), 0u);
}

TEST(BatchMemoryTest, InputsAndOutputsAreStagedElsewhere) {
  Device device(false);
  BatchMemory memory(device.lane());
  const std::vector<int> in = {1, 2, 3};
  std::vector<int> out = {0, 0, 0};
  const int* staged_in = memory.In(in.data(), 3);
  int* staged_out = memory.Out(out.data(), 3);
  EXPECT_NE(staged_in, in.data());
  EXPECT_NE(staged_out, out.data());
  EXPECT_EQ(memory.In(static_cast<const int*>(nullptr), 3), nullptr);
  ASSERT_THAT(device.backend.Synchronize(*device.stream), IsOk());
  std::memcpy(staged_out, staged_in, sizeof(int) * 3);  // what an operation would do
  ASSERT_THAT(memory.Finish(), IsOk());
  EXPECT_EQ(out, in);
}

TEST(BatchMemoryTest, EqualTablesAreStagedOnce) {
  Device device(false);
  BatchMemory memory(device.lane());
  std::byte* pages[2] = {nullptr, nullptr};
  HeadView view{.layout = {}, .pages = pages};
  const HeadView first = memory.Stage(view, 2), second = memory.Stage(view, 2), shorter = memory.Stage(view, 1);
  EXPECT_EQ(first.pages, second.pages);
  EXPECT_NE(first.pages, shorter.pages);
  EXPECT_EQ(first.raw_pages, nullptr);
}

TEST(BatchMemoryTest, WhatDoesNotFitShowsAndCanBeUndone) {
  Device device(true, 4096);
  BatchMemory memory(device.lane());
  EXPECT_NE(memory.Take<std::byte>(1000), nullptr);
  const BatchMemory::Mark mark = memory.mark();
  EXPECT_NE(memory.Take<std::byte>(1000), nullptr);
  EXPECT_EQ(memory.Take<std::byte>(5000), nullptr);
  EXPECT_EQ(memory.Take<std::byte>(1), nullptr) << "nothing fits once something did not";
  EXPECT_TRUE(memory.exhausted());
  EXPECT_THAT(memory.ExhaustedError("the work"),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("the work needs 7168 bytes of scratch; the lane has 4096")));
  memory.ResetTo(mark);
  EXPECT_FALSE(memory.exhausted());
  EXPECT_NE(memory.Take<std::byte>(3000), nullptr);
}

TEST(BatchMemoryTest, ScratchIsGivenBack) {
  Device device(false);
  {
    BatchMemory memory(device.lane());
    memory.Take<std::byte>(4096);
    EXPECT_EQ(device.scratch.mark(), 4096u);
    ASSERT_THAT(memory.FinishAndReset(), IsOk());
    EXPECT_EQ(device.scratch.mark(), 0u);
    memory.Take<std::byte>(64);
  }
  EXPECT_EQ(device.scratch.mark(), 0u);
}

TEST(BatchMemoryTest, AFailedCopyIsReportedByStatusAndByFinish) {
  Device device(false);
  BatchMemory memory(device.lane());
  const int value = 1;
  device.backend.Fail({.first = 0});
  memory.In(&value, 1);
  EXPECT_THAT(memory.status(), StatusIs(absl::StatusCode::kInternal, HasSubstr("CopyIn")));
  EXPECT_THAT(memory.Finish(), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(memory.Settle(), IsOk());
  EXPECT_THAT(memory.status(), IsOk());
}

TEST(BatchMemoryTest, CopiesOnTheDeviceAreDoneWhenTheCallReturns) {
  for (const bool shares : {true, false}) {
    Device device(shares, size_t{10} << 20);
    constexpr size_t kBytes = size_t{1} << 20;
    auto* from = device.scratch.Allocate<std::byte>(5 * kBytes);
    auto* to = device.scratch.Allocate<std::byte>(5 * kBytes - 64);
    std::memset(from, 7, 5 * kBytes);
    std::memset(to, 0, 5 * kBytes - 64);
    // More than the hop holds at once, and a piece larger than it.
    std::vector<DeviceCopy> copies = {{.to = to, .from = from, .bytes = 100},
                                      {.to = to + 100, .from = from + 100, .bytes = kBytes * 9 / 2},
                                      {.to = to + 100 + kBytes * 9 / 2, .from = from, .bytes = 50}};
    ASSERT_THAT(CopyOnDevice(device.lane(), copies), IsOk());
    const size_t copied = 150 + kBytes * 9 / 2;
    EXPECT_EQ(std::memcmp(from, to, copied), 0);
    EXPECT_EQ(to[copied], std::byte{0});
    device.backend.Fail({.first = 1});
    EXPECT_THAT(CopyOnDevice(device.lane(), copies), StatusIs(absl::StatusCode::kInternal));
  }
}

}  // namespace
}  // namespace ctkvr::testing
