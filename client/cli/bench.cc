// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

namespace ctkvr::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint32_t kClusters = 64;
constexpr uint32_t kSlice = 1024;  // tokens generated at a time
constexpr uint32_t kDistinctQueries = 64;

// https://prng.di.unimi.it/splitmix64.c
uint64_t NextRandom(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

v1::SessionOptions OptionsOf(const BenchFlags& flags) {
  v1::SessionOptions options = MakeSessionOptions(flags.selection);
  v1::Geometry* geometry = options.mutable_geometry();
  geometry->set_layers(1);
  geometry->set_q_heads(flags.q_heads);
  geometry->set_kv_heads(flags.kv_heads);
  geometry->set_head_dim(flags.head_dim);
  geometry->set_value_dim(flags.value_dim);
  geometry->set_dtype(v1::DTYPE_F16);
  options.set_token_limit(flags.tokens);
  return options;
}

absl::Status AppendTokens(const client::Session& session, const client::LayerShape& shape, const BenchFlags& flags,
                          Progress* progress, BenchResult* result) {
  SyntheticRows key_rows(shape.head_dim, kClusters, flags.selection.seed);
  SyntheticRows value_rows(shape.value_dim, kClusters, flags.selection.seed + 1);
  SyntheticRows query_rows(shape.head_dim, kClusters, flags.selection.seed);  // the keys' own centres
  std::vector<uint16_t> keys(size_t{kSlice} * shape.kv_heads * shape.head_dim);
  std::vector<uint16_t> values(size_t{kSlice} * shape.kv_heads * shape.value_dim);
  std::vector<uint16_t> queries(size_t{kSlice} * shape.q_heads * shape.head_dim);
  // Only an index of queries needs them, and as many as it keeps.
  const bool indexed = session.options().query_centroids_size() > 0;
  const uint32_t queried = indexed ? std::min(flags.selection.centroids, kSlice) : 0;
  auto stream = session.StartAppend();
  if (!stream.ok()) return stream.status();
  progress->Start("append", flags.tokens);
  for (uint32_t begin = 0; begin < flags.tokens; begin += kSlice) {
    const uint32_t count = std::min(kSlice, flags.tokens - begin);
    const auto key_part = std::span(keys).first(size_t{count} * shape.kv_heads * shape.head_dim);
    const auto value_part = std::span(values).first(size_t{count} * shape.kv_heads * shape.value_dim);
    const uint32_t positions = std::min(queried, count);
    const auto query_part = std::span(queries).first(size_t{positions} * shape.q_heads * shape.head_dim);
    key_rows.Fill(key_part);
    value_rows.Fill(value_part);
    query_rows.Fill(query_part);
    const auto start = Clock::now();
    const absl::Status written = (*stream)->Write({.first_position = begin,
                                                   .tokens = count,
                                                   .keys = std::as_bytes(key_part),
                                                   .values = std::as_bytes(value_part),
                                                   .query_positions = positions,
                                                   .queries = std::as_bytes(query_part)});
    if (!written.ok()) return written;
    result->append_seconds += Seconds(Clock::now() - start).count();
    result->append_bytes += std::as_bytes(key_part).size() + std::as_bytes(value_part).size();
    progress->Update(begin + count);
  }
  const auto start = Clock::now();
  if (const auto done = (*stream)->Finish(); !done.ok()) return done.status();
  result->append_seconds += Seconds(Clock::now() - start).count();
  progress->Finish();
  if (const auto indexed_length = session.Maintain(); !indexed_length.ok()) return indexed_length.status();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::Query>> MakeQueries(const client::LayerShape& shape, const BenchFlags& flags) {
  SyntheticRows rows(shape.head_dim, kClusters, flags.selection.seed);
  std::vector<uint16_t> numbers(size_t{shape.q_heads} * shape.head_dim);
  std::vector<v1::Query> queries;
  for (uint32_t i = 0; i < kDistinctQueries; ++i) {
    rows.Fill(numbers);
    auto query = client::MakeQuery(shape, 0, flags.tokens - 1, 1, std::as_bytes(std::span(numbers)));
    if (!query.ok()) return query.status();
    queries.push_back(*std::move(query));
  }
  return queries;
}

absl::StatusOr<BenchRun> RunRetrievals(const client::Client& client, const client::Session& session,
                                       const std::vector<v1::Query>& queries, const BenchFlags& flags,
                                       uint32_t in_flight, Progress* progress) {
  const v1::AnswerOptions answer = MakeAnswerOptions(flags.selection);
  const auto stream = client.StartDecode({.in_flight_max = in_flight});
  BenchRun run{.in_flight = in_flight};
  std::deque<Clock::time_point> sent;
  progress->Start(fmt::format("retrieve, {} in flight", in_flight), flags.retrievals);
  const auto start = Clock::now();
  for (uint32_t next = 0; run.latency_us.size() < flags.retrievals;) {
    while (sent.size() < in_flight && next < flags.retrievals) {
      const client::DecodeEntry entry{.session = &session, .chunk = {}, .query = queries[next++ % queries.size()]};
      sent.push_back(Clock::now());
      if (const auto sequence = stream->Send({&entry, 1}, answer); !sequence.ok()) return stream->Receive().status();
      run.request_bytes += static_cast<double>(entry.query->ByteSizeLong());
    }
    const auto reply = stream->Receive();
    if (!reply.ok()) return reply.status();
    run.latency_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - sent.front()).count());
    sent.pop_front();
    if (reply->items_size() != 1) return absl::InternalError("a Decode reply without its item");
    if (auto s = client::StatusOf(reply->items(0).status()); !s.ok()) return s;
    run.reply_bytes += static_cast<double>(reply->ByteSizeLong());
    run.bytes_read += static_cast<double>(reply->items(0).answer().bytes_read());
    progress->Update(run.latency_us.size());
  }
  run.seconds = Seconds(Clock::now() - start).count();
  progress->Finish();
  const auto count = static_cast<double>(std::max<size_t>(run.latency_us.size(), 1));
  run.request_bytes /= count;
  run.reply_bytes /= count;
  run.bytes_read /= count;
  std::sort(run.latency_us.begin(), run.latency_us.end());
  return run;
}

double PerSecond(const BenchRun& run) {
  return run.seconds > 0 ? static_cast<double>(run.latency_us.size()) / run.seconds : 0;
}

}  // namespace

SyntheticRows::SyntheticRows(uint32_t dim, uint32_t clusters, uint64_t seed)
    : dim_(dim), state_(seed), centres_(size_t{clusters} * dim) {
  for (float& value : centres_) value = static_cast<float>(Normal());
}

// Twelve uniforms make a near normal number, with no branch and no logarithm.
double SyntheticRows::Normal() {
  double sum = 0;
  for (int word = 0; word < 3; ++word) {
    const uint64_t bits = NextRandom(&state_);
    for (int part = 0; part < 4; ++part) sum += static_cast<double>((bits >> (16 * part)) & 0xffff) / 65536;
  }
  return sum - 6;
}

void SyntheticRows::Fill(std::span<uint16_t> out) {
  constexpr double kSpread = 0.7;  // of a row about its centre
  const size_t clusters = centres_.size() / dim_;
  for (size_t begin = 0; begin + dim_ <= out.size(); begin += dim_) {
    const float* centre = centres_.data() + NextRandom(&state_) % clusters * dim_;
    for (uint32_t i = 0; i < dim_; ++i) {
      out[begin + i] = client::FloatToHalf(static_cast<float>(centre[i] + kSpread * Normal()));
    }
  }
}

absl::StatusOr<BenchResult> Bench(const client::Client& client, const BenchFlags& flags, Progress* progress) {
  if (flags.tokens == 0 || flags.retrievals == 0 || flags.in_flight == 0) {
    return absl::InvalidArgumentError("tokens, retrievals and in-flight must be at least 1");
  }
  auto session = client.OpenSession(OptionsOf(flags), {.close_on_destroy = true});
  if (!session.ok()) return session.status();
  const auto shape = session->Shape(0);
  if (!shape.ok()) return shape.status();
  BenchResult result;
  if (auto s = AppendTokens(*session, *shape, flags, progress, &result); !s.ok()) return s;
  const auto info = session->Get();
  if (!info.ok()) return info.status();
  result.memory = info->memory();
  const auto queries = MakeQueries(*shape, flags);
  if (!queries.ok()) return queries.status();
  std::vector<uint32_t> depths{1};
  if (flags.in_flight > 1) depths.push_back(flags.in_flight);
  for (const uint32_t depth : depths) {
    auto run = RunRetrievals(client, *session, *queries, flags, depth, progress);
    if (!run.ok()) return run.status();
    result.runs.push_back(*std::move(run));
  }
  if (const auto closed = session->Close(); !closed.ok()) return closed.status();
  return result;
}

std::string BenchTable(const BenchResult& result) {
  const auto bytes = static_cast<double>(result.append_bytes);
  std::string out = fmt::format(
      "appended {} of keys and values in {:.2f} s ({}/s); {:.1f} bytes a token and KV head, {} of f32\n", Bytes(bytes),
      result.append_seconds, Bytes(result.append_seconds > 0 ? bytes / result.append_seconds : 0),
      result.memory.bytes_per_token_head(), Percent(result.memory.share_of_f32()));
  Table table({"in flight", "retrievals", "p50 ms", "p90 ms", "p99 ms", "a second", "request", "reply", "bytes read"});
  for (const BenchRun& run : result.runs) {
    table.Add({std::to_string(run.in_flight), Count(run.latency_us.size()),
               Number(Quantile(run.latency_us, 0.5) / 1000, 3), Number(Quantile(run.latency_us, 0.9) / 1000, 3),
               Number(Quantile(run.latency_us, 0.99) / 1000, 3), Number(PerSecond(run), 1), Bytes(run.request_bytes),
               Bytes(run.reply_bytes), Bytes(run.bytes_read)});
  }
  return out + table.ToString();
}

nlohmann::json BenchJson(const BenchResult& result) {
  nlohmann::json runs = nlohmann::json::array();
  for (const BenchRun& run : result.runs) {
    runs.push_back({{"in_flight", run.in_flight},
                    {"retrievals", run.latency_us.size()},
                    {"latency_us_p50", Quantile(run.latency_us, 0.5)},
                    {"latency_us_p90", Quantile(run.latency_us, 0.9)},
                    {"latency_us_p99", Quantile(run.latency_us, 0.99)},
                    {"retrievals_per_second", PerSecond(run)},
                    {"request_bytes", run.request_bytes},
                    {"reply_bytes", run.reply_bytes},
                    {"bytes_read", run.bytes_read}});
  }
  return {{"append_seconds", result.append_seconds},
          {"append_bytes", result.append_bytes},
          {"memory", ToJson(result.memory)},
          {"runs", std::move(runs)}};
}

}  // namespace ctkvr::cli
