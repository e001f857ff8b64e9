// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"
#include "kernels/cpu/sketch_slots.h"

namespace ctkvr::cpu {
namespace {

// One key into its place. False when a scale overflows.
bool WriteCodedKey(const RowKernels& rows, const HeadView& view, const float* key, uint32_t position, uint32_t slot) {
  const PageLayout& layout = view.layout;
  float x[kDimMax];
  for (uint32_t i = 0; i < layout.head_dim; ++i) x[i] = key[i] - view.mean[i];
  rows.rotate(x, layout.head_dim, view.signs);
  std::byte packed[kDimMax];  // at most 8 planes of kDimMax / 8 bytes
  uint16_t code_scale = 0;
  uint16_t sketch_scale = 0;
  if (!rows.encode_key(x, layout.head_dim, layout.planes, layout.first_planes, packed, &code_scale, &sketch_scale)) {
    return false;
  }
  const size_t first_bytes = layout.sketch_token_bytes();
  std::memcpy(FirstPlanesPlace(view, position, slot), packed, first_bytes);
  std::memcpy(SketchScalePlace(view, position, slot), &sketch_scale, sizeof(sketch_scale));
  std::byte* record = RecordAt(view, position);
  std::memcpy(record, &code_scale, PageLayout::kCodeScaleBytes);
  std::memcpy(record + PageLayout::kCodeScaleBytes, packed + first_bytes,
              layout.record_bytes_of(layout.planes) - PageLayout::kCodeScaleBytes);
  return true;
}

// Returns -1 or the dimension that cannot be held.
int64_t WriteKey(const RowKernels& rows, const WriteTokensItem& item, uint32_t token, SketchSlots& slots) {
  const HeadView& view = item.view;
  const uint32_t head_dim = view.layout.head_dim;
  const uint32_t page = (item.first_position + token) / kPageTokens;
  const uint32_t slot = (item.first_position + token) % kPageTokens;
  float key[kDimMax];
  LoadRow(rows, item.keys + token * item.key_stride, item.dtype, key, head_dim);
  if (!view.raw() && KeysAreCoded(view.layout.format)) {
    const uint32_t position = item.first_position + token;
    return WriteCodedKey(rows, view, key, position, slots.SlotOf(position)) ? -1 : 0;
  }
  const DType dtype = view.raw() ? view.raw_dtype : FloatType(view.layout.format);
  std::byte* keys = view.raw() ? view.raw_pages[page] : view.pages[page] + view.layout.keys_offset;
  return StoreRow(rows, key, dtype, keys + slot * head_dim * DTypeBytes(dtype), head_dim);
}

int64_t WriteValue(const RowKernels& rows, const WriteTokensItem& item, uint32_t token) {
  const PageLayout& layout = item.view.layout;
  const uint32_t page = (item.first_position + token) / kPageTokens;
  const uint32_t slot = (item.first_position + token) % kPageTokens;
  float value[kDimMax];
  LoadRow(rows, item.values + token * item.value_stride, item.dtype, value, layout.value_dim);
  std::byte* row = item.view.pages[page] + layout.values_offset + size_t{slot} * layout.value_row_bytes;
  if (!KeysAreCoded(layout.format)) return StoreRow(rows, value, FloatType(layout.format), row, layout.value_dim);
  return rows.encode_value(value, layout.value_dim, ValueBits(layout.format), row);
}

// Codes keys at the places where they lie one after another, as many of [token, end) as the loop takes. Returns the
// first one left.
uint32_t WriteKeyRun(const RowKernels& rows, const WriteTokensItem& item, uint32_t token, uint32_t end,
                     SketchSlots& slots) {
  const HeadView& view = item.view;
  const PageLayout& layout = view.layout;
  const uint32_t position = item.first_position + token, count = end - token;
  const BlockOrder order(view.order, position / kSketchTokens);
  // Positions that once were in clusters and come again: their slots lie apart.
  const bool apart = order.clustered() && position % kSketchTokens < order.last();
  std::byte planes[kPageTokens * 2 * (kDimMax / 8)], scales[kPageTokens * sizeof(uint16_t)];
  const uint32_t slot = position % kSketchTokens;
  const uint32_t done = rows.encode_keys({.keys = item.keys + token * item.key_stride,
                                          .stride = item.key_stride,
                                          .dtype = item.dtype,
                                          .tokens = count,
                                          .head_dim = layout.head_dim,
                                          .planes = layout.planes,
                                          .first_planes = layout.first_planes,
                                          .mean = view.mean,
                                          .signs = view.signs,
                                          .first = apart ? planes : FirstPlanesPlace(view, position, slot),
                                          .sketch_scales = apart ? scales : SketchScalePlace(view, position, slot),
                                          .records = RecordAt(view, position),
                                          .record_bytes = layout.record_bytes});
  for (uint32_t n = 0; apart && n < done; ++n) {
    const uint32_t own = slots.SlotOf(position + n), bytes = layout.sketch_token_bytes();
    std::memcpy(FirstPlanesPlace(view, position, own), planes + size_t{n} * bytes, bytes);
    std::memcpy(SketchScalePlace(view, position, own), scales + n * sizeof(uint16_t), sizeof(uint16_t));
  }
  return token + done;
}

// Tokens [begin, end) lie in one page. Both return the first bad element of the item, or -1.
int64_t WritePageKeys(const RowKernels& rows, const WriteTokensItem& item, uint32_t begin, uint32_t end) {
  const bool coded = !item.view.raw() && KeysAreCoded(item.view.layout.format);
  SketchSlots slots(item.view, false);
  for (uint32_t token = begin; token < end; ++token) {
    if (coded) token = WriteKeyRun(rows, item, token, end, slots);
    if (token == end) break;
    const int64_t dimension = WriteKey(rows, item, token, slots);
    if (dimension >= 0) return int64_t{token} * item.view.layout.head_dim + dimension;
  }
  return -1;
}

int64_t WritePageValues(const RowKernels& rows, const WriteTokensItem& item, uint32_t begin, uint32_t end) {
  const PageLayout& layout = item.view.layout;
  std::byte* page = item.view.pages[(item.first_position + begin) / kPageTokens];
  for (uint32_t token = begin; token < end;) {
    if (KeysAreCoded(layout.format)) {
      const size_t slot = (item.first_position + token) % kPageTokens;
      token += rows.encode_values({.values = item.values + token * item.value_stride,
                                   .stride = item.value_stride,
                                   .dtype = item.dtype,
                                   .tokens = end - token,
                                   .value_dim = layout.value_dim,
                                   .bits = ValueBits(layout.format),
                                   .rows = page + layout.values_offset + slot * layout.value_row_bytes,
                                   .row_bytes = layout.value_row_bytes});
      if (token == end) break;
    }
    const int64_t dimension = WriteValue(rows, item, token);
    if (dimension >= 0) return int64_t{token} * layout.value_dim + dimension;
    ++token;
  }
  return -1;
}

}  // namespace

void WriteTokens(const CpuKernels& kernels, const WriteTokensItem& item) {
  const RowKernels& rows = *kernels.rows;
  int64_t bad_key = -1;
  int64_t bad_value = -1;
  // Page by page, so that a page's arrays stay in cache while they are written.
  for (uint32_t begin = 0; begin < item.count;) {
    const uint32_t room = kPageTokens - (item.first_position + begin) % kPageTokens;
    const uint32_t end = begin + std::min(room, item.count - begin);
    if (item.keys != nullptr && bad_key < 0) bad_key = WritePageKeys(rows, item, begin, end);
    if (item.values != nullptr && bad_value < 0) bad_value = WritePageValues(rows, item, begin, end);
    begin = end;
  }
  if (item.bad_key_element != nullptr) *item.bad_key_element = bad_key;
  if (item.bad_value_element != nullptr) *item.bad_value_element = bad_value;
}

}  // namespace ctkvr::cpu
