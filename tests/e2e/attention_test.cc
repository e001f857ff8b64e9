// SPDX-License-Identifier: Apache-2.0
//
// The whole way of a partial attention: a worker appends and asks the real program over a decode stream, attends its
// own last tokens and sinks itself, merges, and has full attention over everything.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>

#include "ctkvr/client/client.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/process.h"
#include "tests/testing/random_kv.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::testing {
namespace {

constexpr uint32_t kQHeads = 6, kKvHeads = 2, kHeadDim = 32, kValueDim = 24, kTokens = 300;
constexpr uint32_t kLocalSinks = 2, kLocalBegin = kTokens - 20;
constexpr float kSinkLogits[kQHeads] = {0, 1, -1, 2, -2, 3};

struct Parts {
  std::vector<double> output = std::vector<double>(size_t{kQHeads} * kValueDim);
  std::vector<double> log_sum_exp = std::vector<double>(kQHeads);
};

class AttentionTest : public ::testing::Test {
 protected:
  AttentionTest()
      : kv_(MakeRandomKv({.tokens = kTokens,
                          .kv_heads = kKvHeads,
                          .group_heads = kQHeads / kKvHeads,
                          .head_dim = kHeadDim,
                          .value_dim = kValueDim},
                         KvPattern::kNormal, 21)) {
    process_ = std::make_unique<Process>(
        CTKVRD_PATH,
        std::vector<std::string>{"--listen_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", "--arena_bytes=64MiB",
                                 "--scratch_bytes=32MiB", "--lanes=1", "--log_format=json"});
    const auto serving = nlohmann::json::parse(process_->AwaitLine("\"event\":\"serving\""));
    auto client = client::Client::Connect({.address = serving.at("listen_address")});
    EXPECT_THAT(client, IsOk());
    client_ = *std::move(client);
  }

  static v1::SessionOptions Options() {
    v1::SessionOptions options;
    v1::Geometry* geometry = options.mutable_geometry();
    geometry->set_layers(1);
    geometry->set_q_heads(kQHeads);
    geometry->set_kv_heads(kKvHeads);
    geometry->set_head_dim(kHeadDim);
    geometry->set_value_dim(kValueDim);
    geometry->set_dtype(v1::DTYPE_F32);
    options.set_format(v1::FORMAT_F32);
    options.mutable_selection()->set_source(v1::SOURCE_EXACT);
    options.mutable_selection()->set_k_tokens(kTokens);
    options.mutable_softmax()->mutable_sink_logits()->Add(std::begin(kSinkLogits), std::end(kSinkLogits));
    options.set_token_limit(kTokens);
    return options;
  }

  client::ChunkView Chunk(uint32_t begin, uint32_t end) const {
    const auto part = [=](const std::vector<float>& floats, uint32_t dim) {
      const size_t row = size_t{kKvHeads} * dim;
      return std::as_bytes(std::span(floats).subspan(begin * row, (end - begin) * row));
    };
    return {.first_position = begin,
            .tokens = end - begin,
            .keys = part(kv_.keys, kHeadDim),
            .values = part(kv_.values, kValueDim)};
  }

  // In float64 over the tokens that `wanted` names, with their sink logits or without.
  template <typename Wanted>
  Parts Exact(Wanted wanted, bool with_sinks) const {
    Parts parts;
    for (uint32_t h = 0; h < kQHeads; ++h) {
      const uint32_t kv_head = h / (kQHeads / kKvHeads);
      double sum = with_sinks ? std::exp(kSinkLogits[h]) : 0;
      double* output = parts.output.data() + size_t{h} * kValueDim;
      for (uint32_t t = 0; t < kTokens; ++t) {
        if (!wanted(t)) continue;
        double score = 0;
        for (uint32_t i = 0; i < kHeadDim; ++i) {
          score += double{kv_.queries[h * kHeadDim + i]} * kv_.keys[(size_t{t} * kKvHeads + kv_head) * kHeadDim + i];
        }
        const double weight = std::exp(score / std::sqrt(double{kHeadDim}));
        sum += weight;
        for (uint32_t i = 0; i < kValueDim; ++i) {
          output[i] += weight * kv_.values[(size_t{t} * kKvHeads + kv_head) * kValueDim + i];
        }
      }
      for (uint32_t i = 0; i < kValueDim; ++i) output[i] /= sum;
      parts.log_sum_exp[h] = std::log(sum);
    }
    return parts;
  }

  const RandomKv kv_;
  std::unique_ptr<Process> process_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(AttentionTest, WhatTheServerAndTheWorkerAttendMergesToFullAttention) {
  SCOPED_TRACE("CTKVR_TEST_SEED=" + std::to_string(TestSeed()));
  const auto session = client_->OpenSession(Options(), {.close_on_destroy = true});
  ASSERT_THAT(session, IsOk());
  ASSERT_THAT(session->Append(Chunk(0, kTokens - 1)), IsOk());
  const auto shape = session->Shape(0);
  ASSERT_THAT(shape, IsOk());
  auto query = client::MakeQuery(*shape, 0, kTokens - 1, 1, std::as_bytes(std::span(kv_.queries)));
  ASSERT_THAT(query, IsOk());
  query->set_local_begin(kLocalBegin);
  query->set_local_sinks(kLocalSinks);
  v1::AnswerOptions wanted;
  wanted.set_mode(v1::ANSWER_MODE_ATTENTION);
  const auto stream = client_->StartDecode();
  const client::DecodeEntry entry{.session = &*session, .chunk = Chunk(kTokens - 1, kTokens), .query = *query};
  ASSERT_THAT(stream->Send({&entry, 1}, wanted), IsOk());
  const auto reply = stream->Receive();
  ASSERT_THAT(reply, IsOk());
  ASSERT_THAT(client::StatusOf(reply->items(0).status()), IsOk());
  const auto chosen = client::AttentionOf(reply->items(0).answer(), *shape);
  ASSERT_THAT(chosen, IsOk());

  const auto is_local = [](uint32_t t) { return t < kLocalSinks || t >= kLocalBegin; };
  const Parts local = Exact(is_local, false);
  const client::Attention own{.output = {local.output.begin(), local.output.end()},
                              .log_sum_exp = {local.log_sum_exp.begin(), local.log_sum_exp.end()}};
  const client::AttentionView parts[] = {chosen->view(), own.view()};
  const auto merged = client::MergeAttention(parts, kSinkLogits);
  ASSERT_THAT(merged, IsOk());
  const Parts whole = Exact([](uint32_t) { return true; }, true);
  for (size_t i = 0; i < whole.output.size(); ++i) EXPECT_NEAR(merged->output[i], whole.output[i], 1e-5) << i;
  for (size_t h = 0; h < kQHeads; ++h) EXPECT_NEAR(merged->log_sum_exp[h], whole.log_sum_exp[h], 1e-5) << h;
}

}  // namespace
}  // namespace ctkvr::testing
