// SPDX-License-Identifier: Apache-2.0
//
// gMock matchers for absl::Status and absl::StatusOr. Thread-safe: values.
//
//   EXPECT_THAT(status, IsOk());
//   EXPECT_THAT(result, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("k_tokens")));

#pragma once

#include <gmock/gmock.h>

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ctkvr::testing {

inline const absl::Status& AsStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& AsStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  *result_listener << AsStatus(arg).ToString();
  return AsStatus(arg).ok();
}

MATCHER_P(StatusIs, code, std::string("has code ") + absl::StatusCodeToString(code)) {
  *result_listener << AsStatus(arg).ToString();
  return AsStatus(arg).code() == code;
}

MATCHER_P2(StatusIs, code, message, std::string("has code ") + absl::StatusCodeToString(code) + " and such a message") {
  *result_listener << AsStatus(arg).ToString();
  return AsStatus(arg).code() == code &&
         ::testing::ExplainMatchResult(message, std::string(AsStatus(arg).message()), result_listener);
}

}  // namespace ctkvr::testing
