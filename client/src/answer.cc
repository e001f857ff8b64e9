// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/answer.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace ctkvr::client {

absl::StatusOr<AnswerView> AnswerView::Create(const v1::Answer& answer, const LayerShape& shape) {
  if (answer.has_output()) {
    return absl::InvalidArgumentError("the answer carries attention and no ids; see AttentionOf");
  }
  const bool per_head = answer.used().reduction() == v1::GROUP_REDUCTION_PER_HEAD;
  AnswerView view;
  view.sets_ = per_head ? shape.q_heads : shape.kv_heads;
  view.set_heads_ = per_head ? 1 : shape.group_heads();
  const auto counts = static_cast<uint32_t>(answer.counts_size());
  if (view.sets_ == 0 || counts % view.sets_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer.counts has ", counts, " numbers; a multiple of ", view.sets_, " is expected"));
  }
  view.positions_ = counts / view.sets_;
  view.begins_.reserve(counts + 1);
  view.begins_.push_back(0);
  for (const uint32_t count : answer.counts()) view.begins_.push_back(view.begins_.back() + count);
  const size_t rows = view.begins_.back();
  if (answer.ids().size() != rows * sizeof(uint32_t)) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer.ids has ", answer.ids().size(), " bytes; ", rows, " tokens have ", 4 * rows));
  }
  const size_t scores_bytes = rows * view.set_heads_ * sizeof(float);
  if (!answer.scores().empty() && answer.scores().size() != scores_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer.scores has ", answer.scores().size(), " bytes; ", scores_bytes, " are expected"));
  }
  view.ids_.resize(rows);
  if (rows > 0) std::memcpy(view.ids_.data(), answer.ids().data(), answer.ids().size());
  view.scores_.resize(answer.scores().size() / sizeof(float));
  if (!view.scores_.empty()) std::memcpy(view.scores_.data(), answer.scores().data(), answer.scores().size());
  return view;
}

std::span<const uint32_t> AnswerView::ids(uint32_t position, uint32_t set) const {
  const size_t group = size_t{position} * sets_ + set;
  return {ids_.data() + begins_[group], begins_[group + 1] - begins_[group]};
}

std::span<const float> AnswerView::scores(uint32_t position, uint32_t set, uint32_t head) const {
  if (scores_.empty()) return {};
  const size_t group = size_t{position} * sets_ + set;
  const size_t count = begins_[group + 1] - begins_[group];
  return {scores_.data() + begins_[group] * set_heads_ + head * count, count};
}

size_t AnswerView::first_row(uint32_t position, uint32_t set) const { return begins_[size_t{position} * sets_ + set]; }

}  // namespace ctkvr::client
