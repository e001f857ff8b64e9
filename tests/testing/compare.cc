// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/compare.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace ctkvr::testing {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

AssertionResult IsAscendingSet(std::span<const uint32_t> positions) {
  for (size_t i = 1; i < positions.size(); ++i) {
    if (positions[i] > positions[i - 1]) continue;
    return AssertionFailure() << "entry " << i << " is " << positions[i] << " after " << positions[i - 1];
  }
  return AssertionSuccess();
}

AssertionResult IsTopK(std::span<const uint32_t> chosen, std::span<const double> values, size_t k, double band) {
  k = std::min(k, values.size());
  if (chosen.size() != k) return AssertionFailure() << chosen.size() << " entries chosen, not " << k;
  if (AssertionResult ascending = IsAscendingSet(chosen); !ascending) return ascending;
  if (k == 0) return AssertionSuccess();
  if (chosen.back() >= values.size())
    return AssertionFailure() << "index " << chosen.back() << " is none of the values";
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double last = sorted[k - 1];
  std::vector<bool> in(values.size(), false);
  for (const uint32_t index : chosen) in[index] = true;
  bool tie_left_out = false;
  for (size_t i = 0; i < values.size(); ++i) {
    if (in[i] && values[i] < last - band) {
      return AssertionFailure() << "index " << i << " is chosen with " << values[i] << ", the k-th is " << last;
    }
    if (!in[i] && values[i] > last + band) {
      return AssertionFailure() << "index " << i << " is left out with " << values[i] << ", the k-th is " << last;
    }
    if (band != 0 || values[i] != last) continue;
    if (in[i] && tie_left_out) return AssertionFailure() << "index " << i << " is preferred to an equal lower one";
    tie_left_out |= !in[i];
  }
  return AssertionSuccess();
}

AssertionResult IsWithin(double actual, double expected, double bound) {
  if (std::isfinite(actual) && std::isfinite(expected) && std::abs(actual - expected) <= bound) {
    return AssertionSuccess();
  }
  return AssertionFailure() << actual << " differs from " << expected << " by more than " << bound;
}

double NormalisedSquaredError(std::span<const double> actual, std::span<const double> expected) {
  double error = 0, power = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    power += expected[i] * expected[i];
  }
  return power > 0 ? error / power : error;
}

}  // namespace ctkvr::testing
