// SPDX-License-Identifier: Apache-2.0
//
// absl::Status as clients see it: the same code, the text, ErrorInfo {reason, domain "ctkvr", metadata} and, where a
// retry may succeed, RetryInfo. Thread-safe: pure functions.

#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "ctkvr/v1/cache.pb.h"
#include "google/rpc/status.pb.h"

namespace ctkvr::rpc {

// Texts travel in HTTP/2 headers, which proxies bound; longer ones are cut before a character that would not fit.
inline constexpr size_t kErrorMessageBytesMax = 1024;
inline constexpr char kErrorDomain[] = "ctkvr";

// When a refused call is worth trying again.
inline constexpr double kRetryQueueSeconds = 0.05;  // a full queue empties at the pace of batches
inline constexpr double kRetryMemorySeconds = 1.0;  // memory and session slots come back when sessions end

// With all details; empty when OK.
google::rpc::Status EncodeStatus(const absl::Status& status);

// The status of one item of a batch; left empty (code 0) when OK.
void EncodeItemStatus(const absl::Status& status, v1::ItemStatus* item);

// At most kErrorMessageBytesMax bytes of `message`, cut on the border of a UTF-8 character.
std::string CapMessage(const std::string& message);

}  // namespace ctkvr::rpc
