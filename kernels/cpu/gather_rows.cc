// SPDX-License-Identifier: Apache-2.0

#include <cmath>
#include <cstring>

#include "kernels/cpu/coded_key.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_rows.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/sketch_slots.h"
#include "kernels/cpu/stored_row.h"

namespace ctkvr::cpu {
namespace {

DType RowDType(RowFormat format) {
  return format == RowFormat::kF32 ? DType::kF32 : format == RowFormat::kF16 ? DType::kF16 : DType::kBF16;
}

bool IsCoded(const HeadView& view) { return !view.raw() && KeysAreCoded(view.layout.format); }

void PrefetchRows(const GatherRowsItem& item, uint32_t n, SketchSlots& slots) {
  if (n >= *item.count) return;
  const HeadView& view = item.view;
  const uint32_t token = item.tokens[n];
  if (item.values != nullptr) PrefetchBytes(ValueAt(view, token), view.layout.value_row_bytes);
  if (item.keys == nullptr) return;
  if (IsCoded(view)) {
    PrefetchCodedKey(view, token, slots.SlotOf(token), view.layout.planes);
  } else {
    const FloatKey key = FloatKeyAt(view, token);
    PrefetchBytes(key.data, view.layout.head_dim * DTypeBytes(key.dtype));
  }
}

void DecodeKey(const CpuKernels& kernels, const HeadView& view, uint32_t token, SketchSlots& slots, float* key) {
  if (!IsCoded(view)) {
    const FloatKey stored = FloatKeyAt(view, token);
    LoadRow(*kernels.rows, stored.data, stored.dtype, key, view.layout.head_dim);
    return;
  }
  kernels.scan->decode_coded(CodedKeyAt(view, token, slots.SlotOf(token)), key);
  const float scale = CodeScaleAt(view, token);
  for (uint32_t i = 0; i < view.layout.head_dim; ++i) key[i] = scale * (key[i] + 0.5f);
  kernels.rows->unrotate(key, view.layout.head_dim, view.signs);
  for (uint32_t i = 0; i < view.layout.head_dim; ++i) key[i] += view.mean[i];
}

// Returns how many elements do not fit.
uint64_t StoreCounting(const RowKernels& rows, const float* from, DType dtype, std::byte* to, uint32_t count) {
  if (StoreRow(rows, from, dtype, to, count) < 0) return 0;
  uint64_t overflow = 0;
  for (uint32_t i = 0; i < count; ++i) {
    std::byte element[sizeof(float)];
    StoreElement(element, dtype, 0, from[i]);
    overflow += !std::isfinite(LoadElement(element, dtype, 0));
  }
  return overflow;
}

uint64_t GatherFloatRows(const CpuKernels& kernels, const GatherRowsItem& item) {
  const PageLayout& layout = item.view.layout;
  const DType dtype = RowDType(item.row_format);
  const size_t key_bytes = layout.head_dim * DTypeBytes(dtype);
  const size_t value_bytes = layout.value_dim * DTypeBytes(dtype);
  uint64_t overflow = 0;
  SketchSlots slots(item.view, false);
  float row[kDimMax];
  for (uint32_t n = 0; n < *item.count; ++n) {
    PrefetchRows(item, n + kPrefetchTokens, slots);
    if (item.keys != nullptr) {
      DecodeKey(kernels, item.view, item.tokens[n], slots, row);
      overflow += StoreCounting(*kernels.rows, row, dtype, item.keys + n * key_bytes, layout.head_dim);
    }
    if (item.values != nullptr) {
      DecodeValue(*kernels.rows, item.view, item.tokens[n], row);
      overflow += StoreCounting(*kernels.rows, row, dtype, item.values + n * value_bytes, layout.value_dim);
    }
  }
  return overflow;
}

void GatherStorageKey(const HeadView& view, uint32_t token, SketchSlots& slots, std::byte* to) {
  if (!IsCoded(view)) {
    const FloatKey stored = FloatKeyAt(view, token);
    std::memcpy(to, stored.data, view.layout.head_dim * DTypeBytes(stored.dtype));
    return;
  }
  const CodedKey key = CodedKeyAt(view, token, slots.SlotOf(token));
  const size_t first_bytes = size_t{view.layout.first_planes} * view.layout.plane_bytes;
  const size_t all_bytes = size_t{view.layout.planes} * view.layout.plane_bytes;
  std::memcpy(to, key.first, first_bytes);
  std::memcpy(to + first_bytes, key.rest, all_bytes - first_bytes);
  std::memcpy(to + all_bytes, RecordAt(view, token), PageLayout::kCodeScaleBytes);
}

void GatherStorageRows(const GatherRowsItem& item) {
  const HeadView& view = item.view;
  const size_t key_bytes =
      view.raw() ? view.layout.head_dim * DTypeBytes(view.raw_dtype) : StorageKeyRowBytes(view.layout);
  const size_t value_bytes = StorageValueRowBytes(view.layout);
  SketchSlots slots(view, false);
  for (uint32_t n = 0; n < *item.count; ++n) {
    const uint32_t token = item.tokens[n];
    PrefetchRows(item, n + kPrefetchTokens, slots);
    if (item.keys != nullptr) GatherStorageKey(view, token, slots, item.keys + n * key_bytes);
    if (item.values != nullptr) std::memcpy(item.values + n * value_bytes, ValueAt(view, token), value_bytes);
  }
}

}  // namespace

void GatherRows(const CpuKernels& kernels, const GatherRowsItem& item) {
  uint64_t overflow = 0;
  if (item.row_format == RowFormat::kStorage) {
    GatherStorageRows(item);
  } else {
    overflow = GatherFloatRows(kernels, item);
  }
  if (item.overflow != nullptr) *item.overflow = overflow;
}

}  // namespace ctkvr::cpu
