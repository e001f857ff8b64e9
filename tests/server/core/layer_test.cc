// SPDX-License-Identifier: Apache-2.0
//
// Places, commits and what they hold, without an engine: pages come and go with the length, raw pages until the mean is
// fixed, and an abandoned write leaves nothing.

#include "server/core/layer.h"

#include <gtest/gtest.h>

#include "tests/server/core/core_fixture.h"

namespace ctkvr::testing {
namespace {

class LayerTest : public ::testing::Test {
 protected:
  void Make(const LayerConfig& layer, uint32_t token_limit = 1024) {
    config_ = SmallConfig(layer, token_limit);
    MemoryPlan plan;
    const LayerRequests requests = PlanLayer(config_.layers[0], config_, {}, plan);
    arena_ = *Arena::Create(backend_, size_t{16} << 20);
    reservations_ = *arena_->Reserve(plan.requests());
    EXPECT_EQ(plan.bytes(), arena_->reserved_bytes());
    const auto at = [&](size_t i) { return i == MemoryPlan::kNone ? nullptr : &reservations_[i]; };
    layer_.emplace(config_.layers[0], config_,
                   Layer::Memory{.pages = at(requests.pages),
                                 .sketches = at(requests.sketches),
                                 .raw_pages = at(requests.raw_pages),
                                 .mean = at(requests.mean),
                                 .index = {.centroids = at(requests.index.centroids),
                                           .lists = at(requests.index.lists),
                                           .norms = at(requests.index.norms)},
                                 .signs = nullptr});
  }
  MemoryInfo Memory() {
    MemoryInfo memory;
    layer_->AddTo(memory);
    EXPECT_EQ(memory.held_bytes(), arena_->held_bytes());
    return memory;
  }

  FakeBackend backend_;
  SessionConfig config_;
  std::unique_ptr<Arena> arena_;
  std::vector<Reservation> reservations_;
  std::optional<Layer> layer_;
};

TEST_F(LayerTest, PagesComeByGrowAndGoByCommit) {
  Make(SmallLayer(Format::kF16, Source::kExact));
  const uint64_t page = layer_->layout().page_bytes;
  EXPECT_EQ(Memory().page_bytes, 0u);
  layer_->Grow(1);
  EXPECT_EQ(Memory().page_bytes, 2 * page);
  layer_->Grow(64);
  EXPECT_EQ(Memory().page_bytes, 2 * page);
  layer_->Grow(65);
  EXPECT_EQ(Memory().page_bytes, 4 * page);
  EXPECT_EQ(layer_->length(), 0u);
  layer_->Commit(65);
  EXPECT_EQ(layer_->length(), 65u);
  EXPECT_EQ(layer_->View(1).length, 65u);
  layer_->Commit(64);
  EXPECT_EQ(Memory().page_bytes, 2 * page);
  layer_->Commit(0);
  EXPECT_EQ(Memory().held_bytes(), 0u);
}

TEST_F(LayerTest, AnAbandonedWriteLeavesWhatWasCommitted) {
  Make(SmallLayer());
  layer_->Grow(100);
  layer_->Commit(100);
  const MemoryInfo before = Memory();
  layer_->Grow(600);
  layer_->MeanPlace(0);
  EXPECT_GT(Memory().held_bytes(), before.held_bytes());
  layer_->Abandon();
  EXPECT_EQ(Memory().held_bytes(), before.held_bytes());
  EXPECT_TRUE(layer_->raw());
}

TEST_F(LayerTest, RawPagesEndWhereCodesBegin) {
  Make(SmallLayer());
  EXPECT_EQ(layer_->coding_length(), 516u);
  const uint64_t raw_page = 64 * 32 * 2;
  layer_->Grow(1000);
  EXPECT_EQ(Memory().raw_bytes, 2 * 9 * raw_page);
  const uint64_t reserved = arena_->reserved_bytes();
  EXPECT_EQ(layer_->key_bytes(), 64u);
  EXPECT_EQ(layer_->storage_key_bytes(), 64u);
  layer_->MeanPlace(1)[3] = 0;
  layer_->FixMean(std::vector<float>(64, 0.5f));
  layer_->Commit(1000);
  EXPECT_EQ(Memory().raw_bytes, 0u);
  EXPECT_EQ(reserved - arena_->reserved_bytes(), 2 * 9 * raw_page);
  EXPECT_FALSE(layer_->raw());
  EXPECT_EQ(layer_->View(0).raw_pages, nullptr);
  EXPECT_EQ(layer_->key_bytes(), 8u * 4 + 2);
  EXPECT_EQ(layer_->Codec(9).key_mean[63], 0.5f);
  EXPECT_EQ(layer_->Codec(9).rotation_seed, 9u);
}

TEST_F(LayerTest, AShortTokenLimitKeepsTheLayerRaw) {
  Make(SmallLayer(), 100);
  layer_->Grow(100);
  layer_->Commit(100);
  EXPECT_TRUE(layer_->raw());
  EXPECT_EQ(Memory().raw_bytes, 2u * 2 * 64 * 32 * 2);
}

TEST_F(LayerTest, PlacesCountFromTheirFirstSketchBlock) {
  Make(SmallLayer(), 4096);
  layer_->Grow(2100);
  layer_->Commit(2100);
  const HeadView whole = layer_->View(1);
  const HeadView places = layer_->Places(1, 2, false);
  EXPECT_EQ(places.sketches[0], whole.sketches[2]);
  EXPECT_EQ(places.pages[0], whole.pages[32]);
  EXPECT_EQ(places.raw_pages, nullptr);
  EXPECT_EQ(layer_->Places(1, 0, true).raw_pages, whole.raw_pages);
}

TEST_F(LayerTest, SketchBlocksAreOfCodedKeysAlone) {
  Make(SmallLayer(), 4096);
  const uint64_t page = layer_->layout().page_bytes, sketch = layer_->layout().sketch_bytes;
  for (const auto& [length, blocks] : {std::pair{1u, 1u}, {1024u, 1u}, {1025u, 2u}, {2048u, 2u}}) {
    layer_->Grow(length);
    EXPECT_EQ(Memory().page_bytes, 2 * (Layer::page_count(length) * page + blocks * sketch)) << length;
  }
  layer_->Commit(1024);
  EXPECT_EQ(Memory().page_bytes, 2 * (16 * page + sketch));
  layer_.reset();
  reservations_.clear();
  Make(SmallLayer(Format::kF16, Source::kExact));
  layer_->Grow(100);
  EXPECT_EQ(layer_->View(0).sketches, nullptr);
  EXPECT_EQ(Memory().page_bytes, 2 * 2 * layer_->layout().page_bytes);
}

TEST_F(LayerTest, OnlyLayersWithCentroidsHaveAnIndex) {
  Make(SmallLayer());
  EXPECT_EQ(layer_->index(), nullptr);
  layer_.reset();
  reservations_.clear();
  Make(SmallLayer(Format::kF16, Source::kQueryCentroids));
  ASSERT_NE(layer_->index(), nullptr);
  EXPECT_EQ(layer_->index()->ring_count(), 0u);
}

}  // namespace
}  // namespace ctkvr::testing
