// SPDX-License-Identifier: Apache-2.0

#include "kernels/scratch.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/backend_registry.h"

namespace ctkvr {
namespace {

class ScratchTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = *CreateBackend("cpu:portable");
};

TEST_F(ScratchTest, AllocationsAreAlignedAndDoNotOverlap) {
  Scratch scratch = *Scratch::Create(*backend_, 4096);
  auto* bytes = scratch.Allocate<std::byte>(3);
  auto* floats = scratch.Allocate<float>(17);
  auto* halves = scratch.Allocate<uint16_t>(1);
  for (const void* data : {static_cast<void*>(bytes), static_cast<void*>(floats), static_cast<void*>(halves)}) {
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
  }
  EXPECT_GE(reinterpret_cast<std::byte*>(floats), bytes + 3);
  EXPECT_GE(reinterpret_cast<std::byte*>(halves), reinterpret_cast<std::byte*>(floats + 17));
}

TEST_F(ScratchTest, WhatDoesNotFitIsNullAndTakesNothing) {
  Scratch scratch = *Scratch::Create(*backend_, 256);
  EXPECT_EQ(scratch.Allocate<std::byte>(257), nullptr);
  EXPECT_NE(scratch.Allocate<std::byte>(256), nullptr);
  EXPECT_EQ(scratch.Allocate<std::byte>(1), nullptr);
  EXPECT_EQ(scratch.high_water_bytes(), 256u);
}

TEST_F(ScratchTest, ASizeThatOverflowsIsNull) {
  Scratch scratch = *Scratch::Create(*backend_, 256);
  EXPECT_EQ(scratch.Allocate<uint64_t>((size_t{1} << 61) + 1), nullptr);
  EXPECT_EQ(scratch.Allocate<std::byte>(~size_t{0}), nullptr);
  EXPECT_EQ(scratch.mark(), 0u);
}

TEST_F(ScratchTest, ResetGivesTheSameMemoryAgainAndKeepsTheHighWater) {
  Scratch scratch = *Scratch::Create(*backend_, 4096);
  (void)scratch.Allocate<std::byte>(100);
  const size_t mark = scratch.mark();
  auto* first = scratch.Allocate<float>(100);
  scratch.ResetTo(mark);
  EXPECT_EQ(scratch.Allocate<float>(50), first);
  EXPECT_EQ(scratch.high_water_bytes(), 128u + 400u);
  EXPECT_EQ(scratch.capacity_bytes(), 4096u);
}

TEST_F(ScratchTest, ClearingZeroesAllThatWasUsedSince) {
  const auto stream = *backend_->NewStream();
  Scratch scratch = *Scratch::Create(*backend_, 4096);
  auto* bytes = scratch.Allocate<unsigned char>(1000);
  std::fill_n(bytes, 1000, 0x77);
  scratch.ResetTo(0);
  (void)scratch.Allocate<std::byte>(10);
  scratch.ResetTo(0);
  scratch.Clear(*backend_, *stream);
  EXPECT_EQ(std::count(bytes, bytes + 1000, 0), 1000);
  std::fill_n(bytes, 1000, 0x77);  // not allocated: nothing of it is used
  scratch.Clear(*backend_, *stream);
  EXPECT_EQ(std::count(bytes, bytes + 1000, 0x77), 1000);
  EXPECT_EQ(scratch.high_water_bytes(), 1000u) << "of all time";
}

TEST_F(ScratchTest, MemoryThatCannotBeHadIsExhausted) {
  EXPECT_EQ(Scratch::Create(*backend_, size_t{1} << 52).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace ctkvr
