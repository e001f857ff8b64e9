// SPDX-License-Identifier: Apache-2.0
//
// The unit of retrieval: one KV head (or query head, under per_head) at one position, with its operations laid out in
// scratch. Not thread-safe: belongs to one lane.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops.h"
#include "server/core/batch_memory.h"
#include "server/core/layer.h"
#include "server/core/retrieval_plan.h"
#include "server/core/types.h"

namespace ctkvr {

class SessionObserver;

// Chosen tokens of each set of one position, ascending.
using ChosenTokens = std::vector<std::vector<uint32_t>>;

// One task at work.
struct RetrievalItem {
  const Query* query = nullptr;
  const CallContext* context = nullptr;
  Layer* layer = nullptr;
  const PolicyConfig* policies = nullptr;
  QueryPlan plan;
  Answer answer;
  absl::Status status;
  // Tokens and scores in the answer so far, and those that the sets of the present round add.
  size_t filled_tokens = 0;
  size_t filled_scores = 0;
  size_t new_tokens = 0;
  size_t new_scores = 0;
  bool placing = false;                 // the layer's slot table has begun this answer
  bool shadows = false;                 // it leaves what an exact repeat needs
  SessionObserver* observer = nullptr;  // who is told; null: nobody
  ChosenTokens last_chosen;             // [sets] of the last position, where somebody wants them; else empty

  const AnswerOptions& options() const { return query->answer; }
  // What the answer carries.
  bool wants_ids() const { return options().mode != AnswerMode::kAttention; }
  bool wants_scores() const { return WantsScores(options().mode); }
  bool wants_rows() const { return WantsRows(options().mode); }
  bool wants_new_rows() const { return options().mode == AnswerMode::kNewRows; }
  bool wants_attention() const { return options().mode == AnswerMode::kAttention; }
};

// Tokens that the device lists and the host reads once they have arrived.
struct TokenList {
  const uint32_t* data = nullptr;
  uint32_t count = 0;
  std::vector<uint32_t> copy;  // where the device does not share the host's memory

  std::span<const uint32_t> tokens() const { return {data, count}; }
};

// One set at work: its operations, and what they leave for the host. Stays where it is until its round is over.
struct RetrievalSet {
  RetrievalItem* item = nullptr;
  const PositionPlan* plan = nullptr;
  uint32_t position = 0;  // of the query's positions
  uint32_t set = 0;       // of the position's sets
  uint32_t kv_head = 0;
  uint32_t first_q_head = 0;

  std::vector<PrepareQueriesItem> prepare;
  ScanPlanesItem scan;
  SelectTokensItem select_survivors;
  RefinePlanesItem refine;
  SelectTokensItem select_candidates;
  SelectListsItem select_lists;
  MergeCandidatesItem merge;
  MergeCandidatesItem list_forced;
  ScoreTokensItem score_forced;
  SelectClustersItem select_clusters;
  ScanClustersItem scan_clusters;
  ScoreTokensItem score;
  SelectTokensItem select;
  GatherRowsItem gather;
  AttendItem attend;
  EstimateRestItem rest;

  // Host side of what the device reads and writes.
  uint32_t visible = 0;
  TokenList survivors;   // kSketch: after the first pass, where a second one follows
  TokenList candidates;  // kSketch, kCentroids, kClusters, kClusterSketch: the tokens scored
  TokenList opened;      // kClusters, kClusterSketch: clusters
  uint32_t chosen = 0;
  uint64_t overflow = 0;
  uint64_t rest_lines = 0;
  std::vector<uint32_t> all_tokens;   // dense with rows
  std::vector<uint32_t> host_tokens;  // new rows: the chosen tokens, then those whose rows the worker lacks
  uint32_t missing = 0;               // how many those are
  std::vector<uint32_t> selected_lists;

  bool is(Path path) const { return plan->path == path; }
  bool opens_clusters() const { return plan->opens_clusters(); }
  bool scans_sketch() const { return is(Path::kSketch) || is(Path::kClusterSketch); }
  bool keeps_scores() const { return item->wants_scores() || item->wants_attention(); }
  bool scores() const { return !is(Path::kDense) || keeps_scores(); }
  bool selects() const { return !is(Path::kDense); }
  // Whether its chosen tokens are kept for the host.
  bool keeps_chosen() const { return !item->last_chosen.empty() && position + 1 == item->plan.positions.size(); }
  // Tokens that the answer lists, with their rows where it has rows.
  uint32_t listed() const { return item->wants_new_rows() ? missing : chosen; }
  // What is not chosen is empty where everything is, and so it stays as the answer began.
  bool estimates() const {
    return item->options().remainder && selects() && item->layer->clusters()->clustered_length() > 0;
  }
};

// Stages inputs, takes arrays and fills in the set's operations. What does not fit shows in memory.exhausted(); the set
// must then stay alive until the device is done with what was staged.
void BuildSet(BatchMemory& memory, RetrievalSet& set);

// PrepareQueries of some heads, with its arrays in scratch. query [heads, head_dim] of the session's dtype; stays valid
// until the batch is over.
PrepareQueriesItem MakePrepare(BatchMemory& memory, const Layer& layer, const HeadView& view,
                               std::span<const std::byte> query);

// Where the set's rows of an attention of the answer lie: output [R, value_dim] and log_sum_exp [R], float32 until the
// retrieval ends.
float* OutputPlace(PartialAttention& attention, const RetrievalSet& set);
float* LogSumExpPlace(PartialAttention& attention, const RetrievalSet& set);

// Adds what the set's stages read to the counts of an explanation. REQUIRES: counts have arrived.
void AddStages(const RetrievalSet& set, Explanation& explanation);

}  // namespace ctkvr
