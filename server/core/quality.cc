// SPDX-License-Identifier: Apache-2.0

#include "server/core/quality.h"

#include <cmath>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Wilson's score interval (Wilson 1927), upper end, one-sided 95 %.
double UpperBound(double found, double needles) {
  constexpr double kZ = 1.6448536269514722;
  const double share = found / needles, z2 = kZ * kZ / needles;
  return (share + z2 / 2 + kZ * std::sqrt(share * (1 - share) / needles + z2 / needles / 4)) / (1 + z2);
}

}  // namespace

bool QualityControl::Add(uint64_t needles, uint64_t found, double target) {
  if (strength_ == limits::kStrengthMax) return false;
  needles_ += needles;
  found_ += found;
  if (needles_ < limits::kQualityNeedlesMin) return false;
  const auto of = static_cast<double>(needles_), share = static_cast<double>(found_);
  const bool enough = needles_ >= limits::kQualityNeedlesMax;
  if (UpperBound(share, of) < target || (enough && share < target * of)) {
    ++strength_;
    needles_ = found_ = 0;
    return true;
  }
  if (enough) {
    needles_ /= 2;
    found_ /= 2;
  }
  return false;
}

}  // namespace ctkvr
