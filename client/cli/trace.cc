// SPDX-License-Identifier: Apache-2.0
#include "client/cli/trace.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/npy.h"

namespace ctkvr::cli {
namespace {

constexpr size_t kArrayBytesMax = size_t{4} << 30;
constexpr size_t kMetaBytesMax = size_t{1} << 20;

// [heads, tokens, dim] to [tokens, heads, dim].
std::vector<uint16_t> TokenMajor(const HalfArray& array) {
  const size_t heads = array.shape[0], tokens = array.shape[1], dim = array.shape[2];
  std::vector<uint16_t> out(array.data.size());
  for (size_t head = 0; head < heads; ++head) {
    for (size_t token = 0; token < tokens; ++token) {
      const auto from = array.data.begin() + static_cast<std::ptrdiff_t>((head * tokens + token) * dim);
      std::copy(from, from + static_cast<std::ptrdiff_t>(dim),
                out.begin() + static_cast<std::ptrdiff_t>((token * heads + head) * dim));
    }
  }
  return out;
}

absl::StatusOr<HalfArray> LoadArray(const std::filesystem::path& path) {
  const auto bytes = ReadFile(path.string(), kArrayBytesMax);
  if (!bytes.ok()) return bytes.status();
  auto array = ParseHalfArray(*bytes, path.string());
  if (array.ok() && (array->shape.size() != 3 || array->data.empty() || array->data.size() > UINT32_MAX)) {
    return absl::InvalidArgumentError(path.string() + ": three dimensions, none of them 0, are needed");
  }
  return array;
}

absl::Status ReadMeta(const std::filesystem::path& path, Trace* trace) {
  const auto text = ReadFile(path.string(), kMetaBytesMax);
  if (!text.ok()) return text.status();
  const auto meta = nlohmann::json::parse(*text, nullptr, false);
  if (!meta.is_object()) return absl::InvalidArgumentError(path.string() + ": not a JSON object");
  for (const char* key : {"tokens", "prompt_tokens", "query_first_position"}) {
    if (!meta.contains(key) || !meta[key].is_number_unsigned() || meta[key].get<uint64_t>() > UINT32_MAX) {
      return absl::InvalidArgumentError(absl::StrCat(path.string(), ": ", key, " must be a number of 32 bits"));
    }
  }
  if (!meta.contains("scale") || !meta["scale"].is_number() || !(meta["scale"].get<double>() > 0)) {
    return absl::InvalidArgumentError(path.string() + ": scale must be a number above 0");
  }
  trace->tokens = meta["tokens"].get<uint32_t>();
  trace->prompt_tokens = meta["prompt_tokens"].get<uint32_t>();
  trace->query_first_position = meta["query_first_position"].get<uint32_t>();
  trace->scale = meta["scale"].get<float>();
  return absl::OkStatus();
}

absl::Status CheckShapes(const Trace& trace, const HalfArray& q, const HalfArray& k, const HalfArray& v) {
  const auto bad = [&trace](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("trace ", trace.name, ": ", what));
  };
  if (k.shape[1] != trace.tokens || v.shape[1] != trace.tokens) return bad("k and v must hold meta.tokens tokens");
  if (k.shape[0] != v.shape[0]) return bad("k and v must have the same heads");
  if (q.shape[2] != k.shape[2]) return bad("q and k must have the same head_dim");
  if (q.shape[0] % k.shape[0] != 0) return bad("q_heads must be a multiple of kv_heads");
  if (trace.query_first_position > trace.prompt_tokens || trace.prompt_tokens >= trace.tokens) {
    return bad("query_first_position <= prompt_tokens < tokens must hold");
  }
  if (q.shape[1] != trace.tokens - trace.query_first_position) {
    return bad("q must hold the positions from query_first_position on");
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const uint16_t> Trace::keys_of(uint32_t begin, uint32_t count) const {
  const size_t row = size_t{kv_heads} * head_dim;
  return std::span(keys).subspan(begin * row, count * row);
}

std::span<const uint16_t> Trace::values_of(uint32_t begin, uint32_t count) const {
  const size_t row = size_t{kv_heads} * value_dim;
  return std::span(values).subspan(begin * row, count * row);
}

std::span<const uint16_t> Trace::queries_of(uint32_t begin, uint32_t count) const {
  const size_t row = size_t{q_heads} * head_dim;
  return std::span(queries).subspan((begin - query_first_position) * row, count * row);
}

absl::StatusOr<Trace> LoadTrace(const std::string& folder) {
  const std::filesystem::path path(folder);
  Trace trace;
  trace.name = path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  if (auto s = ReadMeta(path / "meta.json", &trace); !s.ok()) return s;
  const auto q = LoadArray(path / "q.npy");
  if (!q.ok()) return q.status();
  const auto k = LoadArray(path / "k.npy");
  if (!k.ok()) return k.status();
  const auto v = LoadArray(path / "v.npy");
  if (!v.ok()) return v.status();
  if (auto s = CheckShapes(trace, *q, *k, *v); !s.ok()) return s;
  trace.q_heads = static_cast<uint32_t>(q->shape[0]);
  trace.kv_heads = static_cast<uint32_t>(k->shape[0]);
  trace.head_dim = static_cast<uint32_t>(k->shape[2]);
  trace.value_dim = static_cast<uint32_t>(v->shape[2]);
  trace.queries = TokenMajor(*q);
  trace.keys = TokenMajor(*k);
  trace.values = TokenMajor(*v);
  return trace;
}

}  // namespace ctkvr::cli
