// SPDX-License-Identifier: Apache-2.0
//
// Appends 8,192 tokens of one layer, asks which of them matter to a query, and closes. Run: quickstart [ADDRESS]

#include <ctkvr/client/client.h>

#include <cstdio>
#include <random>
#include <vector>

namespace cc = ctkvr::client;

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "quickstart: %s\n", status.ToString().c_str());
  return 1;
}

int main(int argc, char** argv) {
  auto client = cc::Client::Connect({.address = argc > 1 ? argv[1] : "127.0.0.1:7420"});
  if (!client.ok()) return Fail(client.status());

  ctkvr::v1::SessionOptions options;  // what is left out takes the server's defaults
  options.mutable_geometry()->set_layers(1);
  options.mutable_geometry()->set_q_heads(8);
  options.mutable_geometry()->set_kv_heads(2);
  options.mutable_geometry()->set_head_dim(64);
  options.mutable_geometry()->set_dtype(ctkvr::v1::DTYPE_F32);
  options.set_token_limit(10000);
  auto session = (*client)->OpenSession(options, {.close_on_destroy = true});
  if (!session.ok()) return Fail(session.status());

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> keys(8192 * 2 * 64), values(8192 * 2 * 64), query(8 * 64);  // [tokens, kv_heads, head_dim] ...
  for (auto* array : {&keys, &values, &query}) {
    for (float& x : *array) x = normal(random);
  }
  auto appended = session->Append({.layer = 0,
                                   .first_position = 0,
                                   .tokens = 8192,
                                   .keys = std::as_bytes(std::span(keys)),
                                   .values = std::as_bytes(std::span(values))});
  if (!appended.ok()) return Fail(appended.status());

  auto shape = session->Shape(0);
  auto question = cc::MakeQuery(*shape, /*layer=*/0, /*position=*/8191, 1, std::as_bytes(std::span(query)));
  if (!question.ok()) return Fail(question.status());
  ctkvr::v1::AnswerOptions wanted;
  wanted.set_mode(ctkvr::v1::ANSWER_MODE_ROWS);  // ids, scores, keys and values
  auto answer = session->Retrieve(*question, wanted);
  if (!answer.ok()) return Fail(answer.status());

  auto view = cc::AnswerView::Create(*answer, *shape);
  if (!view.ok()) return Fail(view.status());
  for (uint32_t kv_head = 0; kv_head < view->sets(); ++kv_head) {
    std::printf("KV head %u: %zu of %u tokens matter\n", kv_head, view->ids(0, kv_head).size(), answer->length());
  }
  return 0;
}
