// SPDX-License-Identifier: Apache-2.0

#include "server/obs/metrics.h"

#include <algorithm>
#include <exception>
#include <sstream>

#include "kernels/base/check.h"
#include "prometheus/exposer.h"
#include "prometheus/text_serializer.h"

namespace ctkvr::obs {
namespace {

// From what a small call costs over loopback to what a long prompt's stream may take.
const prometheus::Histogram::BucketBoundaries kCallBuckets = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};

bool HasItems(Method method) { return method == Method::kRetrieve || method == Method::kDecode; }

double Seconds(std::chrono::nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

size_t CodeIndex(int code) {
  const auto index = static_cast<size_t>(code);
  return code >= 0 && index < kCodeNames.size() ? index : 2;  // UNKNOWN
}

}  // namespace

const char* CodeName(int code) { return kCodeNames[CodeIndex(code)]; }

Metrics::Metrics(const Stats& stats, std::function<ServerSample()> sample, ServerFacts facts)
    : registry_(std::make_shared<prometheus::Registry>()),
      engine_(std::make_shared<EngineCollector>(stats, std::move(sample), std::move(facts))) {
  MakeSeries();
  MakeAdminSeries();
}

Metrics::~Metrics() = default;

void Metrics::MakeSeries() {
  auto& calls = prometheus::BuildCounter()
                    .Name("ctkvr_rpc_calls_total")
                    .Help("Calls that ended, by method and status code.")
                    .Register(*registry_);
  auto& items = prometheus::BuildCounter()
                    .Name("ctkvr_rpc_items_total")
                    .Help("Items of batches, by method and status code of the item.")
                    .Register(*registry_);
  auto& seconds = prometheus::BuildHistogram()
                      .Name("ctkvr_rpc_seconds")
                      .Help("Time from a call's arrival to its end; streams as a whole.")
                      .Register(*registry_);
  auto& message_seconds = prometheus::BuildHistogram()
                              .Name("ctkvr_rpc_message_seconds")
                              .Help("Time from reading a stream's message to its result.")
                              .Register(*registry_);
  auto& in_flight =
      prometheus::BuildGauge().Name("ctkvr_rpc_in_flight").Help("Calls that run now.").Register(*registry_);
  auto& cancelled = prometheus::BuildCounter()
                        .Name("ctkvr_rpc_cancelled_total")
                        .Help("Calls whose client went away or whose deadline passed while they ran.")
                        .Register(*registry_);
  auto& received = prometheus::BuildCounter()
                       .Name("ctkvr_rpc_received_bytes_total")
                       .Help("Bytes of request messages.")
                       .Register(*registry_);
  auto& sent = prometheus::BuildCounter()
                   .Name("ctkvr_rpc_sent_bytes_total")
                   .Help("Bytes of reply messages.")
                   .Register(*registry_);
  for (size_t m = 0; m < kMethodNames.size(); ++m) {
    const auto method = static_cast<Method>(m);
    const std::string name = kMethodNames[m];
    MethodSeries& own = series_[m];
    for (size_t c = 0; c < kCodeNames.size(); ++c) {
      own.calls[c] = &calls.Add({{"method", name}, {"code", kCodeNames[c]}});
      if (HasItems(method)) own.items[c] = &items.Add({{"method", name}, {"code", kCodeNames[c]}});
    }
    own.seconds = &seconds.Add({{"method", name}}, kCallBuckets);
    if (IsStream(method)) own.message_seconds = &message_seconds.Add({{"method", name}}, kCallBuckets);
    own.in_flight = &in_flight.Add({{"method", name}});
    own.cancelled = &cancelled.Add({{"method", name}});
    own.received_bytes = &received.Add({{"method", name}});
    own.sent_bytes = &sent.Add({{"method", name}});
  }
}

void Metrics::MakeAdminSeries() {
  auto& calls = prometheus::BuildCounter()
                    .Name("ctkvr_admin_calls_total")
                    .Help("Calls of service Admin that ended, by method and status code.")
                    .Register(*registry_);
  for (size_t m = 0; m < kAdminMethodNames.size(); ++m) {
    for (size_t c = 0; c < kCodeNames.size(); ++c) {
      admin_calls_[m][c] = &calls.Add({{"method", kAdminMethodNames[m]}, {"code", kCodeNames[c]}});
    }
  }
}

void Metrics::AdminCallDone(AdminMethod method, int code) {
  admin_calls_[static_cast<size_t>(method)][CodeIndex(code)]->Increment();
}

void Metrics::CallStarted(Method method) { series(method).in_flight->Increment(); }

void Metrics::CallDone(Method method, int code, std::chrono::nanoseconds duration) {
  MethodSeries& own = series(method);
  own.in_flight->Decrement();
  own.calls[CodeIndex(code)]->Increment();
  own.seconds->Observe(Seconds(duration));
}

void Metrics::CallCancelled(Method method) { series(method).cancelled->Increment(); }

void Metrics::Bytes(Method method, uint64_t received, uint64_t sent) {
  series(method).received_bytes->Increment(static_cast<double>(received));
  series(method).sent_bytes->Increment(static_cast<double>(sent));
}

void Metrics::MessageDone(Method method, std::chrono::nanoseconds duration) {
  CTKVR_CHECK(IsStream(method));
  series(method).message_seconds->Observe(Seconds(duration));
}

void Metrics::ItemDone(Method method, int code) {
  CTKVR_CHECK(HasItems(method));
  series(method).items[CodeIndex(code)]->Increment();
}

absl::StatusOr<std::string> Metrics::Expose(const std::string& address) {
  CTKVR_CHECK(exposer_ == nullptr);
  if (address.empty()) return std::string();
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(address);
  } catch (const std::exception& error) {  // the library's way to say that it cannot bind
    return absl::UnavailableError("metrics_address is " + address + "; cannot listen there: " + error.what());
  }
  exposer_->RegisterCollectable(registry_);
  exposer_->RegisterCollectable(engine_);
  return address.substr(0, address.rfind(':') + 1) + std::to_string(exposer_->GetListeningPorts().front());
}

std::string Metrics::Text() const {
  std::vector<prometheus::MetricFamily> families = registry_->Collect();
  std::vector<prometheus::MetricFamily> engine = engine_->Collect();
  families.insert(families.end(), std::make_move_iterator(engine.begin()), std::make_move_iterator(engine.end()));
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

}  // namespace ctkvr::obs
