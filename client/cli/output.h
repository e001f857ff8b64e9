// SPDX-License-Identifier: Apache-2.0
//
// What the CLI shows people: tables, numbers with units, a progress bar. Not thread-safe.

#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/message.h"

namespace ctkvr::cli {

enum class Align { kLeft, kRight };

// Columns as wide as their widest cell, two spaces between; the first to the left, the others as asked.
class Table {
 public:
  explicit Table(std::vector<std::string> head, Align align = Align::kRight) : align_(align), rows_{std::move(head)} {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string ToString() const;

 private:
  Align align_;
  std::vector<std::vector<std::string>> rows_;
};

// 0.9876 with `digits` behind the point; "-" for nothing.
std::string Number(std::optional<double> value, int digits);
std::string Percent(std::optional<double> share);  // "12.3 %"
std::string Bytes(double bytes);                   // "1.5 MiB"
std::string Count(uint64_t count);                 // "7,081"

// The value at `share` of a sorted list, by nearest rank; 0 for an empty one.
double Quantile(const std::vector<double>& sorted, double share);

// Writes `text` as it is. A stream that is closed or full is no reason to stop: fmt::print would throw.
void Write(std::FILE* out, const std::string& text);

// A message with the names and rules of protobuf's JSON mapping (64-bit numbers are strings), defaults included.
nlohmann::json ToJson(const google::protobuf::Message& message);

// On a terminal one line that is drawn over; elsewhere a line for each tenth done, so that a log stays readable.
class Progress {
 public:
  // `out` is usually stderr; `terminal` says what it is.
  Progress(std::FILE* out, bool terminal) : out_(out), terminal_(terminal) {}
  static Progress Stderr();

  void Start(const std::string& label, uint64_t total);
  void Update(uint64_t done);
  void Finish();

 private:
  void Draw(uint64_t done);

  std::FILE* out_;
  bool terminal_;
  std::string label_;
  uint64_t total_ = 0;
  uint64_t drawn_ = 0;  // in parts of kParts or tenths
};

}  // namespace ctkvr::cli
