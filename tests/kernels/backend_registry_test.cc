// SPDX-License-Identifier: Apache-2.0

#include "kernels/backend_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cpu/kernels.h"

namespace ctkvr {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(BackendRegistryTest, PortableRunsOnEveryMachine) {
  const auto backend = CreateBackend("cpu:portable");
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->Info().name, "cpu");
  EXPECT_THAT((*backend)->Info().device, EndsWith(", portable"));
}

TEST(BackendRegistryTest, AutoAndCpuTakeTheBestInstructionSet) {
  for (const char* name : {"auto", "cpu"}) {
    const auto backend = CreateBackend(name);
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_THAT((*backend)->Info().device, EndsWith(std::string(", ") + cpu::BestCpuKernels().name));
  }
}

TEST(BackendRegistryTest, AnInstructionSetIsThereExactlyWhereTheMachineHasIt) {
  for (const char* name : {"avx2", "avx512"}) {
    const auto backend = CreateBackend(std::string("cpu:") + name);
    if (cpu::FindCpuKernels(name) != nullptr) {
      ASSERT_TRUE(backend.ok()) << backend.status();
      EXPECT_THAT((*backend)->Info().device, EndsWith(name));
    } else {
      ASSERT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(backend.status().message()), HasSubstr(name));
    }
  }
}

TEST(BackendRegistryTest, UnknownNamesAreRefusedWithTheKnownOnes) {
  for (const char* name : {"", "gpu", "CPU", "cpu:", "cpu:sse2", "portable", "cpu:avx2 "}) {
    const auto backend = CreateBackend(name);
    ASSERT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(backend.status().message()), HasSubstr("cpu:portable"));
  }
}

}  // namespace
}  // namespace ctkvr
