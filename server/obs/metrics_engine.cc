// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <limits>
#include <string>
#include <utility>

#include "prometheus/metric_family.h"
#include "server/obs/metrics.h"

namespace ctkvr::obs {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// Collects families; each call adds one, or a metric to the last one.
class Page {
 public:
  void Counter(const char* name, const char* help, uint64_t value) {
    Open(name, help, MetricType::Counter);
    CounterSeries({}, static_cast<double>(value));
  }
  void Gauge(const char* name, const char* help, double value) {
    Open(name, help, MetricType::Gauge);
    families_.back().metric.emplace_back().gauge.value = value;
  }
  void Open(const char* name, const char* help, MetricType type) { families_.push_back({name, help, type, {}}); }
  void CounterSeries(std::vector<ClientMetric::Label> labels, double value) {
    Series(MetricType::Counter, std::move(labels), value);
  }
  void Series(MetricType type, std::vector<ClientMetric::Label> labels, double value) {
    ClientMetric& metric = families_.back().metric.emplace_back();
    metric.label = std::move(labels);
    (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  }
  void HistogramSeries(std::vector<ClientMetric::Label> labels, const DurationHistogram::Snapshot& snapshot) {
    ClientMetric& metric = families_.back().metric.emplace_back();
    metric.label = std::move(labels);
    uint64_t cumulative = 0;
    for (size_t i = 0; i < snapshot.counts.size(); ++i) {
      cumulative += snapshot.counts[i];
      const double bound = i < kDurationBuckets.size() ? kDurationBuckets[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({cumulative, bound});
    }
    // Taken from the same reading as the buckets, so that the page never contradicts itself.
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = snapshot.sum_seconds;
  }
  MetricFamily& last() { return families_.back(); }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<MetricFamily> families_;
};

void AddSessions(const Stats& stats, Page& page) {
  page.Gauge("ctkvr_sessions", "Sessions open now.", static_cast<double>(stats.sessions.load()));
  page.Counter("ctkvr_sessions_opened_total", "Sessions opened.", stats.sessions_opened);
  page.Open("ctkvr_sessions_ended_total", "Sessions ended, by how.", MetricType::Counter);
  for (size_t i = 0; i < kSessionEndCount; ++i) {
    page.CounterSeries({{"end", SessionEndName(static_cast<SessionEnd>(i))}},
                       static_cast<double>(stats.sessions_ended[i].load()));
  }
  page.Counter("ctkvr_sessions_failed_total", "Sessions failed by a device error.", stats.sessions_failed);
}

void AddDevice(const Stats& stats, Page& page) {
  page.Counter("ctkvr_device_errors_total", "Calls of the backend that failed.", stats.device_errors);
  page.Gauge("ctkvr_device_lost", "1 once the device is lost, which is for good.", stats.device_lost ? 1 : 0);
}

void AddWork(const Stats& stats, Page& page) {
  page.Gauge("ctkvr_held_tokens", "Tokens held, summed over layers.", static_cast<double>(stats.tokens_held.load()));
  page.Counter("ctkvr_appended_tokens_total", "Tokens appended, summed over layers.", stats.appended_tokens);
  page.Counter("ctkvr_repeated_appends_total", "Appends acknowledged as repeats.", stats.repeated_appends);
  page.Counter("ctkvr_appended_bytes_total", "Bytes of keys, values and queries appended.", stats.append_bytes);
  page.Open("ctkvr_retrievals_total", "Query positions answered, summed over layers, by source.", MetricType::Counter);
  for (size_t i = 0; i < kSourceCount; ++i) {
    page.CounterSeries({{"source", SourceName(static_cast<Source>(i))}},
                       static_cast<double>(stats.retrievals[i].load()));
  }
  page.Counter("ctkvr_chosen_tokens_total", "Tokens chosen, summed over sets.", stats.chosen_tokens);
  page.Counter("ctkvr_scanned_bytes_total", "Bytes read to choose, in whole lines of 64.", stats.bytes_read);
  page.Counter("ctkvr_row_bytes_total", "Bytes of key and value rows answered.", stats.row_bytes);
  page.Counter("ctkvr_batches_total", "Batches that lanes ran.", stats.batches);
  page.Counter("ctkvr_batch_items_total", "Steps in those batches.", stats.batch_items);
  page.Counter("ctkvr_maintenance_steps_total", "Steps of index maintenance.", stats.maintenance_steps);
  page.Open("ctkvr_stage_seconds", "Time of a batch's stages.", MetricType::Histogram);
  for (size_t i = 0; i < kStageCount; ++i) {
    page.HistogramSeries({{"stage", StageName(static_cast<Stage>(i))}}, stats.stages[i].Read());
  }
}

// What exact repeats found, a series a source each.
struct TruthFamily {
  const char* name;
  const char* help;
  double (*read)(const TruthStats&);
};
constexpr std::array<TruthFamily, 8> kTruthFamilies = {
    {{"ctkvr_truth_samples_total", "Retrievals repeated exactly, by the source that had served.",
      [](const TruthStats& t) { return static_cast<double>(t.samples.load()); }},
     {"ctkvr_truth_needles_total", "Query heads of them with one token that holds over 10 % of the attention.",
      [](const TruthStats& t) { return static_cast<double>(t.needles.load()); }},
     {"ctkvr_truth_needles_found_total", "Of those, with that token chosen.",
      [](const TruthStats& t) { return static_cast<double>(t.needles_found.load()); }},
     {"ctkvr_truth_best_tokens_total", "Tokens of the exact best k.",
      [](const TruthStats& t) { return static_cast<double>(t.best_tokens.load()); }},
     {"ctkvr_truth_best_chosen_total", "Of those, chosen.",
      [](const TruthStats& t) { return static_cast<double>(t.best_chosen.load()); }},
     {"ctkvr_truth_heads_total", "Query heads of the repeats.",
      [](const TruthStats& t) { return static_cast<double>(t.heads.load()); }},
     {"ctkvr_truth_mass_total", "Attention kept, summed over those heads.",
      [](const TruthStats& t) { return t.mass.load(); }},
     {"ctkvr_truth_output_error_total", "Relative error of the attention's output, summed over those heads.",
      [](const TruthStats& t) { return t.output_error.load(); }}}};

void AddTruth(const Stats& stats, Page& page) {
  for (const TruthFamily& family : kTruthFamilies) {
    page.Open(family.name, family.help, MetricType::Counter);
    for (size_t i = 0; i < kSourceCount; ++i) {
      page.CounterSeries({{"source", SourceName(static_cast<Source>(i))}}, family.read(stats.truth[i]));
    }
  }
  page.Open("ctkvr_quality_steps_total", "Layers moved to stronger settings for a needle share, by step.",
            MetricType::Counter);
  for (size_t i = 0; i < stats.quality_steps.size(); ++i) {
    page.CounterSeries({{"step", std::to_string(i + 1)}}, static_cast<double>(stats.quality_steps[i].load()));
  }
  page.Open("ctkvr_shadows_skipped_total", "Sampled retrievals that were not repeated, by why.", MetricType::Counter);
  for (size_t i = 0; i < kShadowSkipCount; ++i) {
    page.CounterSeries({{"reason", ShadowSkipName(static_cast<ShadowSkip>(i))}},
                       static_cast<double>(stats.shadows_skipped[i].load()));
  }
}

void AddQueue(const Stats& stats, const ServerFacts& facts, Page& page) {
  page.Gauge("ctkvr_queue_items", "Calls waiting for a lane.", static_cast<double>(stats.queued_items.load()));
  page.Gauge("ctkvr_queue_items_max", "Calls that may wait, all lanes.", static_cast<double>(facts.queue_items_max));
  page.Counter("ctkvr_queue_rejections_total", "Calls refused because a queue was full.", stats.queue_rejections);
  page.Open("ctkvr_expired_calls_total", "Calls dropped for deadline or cancellation: before work, or before rows.",
            MetricType::Counter);
  page.CounterSeries({{"point", "queue"}}, static_cast<double>(stats.expired_in_queue.load()));
  page.CounterSeries({{"point", "flight"}}, static_cast<double>(stats.expired_in_flight.load()));
}

void AddServer(const ServerSample& sample, const ServerFacts& facts, double start_time_seconds, Page& page) {
  page.Gauge("ctkvr_arena_bytes", "Memory for sessions.", static_cast<double>(sample.arena_bytes));
  page.Gauge("ctkvr_arena_free_bytes", "Of it, can be admitted now.", static_cast<double>(sample.arena_free_bytes));
  page.Gauge("ctkvr_arena_reserved_bytes", "Of it, admitted.", static_cast<double>(sample.arena_reserved_bytes));
  page.Gauge("ctkvr_arena_held_bytes", "Of it, taken for tokens.", static_cast<double>(sample.arena_held_bytes));
  page.Counter("ctkvr_arena_cleared_bytes_total", "Of it, zeroed because another tenant's sessions had held it.",
               sample.arena_cleared_bytes);
  page.Gauge("ctkvr_slot_table_bytes", "Host memory beside the arena, for workers' row caches and tokens' tags.",
             static_cast<double>(sample.slot_table_bytes));
  page.Gauge("ctkvr_sessions_max", "Sessions that may be open.", static_cast<double>(facts.sessions_max));
  page.Gauge("ctkvr_lanes", "Threads that own sessions.", facts.lanes);
  page.Gauge("ctkvr_draining", "1 while the server refuses to open sessions because it ends.", sample.draining ? 1 : 0);
  page.Gauge("ctkvr_start_time_seconds", "When the server started, seconds since 1970.", start_time_seconds);
  page.Gauge("ctkvr_build_info", "1; the labels say what runs.", 1);
  page.last().metric.back().label = {{"version", facts.version}, {"backend", facts.backend}, {"device", facts.device}};
}

// A tenant's, by name: as many as the access file names, and for as long.
void AddTenants(const std::vector<TenantSample>& tenants, Page& page) {
  const auto family = [&](const char* name, const char* help, MetricType type, uint64_t (*read)(const TenantSample&)) {
    page.Open(name, help, type);
    for (const TenantSample& tenant : tenants) {
      page.Series(type, {{"tenant", tenant.name}}, static_cast<double>(read(tenant)));
    }
  };
  family("ctkvr_tenant_sessions", "Sessions of a tenant that are open.", MetricType::Gauge,
         [](const TenantSample& t) { return t.usage.sessions; });
  family("ctkvr_tenant_reserved_bytes", "Of the arena, admitted to a tenant.", MetricType::Gauge,
         [](const TenantSample& t) { return t.usage.memory_bytes; });
  family("ctkvr_tenant_queue_items", "Calls of a tenant that wait for a lane.", MetricType::Gauge,
         [](const TenantSample& t) { return t.usage.queued_calls; });
  family("ctkvr_tenant_calls_total", "Calls, and messages of streams, of a tenant.", MetricType::Counter,
         [](const TenantSample& t) { return t.calls; });
  page.Open("ctkvr_tenant_refusals_total", "Calls that a tenant's quota refused, by which.", MetricType::Counter);
  for (const TenantSample& tenant : tenants) {
    for (size_t i = 0; i < kQuotaKindCount; ++i) {
      page.CounterSeries({{"tenant", tenant.name}, {"quota", kQuotaNames[i]}},
                         static_cast<double>(tenant.usage.refusals[i]));
    }
    page.CounterSeries({{"tenant", tenant.name}, {"quota", "rate"}}, static_cast<double>(tenant.rate_refusals));
  }
}

void AddAccess(const AccessSample& access, Page& page) {
  page.Open("ctkvr_access_refusals_total", "Calls refused for who called, by what was wrong.", MetricType::Counter);
  for (size_t i = 0; i < kAccessRefusalCount; ++i) {
    page.CounterSeries({{"reason", kAccessRefusalNames[i]}}, static_cast<double>(access.refusals[i]));
  }
  AddTenants(access.tenants, page);
}

}  // namespace

EngineCollector::EngineCollector(const Stats& stats, std::function<ServerSample()> sample, ServerFacts facts)
    : stats_(stats),
      sample_(std::move(sample)),
      facts_(std::move(facts)),
      start_time_seconds_(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()) {}

std::vector<prometheus::MetricFamily> EngineCollector::Collect() const {
  Page page;
  AddSessions(stats_, page);
  AddDevice(stats_, page);
  AddWork(stats_, page);
  AddTruth(stats_, page);
  AddQueue(stats_, facts_, page);
  const ServerSample sample = sample_();
  AddServer(sample, facts_, start_time_seconds_, page);
  AddAccess(sample.access, page);
  return page.Take();
}

}  // namespace ctkvr::obs
