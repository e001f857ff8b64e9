// SPDX-License-Identifier: Apache-2.0
//
// A /metrics page as a test reads it: series by their full text, so that nothing of the library that wrote the page is
// trusted. Thread-safe: values.

#pragma once

#include <map>
#include <string>

namespace ctkvr::testing {

// `name{label="value",...}` to its value, in the text format 0.0.4. Throws nothing; lines that are no series are left.
std::map<std::string, double> ParsePage(const std::string& text);

// The value of a series, or NaN where the page has none.
double ValueOf(const std::string& text, const std::string& series);

}  // namespace ctkvr::testing
