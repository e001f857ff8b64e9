// SPDX-License-Identifier: Apache-2.0
//
// The flags that say how a session stores and selects, shared by `replay` and `bench`. Thread-safe: values.

#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::cli {

// Names as on the command line; counts in tokens unless said otherwise.
struct SelectionFlags {
  std::string format = "k8v4";
  std::string source = "key_centroids_sketch";
  std::string reduction = "sum_softmax";
  uint32_t k_tokens = 256;
  uint32_t first_planes = 2;   // planes
  float keep_share = 0.2f;     // share of the tokens
  uint32_t refine_planes = 4;  // planes; 0: no second pass
  uint32_t candidate_tokens = 384;
  uint32_t centroids = 256;
  uint32_t list_tokens = 512;
  std::string placement = "last";
  uint32_t probes = 4;  // lists
  uint32_t sink_tokens = 4;
  uint32_t window_tokens = 64;
  uint32_t dense_below_tokens = 0;
  bool load_adaptive_k = false;
  bool length_scaled_k = false;
  uint32_t ramp_tokens = 0;    // 0: none
  float dedup_similarity = 0;  // 0: none
  float recency_weight_min = 1;
  float recency_weight_max = 1;
  std::string answer = "rows";
  uint32_t cache_slots = 2048;  // a KV head
  std::string row_format = "f16";
  float needle_share_target = 0;
  uint64_t seed = 1;
  float open_share = 0.25f;  // at 8,192 tokens
  uint32_t tokens_per_cluster = 17;
  bool remainder = true;  // where the answer carries values and the session keeps key clusters
  bool maintain = false;  // by the server, between calls
};

void AddSelectionFlags(CLI::App* command, SelectionFlags* flags);

// Format, selection, sets of query centroids and key clusters (only where the source needs them), policies, first
// planes, rotation seed, maintenance. Geometry, token limit and softmax are left to the caller. REQUIRES: names
// as AddSelectionFlags lets through.
v1::SessionOptions MakeSessionOptions(const SelectionFlags& flags);
v1::AnswerOptions MakeAnswerOptions(const SelectionFlags& flags);

// "SOURCE_SKETCH" to "sketch", and so for every enum of the proto whose names start with that of the type.
std::string ShortName(v1::Source source);
std::string ShortName(v1::Format format);

}  // namespace ctkvr::cli
