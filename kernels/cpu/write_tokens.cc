// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"

namespace ctkvr::cpu {
namespace {

// One key into its place. False when a scale overflows.
bool WriteCodedKey(const RowKernels& rows, const HeadView& view, const float* key, std::byte* page, uint32_t slot) {
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
  const size_t first_bytes = size_t{layout.first_planes} * layout.plane_bytes;
  const size_t rest_bytes = size_t{layout.planes - layout.first_planes} * layout.plane_bytes;
  std::memcpy(page + layout.first_planes_offset + slot * first_bytes, packed, first_bytes);
  std::memcpy(page + layout.rest_planes_offset + slot * rest_bytes, packed + first_bytes, rest_bytes);
  std::memcpy(page + layout.sketch_scales_offset + slot * sizeof(sketch_scale), &sketch_scale, sizeof(sketch_scale));
  std::memcpy(page + layout.code_scales_offset + slot * sizeof(code_scale), &code_scale, sizeof(code_scale));
  return true;
}

// Returns -1 or the dimension that cannot be held.
int64_t WriteKey(const RowKernels& rows, const WriteTokensItem& item, uint32_t token) {
  const HeadView& view = item.view;
  const uint32_t head_dim = view.layout.head_dim;
  const uint32_t page = (item.first_position + token) / kPageTokens;
  const uint32_t slot = (item.first_position + token) % kPageTokens;
  float key[kDimMax];
  LoadRow(rows, item.keys + token * item.key_stride, item.dtype, key, head_dim);
  if (!view.raw() && KeysAreCoded(view.layout.format)) {
    return WriteCodedKey(rows, view, key, view.pages[page], slot) ? -1 : 0;
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

// Tokens [begin, end) lie in one page. Both return the first bad element of the item, or -1.
int64_t WritePageKeys(const RowKernels& rows, const WriteTokensItem& item, uint32_t begin, uint32_t end) {
  const PageLayout& layout = item.view.layout;
  const bool coded = !item.view.raw() && KeysAreCoded(layout.format);
  std::byte* page = item.view.pages[(item.first_position + begin) / kPageTokens];
  for (uint32_t token = begin; token < end;) {
    if (coded) {
      const size_t slot = (item.first_position + token) % kPageTokens;
      const size_t first_bytes = size_t{layout.first_planes} * layout.plane_bytes;
      const size_t rest_bytes = size_t{layout.planes - layout.first_planes} * layout.plane_bytes;
      token += rows.encode_keys({.keys = item.keys + token * item.key_stride,
                                 .stride = item.key_stride,
                                 .dtype = item.dtype,
                                 .tokens = end - token,
                                 .head_dim = layout.head_dim,
                                 .planes = layout.planes,
                                 .first_planes = layout.first_planes,
                                 .mean = item.view.mean,
                                 .signs = item.view.signs,
                                 .first = page + layout.first_planes_offset + slot * first_bytes,
                                 .rest = page + layout.rest_planes_offset + slot * rest_bytes,
                                 .sketch_scales = page + layout.sketch_scales_offset + slot * sizeof(uint16_t),
                                 .code_scales = page + layout.code_scales_offset + slot * sizeof(uint16_t)});
      if (token == end) break;
    }
    const int64_t dimension = WriteKey(rows, item, token);
    if (dimension >= 0) return int64_t{token} * layout.head_dim + dimension;
    ++token;
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
