// SPDX-License-Identifier: Apache-2.0
//
// What answers say was read, against a set of the addresses of the lines that each operation's text makes it read:
// every source, both orders of sketch blocks, records that are and are not whole lines. The parameter says whether the
// backend shares host memory.

#include "server/core/bytes_read.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "kernels/cluster_ops.h"
#include "tests/server/core/core_fixture.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

// Lines read, for each set: items of one call belong to the sets in their order.
class LineRecorder {
 public:
  void operator()(const FakeBackend::Watched& watched) {
    std::visit(
        [this](const auto& items) {
          for (size_t i = 0; i < items.size(); ++i) {
            lines_ = &sets_[i];
            Read(items[i]);
          }
        },
        watched);
  }
  uint64_t TakeBytes() {
    uint64_t lines = 0;
    for (const auto& [set, own] : sets_) lines += own.size();
    sets_.clear();
    return 64 * lines + TakeRestBytes();
  }

 private:
  void Touch(const void* at, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(at);
    for (uintptr_t line = begin / 64; bytes > 0 && line <= (begin + bytes - 1) / 64; ++line) lines_->insert(line);
  }
  uint64_t TakeRestBytes() { return 64 * std::exchange(rest_lines_, 0); }

  static bool IsCoded(const HeadView& view) { return KeysAreCoded(view.layout.format) && view.raw_pages == nullptr; }
  static const std::byte* BlockOf(const HeadView& view, uint32_t index) {
    return view.order.blocks == nullptr ? nullptr : view.order.blocks[index];
  }
  static uint16_t Number(const std::byte* at, size_t index) {
    uint16_t value;
    std::memcpy(&value, at + 2 * index, 2);
    return value;
  }
  // Slots [first, last) of a block are those of its clusters.
  static uint32_t FirstOf(const HeadView& view, uint32_t index) {
    return view.order.begin > index * 1024 ? view.order.begin - index * 1024 : 0;
  }
  static uint32_t LastOf(const HeadView& view, const std::byte* block) {
    return Number(block + view.order.ends_offset, view.order.clusters - 1);
  }

  void TouchPlanes(const HeadView& view, uint32_t index, size_t slot) {
    const size_t bytes = size_t{view.layout.first_planes} * view.layout.head_dim / 8;
    Touch(view.sketches[index] + slot * bytes, bytes);
  }
  void TouchScanned(const HeadView& view, uint32_t index, size_t slot) {
    TouchPlanes(view, index, slot);
    Touch(view.sketches[index] + view.layout.sketch_scales_offset + 2 * slot, 2);
  }
  // Whether the token's slot is among those of clusters.
  static bool IsClustered(const HeadView& view, uint32_t token) {
    const std::byte* block = BlockOf(view, token / 1024);
    const uint32_t offset = token % 1024;
    return block != nullptr && offset >= FirstOf(view, token / 1024) && offset < LastOf(view, block);
  }
  void TouchEnds(const HeadView& view, const std::byte* block) {
    Touch(block + view.order.ends_offset, 2 * view.order.clusters);
  }
  // The code scale and planes [first_planes, planes).
  void TouchRecord(const HeadView& view, uint32_t token, uint32_t planes) {
    const PageLayout& layout = view.layout;
    Touch(view.pages[token / 64] + layout.records_offset + token % 64 * size_t{layout.record_bytes},
          2 + (planes - layout.first_planes) * layout.head_dim / 8);
  }
  // By the list: the token's cluster, then its slot among the cluster's.
  void TouchListed(const HeadView& view, uint32_t token, uint32_t planes) {
    const uint32_t index = token / 1024, offset = token % 1024;
    TouchPlanes(view, index, oracle::SketchSlot(view, token));
    TouchRecord(view, token, planes);
    const std::byte* block = BlockOf(view, index);
    if (block == nullptr) return;
    TouchEnds(view, block);
    if (!IsClustered(view, token)) return;
    const bool apart = view.order.members_offset != 0;
    const uint32_t cluster = apart ? static_cast<uint32_t>(block[view.order.members_offset + offset])
                                   : Number(block + view.order.places_offset, offset) / 1024u;
    if (apart) Touch(block + view.order.members_offset + offset, 1);
    if (!apart) Touch(block + view.order.places_offset + 2 * offset, 2);
    const uint32_t begin = cluster == 0 ? FirstOf(view, index) : Number(block + view.order.ends_offset, cluster - 1);
    const uint32_t end = Number(block + view.order.ends_offset, cluster);
    Touch(block + view.order.places_offset + 2 * begin, 2 * (end - begin));
  }
  void TouchFloats(const HeadView& view, uint32_t token) {
    const bool raw = view.raw_pages != nullptr;
    const size_t bytes = view.layout.head_dim * DTypeBytes(raw ? view.raw_dtype : FloatType(view.layout.format));
    const std::byte* keys = raw ? view.raw_pages[token / 64] : view.pages[token / 64] + view.layout.keys_offset;
    Touch(keys + token % 64 * bytes, bytes);
  }

  void Read(const ScanPlanesItem& item) {
    const HeadView& view = item.view;
    uint32_t clusters_of = 0xffffffff;  // block whose clusters were read
    for (uint32_t token = item.begin; token < item.end; ++token) {
      const uint32_t index = token / 1024;
      if (index == clusters_of && IsClustered(view, token)) continue;
      TouchScanned(view, index, oracle::SketchSlot(view, token));
      const std::byte* block = BlockOf(view, index);
      if (block == nullptr) continue;
      TouchEnds(view, block);
      if (!IsClustered(view, token)) continue;
      // One token of a cluster: the slots of all clusters are scanned.
      clusters_of = index;
      const uint32_t first = FirstOf(view, index), last = LastOf(view, block);
      Touch(block + view.order.places_offset + 2 * first, 2 * (last - first));
      for (uint32_t slot = first; slot < last; ++slot) TouchScanned(view, index, slot);
    }
  }
  void Read(const RefinePlanesItem& item) {
    for (uint32_t n = 0; n < *item.count; ++n) TouchListed(item.view, item.tokens[n], item.planes);
  }
  void Read(const ScoreTokensItem& item) {
    for (uint32_t n = 0; n < *item.count; ++n) {
      const uint32_t token = item.tokens == nullptr ? item.begin + n : item.tokens[n];
      if (!IsCoded(item.view)) {
        TouchFloats(item.view, token);
      } else if (item.tokens != nullptr) {
        TouchListed(item.view, token, item.view.layout.planes);
      } else {
        TouchPlanes(item.view, token / 1024, oracle::SketchSlot(item.view, token));
        TouchRecord(item.view, token, item.view.layout.planes);
        const std::byte* block = BlockOf(item.view, token / 1024);
        if (block == nullptr) continue;
        // By the run: the order is turned around.
        TouchEnds(item.view, block);
        const uint32_t first = FirstOf(item.view, token / 1024);
        Touch(block + item.view.order.places_offset + 2 * first, 2 * (LastOf(item.view, block) - first));
      }
    }
  }
  void Read(const SelectListsItem& item) {
    for (uint32_t c = 0; c < item.centroid_count; ++c) {
      Touch(item.centroids[c], size_t{item.query.heads} * item.head_dim * 2);
    }
  }
  void Read(const MergeCandidatesItem& item) {
    for (uint32_t i = 0; i < item.probes; ++i) {
      if (item.list_counts[item.selected[i]] > 0) Touch(item.lists[item.selected[i]], item.packing.list_bytes());
    }
  }
  // The conformance cases of the operation hold it to the lines it counts.
  void Read(const EstimateRestItem& item) { rest_lines_ += *item.lines_read; }

  std::map<size_t, std::set<uintptr_t>> sets_;
  std::set<uintptr_t>* lines_ = nullptr;
  uint64_t rest_lines_ = 0;
};

class BytesReadTest : public ::testing::TestWithParam<bool> {
 protected:
  BytesReadTest() : harness_({.shares_host_memory = GetParam()}) {
    harness_.backend().Watch([this](const FakeBackend::Watched& watched) { recorder_(watched); });
  }

  void Open(const SessionConfig& config) {
    config_ = config;
    tokens_.emplace(config.layers[0], config.dtype, 9);
    ASSERT_THAT(harness_.Open("s", config), IsOk());
  }
  void Append(uint32_t first, uint32_t tokens, uint32_t query_positions = 0) {
    ASSERT_THAT(harness_.Append("s", tokens_->Append(first, tokens, query_positions)), IsOk());
  }
  void Expect(const OwnedQuery& query, Source source) {
    (void)recorder_.TakeBytes();
    const auto answer = harness_.Retrieve("s", query);
    ASSERT_THAT(answer, IsOk());
    EXPECT_EQ(answer->source, source);
    EXPECT_EQ(answer->bytes_read, recorder_.TakeBytes());
    EXPECT_GT(answer->bytes_read, 0u);
  }
  // Every path that a query of the layer can take, over all that is visible and over parts of it.
  void ExpectAll(uint32_t position, bool remainder) {
    for (const auto& [sinks, begin] :
         {std::pair{0u, 0xffffffffu}, {0u, position - 30}, {2u, 0xffffffffu}, {7u, 300u}}) {
      for (const Source source : {Source::kExact, Source::kSketch}) {
        SCOPED_TRACE(::testing::Message()
                     << "local " << sinks << " " << begin << " source " << static_cast<int>(source));
        OwnedQuery query = tokens_->Ask(position);
        query.query.local_sinks = sinks;
        if (begin != 0xffffffffu) query.query.local_begin = begin;
        query.query.selection.source = source;
        query.query.answer.remainder = remainder;
        ASSERT_NO_FATAL_FAILURE(Expect(query, source));
      }
    }
  }

  Harness harness_;
  SessionConfig config_;
  std::optional<Tokens> tokens_;
  LineRecorder recorder_;
};

// head_dim, format and planes of the first pass: records of 64 bytes with padding, of 64 without, and of odd ones.
struct Shape {
  Format format;
  uint32_t head_dim;
  uint32_t first_planes;
};
constexpr Shape kShapes[] = {{Format::kK8V4, 64, 1}, {Format::kK6V4, 64, 1},  {Format::kK8V8, 64, 2},
                             {Format::kK8V4, 24, 1}, {Format::kK8V4, 144, 1}, {Format::kK6V4, 128, 2}};

TEST_P(BytesReadTest, IsTheLinesOfTheOperations) {
  for (const Shape& shape : kShapes) {
    for (const uint32_t refine_planes : {0u, 4u}) {
      SCOPED_TRACE(::testing::Message() << FormatName(shape.format) << " " << shape.head_dim << " " << refine_planes);
      LayerConfig layer = SmallLayer(shape.format);
      layer.head_dim = shape.head_dim;
      layer.selection.refine_planes = refine_planes;
      layer.selection.candidate_tokens = 40;
      SessionConfig config = SmallConfig(layer, 2048);
      config.first_planes = shape.first_planes;
      ASSERT_NO_FATAL_FAILURE(Open(config));
      Append(0, 1100);
      ASSERT_NO_FATAL_FAILURE(ExpectAll(1100, false));
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

TEST_P(BytesReadTest, OfFloatRawAndDenseKeys) {
  for (const Format format : {Format::kF16, Format::kF32, Format::kK8V4}) {
    LayerConfig layer = SmallLayer(format, Source::kExact);
    layer.head_dim = 24;
    ASSERT_NO_FATAL_FAILURE(Open(SmallConfig(layer)));
    Append(0, 300);  // raw still, where coded
    OwnedQuery query = tokens_->Ask(300);
    query.query.local_sinks = 1;
    ASSERT_NO_FATAL_FAILURE(Expect(query, Source::kExact));
    query.query.selection.source = Source::kDense;
    ASSERT_NO_FATAL_FAILURE(Expect(query, Source::kDense));
    Append(300, 300);
    ASSERT_NO_FATAL_FAILURE(Expect(query, Source::kDense));
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(BytesReadTest, OfQueryCentroids) {
  for (const uint32_t tokens_per_cluster : {0u, 16u, 8u}) {
    LayerConfig layer = SmallLayer(Format::kK8V4, Source::kQueryCentroids);
    layer.head_dim = 24;
    layer.tokens_per_cluster = tokens_per_cluster;
    layer.query_centroids.list_tokens = 30;
    layer.selection.probes = 5;
    ASSERT_NO_FATAL_FAILURE(Open(SmallConfig(layer, 4096)));
    Append(0, 2200, 40);
    ASSERT_THAT(harness_.Maintain("s"), IsOk());
    Append(2200, 20);
    OwnedQuery query = tokens_->Ask(2220);
    ASSERT_NO_FATAL_FAILURE(Expect(query, Source::kQueryCentroids));
    ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
  }
}

TEST_P(BytesReadTest, OfBlocksInClusterOrder) {
  for (const uint32_t tokens_per_cluster : {16u, 8u}) {
    for (const uint32_t refine_planes : {0u, 3u}) {
      SCOPED_TRACE(::testing::Message() << tokens_per_cluster << " a cluster, refined " << refine_planes);
      LayerConfig layer = SmallLayer();
      layer.head_dim = 40;
      layer.tokens_per_cluster = tokens_per_cluster;
      layer.selection.refine_planes = refine_planes;
      ASSERT_NO_FATAL_FAILURE(Open(SmallConfig(layer, 4096)));
      Append(0, 2500);
      ASSERT_THAT(harness_.Maintain("s"), IsOk());
      Append(2500, 100);
      ASSERT_NO_FATAL_FAILURE(ExpectAll(2600, true));
      ASSERT_NO_FATAL_FAILURE(ExpectAll(2600, false));
      ASSERT_THAT(harness_.Truncate("s", 2300), IsOk());
      ASSERT_NO_FATAL_FAILURE(ExpectAll(2300, true));
      Append(2300, 100);
      ASSERT_NO_FATAL_FAILURE(ExpectAll(2400, false));
      ASSERT_THAT(harness_.Close(Ref("s")), IsOk());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, BytesReadTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "shared" : "separate"; });

}  // namespace
}  // namespace ctkvr::testing
