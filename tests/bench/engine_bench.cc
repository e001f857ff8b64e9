// SPDX-License-Identifier: Apache-2.0
//
// The engine in this process, without gRPC, at Llama-3-8B geometry for one layer (32 query heads, 8 KV heads, head_dim
// 128): an append of a long prompt, retrievals at that length, and the memory they take against the formula.

#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <vector>

#include "kernels/backend_registry.h"
#include "server/core/engine.h"
#include "tests/bench/baselines.h"
#include "tests/bench/bench.h"
#include "tests/bench/machine.h"

namespace ctkvr::bench {
namespace {

constexpr uint32_t kQHeads = 32;
constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kHeadDim = 128;
constexpr uint32_t kChunkTokens = 1024;
constexpr uint32_t kQueryPositions = 256;  // of the prompt's end, for query centroids

// Waits for the answer of one engine call.
template <typename T, typename Call>
T Await(const char* what, Call call) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  auto future = promise->get_future();
  call(Callback<T>([promise](absl::StatusOr<T> result) { promise->set_value(std::move(result)); }));
  absl::StatusOr<T> result = future.get();
  CheckOk(result.ok(), std::string(what) + ": " + std::string(result.status().message()));
  return *std::move(result);
}

struct Bed {
  Options options;
  std::unique_ptr<Backend> backend;
  RealClock clock;
  std::unique_ptr<Engine> engine;
  std::vector<uint16_t> prompt;   // [tokens, kv_heads, head_dim]; keys, and read from its end, values
  std::vector<uint16_t> queries;  // [kQueryPositions, q_heads, head_dim]
};

SessionConfig Config(uint32_t tokens, uint32_t centroids) {
  LayerConfig layer;
  layer.q_heads = kQHeads;
  layer.kv_heads = kKvHeads;
  layer.head_dim = kHeadDim;
  layer.value_dim = kHeadDim;
  layer.format = Format::kK8V4;
  layer.softmax.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  if (centroids > 0) layer.query_centroids = {.centroids = centroids, .list_tokens = 512};
  if (centroids > 0) layer.tokens_per_cluster = 17;
  SessionConfig config;
  config.layers = {layer};
  config.token_limit = tokens;
  config.maintenance = Maintenance::kManual;
  return config;
}

std::span<const std::byte> Bytes(const uint16_t* data, size_t count) {
  return {reinterpret_cast<const std::byte*>(data), 2 * count};
}

StepResult Step(Bed& bed, StepRequest request) {
  auto promise = std::make_shared<std::promise<std::vector<StepResult>>>();
  auto future = promise->get_future();
  std::vector<StepRequest> requests;
  requests.push_back(std::move(request));
  bed.engine->Step(std::move(requests), {},
                   [promise](std::vector<StepResult> results) { promise->set_value(std::move(results)); });
  std::vector<StepResult> results = future.get();
  CheckOk(results.size() == 1, "Step answers another number of items than asked");
  return std::move(results[0]);
}

void Open(Bed& bed, const std::string& id, uint32_t centroids) {
  Await<SessionInfo>("Open", [&](Callback<SessionInfo> done) {
    bed.engine->Open(id, Config(bed.options.tokens, centroids), {}, std::move(done));
  });
}

void Close(Bed& bed, const std::string& id) {
  Await<CloseResult>("Close", [&](Callback<CloseResult> done) { bed.engine->Close({.id = id}, {}, std::move(done)); });
}

// The whole prompt in chunks; the last carries queries when asked to.
void AppendAll(Bed& bed, const std::string& id, bool with_queries) {
  constexpr size_t kRow = size_t{kKvHeads} * kHeadDim;
  for (uint32_t at = 0; at < bed.options.tokens; at += kChunkTokens) {
    const uint32_t count = std::min(kChunkTokens, bed.options.tokens - at);
    const bool last = at + count == bed.options.tokens;
    Chunk chunk = {.first_position = at,
                   .tokens = count,
                   .kv_heads = kKvHeads,
                   .head_dim = kHeadDim,
                   .value_dim = kHeadDim,
                   .keys = Bytes(&bed.prompt[at * kRow], count * kRow),
                   .values = Bytes(&bed.prompt[(bed.options.tokens - at - count) * kRow], count * kRow)};
    if (last && with_queries) {
      chunk.q_heads = kQHeads;
      chunk.query_positions = std::min(count, kQueryPositions);
      chunk.queries = Bytes(bed.queries.data(), size_t{chunk.query_positions} * kQHeads * kHeadDim);
    }
    const StepResult result = Step(bed, {.session = {.id = id}, .chunk = chunk, .query = std::nullopt});
    CheckOk(result.append.ok(), "Append: " + std::string(result.append.status().message()));
  }
}

Answer Retrieve(Bed& bed, const std::string& id, Source source) {
  Query query = {.layer = 0,
                 .position = bed.options.tokens - 1,
                 .positions = 1,
                 .q_heads = kQHeads,
                 .head_dim = kHeadDim,
                 .queries = Bytes(bed.queries.data(), size_t{kQHeads} * kHeadDim)};
  query.selection.source = source;
  query.selection.k_tokens = 256;
  query.selection.dense_below_tokens = 0;
  query.answer.mode = AnswerMode::kIds;
  StepResult result = Step(bed, {.session = {.id = id}, .chunk = std::nullopt, .query = query});
  CheckOk(result.answer.ok(), "Retrieve: " + std::string(result.answer.status().message()));
  CheckOk(result.answer->source == source, std::string("Retrieve was served by ") + SourceName(result.answer->source));
  return *std::move(result.answer);
}

double Megabytes(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Prints what one session of this length takes: the formula, the engine's account, the process.
void ReportMemory(Bed& bed) {
  const uint64_t before = ResidentBytes();
  Open(bed, "memory", 0);
  AppendAll(bed, "memory", false);
  const uint64_t after = ResidentBytes();
  const SessionInfo info = Await<SessionInfo>(
      "Get", [&](Callback<SessionInfo> done) { bed.engine->Get({.id = "memory"}, {}, std::move(done)); });
  const PageLayout layout = MakePageLayout(Format::kK8V4, kHeadDim, kHeadDim, info.config.first_planes);
  const uint64_t pages = uint64_t{kKvHeads} * ((bed.options.tokens + kPageTokens - 1) / kPageTokens);
  const uint64_t blocks = uint64_t{kKvHeads} * ((bed.options.tokens + kSketchTokens - 1) / kSketchTokens);
  const uint64_t formula = pages * layout.page_bytes + blocks * layout.sketch_bytes;
  const double fp32 = 8.0 * kHeadDim * kKvHeads * bed.options.tokens;
  std::printf(
      "memory of %u tokens, MiB: pages by the formula %.1f; session holds %.1f in pages, %.1f raw, %.1f index, "
      "%.1f state, of %.1f reserved; resident set grew by %.1f\n",
      bed.options.tokens, Megabytes(formula), Megabytes(info.memory.page_bytes), Megabytes(info.memory.raw_bytes),
      Megabytes(info.memory.index_bytes), Megabytes(info.memory.state_bytes), Megabytes(info.memory.reserved_bytes),
      Megabytes(after > before ? after - before : 0));
  std::printf("held bytes are %.2f %% of keys and values in FP32\n",
              100 * static_cast<double>(info.memory.held_bytes()) / fp32);
  CheckOk(info.memory.page_bytes == formula, "the pages held are not those of the formula");
  Close(bed, "memory");
}

void AddLines(Bed& bed) {
  const size_t bytes = 2 * bed.prompt.size();
  static BigBuffer* const from = new BigBuffer(bytes);
  static BigBuffer* const to = new BigBuffer(bytes);
  Add(kCopy, {.bytes = 2.0 * static_cast<double>(from->bytes())}, [] {
    std::memcpy(to->data(), from->data(), from->bytes());
    benchmark::ClobberMemory();
  });
  const double tokens = static_cast<double>(kKvHeads) * bed.options.tokens;
  static auto* const scores = new std::vector<float>(size_t{4} * kKvHeads * bed.options.tokens);
  static const auto* const query = new std::vector<float>(size_t{4} * kHeadDim, 0.5f);
  Add(kPlainScan, {.bytes = static_cast<double>(bytes), .tokens = tokens}, [&bed] {
    PlainScanF16(bed.prompt.data(), size_t{kKvHeads} * bed.options.tokens, kHeadDim, query->data(), 4, scores->data());
  });
  // Keys and values read, pages written.
  const PageLayout layout = MakePageLayout(Format::kK8V4, kHeadDim, kHeadDim, SessionConfig().first_planes);
  const double written =
      tokens * (layout.page_bytes / double{kPageTokens} + layout.sketch_bytes / double{kSketchTokens});
  Add(
      "append of the whole prompt", {.bytes = 2.0 * static_cast<double>(bytes) + written, .tokens = tokens},
      [&bed] {
        Open(bed, "append", 0);
        AppendAll(bed, "append", false);
        Close(bed, "append");
      },
      1);
  struct Case {
    const char* name;
    Source source;
  };
  for (const Case& c : {Case{"retrieve, sketch", Source::kSketch}, Case{"retrieve, exact", Source::kExact},
                        Case{"retrieve, query_centroids", Source::kQueryCentroids},
                        Case{"retrieve, key_centroids", Source::kKeyCentroids},
                        Case{"retrieve, key_centroids_sketch", Source::kKeyCentroidsSketch}}) {
    const double read = static_cast<double>(Retrieve(bed, "long", c.source).bytes_read);
    Add(c.name, {.bytes = read, .tokens = tokens},
        [&bed, source = c.source] { benchmark::DoNotOptimize(Retrieve(bed, "long", source).counts.data()); });
  }
}

int Run(int argc, char** argv) {
  static auto* const bed = new Bed{.options = Start(argc, argv)};
  auto backend = CreateBackend(bed->options.backend);
  CheckOk(backend.ok(), std::string(backend.status().message()));
  bed->backend = *std::move(backend);
  const uint32_t tokens = bed->options.tokens;
  const size_t arena = size_t{3} * tokens * kKvHeads * 2 * kHeadDim + (size_t{256} << 20);
  auto engine = Engine::Create({.lanes = 1, .arena_bytes = arena}, *bed->backend, bed->clock);
  CheckOk(engine.ok(), std::string(engine.status().message()));
  bed->engine = *std::move(engine);
  bed->prompt.resize(size_t{tokens} * kKvHeads * kHeadDim);
  FillNormalF16(11, bed->prompt.data(), bed->prompt.size());
  bed->queries.resize(size_t{kQueryPositions} * kQHeads * kHeadDim);
  FillNormalF16(13, bed->queries.data(), bed->queries.size());
  std::printf(
      "backend: %s (%s), one lane, %u tokens of one layer, 32 query heads, 8 KV heads, head_dim 128, k8v4, "
      "K = 256\n",
      bed->backend->Info().name.c_str(), bed->backend->Info().device.c_str(), tokens);
  ReportMemory(*bed);
  Open(*bed, "long", kQueryPositions);
  AppendAll(*bed, "long", true);
  Await<MaintainResult>("Maintain", [&](Callback<MaintainResult> done) {
    bed->engine->Maintain({.id = "long"}, {}, {}, std::move(done));
  });
  AddLines(*bed);
  const int code = Finish();
  bed->engine.reset();
  return code;
}

}  // namespace
}  // namespace ctkvr::bench

int main(int argc, char** argv) { return ctkvr::bench::Run(argc, argv); }
