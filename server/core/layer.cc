// SPDX-License-Identifier: Apache-2.0

#include "server/core/layer.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/core/limits.h"

namespace ctkvr {
namespace {

size_t RawPageBytes(const LayerConfig& layer, DType dtype) {
  return size_t{kPageTokens} * layer.head_dim * DTypeBytes(dtype);
}

uint32_t CodingLength(const LayerConfig& layer) { return layer.selection.sink_tokens + limits::kMeanTokens; }

uint32_t SlotTableSets(const LayerConfig& layer) {
  return layer.selection.reduction == Reduction::kPerHead ? layer.q_heads : layer.kv_heads;
}

// The first `count` blocks and pointers stay.
void ShrinkTable(std::vector<Block>& blocks, std::vector<std::byte*>& table, size_t count) {
  if (blocks.size() <= count) return;
  blocks.resize(count);
  table.resize(count);
}

void GrowTable(Reservation& reservation, std::vector<Block>& blocks, std::vector<std::byte*>& table, size_t count) {
  while (blocks.size() < count) {
    blocks.push_back(reservation.Take());
    table.push_back(blocks.back().data());
  }
}

}  // namespace

LayerRequests PlanLayer(const LayerConfig& layer, const SessionConfig& session, LayerSpares spares, MemoryPlan& plan) {
  const PageLayout layout = MakePageLayout(layer.format, layer.head_dim, layer.value_dim, session.first_planes);
  LayerRequests requests;
  requests.pages = plan.Add(layout.page_bytes, layer.kv_heads * Layer::page_count(session.token_limit));
  if (KeysAreCoded(layer.format)) {
    const size_t sketches = Layer::sketch_count(session.token_limit) + (spares.clusters ? 1 : 0);
    requests.sketches = plan.Add(layout.sketch_bytes, layer.kv_heads * sketches);
    const uint32_t raw_tokens = std::min(session.token_limit, CodingLength(layer));
    requests.raw_pages =
        plan.AddAlone(RawPageBytes(layer, session.dtype), layer.kv_heads * Layer::page_count(raw_tokens));
    requests.mean = plan.Add(sizeof(float) * layer.kv_heads * layer.head_dim, 1);
  }
  if (layer.query_centroids.centroids > 0) {
    requests.index = PlanIndex(MakeIndexShape(layer, session.token_limit), spares.index, plan);
  }
  if (layer.tokens_per_cluster > 0) {
    const ClusterShape shape = MakeClusterShape(layer, session.token_limit, session.first_planes);
    requests.clusters = PlanClusters(shape, spares.clusters, plan);
  }
  return requests;
}

Layer::Layer(const LayerConfig& config, const SessionConfig& session, const Memory& memory)
    : config_(config),
      dtype_(session.dtype),
      memory_(memory),
      layout_(MakePageLayout(config.format, config.head_dim, config.value_dim, session.first_planes)),
      heads_(config.kv_heads) {
  if (config.query_centroids.centroids > 0) {
    index_.emplace(MakeIndexShape(config, session.token_limit), memory.index);
  }
  if (config.tokens_per_cluster > 0) clusters_.emplace(config, session.token_limit, memory.clusters);
  if (session.tags) tags_.emplace(session);
  if (session.cache_slots > 0) {
    slot_table_.emplace(SlotTableSets(config), session.cache_slots, memory.first_cache_version);
  }
}

size_t Layer::SlotTablesBytes(const LayerConfig& config, uint32_t cache_slots) {
  return cache_slots == 0 ? 0 : SlotTableBytes(SlotTableSets(config), cache_slots);
}

uint32_t Layer::coding_length() const { return CodingLength(config_); }

size_t Layer::key_bytes() const {
  if (raw()) return size_t{config_.head_dim} * DTypeBytes(dtype_);
  if (coded()) return size_t{layout_.planes} * layout_.plane_bytes + sizeof(uint16_t);
  return size_t{config_.head_dim} * DTypeBytes(FloatType(config_.format));
}

RowCodec Layer::Codec(uint64_t rotation_seed) const {
  return {.format = config_.format,
          .code_generation = code_generation_,
          .rotation_seed = rotation_seed,
          .key_mean = mean_,
          .key_row_bytes = storage_key_bytes(),
          .value_row_bytes = storage_value_bytes()};
}

HeadView Layer::View(uint32_t kv_head) const {
  HeadView view = Places(kv_head, 0, raw());
  view.length = length_;
  return view;
}

void Layer::Grow(uint32_t length) {
  for (Head& head : heads_) {
    GrowTable(*memory_.pages, head.pages, head.page_table, page_count(length));
    if (coded()) GrowTable(*memory_.sketches, head.sketches, head.sketch_table, sketch_count(length));
    if (!raw()) continue;
    GrowTable(*memory_.raw_pages, head.raw_pages, head.raw_table, page_count(std::min(length, coding_length())));
  }
}

HeadView Layer::Places(uint32_t kv_head, uint32_t first_block, bool raw) const {
  const Head& head = heads_[kv_head];
  const size_t first_page = size_t{first_block} * (kSketchTokens / kPageTokens);
  HeadView view{.layout = layout_,
                .pages = head.page_table.data() + first_page,
                .sketches = coded() ? head.sketch_table.data() + first_block : nullptr,
                .order = {},
                .raw_pages = raw ? head.raw_table.data() + first_page : nullptr,
                .raw_dtype = dtype_,
                .mean = nullptr,
                .signs = memory_.signs,
                .length = 0};
  if (has_codes() && clusters_.has_value()) {
    view.order = clusters_->order(kv_head);
    view.order.blocks += first_block;
    view.order.begin -= std::min(view.order.begin, first_block * kSketchTokens);
  }
  if (coded() && mean_block_) {
    view.mean = reinterpret_cast<const float*>(mean_block_.data()) + size_t{kv_head} * config_.head_dim;
  }
  return view;
}

float* Layer::MeanPlace(uint32_t kv_head) {
  CTKVR_CHECK(raw());
  if (!mean_block_) mean_block_ = memory_.mean->Take();
  return reinterpret_cast<float*>(mean_block_.data()) + size_t{kv_head} * config_.head_dim;
}

void Layer::FixMean(std::vector<float> mean) {
  CTKVR_CHECK(raw() && mean_block_);
  mean_ = std::move(mean);
  code_generation_ = 1;
  for (Head& head : heads_) ShrinkTable(head.raw_pages, head.raw_table, 0);
  *memory_.raw_pages = Reservation();
}

void Layer::Commit(uint32_t length) {
  length_ = length;
  if (tags_.has_value()) tags_->Truncate(length);
  Shrink(length);
}

void Layer::Abandon() {
  Shrink(length_);
  if (raw()) mean_block_ = Block();
}

void Layer::Shrink(uint32_t length) {
  for (Head& head : heads_) {
    ShrinkTable(head.pages, head.page_table, page_count(length));
    ShrinkTable(head.raw_pages, head.raw_table, page_count(length));
    ShrinkTable(head.sketches, head.sketch_table, sketch_count(length));
  }
}

absl::Status Layer::ClusterStep(LaneDevice device, uint32_t end) {
  CTKVR_RETURN_IF_ERROR(clusters_->Step(device, View(clusters_->next_head()), end));
  if (!clusters_->built()) return absl::OkStatus();
  std::vector<Block> sketches;
  if (has_codes()) {
    if (absl::Status status = ArrangeSketches(device, sketches); !status.ok()) {
      clusters_->Drop();
      return status;
    }
  }
  const uint32_t index = clusters_->Publish();
  for (size_t h = 0; h < sketches.size(); ++h) {
    heads_[h].sketch_table[index] = sketches[h].data();
    heads_[h].sketches[index] = std::move(sketches[h]);
  }
  return absl::OkStatus();
}

// All in one step: what is appended between steps lies in the live blocks alone.
absl::Status Layer::ArrangeSketches(LaneDevice device, std::vector<Block>& sketches) {
  BatchMemory memory(device);
  std::vector<ArrangeSketchItem> items;
  for (uint32_t h = 0; h < config_.kv_heads; ++h) {
    sketches.push_back(memory_.sketches->Take());
    items.push_back(clusters_->Arrange(memory.Stage(View(h), page_count(length_)), h, sketches.back().data()));
  }
  if (memory.exhausted()) return memory.ExhaustedError("a maintenance step");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.ArrangeSketch(device.stream, items);
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  return status;
}

void Layer::AddTo(MemoryInfo& memory) const {
  for (const Head& head : heads_) {
    memory.page_bytes += head.pages.size() * memory_.pages->block_bytes();
    if (!head.sketches.empty()) memory.page_bytes += head.sketches.size() * memory_.sketches->block_bytes();
    if (!head.raw_pages.empty()) memory.raw_bytes += head.raw_pages.size() * memory_.raw_pages->block_bytes();
  }
  memory.state_bytes += mean_block_.bytes();
  if (slot_table_.has_value()) memory.slot_table_bytes += SlotTableBytes(slot_table_->sets(), slot_table_->slots());
  if (tags_.has_value()) memory.tag_bytes += TokenTags::Bytes(length_);
  if (index_.has_value()) memory.index_bytes += index_->held_bytes();
  if (clusters_.has_value()) memory.index_bytes += clusters_->held_bytes();
}

}  // namespace ctkvr
