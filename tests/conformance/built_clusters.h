// SPDX-License-Identifier: Apache-2.0
//
// Key clusters made by the backend under test, for the operations that read them. Not thread-safe.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cluster_ops.h"
#include "tests/conformance/op_cases.h"
#include "tests/testing/cluster_oracle.h"

namespace ctkvr::testing {

// Clusters of tokens [begin, end) of a head, block by block.
class BuiltClusters {
 public:
  BuiltClusters(const StoredHead& head, uint32_t tokens_per_cluster, uint32_t begin, uint32_t end)
      : layout(MakeClusterLayout(head.options().format, head.options().head_dim, head.options().value_dim,
                                 tokens_per_cluster)),
        begin_(begin),
        end_(end) {
    for (uint32_t block = 0; block < ClusterBlocks(begin, end); ++block) blocks_.emplace_back(layout.block_bytes);
    for (auto& block : blocks_) pointers_.push_back(block.data());
  }
  void Build(Backend& backend, Stream& stream, const StoredHead& head) {
    GuardedArray<std::byte> workspace(BuildClustersWorkspaceBytes(layout), 4);
    for (uint32_t block = 0; block < blocks_.size(); ++block) {
      const BuildClustersItem item{.view = head.view(),
                                   .layout = layout,
                                   .begin = first(block),
                                   .count = count(block),
                                   .block = pointers_[block],
                                   .workspace = workspace.data()};
      ASSERT_TRUE(backend.BuildClusters(stream, {&item, 1}).ok());
      EXPECT_TRUE(workspace.IsUntouchedFrom(workspace.size()));
      EXPECT_TRUE(blocks_[block].IsUntouchedFrom(blocks_[block].size()));
      // Members of other tokens than the clusters' stay as they were.
      for (uint32_t offset = 0; layout.members_offset != 0 && offset < kClusterBlockTokens; ++offset) {
        const bool other =
            offset < item.begin % kClusterBlockTokens || offset >= item.begin % kClusterBlockTokens + item.count;
        EXPECT_TRUE(!other || blocks_[block].IsUntouched(layout.members_offset + offset));
      }
    }
  }
  // Blocks are cut at multiples of 1,024 positions.
  uint32_t first(uint32_t block) const { return block == 0 ? begin_ : (begin_ / 1024 + block) * 1024; }
  uint32_t count(uint32_t block) const { return std::min(end_, (begin_ / 1024 + block + 1) * 1024) - first(block); }
  oracle::Clusters Decoded(const StoredHead& head) const {
    const std::vector<const std::byte*> blocks(pointers_.begin(), pointers_.end());
    return oracle::DecodeClusters(layout, blocks, begin_, end_, oracle::CodecOf(head.view()));
  }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> all;
    for (uint32_t block = 0; block < blocks_.size(); ++block) {
      all.insert(all.end(), pointers_[block], pointers_[block] + layout.block_bytes);
    }
    return all;
  }
  // Every offset of a block once: those of no cluster at their own slots, a cluster's in ascending order.
  void CheckOrder(const oracle::Clusters& clusters) const {
    for (uint32_t block = 0; block < blocks_.size(); ++block) {
      std::vector<bool> seen(kClusterBlockTokens);
      uint32_t last_cluster = 0, last_offset = 0;
      for (uint32_t slot = 0; slot < kClusterBlockTokens; ++slot) {
        uint16_t place;
        std::memcpy(&place, pointers_[block] + layout.places_offset + 2 * slot, 2);
        const uint32_t offset = place % 1024, begin = first(block) % 1024;
        ASSERT_FALSE(seen[offset]);
        seen[offset] = true;
        if (slot < begin || slot >= begin + count(block)) {
          ASSERT_EQ(offset, slot);
          continue;
        }
        const uint32_t cluster = clusters.cluster_of[first(block) - begin_ + offset - begin];
        if (slot > begin) {
          ASSERT_TRUE(last_cluster < cluster || (last_cluster == cluster && last_offset < offset)) << slot;
        }
        last_cluster = cluster;
        last_offset = offset;
      }
    }
  }
  uint32_t block_count() const { return static_cast<uint32_t>(blocks_.size()); }
  const std::byte* const* blocks() const { return pointers_.data(); }
  std::byte* block(uint32_t index) { return pointers_[index]; }

  const ClusterLayout layout;

 private:
  const uint32_t begin_, end_;
  std::vector<GuardedArray<std::byte>> blocks_;
  std::vector<std::byte*> pointers_;
};

}  // namespace ctkvr::testing
