// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <numeric>

#include "kernels/base/status_macros.h"
#include "server/core/index.h"

namespace ctkvr {
namespace {

// A centroid is known by the last of its queries, so that truncation takes it with any of them.
void SortByPosition(IndexSet::Head& head) {
  std::vector<uint32_t> order(head.positions.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return head.positions[a] < head.positions[b]; });
  head.KeepCentroids(order);
}

}  // namespace

std::vector<const uint16_t*> QueryIndex::QueriesOf(const IndexSet::Clustering& clustering) const {
  std::vector<const uint16_t*> queries;
  for (const RingEntry& entry : clustering.queries) queries.push_back(ring_[clustering.kv_head].centroids[entry.slot]);
  return queries;
}

absl::Status QueryIndex::AssignStep(LaneDevice device, IndexSet& set) const {
  IndexSet::Clustering& clustering = *set.clustering;
  const IndexSet::Head& head = set.heads[clustering.kv_head];
  const auto count = static_cast<uint32_t>(clustering.queries.size());
  const uint32_t first = clustering.next, last = std::min(count, first + limits::kMaintenanceQueries);
  const std::vector<const uint16_t*> queries = QueriesOf(clustering);
  BatchMemory memory(device);
  const AssignQueriesItem item{.queries = memory.In(queries.data() + first, last - first),
                               .centroids = memory.In(head.centroids.data(), head.centroids.size()),
                               .first = 0,
                               .last = last - first,
                               .centroid_count = static_cast<uint32_t>(head.centroids.size()),
                               .heads = shape_.group_heads,
                               .head_dim = shape_.head_dim,
                               .nearest = memory.Out(clustering.nearest.data() + first, last - first)};
  if (memory.exhausted()) return memory.ExhaustedError("a maintenance step");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.AssignQueries(device.stream, {&item, 1});
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  if (status.ok()) clustering.next = last;
  return status;
}

absl::Status QueryIndex::AverageStep(LaneDevice device, IndexSet& set) const {
  IndexSet::Clustering& clustering = *set.clustering;
  IndexSet::Head& head = set.heads[clustering.kv_head];
  const std::vector<const uint16_t*> queries = QueriesOf(clustering);
  BatchMemory memory(device);
  const AverageQueriesItem item{.queries = memory.In(queries.data(), queries.size()),
                                .nearest = memory.In(clustering.nearest.data(), queries.size()),
                                .query_count = static_cast<uint32_t>(queries.size()),
                                .centroids = memory.In(head.centroids.data(), head.centroids.size()),
                                .first = 0,
                                .last = static_cast<uint32_t>(head.centroids.size()),
                                .heads = shape_.group_heads,
                                .head_dim = shape_.head_dim};
  if (memory.exhausted()) return memory.ExhaustedError("a maintenance step");
  absl::Status status = memory.status();
  if (status.ok()) status = device.backend.AverageQueries(device.stream, {&item, 1});
  if (status.ok()) status = memory.Finish();
  if (!status.ok()) (void)memory.Settle();
  if (!status.ok()) return status;
  for (size_t q = 0; q < queries.size(); ++q) {
    uint32_t& position = head.positions[clustering.nearest[q]];
    position = std::max(position, clustering.queries[q].position);
  }
  clustering.next = 0;
  if (++clustering.round < limits::kQueryClusterRounds) return absl::OkStatus();
  SortByPosition(head);
  clustering.round = 0;
  if (++clustering.kv_head == shape_.kv_heads) set.clustering.reset();
  return absl::OkStatus();
}

absl::Status QueryIndex::ClusterStep(LaneDevice device, IndexSet& set) const {
  const IndexSet::Clustering& clustering = *set.clustering;
  if (clustering.forgotten != forgotten_) return absl::AbortedError("a query of the clustering has left the ring");
  return clustering.next < clustering.queries.size() ? AssignStep(device, set) : AverageStep(device, set);
}

}  // namespace ctkvr
