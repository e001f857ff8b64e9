// SPDX-License-Identifier: Apache-2.0

#include "server/core/query_feed.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"

namespace ctkvr {
namespace {

// Queries of different layers, written by one operation.
class FeedRound {
 public:
  explicit FeedRound(LaneDevice device) : device_(device), memory_(device) {}

  // Whether it takes part; else a round of its own must.
  bool Add(const FedQuery& fed) {
    if (layers_.contains(fed.layer)) return false;
    const Query& query = *fed.query;
    const uint32_t end = std::min(query.position + query.positions, fed.layer->length() + 1);
    QueryIndex& index = *fed.layer->index();
    const BatchMemory::Mark mark = memory_.mark();
    const size_t items = items_.size();
    Pending& pending = pending_.emplace_back(
        Pending{.fed = &fed, .write = index.BeginRingWrite(query.position, end - std::min(end, query.position))});
    index.StageRingWrite({.queries = query.queries, .dtype = query.dtype}, pending.write, memory_, items_);
    if (memory_.exhausted() && pending_.size() > 1) {
      items_.resize(items);
      pending_.pop_back();
      memory_.ResetTo(mark);
      return false;
    }
    layers_.insert(fed.layer);
    return true;
  }

  void Run(Stats& stats) {
    const absl::Status status = Write();
    if (status.ok()) {
      for (const Pending& pending : pending_) pending.fed->layer->index()->CommitRing(pending.write, false);
      return;
    }
    NoteDeviceError(stats, status);
    const bool unknown_outcome = !memory_.Settle().ok();
    for (const Pending& pending : pending_) {
      *pending.fed->status = status;
      if (!unknown_outcome || pending.fed->session->failed()) continue;
      pending.fed->session->Fail();
      stats.sessions_failed.fetch_add(1, std::memory_order_relaxed);
    }
  }

 private:
  struct Pending {
    const FedQuery* fed = nullptr;
    QueryIndex::RingWrite write;
  };

  absl::Status Write() {
    if (memory_.exhausted()) return memory_.ExhaustedError("the queries of a retrieval");
    CTKVR_RETURN_IF_ERROR(memory_.status());
    if (items_.empty()) return absl::OkStatus();
    CTKVR_RETURN_IF_ERROR(device_.backend.WriteCentroids(device_.stream, items_));
    return memory_.Finish();
  }

  const LaneDevice device_;
  BatchMemory memory_;
  std::set<const Layer*> layers_;
  std::deque<Pending> pending_;  // what is staged points into it
  std::vector<WriteCentroidsItem> items_;
};

bool Wanted(const FedQuery& fed) {
  return fed.layer->index() != nullptr && fed.layer->config().query_centroids.retrieved_queries;
}

}  // namespace

void FeedQueries(LaneDevice device, Stats& stats, std::span<const FedQuery> queries) {
  std::vector<const FedQuery*> waiting;
  for (const FedQuery& fed : queries) {
    if (Wanted(fed)) waiting.push_back(&fed);
  }
  while (!waiting.empty()) {
    FeedRound round(device);
    std::vector<const FedQuery*> later;
    for (const FedQuery* fed : waiting) {
      if (!round.Add(*fed)) later.push_back(fed);
    }
    round.Run(stats);
    waiting = std::move(later);
  }
}

}  // namespace ctkvr
