// SPDX-License-Identifier: Apache-2.0
#include "client/cli/output.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ctkvr::cli {
namespace {

constexpr uint64_t kTerminalParts = 100;
constexpr uint64_t kLogParts = 10;
constexpr size_t kBarWidth = 30;

}  // namespace

std::string Table::ToString() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      line += i == 0 || align_ == Align::kLeft ? fmt::format("{:<{}}", row[i], widths[i])
                                               : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string Number(std::optional<double> value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

std::string Percent(std::optional<double> share) { return share ? fmt::format("{:.1f} %", 100 * *share) : "-"; }

std::string Bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string Count(uint64_t count) {
  std::string digits = std::to_string(count);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

double Quantile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

void Write(std::FILE* out, const std::string& text) { static_cast<void>(std::fputs(text.c_str(), out)); }

nlohmann::json ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  // Fails only for messages with an Any of an unknown type; ours have none.
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return nullptr;
  return nlohmann::json::parse(text, nullptr, false);
}

Progress Progress::Stderr() { return Progress(stderr, isatty(STDERR_FILENO) != 0); }

void Progress::Start(const std::string& label, uint64_t total) {
  label_ = label;
  total_ = total;
  drawn_ = 0;
  if (terminal_) Draw(0);
}

void Progress::Update(uint64_t done) {
  if (total_ == 0) return;
  const uint64_t part = done * (terminal_ ? kTerminalParts : kLogParts) / total_;
  if (part == drawn_) return;
  drawn_ = part;
  Draw(done);
}

void Progress::Draw(uint64_t done) {
  const double share = total_ == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total_);
  if (!terminal_) {
    Write(out_, fmt::format("{}: {:.0f} %\n", label_, 100 * share));
    return;
  }
  const auto filled = static_cast<size_t>(share * kBarWidth);
  Write(out_, fmt::format("\r{:<40} [{}{}] {:3.0f} %", label_, std::string(filled, '#'),
                          std::string(kBarWidth - filled, '.'), 100 * share));
  std::fflush(out_);
}

void Progress::Finish() {
  // The line is wiped: what it told is in the table.
  if (terminal_) Write(out_, fmt::format("\r{:<90}\r", ""));
  std::fflush(out_);
}

}  // namespace ctkvr::cli
