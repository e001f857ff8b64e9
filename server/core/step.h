// SPDX-License-Identifier: Apache-2.0
//
// Steps: appends and retrievals of many callers, put together so that one operation serves all of them. What two calls
// do to one layer keeps their order; different layers do not wait for each other.
// StepCall is shared by lanes, each writing the results of its own items; StepRunner belongs to one lane.

#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "server/core/appender.h"
#include "server/core/batch_memory.h"
#include "server/core/join.h"
#include "server/core/retriever.h"
#include "server/core/session.h"
#include "server/core/types.h"

namespace ctkvr {

struct StepCall : JoinedCall {
  std::vector<StepRequest> requests;
  std::vector<float> key_magnitudes;  // [requests], as CheckElements found them
  std::vector<StepResult> results;    // [requests]
  CallContext context;
  absl::AnyInvocable<void(std::vector<StepResult>)> done;

  void Complete() { done(std::move(results)); }
  void Fail(uint32_t item, const absl::Status& status) { results[item] = {.append = status, .answer = status}; }
};

// A lane's items of a call.
struct StepPart {
  Part<StepCall> call;
  std::vector<uint32_t> items;

  void Fail(const absl::Status& status) {
    for (uint32_t item : items) call->Fail(item, status);
  }
};

class StepRunner {
 public:
  // Finds a session of the tenant by reference for a call queued at `arrived`, renews its lease, or says why not.
  using Finder = std::function<absl::StatusOr<Session*>(const SessionRef&, TenantId, TimePoint arrived)>;
  // Told of every session that tokens were appended to.
  using Observer = std::function<void(Session&)>;
  // Where a retrieval of the session leaves what an exact repeat needs; null: it is not sampled.
  using Sampler = std::function<ShadowSlot*(Session&)>;
  struct Hooks {
    Finder find;
    Observer appended;
    Sampler sample;
  };
  StepRunner(LaneDevice device, const Clock& clock, Stats& stats, Hooks hooks);

  // Of the retrievals added from now on.
  void SetPolicyInputs(const PolicyInputs& inputs) { policy_inputs_ = inputs; }
  // REQUIRES: sessions found stay until Flush.
  void Add(StepPart part, TimePoint arrived);
  // Runs all that was added and completes the calls.
  void Flush();

 private:
  using Key = std::pair<const Session*, uint32_t>;  // and the layer
  struct PendingQuery {
    RetrievalTask task;
    const absl::StatusOr<AppendResult>* append = nullptr;  // of the same item; null: none
  };
  void AddItem(StepCall& call, uint32_t item, TimePoint arrived);
  void AddAppend(Session& session, StepCall& call, uint32_t item);
  void RunPendingAppends();
  void RunPendingQueries();

  const LaneDevice device_;
  const Clock& clock_;
  Stats& stats_;
  const Hooks hooks_;
  PolicyInputs policy_inputs_;
  std::vector<StepPart> parts_;
  std::vector<AppendTask> appends_;
  std::set<Key> appended_keys_;
  std::vector<const StepCall*> appending_calls_;  // of appends_, each once
  std::vector<PendingQuery> queries_;
  std::set<Key> queried_keys_;
};

}  // namespace ctkvr
