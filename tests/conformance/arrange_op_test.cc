// SPDX-License-Identifier: Apache-2.0
//
// ArrangeSketch on every backend: from any order to any other, every token's planes and scale go to its new slot.
// Outputs are poisoned and guarded.

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/cluster_ops.h"
#include "tests/conformance/op_cases.h"

namespace ctkvr::testing {
namespace {

class ArrangeSketchConformance : public OpConformance {
 protected:
  void Check(const StoredHead& from, const StoredHead& to, uint32_t index) {
    const HeadView before = from.view(), after = to.view();
    const SketchOrder& order = after.order;
    GuardedArray<std::byte> sketch(before.layout.sketch_bytes, 2);
    const ArrangeSketchItem item{.view = before,
                                 .index = index,
                                 .layout = {.clusters = order.clusters,
                                            .ends_offset = order.ends_offset,
                                            .places_offset = order.places_offset,
                                            .members_offset = order.members_offset},
                                 .begin = order.begin,
                                 .block = order.blocks[index],
                                 .sketch = sketch.data()};
    ASSERT_TRUE(backend().ArrangeSketch(stream(), {&item, 1}).ok());
    EXPECT_TRUE(sketch.IsUntouchedFrom(sketch.size()));
    const size_t token_bytes = before.layout.first_planes * before.layout.head_dim / 8;
    const size_t scales = before.layout.sketch_scales_offset;
    const std::byte* old = before.sketches[index];
    for (uint32_t token = index * 1024; token < std::min(before.length, index * 1024 + 1024); ++token) {
      const size_t at = oracle::SketchSlot(before, token), slot = oracle::SketchSlot(after, token);
      ASSERT_EQ(std::memcmp(sketch.data() + slot * token_bytes, old + at * token_bytes, token_bytes), 0) << token;
      ASSERT_EQ(std::memcmp(sketch.data() + scales + 2 * slot, old + scales + 2 * at, 2), 0) << token;
    }
  }
};

TEST_P(ArrangeSketchConformance, EveryTokenGoesToItsNewSlot) {
  uint32_t turn = 0;
  for (const uint32_t old_clusters : {0u, 3u, 64u, 128u}) {
    for (const uint32_t new_clusters : {1u, 64u, 128u}) {
      SCOPED_TRACE(::testing::Message() << old_clusters << " to " << new_clusters);
      StoreOptions options{.head_dim = 24, .value_dim = 16, .first_planes = 1 + ++turn % 2, .tokens = 1100};
      options.order_clusters = old_clusters;
      options.order_begin = old_clusters == 64 ? 9 : 0;
      const StoredHead from(options, 11);
      options.order_clusters = new_clusters;
      options.order_begin = 5;
      const StoredHead to(options, 12);
      ASSERT_NO_FATAL_FAILURE(Check(from, to, 0));
    }
  }
  StoreOptions options{.head_dim = 64, .value_dim = 16, .tokens = 2300};
  const StoredHead from(options, 13);
  options.order_clusters = 64;
  ASSERT_NO_FATAL_FAILURE(Check(from, StoredHead(options, 14), 2));
}

INSTANTIATE_TEST_SUITE_P(Backends, ArrangeSketchConformance, ::testing::ValuesIn(BackendNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace ctkvr::testing
