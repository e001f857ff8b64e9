// SPDX-License-Identifier: Apache-2.0
//
// Proves that each code, text, reason and key reaches the client in the standard details, that retries are proposed
// exactly where they may help, and that long texts end on a whole character.

#include "server/rpc/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "google/rpc/status.pb.h"
#include "server/core/error.h"

namespace ctkvr::rpc {
namespace {

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

template <typename Detail>
std::optional<Detail> Find(const google::rpc::Status& details) {
  for (const auto& any : details.details()) {
    Detail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

double RetrySeconds(const absl::Status& status) {
  const auto retry = Find<google::rpc::RetryInfo>(Details(ToGrpcStatus(status)));
  return retry ? static_cast<double>(retry->retry_delay().seconds()) + 1e-9 * retry->retry_delay().nanos() : -1;
}

TEST(StatusTest, OkIsOkWithoutDetails) {
  const grpc::Status status = ToGrpcStatus(absl::OkStatus());
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.error_details(), "");
}

TEST(StatusTest, EveryCodeStaysItself) {
  for (int code = 1; code <= 16; ++code) {
    const grpc::Status status = ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(code), "text"));
    EXPECT_EQ(static_cast<int>(status.error_code()), code);
    EXPECT_EQ(status.error_message(), "text");
    EXPECT_EQ(Details(status).code(), code);
    EXPECT_EQ(Details(status).message(), "text");
  }
}

TEST(StatusTest, ReasonAndMetadataBecomeErrorInfo) {
  const auto info = Find<google::rpc::ErrorInfo>(Details(ToGrpcStatus(MakeError(
      absl::StatusCode::kOutOfRange, "a gap", kReasonWrongPosition, {{"expected_position", "17"}, {"b", "c"}}))));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason(), "WRONG_POSITION");
  EXPECT_EQ(info->domain(), "ctkvr");
  EXPECT_EQ(info->metadata().size(), 2u);
  EXPECT_EQ(info->metadata().at("expected_position"), "17");
}

TEST(StatusTest, AnErrorWithoutReasonHasNoErrorInfo) {
  EXPECT_EQ(Details(ToGrpcStatus(absl::InvalidArgumentError("x"))).details_size(), 0);
}

TEST(StatusTest, RetriesAreProposedWhereRoomComesBack) {
  const auto exhausted = [](const char* reason) {
    return MakeError(absl::StatusCode::kResourceExhausted, "full", reason);
  };
  EXPECT_DOUBLE_EQ(RetrySeconds(exhausted(kReasonQueueFull)), 0.05);
  EXPECT_DOUBLE_EQ(RetrySeconds(exhausted(kReasonArenaFull)), 1);
  EXPECT_DOUBLE_EQ(RetrySeconds(exhausted(kReasonSessionLimit)), 1);
  // A reply that is too large stays too large, and no other code is about room.
  EXPECT_EQ(RetrySeconds(absl::ResourceExhaustedError("reply too large")), -1);
  EXPECT_EQ(RetrySeconds(MakeError(absl::StatusCode::kUnavailable, "draining", kReasonDraining)), -1);
  EXPECT_EQ(RetrySeconds(MakeError(absl::StatusCode::kInternal, "odd", kReasonQueueFull)), -1);
}

TEST(StatusTest, TextsAreCappedInStatusAndDetails) {
  const grpc::Status status = ToGrpcStatus(absl::InternalError(std::string(5000, 'x')));
  EXPECT_EQ(status.error_message().size(), kErrorMessageBytesMax);
  EXPECT_EQ(Details(status).message().size(), kErrorMessageBytesMax);
}

TEST(CapMessageTest, ATextAtTheLimitStaysWhole) {
  EXPECT_EQ(CapMessage(std::string(1024, 'x')), std::string(1024, 'x'));
  EXPECT_EQ(CapMessage(std::string(1025, 'x')), std::string(1024, 'x'));
}

TEST(CapMessageTest, ACharacterAcrossTheLimitIsLeftOut) {
  const std::string euro = "\xe2\x82\xac";  // three bytes
  for (size_t before : {1021u, 1022u, 1023u, 1024u}) {
    const std::string capped = CapMessage(std::string(before, 'x') + euro + "tail");
    EXPECT_EQ(capped, std::string(before, 'x') + (before == 1021 ? euro : "")) << before;
  }
}

TEST(CapMessageTest, BytesThatAreNoTextStillEnd) { EXPECT_EQ(CapMessage(std::string(3000, '\x80')), ""); }

TEST(ItemStatusTest, OkLeavesTheMessageEmpty) {
  v1::ItemStatus item;
  EncodeItemStatus(absl::OkStatus(), &item);
  EXPECT_EQ(item.ByteSizeLong(), 0u);
}

TEST(ItemStatusTest, AnErrorCarriesCodeTextReasonAndMetadata) {
  v1::ItemStatus item;
  EncodeItemStatus(MakeError(absl::StatusCode::kNotFound, "gone", kReasonLeaseExpired, {{"a", "b"}}), &item);
  EXPECT_EQ(item.code(), 5);
  EXPECT_EQ(item.message(), "gone");
  EXPECT_EQ(item.reason(), "LEASE_EXPIRED");
  EXPECT_EQ(item.metadata().at("a"), "b");
}

}  // namespace
}  // namespace ctkvr::rpc
