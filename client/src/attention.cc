// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ctkvr::client {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

absl::StatusOr<std::vector<float>> FloatsOf(const v1::Tensor& tensor, std::span<const uint32_t> dims,
                                            const char* field) {
  const bool same = std::equal(tensor.dims().begin(), tensor.dims().end(), dims.begin(), dims.end());
  size_t count = 1;
  for (const uint32_t dim : dims) count *= dim;
  const size_t element_bytes = BytesOf(tensor.dtype());
  if (!same || element_bytes == 0 || tensor.data().size() != count * element_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer.", field, " has dims [", absl::StrJoin(tensor.dims(), ", "), "] of dtype ",
                     static_cast<int>(tensor.dtype()), " in ", tensor.data().size(),
                     " bytes; the layer's shape and the answer's counts give [", absl::StrJoin(dims, ", "), "]"));
  }
  std::vector<float> floats(count);
  const absl::Status status = ToFloat(tensor.dtype(), std::as_bytes(std::span(tensor.data())), floats);
  if (!status.ok()) return status;
  return floats;
}

// Two tensors of an answer as one part.
absl::StatusOr<Attention> PartOf(const v1::Answer& answer, const LayerShape& shape, const v1::Tensor& output,
                                 const v1::Tensor& log_sum_exp) {
  const bool per_head = answer.used().reduction() == v1::GROUP_REDUCTION_PER_HEAD;
  const uint32_t sets = per_head ? shape.q_heads : shape.kv_heads;
  const uint32_t positions = sets == 0 ? 0 : static_cast<uint32_t>(answer.counts_size()) / sets;
  const uint32_t dims[] = {positions, shape.q_heads, shape.value_dim};
  const bool chosen = &output == &answer.output();
  auto outputs = FloatsOf(output, dims, chosen ? "output" : "remainder_output");
  if (!outputs.ok()) return outputs.status();
  auto sums = FloatsOf(log_sum_exp, std::span(dims).first(2), chosen ? "log_sum_exp" : "remainder_log_sum_exp");
  if (!sums.ok()) return sums.status();
  return Attention{.output = *std::move(outputs), .log_sum_exp = *std::move(sums)};
}

absl::Status CheckParts(std::span<const AttentionView> parts, std::span<const float> sink_logits) {
  if (parts.empty()) return absl::InvalidArgumentError("parts is empty; at least one is needed");
  const size_t rows = parts[0].log_sum_exp.size();
  for (size_t p = 0; p < parts.size(); ++p) {
    const bool whole = rows != 0 ? parts[p].output.size() % rows == 0 : parts[p].output.empty();
    if (parts[p].log_sum_exp.size() != rows || parts[p].output.size() != parts[0].output.size() || !whole) {
      return absl::InvalidArgumentError(absl::StrCat("parts[", p, "] has ", parts[p].output.size(),
                                                     " elements of output and ", parts[p].log_sum_exp.size(),
                                                     " rows; parts[0] has ", parts[0].output.size(), " and ", rows));
    }
  }
  if (!sink_logits.empty() && rows % sink_logits.size() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sink_logits has ", sink_logits.size(), " elements; the ", rows, " rows are no multiple of it"));
  }
  return absl::OkStatus();
}

absl::Status CheckLogSumExp(std::span<const float> values, const std::string& name) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < std::numeric_limits<float>::infinity()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, "[", i, "] is ", values[i], "; it must be finite, or -infinity for an empty row"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Attention> AttentionOf(const v1::Answer& answer, const LayerShape& shape) {
  if (!answer.has_output() || !answer.has_log_sum_exp()) {
    return absl::InvalidArgumentError("the answer carries no attention; ask for ANSWER_MODE_ATTENTION");
  }
  return PartOf(answer, shape, answer.output(), answer.log_sum_exp());
}

absl::StatusOr<Attention> RemainderOf(const v1::Answer& answer, const LayerShape& shape) {
  if (!answer.has_remainder_output() || !answer.has_remainder_log_sum_exp()) {
    return absl::InvalidArgumentError("the answer carries no remainder; ask for AnswerOptions.remainder");
  }
  return PartOf(answer, shape, answer.remainder_output(), answer.remainder_log_sum_exp());
}

absl::StatusOr<Attention> MergeAttention(std::span<const AttentionView> parts, std::span<const float> sink_logits) {
  if (auto s = CheckParts(parts, sink_logits); !s.ok()) return s;
  for (size_t p = 0; p < parts.size(); ++p) {
    if (auto s = CheckLogSumExp(parts[p].log_sum_exp, absl::StrCat("parts[", p, "].log_sum_exp")); !s.ok()) return s;
  }
  if (auto s = CheckLogSumExp(sink_logits, "sink_logits"); !s.ok()) return s;
  const size_t rows = parts[0].log_sum_exp.size();
  const size_t value_dim = rows == 0 ? 0 : parts[0].output.size() / rows;
  Attention merged{.output = std::vector<float>(rows * value_dim), .log_sum_exp = std::vector<float>(rows, kEmpty)};
  std::vector<double> sums(value_dim);
  for (size_t row = 0; row < rows; ++row) {
    const float sink = sink_logits.empty() ? kEmpty : sink_logits[row % sink_logits.size()];
    float max = sink;
    for (const AttentionView& part : parts) max = std::max(max, part.log_sum_exp[row]);
    if (max == kEmpty) continue;
    double weights = std::exp(double{sink} - max);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (const AttentionView& part : parts) {
      if (part.log_sum_exp[row] == kEmpty) continue;
      const double weight = std::exp(double{part.log_sum_exp[row]} - max);
      weights += weight;
      for (size_t i = 0; i < value_dim; ++i) sums[i] += weight * part.output[row * value_dim + i];
    }
    for (size_t i = 0; i < value_dim; ++i) merged.output[row * value_dim + i] = static_cast<float>(sums[i] / weights);
    merged.log_sum_exp[row] = static_cast<float>(max + std::log(weights));
  }
  return merged;
}

}  // namespace ctkvr::client
