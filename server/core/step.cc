// SPDX-License-Identifier: Apache-2.0

#include "server/core/step.h"

#include <utility>

#include "server/core/observer.h"

namespace ctkvr {

StepRunner::StepRunner(LaneDevice device, const Clock& clock, Stats& stats, Hooks hooks)
    : device_(device), clock_(clock), stats_(stats), hooks_(std::move(hooks)) {}

void StepRunner::Add(StepPart part, TimePoint arrived) {
  for (uint32_t item : part.items) AddItem(*part.call.operator->(), item, arrived);
  parts_.push_back(std::move(part));
}

void StepRunner::AddItem(StepCall& call, uint32_t item, TimePoint arrived) {
  const StepRequest& request = call.requests[item];
  StepResult& result = call.results[item];
  const absl::StatusOr<Session*> session = hooks_.find(request.session, call.context.tenant, arrived);
  if (!session.ok()) {
    call.Fail(item, session.status());
    return;
  }
  if (request.chunk.has_value()) AddAppend(**session, call, item);
  if (!request.query.has_value()) return;
  queries_.push_back({.task = {.session = *session,
                               .query = &*request.query,
                               .context = &call.context,
                               .policy_inputs = policy_inputs_,
                               .result = &result.answer},
                      .append = request.chunk.has_value() ? &result.append : nullptr});
  queried_keys_.insert({*session, request.query->layer});
}

// Appends run before the queries that wait, so an append must not overtake a query of its layer; and two appends to
// one layer must not run at once.
void StepRunner::AddAppend(Session& session, StepCall& call, uint32_t item) {
  const StepRequest& request = call.requests[item];
  const Key key{&session, request.chunk->layer};
  if (queried_keys_.contains(key)) {
    RunPendingAppends();
    RunPendingQueries();
  } else if (appended_keys_.contains(key)) {
    RunPendingAppends();
  }
  appends_.push_back({.session = &session,
                      .chunk = &*request.chunk,
                      .key_magnitude_max = call.key_magnitudes[item],
                      .result = &call.results[item].append});
  appended_keys_.insert(key);
  if (appending_calls_.empty() || appending_calls_.back() != &call) appending_calls_.push_back(&call);
}

void StepRunner::RunPendingAppends() {
  if (appends_.empty()) return;
  const TimePoint start = clock_.Now();
  RunAppends(device_, stats_, appends_);
  const std::chrono::nanoseconds took = clock_.Now() - start;
  stats_.stages[static_cast<size_t>(Stage::kAppend)].Observe(took);
  for (const StepCall* call : appending_calls_) call->context.Spent(Stage::kAppend, took);
  for (const AppendTask& task : appends_) {
    if (!task.result->ok()) continue;
    hooks_.appended(*task.session);
    SessionObserver* const observer = task.session->observer();
    if (observer != nullptr && !(*task.result)->repeated) observer->Appended(task.session->epoch(), *task.chunk);
  }
  appends_.clear();
  appended_keys_.clear();
  appending_calls_.clear();
}

void StepRunner::RunPendingQueries() {
  std::vector<RetrievalTask> tasks;
  for (const PendingQuery& query : queries_) {
    if (query.append != nullptr && !query.append->ok()) {
      *query.task.result = query.append->status();
    } else {
      tasks.push_back(query.task);
      tasks.back().shadow = hooks_.sample(*query.task.session);
    }
  }
  if (!tasks.empty()) RunRetrievals(device_, clock_, stats_, tasks);
  queries_.clear();
  queried_keys_.clear();
}

void StepRunner::Flush() {
  RunPendingAppends();
  RunPendingQueries();
  const std::vector<StepPart> ended = std::exchange(parts_, {});
}

}  // namespace ctkvr
