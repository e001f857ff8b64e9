// SPDX-License-Identifier: Apache-2.0
//
// The exact repeat of one retrieval, in slices, while its lane has nothing else to do: online truth. A retrieval that
// is to be repeated leaves what it saw and chose (ShadowQuery); a Shadow scores every key that the query saw, weighs
// every value of the server's part, and compares. It sees the same keys: those that come later lie past `seen`, and
// whoever runs it drops it once positions were taken away or raw keys became codes.
//
// Not thread-safe: belongs to one lane.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/batch_memory.h"
#include "server/core/layer.h"
#include "server/core/retrieval_plan.h"
#include "server/core/truth.h"

namespace ctkvr {

class Session;
struct RetrievalItem;

// What the last position of a retrieval saw and chose.
struct ShadowQuery {
  SessionKey session;
  uint64_t epoch = 0;
  uint64_t truncations = 0;  // of the session so far
  uint32_t code_generation = 0;
  uint32_t layer = 0;
  uint32_t set_heads = 0;  // R
  uint32_t seen = 0;       // positions [0, seen): the query's own and before, as far as the layer held them
  PositionPlan plan;
  Selection used;
  std::vector<std::byte> queries;             // [q_heads, head_dim] of the session's dtype
  std::vector<std::vector<uint32_t>> chosen;  // [sets], ascending
  std::optional<PartialAttention> remainder;  // of this position, where the answer had one

  size_t bytes() const;  // that it and its Shadow may hold
};

// Where a lane collects the one retrieval that it will repeat next.
using ShadowSlot = std::optional<ShadowQuery>;

// Answers that hold everything prove nothing.
constexpr bool WorthShadowing(const PositionPlan& last) {
  return last.path != Path::kEmpty && last.path != Path::kDense;
}

// Fills the slot from a whole answer, or counts why not. Takes item.last_chosen. REQUIRES: that was kept.
void OfferShadow(Session& session, RetrievalItem& item, ShadowSlot& slot, Stats& stats);
void SkipShadow(Session* session, ShadowSkip skip, Stats& stats);  // session null: it ended

class Shadow {
 public:
  // `layer` is the query's, and given again at each step.
  Shadow(ShadowQuery query, const Layer& layer);

  // One slice: reads at most limits::kShadowSliceTokens keys and values. Returns whether it was the last. The
  // backend's errors; RESOURCE_EXHAUSTED: scratch is too small.
  absl::StatusOr<bool> Step(LaneDevice device, const Layer& layer);

  const ShadowQuery& query() const { return query_; }
  // REQUIRES: Step returned true.
  const TruthSample& sample() const { return sample_; }

 private:
  // Merged parts of an attention of the set's heads: see AnswerOptions.remainder in the proto.
  struct Part {
    std::vector<double> output;  // [R, value_dim]
    std::vector<double> lse;     // [R]
    void Clear(size_t heads, size_t value_dim);
    void Add(const float* part_output, const float* part_lse);
  };
  enum class Phase : uint8_t { kScan, kChosen, kRank };

  void BeginSet();
  absl::Status ScanSlice(LaneDevice device, const Layer& layer);
  absl::Status ChosenSlice(LaneDevice device, const Layer& layer);
  void RankSlice();
  void EndSet();
  void AddRemainder();
  void EndHead(uint32_t head);
  bool InRegion(uint32_t token) const { return token >= region_begin_ && token < region_end_; }
  double Logit(float score) const;
  bool HasChosen(uint32_t token) const;

  ShadowQuery query_;
  const LayerConfig config_;  // the session may end first
  const uint32_t sets_;
  const uint32_t heads_;         // R, of a set
  const uint32_t region_begin_;  // tokens that had to be found: visible, and not always included
  const uint32_t region_end_;
  TruthSample sample_;

  uint32_t set_ = 0;
  Phase phase_ = Phase::kScan;
  uint32_t next_ = 0;                              // token, or index into the chosen
  std::unique_ptr<float[]> scores_;                // [R, seen]; left as it comes: clearing it all would be a long slice
  Part served_, local_, chosen_;                   // of the server's part, the worker's, what was chosen
  std::vector<uint32_t> heaviest_;                 // [R], of the region; `seen` where that is empty
  std::vector<double> total_;                      // [R] log of the softmax's denominator, sink logit included
  std::vector<std::pair<double, uint32_t>> best_;  // (group share, token)
  uint32_t best_max_ = 0;
};

}  // namespace ctkvr
