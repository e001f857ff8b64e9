// SPDX-License-Identifier: Apache-2.0
//
// A program of someone else that runs the engine in its own process: opens a session, appends, retrieves.

#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <vector>

#include "kernels/backend_registry.h"
#include "server/core/engine.h"

namespace {

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "consumer: %s\n", what);
  std::exit(1);
}

ctkvr::SessionConfig OneLayer() {
  ctkvr::LayerConfig layer;
  layer.q_heads = 4;
  layer.kv_heads = 2;
  layer.head_dim = 64;
  layer.value_dim = 64;
  layer.softmax.scale = 0.125f;
  ctkvr::SessionConfig config;
  config.layers = {layer};
  config.dtype = ctkvr::DType::kF32;
  config.token_limit = 128;
  return config;
}

}  // namespace

int main() {
  auto backend = ctkvr::CreateBackend("cpu");
  Require(backend.ok(), "no CPU backend");
  ctkvr::RealClock clock;
  auto engine = ctkvr::Engine::Create({.arena_bytes = size_t{64} << 20}, **backend, clock);
  Require(engine.ok(), "no engine");

  auto opened = std::make_shared<std::promise<bool>>();
  (*engine)->Open("mine", OneLayer(), {}, [opened](absl::StatusOr<ctkvr::SessionInfo> info) {
    if (!info.ok()) std::fprintf(stderr, "%s\n", info.status().ToString().c_str());
    opened->set_value(info.ok());
  });
  Require(opened->get_future().get(), "Open failed");

  const std::vector<float> keys(3 * 2 * 64, 0.5f);
  const std::vector<float> query(4 * 64, 1.0f);
  std::vector<ctkvr::StepRequest> steps(1);
  steps[0].session.id = "mine";
  steps[0].chunk = ctkvr::Chunk{.tokens = 3,
                                .dtype = ctkvr::DType::kF32,
                                .kv_heads = 2,
                                .head_dim = 64,
                                .value_dim = 64,
                                .keys = std::as_bytes(std::span(keys)),
                                .values = std::as_bytes(std::span(keys))};
  steps[0].query = ctkvr::Query{.position = 2,
                                .positions = 1,
                                .dtype = ctkvr::DType::kF32,
                                .q_heads = 4,
                                .head_dim = 64,
                                .queries = std::as_bytes(std::span(query))};
  auto stepped = std::make_shared<std::promise<uint32_t>>();
  (*engine)->Step(std::move(steps), {}, [stepped](std::vector<ctkvr::StepResult> results) {
    const auto& answer = results.at(0).answer;
    if (!answer.ok()) std::fprintf(stderr, "%s\n", answer.status().ToString().c_str());
    stepped->set_value(answer.ok() ? answer->counts.at(0) : 0);
  });
  Require(stepped->get_future().get() == 3, "a session of three tokens must be answered with all three");
  std::puts("consumer: ok");
}
