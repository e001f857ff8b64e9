// SPDX-License-Identifier: Apache-2.0

#include "server/core/explain.h"

#include <array>

namespace ctkvr {

const char* SelectionReasonName(SelectionReason reason) {
  constexpr std::array<const char*, kSelectionReasonCount> kNames = {
      "asked",    "nothing_visible", "dense", "short", "everything_fits", "not_coded", "all_are_candidates",
      "no_index", "middle",          "long",  "load",  "quality"};
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace ctkvr
