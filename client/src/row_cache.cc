// SPDX-License-Identifier: Apache-2.0
#include "ctkvr/client/row_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"

namespace ctkvr::client {
namespace {

uint16_t SlotAt(const std::string& slots, size_t index) {
  uint16_t slot = 0;
  std::memcpy(&slot, slots.data() + index * sizeof(slot), sizeof(slot));
  return slot;
}

absl::Status CheckBytes(const char* field, size_t bytes, size_t expected) {
  if (bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " has ", bytes, " bytes; ", expected, " are expected"));
}

}  // namespace

absl::Status RowCache::Apply(const v1::Answer& answer) {
  absl::Status status = Take(answer);
  if (status.ok()) return status;
  version_ = 0;
  positions_ = 0;
  new_rows_ = 0;
  std::fill(tokens_.begin(), tokens_.end(), kEmpty);
  return status;
}

absl::Status RowCache::Check(const v1::Answer& answer, size_t chosen, size_t rows) const {
  const auto groups = static_cast<size_t>(answer.counts_size());
  if (sets_ == 0 || groups % sets_ != 0 || static_cast<size_t>(answer.new_counts_size()) != groups) {
    return absl::InvalidArgumentError(absl::StrCat("answer.counts has ", groups, " numbers and new_counts ",
                                                   answer.new_counts_size(), "; equal multiples of ", sets_,
                                                   " are expected"));
  }
  if (auto s = CheckBytes("answer.slots", answer.slots().size(), chosen * sizeof(uint16_t)); !s.ok()) return s;
  if (auto s = CheckBytes("answer.new_slots", answer.new_slots().size(), rows * sizeof(uint16_t)); !s.ok()) return s;
  if (auto s = CheckBytes("answer.ids", answer.ids().size(), rows * sizeof(uint32_t)); !s.ok()) return s;
  for (const std::string* bytes : {&answer.keys(), &answer.values()}) {
    if (rows == 0 ? bytes->empty() : bytes->size() % rows == 0 && !bytes->empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat("answer.keys and values have ", answer.keys().size(), " and ",
                                                   answer.values().size(), " bytes; multiples of ", rows,
                                                   " rows are expected"));
  }
  return absl::OkStatus();
}

absl::Status RowCache::Take(const v1::Answer& answer) {
  const size_t chosen = std::accumulate(answer.counts().begin(), answer.counts().end(), size_t{0});
  const size_t rows = std::accumulate(answer.new_counts().begin(), answer.new_counts().end(), size_t{0});
  if (auto s = Check(answer, chosen, rows); !s.ok()) return s;
  if (rows > 0) Resize(answer.keys().size() / rows, answer.values().size() / rows);
  size_t row = 0;
  for (int group = 0; group < answer.new_counts_size(); ++group) {
    const uint32_t set = static_cast<uint32_t>(group) % sets_;
    for (uint32_t i = 0; i < answer.new_counts(group); ++i, ++row) {
      const uint16_t slot = SlotAt(answer.new_slots(), row);
      if (slot >= slots_) {
        return absl::InvalidArgumentError(absl::StrCat("a new slot is ", slot, "; the cache has ", slots_, " slots"));
      }
      const size_t place = Place(set, slot);
      std::memcpy(&tokens_[place], answer.ids().data() + row * sizeof(uint32_t), sizeof(uint32_t));
      std::memcpy(keys_.data() + place * key_row_bytes_, answer.keys().data() + row * key_row_bytes_, key_row_bytes_);
      std::memcpy(values_.data() + place * value_row_bytes_, answer.values().data() + row * value_row_bytes_,
                  value_row_bytes_);
    }
  }
  positions_ = static_cast<uint32_t>(answer.counts_size()) / sets_;
  begins_.assign(1, 0);
  for (const uint32_t count : answer.counts()) begins_.push_back(begins_.back() + count);
  chosen_slots_.resize(chosen);
  if (chosen > 0) std::memcpy(chosen_slots_.data(), answer.slots().data(), answer.slots().size());
  for (size_t group = 0; group + 1 < begins_.size(); ++group) {
    for (size_t i = begins_[group]; i < begins_[group + 1]; ++i) {
      const uint16_t slot = chosen_slots_[i];
      if (slot < slots_ && !tokens_.empty() && tokens_[Place(static_cast<uint32_t>(group % sets_), slot)] != kEmpty)
        continue;
      return absl::InvalidArgumentError(absl::StrCat("a chosen slot is ", slot, ", which was never filled"));
    }
  }
  new_rows_ = rows;
  version_ = answer.cache_version();
  return absl::OkStatus();
}

// Rows of another size are of another kind: the server counts on none that was held before.
void RowCache::Resize(size_t key_row_bytes, size_t value_row_bytes) {
  if (key_row_bytes == key_row_bytes_ && value_row_bytes == value_row_bytes_) return;
  key_row_bytes_ = key_row_bytes;
  value_row_bytes_ = value_row_bytes;
  const size_t places = size_t{sets_} * slots_;
  tokens_.assign(places, kEmpty);
  keys_.resize(places * key_row_bytes);
  values_.resize(places * value_row_bytes);
}

std::span<const uint16_t> RowCache::slots(uint32_t position, uint32_t set) const {
  const size_t group = size_t{position} * sets_ + set;
  return {chosen_slots_.data() + begins_[group], begins_[group + 1] - begins_[group]};
}

std::span<const std::byte> RowCache::key(uint32_t set, uint16_t slot) const {
  return {keys_.data() + Place(set, slot) * key_row_bytes_, key_row_bytes_};
}

std::span<const std::byte> RowCache::value(uint32_t set, uint16_t slot) const {
  return {values_.data() + Place(set, slot) * value_row_bytes_, value_row_bytes_};
}

}  // namespace ctkvr::client
