// SPDX-License-Identifier: Apache-2.0
#include "client/cli/npy.h"

#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace ctkvr::cli {
namespace {

constexpr size_t kMagicBytes = 6;
constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kDimensionsMax = 8;
constexpr uint64_t kElementsMax = uint64_t{1} << 40;

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError("npy header: " + what); }

// Walks the Python literal {'descr': '<f2', 'fortran_order': False, 'shape': (3, 4), }.
class Literal {
 public:
  explicit Literal(const std::string& text) : text_(text) {}

  bool Take(char c) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  bool TakeWord(const char* word) {
    SkipSpace();
    if (text_.compare(at_, std::strlen(word), word) != 0) return false;
    at_ += std::strlen(word);
    return true;
  }

  bool TakeString(std::string* out) {
    SkipSpace();
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return false;
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string::npos) return false;
    *out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return true;
  }

  bool TakeNumber(uint64_t* out) {
    SkipSpace();
    const size_t begin = at_;
    *out = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (*out > kElementsMax) return false;
      *out = *out * 10 + static_cast<uint64_t>(text_[at_++] - '0');
    }
    return at_ > begin;
  }

 private:
  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  const std::string& text_;
  size_t at_ = 0;
};

bool TakeShape(Literal& literal, std::vector<uint64_t>* shape) {
  if (!literal.Take('(')) return false;
  shape->clear();
  while (!literal.Take(')')) {
    uint64_t size = 0;
    if (shape->size() == kDimensionsMax || !literal.TakeNumber(&size)) return false;
    shape->push_back(size);
    if (!literal.Take(',')) return literal.Take(')');
  }
  return true;
}

absl::Status ParseFields(const std::string& text, NpyHeader* header) {
  Literal literal(text);
  if (!literal.Take('{')) return Bad("no dictionary");
  bool seen_descr = false, seen_order = false, seen_shape = false;
  for (bool more = !literal.Take('}'); more;) {
    std::string key;
    if (!literal.TakeString(&key) || !literal.Take(':')) return Bad("a key is missing");
    if (key == "descr") {
      if (!literal.TakeString(&header->descr)) return Bad("descr is not a string");
      seen_descr = true;
    } else if (key == "fortran_order") {
      header->fortran_order = literal.TakeWord("True");
      if (!header->fortran_order && !literal.TakeWord("False")) return Bad("fortran_order is not a truth value");
      seen_order = true;
    } else if (key == "shape") {
      if (!TakeShape(literal, &header->shape)) return Bad("shape is not a tuple of at most 8 sizes");
      seen_shape = true;
    } else {
      return Bad("unknown key '" + key + "'");
    }
    const bool comma = literal.Take(',');
    more = !literal.Take('}');
    if (more && !comma) return Bad("no end");
  }
  if (seen_descr && seen_order && seen_shape) return absl::OkStatus();
  return Bad("descr, fortran_order or shape is missing");
}

}  // namespace

absl::StatusOr<NpyHeader> ParseNpyHeader(const std::string& bytes) {
  if (bytes.compare(0, kMagicBytes, kMagic, kMagicBytes) != 0 || bytes.size() < 10) return Bad("not a .npy file");
  const auto byte = [&bytes](size_t i) { return static_cast<size_t>(static_cast<unsigned char>(bytes[i])); };
  const size_t version = byte(6);
  if (version < 1 || version > 3) return Bad(absl::StrCat("version ", version, " is not known"));
  const size_t begin = version == 1 ? 10 : 12;
  if (bytes.size() < begin) return Bad("cut short");
  size_t length = byte(8) | byte(9) << 8;
  if (version > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > bytes.size() - begin) return Bad("cut short");
  NpyHeader header;
  header.data_offset = begin + length;
  if (auto s = ParseFields(bytes.substr(begin, length), &header); !s.ok()) return s;
  return header;
}

absl::StatusOr<HalfArray> ParseHalfArray(const std::string& bytes, const std::string& name) {
  const auto header = ParseNpyHeader(bytes);
  if (!header.ok()) return absl::InvalidArgumentError(absl::StrCat(name, ": ", header.status().message()));
  if (header->descr != "<f2" || header->fortran_order) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": descr is '", header->descr, "'",
                                                   header->fortran_order ? " in Fortran order" : "",
                                                   "; '<f2' in C order is needed"));
  }
  uint64_t elements = 1;
  for (const uint64_t size : header->shape) {
    if (size != 0 && elements > kElementsMax / size) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": the shape's product overflows"));
    }
    elements *= size;
  }
  const size_t data_bytes = bytes.size() - header->data_offset;
  if (data_bytes != 2 * elements) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", data_bytes, " bytes of data; the shape has ", 2 * elements));
  }
  HalfArray array{.shape = header->shape, .data = std::vector<uint16_t>(elements)};
  if (elements > 0) std::memcpy(array.data.data(), bytes.data() + header->data_offset, data_bytes);
  return array;
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t bytes_max) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::NotFoundError(path + ": cannot be opened");
  const std::streamoff size = file.tellg();
  if (size < 0 || static_cast<uint64_t>(size) > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": larger than ", bytes_max, " bytes"));
  }
  std::string bytes(static_cast<size_t>(size), '\0');
  file.seekg(0);
  if (!file.read(bytes.data(), size)) return absl::InvalidArgumentError(path + ": cannot be read");
  return bytes;
}

}  // namespace ctkvr::cli
