// SPDX-License-Identifier: Apache-2.0
//
// What an error says beside its text comes back as it went in, also through copies.

#include "server/core/error.h"

#include <gtest/gtest.h>

namespace ctkvr {
namespace {

TEST(ErrorTest, ReasonAndMetadataComeBack) {
  const absl::Status status = MakeError(absl::StatusCode::kOutOfRange, "text", kReasonWrongPosition,
                                        {{"expected_position", "7"}, {"other/key", ""}});
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(std::string(status.message()), "text");
  const absl::Status copy = status;
  const ErrorDetail detail = GetErrorDetail(copy);
  EXPECT_EQ(detail.reason, "WRONG_POSITION");
  EXPECT_EQ(detail.metadata, (std::map<std::string, std::string>{{"expected_position", "7"}, {"other/key", ""}}));
}

TEST(ErrorTest, AStatusWithoutDetailHasNone) {
  EXPECT_EQ(GetErrorDetail(absl::OkStatus()).reason, "");
  absl::Status status = absl::InternalError("x");
  status.SetPayload("somebody/else", absl::Cord("y"));
  EXPECT_EQ(GetErrorDetail(status).reason, "");
  EXPECT_TRUE(GetErrorDetail(status).metadata.empty());
}

}  // namespace
}  // namespace ctkvr
