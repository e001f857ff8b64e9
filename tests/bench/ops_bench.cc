// SPDX-License-Identifier: Apache-2.0
//
// The operations of one layer at Llama-3-8B geometry (8 KV heads of 4 query heads, head_dim 128), one thread, out of
// cache, against a memory copy and a plain scan of the same run.

#include <cstring>
#include <memory>
#include <vector>

#include "kernels/backend_registry.h"
#include "kernels/rotation.h"
#include "tests/bench/baselines.h"
#include "tests/bench/bench.h"

namespace ctkvr::bench {
namespace {

constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kGroupHeads = 4;
constexpr uint32_t kHeadDim = 128;

// Keys of one format for all KV heads, and prepared queries to go with them.
class Store {
 public:
  Store(Backend& backend, Stream& stream, Format format, uint32_t first_planes, uint32_t tokens)
      : backend_(backend), stream_(stream), layout_(MakePageLayout(format, kHeadDim, kHeadDim, first_planes)) {
    const uint32_t pages = (tokens + kPageTokens - 1) / kPageTokens;
    const uint32_t blocks = (tokens + kSketchTokens - 1) / kSketchTokens;
    const size_t page_bytes = size_t{kKvHeads} * pages * layout_.page_bytes;
    memory_ = std::make_unique<BigBuffer>(page_bytes + size_t{kKvHeads} * blocks * layout_.sketch_bytes);
    signs_ = RotationSigns(kHeadDim, 7);
    pages_.resize(size_t{kKvHeads} * pages);
    for (size_t i = 0; i < pages_.size(); ++i) pages_[i] = memory_->data() + i * layout_.page_bytes;
    sketches_.resize(size_t{kKvHeads} * blocks);
    for (size_t i = 0; i < sketches_.size(); ++i) {
      sketches_[i] = memory_->data() + page_bytes + i * layout_.sketch_bytes;
    }
    views_.resize(kKvHeads);
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      views_[h] = {.layout = layout_,
                   .pages = &pages_[size_t{h} * pages],
                   .sketches = &sketches_[size_t{h} * blocks],
                   .length = tokens};
      if (KeysAreCoded(format)) {
        views_[h].mean = mean_.data();
        views_[h].signs = signs_.data();
      }
    }
    Write(tokens);
    Prepare();
  }

  const HeadView& view(uint32_t head) const { return views_[head]; }
  const PreparedQuery& query(uint32_t head) const { return queries_[head]; }

 private:
  void Write(uint32_t tokens) {
    std::vector<uint16_t> rows(size_t{tokens} * kHeadDim);
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      FillNormalF16(h, rows.data(), rows.size());
      int64_t bad_key = -1;
      int64_t bad_value = -1;
      const std::byte* bytes = reinterpret_cast<const std::byte*>(rows.data());
      const WriteTokensItem item = {.view = views_[h],
                                    .count = tokens,
                                    .keys = bytes,
                                    .values = bytes,
                                    .key_stride = 2 * kHeadDim,
                                    .value_stride = 2 * kHeadDim,
                                    .dtype = DType::kF16,
                                    .bad_key_element = &bad_key,
                                    .bad_value_element = &bad_value};
      CheckOk(backend_.WriteTokens(stream_, {&item, 1}).ok() && backend_.Synchronize(stream_).ok(), "WriteTokens");
      CheckOk(bad_key < 0 && bad_value < 0, "a key or value does not fit");
    }
  }

  // One query a head, with room for all that PreparedQuery names.
  void Prepare() {
    constexpr size_t kElements = size_t{kGroupHeads} * kHeadDim;
    floats_.resize(kKvHeads * (2 * kElements + 4 * kGroupHeads));
    codes_.resize(kKvHeads * 2 * kElements);
    sums_.resize(kKvHeads * 2 * kGroupHeads);
    queries_.resize(kKvHeads);
    std::vector<uint16_t> rows(kElements);
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      float* f = &floats_[h * (2 * kElements + 4 * kGroupHeads)];
      int8_t* c = &codes_[h * 2 * kElements];
      int32_t* s = &sums_[h * size_t{2} * kGroupHeads];
      queries_[h] = {.heads = kGroupHeads,
                     .plain = f,
                     .rotated = f + kElements,
                     .rotated_sum = f + 2 * kElements,
                     .mean_dot = f + 2 * kElements + kGroupHeads,
                     .scan = c,
                     .scan_scale = f + 2 * kElements + 2 * kGroupHeads,
                     .scan_sum = s,
                     .refine = c + kElements,
                     .refine_scale = f + 2 * kElements + 3 * kGroupHeads,
                     .refine_sum = s + kGroupHeads};
      FillNormalF16(1000 + h, rows.data(), rows.size());
      const PrepareQueriesItem item = {.query = reinterpret_cast<const std::byte*>(rows.data()),
                                       .dtype = DType::kF16,
                                       .head_dim = kHeadDim,
                                       .mean = views_[h].mean,
                                       .signs = views_[h].signs,
                                       .out = queries_[h]};
      CheckOk(backend_.PrepareQueries(stream_, {&item, 1}).ok() && backend_.Synchronize(stream_).ok(),
              "PrepareQueries");
    }
  }

  Backend& backend_;
  Stream& stream_;
  const PageLayout layout_;
  std::unique_ptr<BigBuffer> memory_;
  std::vector<float> signs_;
  std::vector<float> mean_ = std::vector<float>(kHeadDim, 0.0f);
  std::vector<std::byte*> pages_, sketches_;
  std::vector<HeadView> views_;
  std::vector<PreparedQuery> queries_;
  std::vector<float> floats_;
  std::vector<int8_t> codes_;
  std::vector<int32_t> sums_;
};

// What all lines share; lives until the program ends.
struct Bed {
  Options options;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Stream> stream;
  std::vector<float> scores;  // [kKvHeads][kGroupHeads, tokens]
  std::vector<std::unique_ptr<Store>> stores;
  uint32_t all_tokens = 0;

  const Store& NewStore(Format format, uint32_t first_planes) {
    stores.push_back(std::make_unique<Store>(*backend, *stream, format, first_planes, options.tokens));
    return *stores.back();
  }
  float* ScoresOf(uint32_t head) { return &scores[size_t{head} * kGroupHeads * options.tokens]; }
};

void AddBaselines(Bed& bed) {
  const size_t elements = size_t{kKvHeads} * bed.options.tokens * kHeadDim;
  static BigBuffer* const from = new BigBuffer(2 * elements);
  static BigBuffer* const to = new BigBuffer(2 * elements);
  auto* keys = reinterpret_cast<uint16_t*>(from->data());
  FillNormalF16(3, keys, elements);
  Add(kCopy, {.bytes = 2.0 * static_cast<double>(from->bytes())}, [] {
    std::memcpy(to->data(), from->data(), from->bytes());
    benchmark::ClobberMemory();
  });
  Add("plain read", {.bytes = static_cast<double>(from->bytes())},
      [] { benchmark::DoNotOptimize(PlainRead(from->data(), from->bytes())); });
  const double tokens = static_cast<double>(kKvHeads) * bed.options.tokens;
  static const auto* const queries = new std::vector<float>(kGroupHeads * kHeadDim, 0.5f);
  Add("plain fp16 scan, 1 head", {.bytes = 2.0 * static_cast<double>(elements), .tokens = tokens},
      [&bed, keys, elements] {
        PlainScanF16(keys, elements / kHeadDim, kHeadDim, queries->data(), 1, bed.scores.data());
      });
  Add(kPlainScan, {.bytes = 2.0 * static_cast<double>(elements), .tokens = tokens}, [&bed, keys, elements] {
    PlainScanF16(keys, elements / kHeadDim, kHeadDim, queries->data(), 4, bed.scores.data());
  });
}

void AddScoreTokens(Bed& bed, Format format, const std::string& name, double bytes_per_token) {
  const Store& store = bed.NewStore(format, 1);
  std::vector<ScoreTokensItem> items(kKvHeads);
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    items[h] = {.view = store.view(h),
                .query = store.query(h),
                .count = &bed.all_tokens,
                .count_max = bed.options.tokens,
                .scores = bed.ScoresOf(h),
                .stride = bed.options.tokens};
  }
  const double tokens = static_cast<double>(kKvHeads) * bed.options.tokens;
  Add(name, {.bytes = tokens * bytes_per_token, .tokens = tokens}, [&bed, items] {
    CheckOk(bed.backend->ScoreTokens(*bed.stream, items).ok() && bed.backend->Synchronize(*bed.stream).ok(),
            "ScoreTokens");
  });
}

void AddScanPlanes(Bed& bed, uint32_t first_planes) {
  const Store& store = bed.NewStore(Format::kK8V4, first_planes);
  std::vector<ScanPlanesItem> items(kKvHeads);
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    items[h] = {.view = store.view(h),
                .query = store.query(h),
                .end = bed.options.tokens,
                .estimates = bed.ScoresOf(h),
                .stride = bed.options.tokens};
  }
  const double tokens = static_cast<double>(kKvHeads) * bed.options.tokens;
  const std::string name = "ScanPlanes, " + std::to_string(first_planes) + (first_planes == 1 ? " plane" : " planes");
  Add(name, {.bytes = tokens * (first_planes * kHeadDim / 8.0 + 2), .tokens = tokens}, [&bed, items] {
    CheckOk(bed.backend->ScanPlanes(*bed.stream, items).ok() && bed.backend->Synchronize(*bed.stream).ok(),
            "ScanPlanes");
  });
}

void AddSelectTokens(Bed& bed) {
  constexpr uint32_t kK = 256;
  static auto* const scores = new std::vector<float>();
  std::vector<uint16_t> halves(size_t{kGroupHeads} * bed.options.tokens);
  FillNormalF16(5, halves.data(), halves.size());
  scores->resize(halves.size());
  for (size_t i = 0; i < halves.size(); ++i) (*scores)[i] = 10 * F32FromF16(halves[i]);
  static auto* const chosen = new std::vector<uint32_t>(kK + 68);
  static auto* const workspace = new std::vector<std::byte>(SelectTokensWorkspaceBytes(bed.options.tokens));
  static uint32_t chosen_count = 0;
  const SelectTokensItem item = {.heads = kGroupHeads,
                                 .scores = scores->data(),
                                 .stride = bed.options.tokens,
                                 .count = &bed.all_tokens,
                                 .count_max = bed.options.tokens,
                                 .k = kK,
                                 .force_below = 4,
                                 .force_from = bed.options.tokens - 64,
                                 .softmax = {.scale = 0.0884f},
                                 .min_score = -1e30f,
                                 .chosen = chosen->data(),
                                 .chosen_count = &chosen_count,
                                 .workspace = workspace->data()};
  Add("SelectTokens, 256 of one KV head",
      {.bytes = 4.0 * static_cast<double>(scores->size()), .tokens = static_cast<double>(bed.options.tokens)},
      [&bed, item] {
        CheckOk(bed.backend->SelectTokens(*bed.stream, {&item, 1}).ok() && bed.backend->Synchronize(*bed.stream).ok(),
                "SelectTokens");
      });
}

// Values of every eighth token, decoded into rows or attended by the heads of their group.
void AddChosenValues(Bed& bed) {
  const Store& store = bed.NewStore(Format::kK8V4, 2);
  static auto* const tokens = new std::vector<uint32_t>();
  for (uint32_t t = 0; t < bed.options.tokens; t += 8) tokens->push_back(t);
  static auto* const rows = new std::vector<float>(tokens->size() * kKvHeads * kHeadDim);
  static auto* const outputs = new std::vector<float>(size_t{kKvHeads} * kGroupHeads * (kHeadDim + 1));
  static const auto count = static_cast<uint32_t>(tokens->size());
  std::vector<GatherRowsItem> gathers(kKvHeads);
  std::vector<AttendItem> attends(kKvHeads);
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    gathers[h] = {.view = store.view(h),
                  .tokens = tokens->data(),
                  .count = &count,
                  .count_max = count,
                  .row_format = RowFormat::kF32,
                  .values = reinterpret_cast<std::byte*>(rows->data() + h * tokens->size() * kHeadDim)};
    float* output = outputs->data() + size_t{h} * kGroupHeads * (kHeadDim + 1);
    attends[h] = {.view = store.view(h),
                  .heads = kGroupHeads,
                  .tokens = tokens->data(),
                  .count = &count,
                  .count_max = count,
                  .scores = bed.ScoresOf(h),
                  .stride = bed.options.tokens,
                  .softmax = {.scale = 0.0884f},
                  .output = output,
                  .log_sum_exp = output + size_t{kGroupHeads} * kHeadDim};
  }
  const double all = static_cast<double>(kKvHeads) * count;
  const double value_bytes = store.view(0).layout.value_row_bytes;
  Add("GatherRows, every 8th token's v4 to f32", {.bytes = all * (value_bytes + 4 * kHeadDim), .tokens = all},
      [&bed, gathers] {
        CheckOk(bed.backend->GatherRows(*bed.stream, gathers).ok() && bed.backend->Synchronize(*bed.stream).ok(),
                "GatherRows");
      });
  Add("Attend, every 8th token's v4", {.bytes = all * (value_bytes + 4 * kGroupHeads), .tokens = all}, [&bed, attends] {
    CheckOk(bed.backend->Attend(*bed.stream, attends).ok() && bed.backend->Synchronize(*bed.stream).ok(), "Attend");
  });
}

int Run(int argc, char** argv) {
  static auto* const bed = new Bed{.options = Start(argc, argv)};
  auto backend = CreateBackend(bed->options.backend);
  CheckOk(backend.ok(), std::string(backend.status().message()));
  bed->backend = *std::move(backend);
  auto stream = bed->backend->NewStream();
  CheckOk(stream.ok(), std::string(stream.status().message()));
  bed->stream = *std::move(stream);
  bed->all_tokens = bed->options.tokens;
  bed->scores.resize(size_t{kKvHeads} * kGroupHeads * bed->options.tokens);
  std::printf("backend: %s (%s), one thread, %u tokens, %u KV heads of %u query heads, head_dim %u\n",
              bed->backend->Info().name.c_str(), bed->backend->Info().device.c_str(), bed->options.tokens, kKvHeads,
              kGroupHeads, kHeadDim);
  AddBaselines(*bed);
  AddScoreTokens(*bed, Format::kF16, "ScoreTokens, f16", 2.0 * kHeadDim);
  AddScoreTokens(*bed, Format::kK8V4, "ScoreTokens, k8", kHeadDim + 2.0);
  AddScoreTokens(*bed, Format::kK6V4, "ScoreTokens, k6", 0.75 * kHeadDim + 2.0);
  AddScanPlanes(*bed, 1);
  AddScanPlanes(*bed, 2);
  AddSelectTokens(*bed);
  AddChosenValues(*bed);
  return Finish();
}

}  // namespace
}  // namespace ctkvr::bench

int main(int argc, char** argv) { return ctkvr::bench::Run(argc, argv); }
