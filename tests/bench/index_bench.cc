// SPDX-License-Identifier: Apache-2.0
//
// Maintenance of query centroids at Llama-3-8B geometry for one layer (32 query heads, 8 KV heads, head_dim 128) and
// C = 1,024: the light step, which adjusts the centroids of all KV heads to their use, and what it leaves to bounded
// steps, lists of 16 centroids of one KV head.

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend_registry.h"
#include "server/core/index.h"
#include "tests/bench/baselines.h"
#include "tests/bench/bench.h"

namespace ctkvr::bench {
namespace {

constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kGroupHeads = 4;
constexpr uint32_t kHeadDim = 128;
constexpr uint32_t kCentroids = 1024;
constexpr uint32_t kListTokens = 512;
constexpr uint32_t kAdjustTokens = 128;
constexpr uint32_t kProbes = 4;

struct Bed {
  Options options;
  LayerConfig layer;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Stream> stream;
  std::optional<Scratch> scratch;
  std::unique_ptr<Arena> arena;
  std::vector<Reservation> reservations;
  std::optional<QueryIndex> index;
  std::unique_ptr<BigBuffer> keys;  // pages of one KV head
  std::vector<std::byte*> pages;
  std::vector<uint16_t> queries;  // [kAdjustTokens, q_heads, head_dim]
  uint32_t position = 0;          // of the next query
  std::mt19937_64 random{17};

  LaneDevice device() { return {.backend = *backend, .stream = *stream, .scratch = *scratch}; }
};

template <typename T>
T Value(absl::StatusOr<T> value) {
  CheckOk(value.ok(), std::string(value.status().message()));
  return *std::move(value);
}

void RequireOk(const absl::Status& status) { CheckOk(status.ok(), std::string(status.message())); }

void WriteQueries(Bed& bed, uint32_t count) {
  for (uint32_t done = 0; done < count; done += kAdjustTokens) {
    const QueryIndex::RingWrite write = bed.index->BeginRingWrite(bed.position, kAdjustTokens);
    BatchMemory memory(bed.device());
    std::vector<WriteCentroidsItem> items;
    bed.index->StageRingWrite({.queries = std::as_bytes(std::span(bed.queries)), .dtype = DType::kF16}, write, memory,
                              items);
    RequireOk(bed.backend->WriteCentroids(*bed.stream, items));
    RequireOk(memory.Finish());
    bed.index->CommitRing(write, false);
    bed.position += kAdjustTokens;
  }
}

// What kAdjustTokens retrievals count: some lists far more often than others.
void Retrieve(Bed& bed) {
  for (uint32_t q = kAdjustTokens; q > 0; --q) {
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      uint32_t lists[kProbes];
      for (uint32_t& list : lists) {
        const double u = static_cast<double>(bed.random() >> 11) * 0x1p-53;
        list = static_cast<uint32_t>(u * u * u * bed.index->centroid_count());
      }
      bed.index->CountUses(h, lists, bed.position - q);
    }
  }
}

void AdjustOnce(Bed& bed) {
  auto adjustment = Value(bed.index->StartAdjustment(bed.device()));
  bed.index->Join(std::move(adjustment));
}

void MakeIndex(Bed& bed) {
  LayerConfig& layer = bed.layer;
  layer.q_heads = kKvHeads * kGroupHeads;
  layer.kv_heads = kKvHeads;
  layer.head_dim = layer.value_dim = kHeadDim;
  layer.format = Format::kF16;
  layer.softmax.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  layer.query_centroids = {.centroids = kCentroids,
                           .list_tokens = kListTokens,
                           .name = "",
                           .placement = Placement::kLast,
                           .retrieved_queries = true,
                           .adjust_tokens = kAdjustTokens,
                           .centroids_max = kCentroids};
  const IndexShape shape = MakeIndexShape(layer, bed.options.tokens);
  MemoryPlan plan;
  const IndexRequests requests = PlanIndex(shape, true, plan);
  bed.arena = Value(Arena::Create(*bed.backend, plan.bytes() + (size_t{64} << 20)));
  bed.reservations = Value(bed.arena->Reserve(plan.requests()));
  bed.index.emplace(shape, QueryIndex::Memory{.centroids = &bed.reservations[requests.centroids],
                                              .lists = &bed.reservations[requests.lists],
                                              .norms = &bed.reservations[requests.norms]});
  bed.queries.resize(size_t{kAdjustTokens} * layer.q_heads * kHeadDim);
  FillNormalF16(13, bed.queries.data(), bed.queries.size());
  WriteQueries(bed, kCentroids);
  bed.index->Publish(Value(bed.index->StartSet(bed.device(), 0, bed.options.tokens)));
  const double index_bytes = static_cast<double>(plan.bytes());
  const double pair_bytes = 2.0 * kHeadDim * sizeof(uint16_t) * kKvHeads * bed.options.tokens;
  std::printf(
      "index, MiB: %.1f reserved with ring and spare set, %.1f held; %.1f bits a listed token; keys and values "
      "in fp16: %.1f MiB, %.1f and %.1f times as much\n",
      index_bytes / (1 << 20), static_cast<double>(bed.index->held_bytes()) / (1 << 20),
      8.0 * static_cast<double>(shape.list_bytes()) / kListTokens, pair_bytes / (1 << 20), pair_bytes / index_bytes,
      pair_bytes / static_cast<double>(bed.index->held_bytes()));
}

HeadView MakeKeys(Bed& bed) {
  const PageLayout layout = MakePageLayout(Format::kF16, kHeadDim, kHeadDim, 1);
  const uint32_t pages = (bed.options.tokens + kPageTokens - 1) / kPageTokens;
  bed.keys = std::make_unique<BigBuffer>(size_t{pages} * layout.page_bytes);
  FillNormalF16(11, reinterpret_cast<uint16_t*>(bed.keys->data()), bed.keys->bytes() / sizeof(uint16_t));
  for (uint32_t p = 0; p < pages; ++p) bed.pages.push_back(bed.keys->data() + size_t{p} * layout.page_bytes);
  return {.layout = layout, .pages = bed.pages.data(), .length = bed.options.tokens};
}

void AddLines(Bed& bed) {
  const size_t tokens = bed.options.tokens;
  static BigBuffer* const from = new BigBuffer(2 * tokens * kKvHeads * kHeadDim);
  static BigBuffer* const to = new BigBuffer(from->bytes());
  FillNormalF16(19, reinterpret_cast<uint16_t*>(from->data()), from->bytes() / sizeof(uint16_t));
  Add(kCopy, {.bytes = 2.0 * static_cast<double>(from->bytes())}, [] {
    std::memcpy(to->data(), from->data(), from->bytes());
    benchmark::ClobberMemory();
  });
  const double all_tokens = static_cast<double>(kKvHeads * tokens);
  static auto* const scores = new std::vector<float>(kGroupHeads * kKvHeads * tokens);
  static const auto* const query = new std::vector<float>(size_t{kGroupHeads} * kHeadDim, 0.5f);
  Add(kPlainScan, {.bytes = static_cast<double>(from->bytes()), .tokens = all_tokens}, [tokens] {
    PlainScanF16(reinterpret_cast<const uint16_t*>(from->data()), kKvHeads * tokens, kHeadDim, query->data(),
                 kGroupHeads, scores->data());
  });
  Add("128 queries into the ring, their uses counted", {}, [&bed] {
    WriteQueries(bed, kAdjustTokens);
    Retrieve(bed);
  });
  Add("the same, and the light step, 8 KV heads", {.bytes = 0, .tokens = all_tokens}, [&bed] {
    WriteQueries(bed, kAdjustTokens);
    Retrieve(bed);
    AdjustOnce(bed);
  });
  static auto* const set = Value(bed.index->StartSet(bed.device(), 0, bed.options.tokens)).release();
  static const HeadView view = MakeKeys(bed);
  const double listed = static_cast<double>(limits::kMaintenanceCentroids * tokens);
  Add("lists of 16 centroids of one KV head", {.bytes = 0, .tokens = listed}, [&bed] {
    RequireOk(bed.index->BuildLists(bed.device(), bed.layer, view, *set,
                                    {.kv_head = 0, .first = 0, .count = limits::kMaintenanceCentroids}));
  });
}

int Run(int argc, char** argv) {
  static auto* const bed = new Bed{.options = Start(argc, argv)};
  bed->backend = Value(CreateBackend(bed->options.backend));
  bed->stream = Value(bed->backend->NewStream());
  bed->scratch = Value(Scratch::Create(*bed->backend, size_t{16} << 20));
  std::printf(
      "backend: %s (%s), one thread, %u tokens of one layer, 32 query heads, 8 KV heads, head_dim 128, C = %u, "
      "lists of %u\n",
      bed->backend->Info().name.c_str(), bed->backend->Info().device.c_str(), bed->options.tokens, kCentroids,
      kListTokens);
  MakeIndex(*bed);
  AddLines(*bed);
  return Finish();
}

}  // namespace
}  // namespace ctkvr::bench

int main(int argc, char** argv) { return ctkvr::bench::Run(argc, argv); }
