// SPDX-License-Identifier: Apache-2.0
//
// Why a retrieval was served as it was, and what each stage read. Thread-safe: values.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ctkvr {

// SelectionReason of the proto, whose comments say when each is given.
enum class SelectionReason : uint8_t {
  kAsked,
  kNothingVisible,
  kDense,
  kShort,
  kEverythingFits,
  kNotCoded,
  kAllAreCandidates,
  kNoIndex,
  kMiddle,
  kLong,
  kLoad,
  kQuality
};
inline constexpr size_t kSelectionReasonCount = 12;
const char* SelectionReasonName(SelectionReason reason);  // "asked"

// Tokens of the last position, summed over its sets.
struct Explanation {
  SelectionReason reason = SelectionReason::kAsked;
  uint64_t scanned = 0;     // looked at first: by their first planes, or as members of the lists read
  uint64_t survivors = 0;   // of those, looked at by more planes
  uint64_t candidates = 0;  // of those, kept for scoring
  uint64_t scored = 0;      // by whole keys
  uint64_t chosen = 0;
};

}  // namespace ctkvr
