// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/test_server.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "kernels/backend_registry.h"
#include "server/rpc/engine_facts.h"
#include "spdlog/sinks/base_sink.h"

namespace ctkvr::testing {
namespace {

template <typename T>
T OrDie(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "the test server cannot start: %s\n", result.status().ToString().c_str());
  std::abort();
}

// Keeps lines under its own lock, so that a test may read while calls end.
class TextSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::string Text() {
    std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    text_.append(line.data(), line.size());
  }
  void flush_() override {}
  std::string text_;
};

// A file that is never empty of news, so that every look asks the test what it says.
rpc::Access::Options AccessOptions(const TestServerOptions& options) {
  return {.file = "/proc/sys/kernel/random/uuid",
          .parse = [rules = options.access](const std::string&, const std::string&) { return rules(); },
          .now = options.wall_time,
          .threads = false};
}

}  // namespace

TestServer::TestServer(const TestServerOptions& options)
    : log_sink_(std::make_shared<TextSink>()), slow_calls_(options.slow_call) {
  if (options.own_backend == nullptr) owned_backend_ = OrDie(CreateBackend(options.backend));
  Backend& backend = options.own_backend == nullptr ? *owned_backend_ : *options.own_backend;
  Clock& clock = options.clock == nullptr ? real_clock_ : *options.clock;
  log_ = std::make_unique<obs::Log>(obs::LogOptions{.sink = log_sink_});
  engine_ = OrDie(Engine::Create(options.engine, backend, clock));
  access_ = std::make_unique<rpc::Access>();
  if (options.access) access_ = OrDie(rpc::Access::Create(AccessOptions(options), *engine_, *log_));
  metrics_ = std::make_unique<obs::Metrics>(
      engine_->stats(), [this] { return rpc::SampleServer(*engine_, *access_); },
      rpc::EngineFacts(*engine_, options.version));
  edge_.emplace(rpc::Edge{.engine = *engine_,
                          .clock = clock,
                          .metrics = *metrics_,
                          .log = *log_,
                          .access = *access_,
                          .slow_calls = slow_calls_});
  server_ =
      OrDie(rpc::GrpcServer::Start({.address = "127.0.0.1:0", .version = options.version, .tls = options.tls}, *edge_));
}

// What still waits is answered first: a server without threads would else wait for it for ever.
TestServer::~TestServer() { engine_->Drain(std::chrono::milliseconds(0)); }

std::string TestServer::log_text() { return static_cast<TextSink&>(*log_sink_).Text(); }

std::shared_ptr<grpc::Channel> TestServer::NewChannel() const {
  static std::atomic<int> number{0};
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt("ctkvr.test_channel", number++);  // else channels with equal arguments share a connection
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

void TestServer::AwaitQueued(int64_t count) const {
  while (engine_->stats().queued_items.load() < count) std::this_thread::yield();
}

void TestServer::AwaitMetric(const std::string& series, double value) const {
  for (;;) {
    std::istringstream lines(metrics_->Text());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(series + " ") && std::strtod(line.c_str() + series.size(), nullptr) >= value) return;
    }
    std::this_thread::yield();
  }
}

}  // namespace ctkvr::testing
