// SPDX-License-Identifier: Apache-2.0

#include "server/core/repeat_check.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "server/core/error.h"

namespace ctkvr {
namespace {

// Tokens compared at a time: bounds scratch, and a repeat is rare.
constexpr uint32_t kWindowTokens = 512;

// Storage rows [count] of one window, from two places.
struct Rows {
  std::vector<std::byte> keys, values;
};

class WindowCheck {
 public:
  WindowCheck(LaneDevice device, const Layer& layer, const Chunk& chunk, uint32_t kv_head)
      : device_(device), layer_(layer), chunk_(chunk), kv_head_(kv_head) {}

  // Positions [begin, end), at most kWindowTokens.
  absl::Status Run(uint32_t begin, uint32_t end) {
    BatchMemory memory(device_);
    absl::Status status = Enqueue(memory, begin, end);
    if (status.ok()) status = memory.Finish();
    if (!status.ok()) {
      (void)memory.Settle();
      return status;
    }
    CTKVR_RETURN_IF_ERROR(CheckBadElements(begin));
    return Compare(begin, end - begin);
  }

 private:
  absl::Status Enqueue(BatchMemory& memory, uint32_t begin, uint32_t end) {
    const uint32_t first_page = begin / kPageTokens;
    const uint32_t offset = begin % kPageTokens;
    const uint32_t count = end - begin;
    count_ = count;
    const HeadView stored = memory.Stage(layer_.View(kv_head_), Layer::page_count(layer_.length()));
    const HeadView again = ScratchView(memory, Layer::page_count(end) - first_page, offset + count);
    const WriteTokensItem write = WriteItem(memory, again, begin, count);
    stored_tokens_.resize(count);
    again_tokens_.resize(count);
    std::iota(stored_tokens_.begin(), stored_tokens_.end(), begin);
    std::iota(again_tokens_.begin(), again_tokens_.end(), offset);
    const GatherRowsItem gathers[] = {GatherItem(memory, stored, stored_tokens_, stored_rows_),
                                      GatherItem(memory, again, again_tokens_, again_rows_)};
    if (memory.exhausted()) return memory.ExhaustedError("comparing a repeated append");
    CTKVR_RETURN_IF_ERROR(memory.status());
    CTKVR_RETURN_IF_ERROR(device_.backend.WriteTokens(device_.stream, {&write, 1}));
    return device_.backend.GatherRows(device_.stream, gathers);
  }

  HeadView ScratchView(BatchMemory& memory, size_t pages, uint32_t length) {
    HeadView view = layer_.View(kv_head_);
    view.length = length;
    view.order = {};
    table_.clear();
    raw_table_.clear();
    for (size_t i = 0; i < pages; ++i) {
      table_.push_back(memory.Take<std::byte>(layer_.layout().page_bytes));
      if (!view.raw()) continue;
      raw_table_.push_back(memory.Take<std::byte>(size_t{kPageTokens} * layer_.key_bytes()));
    }
    sketch_table_.clear();
    for (size_t i = 0; layer_.coded() && i < Layer::sketch_count(length); ++i) {
      sketch_table_.push_back(memory.Take<std::byte>(layer_.layout().sketch_bytes));
    }
    view.pages = table_.data();
    view.sketches = sketch_table_.data();
    if (view.raw()) view.raw_pages = raw_table_.data();
    return memory.Stage(view, pages);
  }

  WriteTokensItem WriteItem(BatchMemory& memory, const HeadView& view, uint32_t begin, uint32_t count) {
    const LayerConfig& config = layer_.config();
    const size_t element = DTypeBytes(chunk_.dtype);
    const size_t key_bytes = config.head_dim * element;
    const size_t value_bytes = config.value_dim * element;
    const size_t key_stride = config.kv_heads * key_bytes;
    const size_t value_stride = config.kv_heads * value_bytes;
    const size_t token = begin - chunk_.first_position;
    const std::byte* keys = chunk_.keys.data() + token * key_stride + kv_head_ * key_bytes;
    const std::byte* values = chunk_.values.data() + token * value_stride + kv_head_ * value_bytes;
    return {.view = view,
            .first_position = begin % kPageTokens,
            .count = count,
            .keys = memory.In(keys, (count - 1) * key_stride + key_bytes),
            .values = memory.In(values, (count - 1) * value_stride + value_bytes),
            .key_stride = key_stride,
            .value_stride = value_stride,
            .dtype = chunk_.dtype,
            .bad_key_element = memory.Out(&bad_key_, 1),
            .bad_value_element = memory.Out(&bad_value_, 1)};
  }

  GatherRowsItem GatherItem(BatchMemory& memory, const HeadView& view, const std::vector<uint32_t>& tokens,
                            Rows& rows) {
    key_row_bytes_ = layer_.storage_key_bytes();
    value_row_bytes_ = layer_.storage_value_bytes();
    rows.keys.resize(tokens.size() * key_row_bytes_);
    rows.values.resize(tokens.size() * value_row_bytes_);
    return {.view = view,
            .tokens = memory.In(tokens.data(), tokens.size()),
            .count = memory.In(&count_, 1),
            .count_max = count_,
            .row_format = RowFormat::kStorage,
            .keys = memory.Out(rows.keys.data(), rows.keys.size()),
            .values = memory.Out(rows.values.data(), rows.values.size()),
            .overflow = memory.Out(&overflow_, 1)};
  }

  absl::Status CheckBadElements(uint32_t begin) const {
    const LayerConfig& config = layer_.config();
    for (const auto& [tensor, bad, dim] : {std::tuple{"keys", bad_key_, int64_t{config.head_dim}},
                                           std::tuple{"values", bad_value_, int64_t{config.value_dim}}}) {
      if (bad < 0) continue;
      const int64_t token = begin - chunk_.first_position + bad / dim;
      return absl::InvalidArgumentError(absl::StrCat(tensor, "[",
                                                     (token * config.kv_heads + kv_head_) * dim + bad % dim,
                                                     "] does not fit format ", FormatName(config.format)));
    }
    return absl::OkStatus();
  }

  absl::Status Compare(uint32_t begin, uint32_t count) const {
    for (uint32_t i = 0; i < count; ++i) {
      const bool keys_equal = std::memcmp(stored_rows_.keys.data() + i * key_row_bytes_,
                                          again_rows_.keys.data() + i * key_row_bytes_, key_row_bytes_) == 0;
      const bool values_equal = std::memcmp(stored_rows_.values.data() + i * value_row_bytes_,
                                            again_rows_.values.data() + i * value_row_bytes_, value_row_bytes_) == 0;
      if (keys_equal && values_equal) continue;
      return MakeError(absl::StatusCode::kAlreadyExists,
                       absl::StrCat("position ", begin + i, " is held already with another ",
                                    keys_equal ? "value" : "key", " in KV head ", kv_head_),
                       kReasonDifferentBytes);
    }
    return absl::OkStatus();
  }

  const LaneDevice device_;
  const Layer& layer_;
  const Chunk& chunk_;
  const uint32_t kv_head_;
  uint32_t count_ = 0;
  size_t key_row_bytes_ = 0, value_row_bytes_ = 0;
  std::vector<std::byte*> table_, raw_table_, sketch_table_;
  std::vector<uint32_t> stored_tokens_, again_tokens_;
  Rows stored_rows_, again_rows_;
  int64_t bad_key_ = -1, bad_value_ = -1;
  uint64_t overflow_ = 0;
};

}  // namespace

absl::Status CheckRepeat(LaneDevice device, const Layer& layer, const Chunk& chunk) {
  const uint32_t end = chunk.first_position + chunk.tokens;
  for (uint32_t h = 0; h < layer.config().kv_heads; ++h) {
    WindowCheck check(device, layer, chunk, h);
    for (uint32_t begin = chunk.first_position; begin < end; begin += kWindowTokens) {
      CTKVR_RETURN_IF_ERROR(check.Run(begin, std::min(end, begin + kWindowTokens)));
    }
  }
  return absl::OkStatus();
}

}  // namespace ctkvr
