// SPDX-License-Identifier: Apache-2.0
//
// Holds a layer to its session's needle share: how strong its selections are to be, from what online truth says of
// them (truth.h). Only ever stronger, so it ends after limits::kStrengthMax steps and never swings.
//
// Not thread-safe: belongs to one lane.

#pragma once

#include <cstdint>

namespace ctkvr {

class QualityControl {
 public:
  // What one repeat found. Returns whether the layer takes a step.
  // Since the last step, of n needles: a step, where the one-sided 95 % upper bound of the share (Wilson's interval) is
  // below `target` and n is at least limits::kQualityNeedlesMin; or where n has reached limits::kQualityNeedlesMax and
  // the share itself is below it. Where that many were enough, half of them are forgotten, so that the text of the day
  // counts.
  bool Add(uint64_t needles, uint64_t found, double target);
  uint32_t strength() const { return strength_; }

 private:
  uint32_t strength_ = 0;
  uint64_t needles_ = 0;
  uint64_t found_ = 0;
};

}  // namespace ctkvr
