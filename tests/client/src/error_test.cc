// SPDX-License-Identifier: Apache-2.0
//
// Proves that what the server says of an error reaches the caller, and that damaged details cost no more than
// themselves.
#include "ctkvr/client/error.h"

#include "client/src/status.h"
#include "tests/client/fake_server.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::client {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::Pair;
using testing::StatusIs;

TEST(Error, DetailsOfTheServerAreKept) {
  const absl::Status status = FromGrpc(testing::RichError(grpc::StatusCode::OUT_OF_RANGE, "expected 40",
                                                          "WRONG_POSITION", {{"expected_position", "40"}}, 1500));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kOutOfRange, "expected 40"));
  const ErrorDetail detail = DetailOf(status);
  EXPECT_EQ(detail.reason, "WRONG_POSITION");
  EXPECT_EQ(detail.domain, "ctkvr");
  EXPECT_THAT(detail.metadata, ElementsAre(Pair("expected_position", "40")));
  EXPECT_EQ(detail.retry_delay, std::chrono::milliseconds(1500));
}

TEST(Error, AnnotationKeepsCodeAndDetails) {
  const absl::Status status =
      Annotate(FromGrpc(testing::RichError(grpc::StatusCode::ABORTED, "text", "WHY")), "in front");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, "in front: text"));
  EXPECT_EQ(DetailOf(status).reason, "WHY");
  EXPECT_THAT(Annotate(absl::OkStatus(), "in front"), IsOk());
}

TEST(Error, MissingOrDamagedDetailsLeaveTheErrorItself) {
  EXPECT_THAT(FromGrpc(grpc::Status::OK), IsOk());
  EXPECT_THAT(DetailOf(absl::OkStatus()).reason, IsEmpty());
  const absl::Status plain = FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "text"));
  EXPECT_THAT(plain, StatusIs(absl::StatusCode::kInternal, "text"));
  EXPECT_FALSE(DetailOf(plain).retry_delay);
  const absl::Status damaged = FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "text", "\xff\xff\xff"));
  EXPECT_THAT(damaged, StatusIs(absl::StatusCode::kInternal, "text"));
  EXPECT_THAT(DetailOf(damaged).reason, IsEmpty());
}

TEST(Error, ItemStatusBecomesAnErrorWithDetails) {
  v1::ItemStatus item;
  EXPECT_THAT(StatusOf(item), IsOk());
  item.set_code(11);
  item.set_message("gap");
  item.set_reason("WRONG_POSITION");
  (*item.mutable_metadata())["expected_position"] = "9";
  const absl::Status status = StatusOf(item);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kOutOfRange, "gap"));
  EXPECT_THAT(DetailOf(status).metadata, ElementsAre(Pair("expected_position", "9")));
}

TEST(Error, OnlyTheRestartErrorIsARestart) {
  EXPECT_TRUE(IsServerRestarted(MakeStatus(absl::StatusCode::kAborted, "x", kReasonServerRestarted)));
  EXPECT_FALSE(IsServerRestarted(MakeStatus(absl::StatusCode::kAborted, "x", "OTHER")));
  EXPECT_FALSE(IsServerRestarted(absl::OkStatus()));
}

}  // namespace
}  // namespace ctkvr::client
