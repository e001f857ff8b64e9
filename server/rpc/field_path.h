// SPDX-License-Identifier: Apache-2.0
//
// Where in a request a value stands, for the texts of errors: "items[3].query.queries.dims[0]". Built on the stack at
// every call, turned into text only when there is an error. Thread-safe: values.

#pragma once

#include <cstdint>
#include <string>

namespace ctkvr::rpc {

class FieldPath {
 public:
  // `name` and `parent` must outlive the path: literals, and the paths of calling functions.
  FieldPath(const char* name) : name_(name) {}  // NOLINT(google-explicit-constructor): a literal is a path
  FieldPath(const char* name, int64_t index) : name_(name), index_(index) {}
  FieldPath(const FieldPath& parent, const char* name, int64_t index = -1)
      : parent_(&parent), name_(name), index_(index) {}

  std::string Text() const {
    std::string text = parent_ == nullptr ? name_ : parent_->Text() + "." + name_;
    if (index_ >= 0) text += "[" + std::to_string(index_) + "]";
    return text;
  }

 private:
  const FieldPath* parent_ = nullptr;
  const char* name_;
  int64_t index_ = -1;
};

}  // namespace ctkvr::rpc
