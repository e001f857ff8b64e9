// SPDX-License-Identifier: Apache-2.0
//
// What a session is: geometry, formats and selection of its layers, fully resolved, and the checks of all of it. The
// comments of proto/ctkvr/v1/session.proto define every field that has the same name there. Thread-safe: values.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"
#include "kernels/formats.h"

namespace ctkvr {

enum class Source : uint8_t { kDense, kExact, kSketch, kQueryCentroids, kKeyCentroids, kKeyCentroidsSketch, kAuto };
inline constexpr size_t kSourceCount = 6;  // that serve; kAuto becomes one of them
const char* SourceName(Source source);     // "sketch"

enum class Reduction : uint8_t { kSumSoftmax, kMaxSoftmax, kPerHead };

// Every setting of a selection. The defaults are the server's.
struct Selection {
  Source source = Source::kSketch;
  uint32_t k_tokens = 256;
  float top_p = 1;
  float min_share = 0;
  std::optional<float> min_score;
  Reduction reduction = Reduction::kSumSoftmax;
  uint32_t sink_tokens = 4;
  uint32_t window_tokens = 64;
  uint32_t dense_below_tokens = 2048;
  float keep_share = 0.2f;
  uint32_t refine_planes = 4;
  uint32_t candidate_tokens = 384;
  uint32_t probes = 4;
  std::string centroid_set;
  float open_share = 0.25f;

  bool operator==(const Selection&) const = default;
};

// What a request or a layer changes of it.
struct SelectionOverride {
  std::optional<Source> source;
  std::optional<uint32_t> k_tokens;
  std::optional<float> top_p;
  std::optional<float> min_share;
  std::optional<float> min_score;
  std::optional<Reduction> reduction;
  std::optional<uint32_t> sink_tokens;
  std::optional<uint32_t> window_tokens;
  std::optional<uint32_t> dense_below_tokens;
  std::optional<float> keep_share;
  std::optional<uint32_t> refine_planes;
  std::optional<uint32_t> candidate_tokens;
  std::optional<uint32_t> probes;
  std::optional<std::string> centroid_set;
  std::optional<float> open_share;
};

struct SoftmaxConfig {
  float scale = 0;                 // resolved: 1 / sqrt(head_dim) when the client gave none
  float softcap = 0;               // 0: none
  std::vector<float> sink_logits;  // [q_heads] or empty
};

// Which queries become centroids.
enum class Placement : uint8_t { kLast, kStrided, kClustered };

struct QueryCentroidConfig {
  uint32_t centroids = 0;  // 0: none
  uint32_t list_tokens = 0;
  std::string name;
  Placement placement = Placement::kLast;
  bool retrieved_queries = true;  // queries of retrievals join those of appends
  uint32_t adjust_tokens = 0;     // positions retrieved between adjustments to use; 0: none
  uint32_t centroids_max = 0;     // that C may grow to by them

  // That a set may hold.
  uint32_t capacity() const { return adjust_tokens == 0 ? centroids : centroids_max; }

  bool operator==(const QueryCentroidConfig&) const = default;
};

// One layer, fully resolved.
struct LayerConfig {
  bool absent = false;
  bool dense = false;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  Format format = Format::kK8V4;
  Selection selection;
  SoftmaxConfig softmax;
  QueryCentroidConfig query_centroids;
  uint32_t tokens_per_cluster = 0;  // of key clusters; 0: none

  uint32_t group_heads() const { return q_heads / kv_heads; }
};

enum class Maintenance : uint8_t { kAuto, kManual };

// See Policies in the proto; what they do is in policies.h.
struct ClassQuota {
  uint32_t token_class = 0;
  uint32_t tokens = 0;

  bool operator==(const ClassQuota&) const = default;
};
struct PolicyConfig {
  bool load_adaptive_k = false;
  bool length_scaled_k = false;
  uint32_t ramp_tokens = 0;  // 0: none
  std::optional<float> dedup_similarity;
  float recency_weight_min = 1;  // both 1: none
  float recency_weight_max = 1;
  float tag_weight_boost = 0;  // 0: none
  std::vector<ClassQuota> class_quotas;

  // Whether K of a query may differ from the selection's.
  bool moves_k() const { return load_adaptive_k || length_scaled_k || ramp_tokens > 0; }
  bool operator==(const PolicyConfig&) const = default;
};

struct SessionConfig {
  std::vector<LayerConfig> layers;
  DType dtype = DType::kF16;  // of the tensors that calls carry
  uint32_t first_planes = 2;
  uint32_t token_limit = 0;
  std::chrono::seconds lease{600};
  Maintenance maintenance = Maintenance::kAuto;
  std::string fingerprint;
  uint64_t rotation_seed = 0;  // 0: drawn by the engine
  uint32_t cache_slots = 0;    // 0: no slot tables
  PolicyConfig policies;
  bool tags = false;              // Append may bring them
  float needle_share_target = 0;  // 0: none
  bool record = false;            // tell EngineOptions.observer
};

// INVALID_ARGUMENT (field, value, limit) unless every number is within limits.h and the settings go together.
// `layer` names the layer in messages.
absl::Status ValidateSelection(const Selection& selection, const LayerConfig& layer, uint32_t first_planes);
absl::Status ValidateSessionConfig(const SessionConfig& config);
Selection Resolve(const Selection& base, const SelectionOverride& override);

}  // namespace ctkvr
