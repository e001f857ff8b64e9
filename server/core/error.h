// SPDX-License-Identifier: Apache-2.0
//
// What an error says beside code and text, so that a client can act on it: a reason in upper case and key-value
// pairs, carried as payloads of absl::Status. The RPC edge turns them into google.rpc.ErrorInfo.
// Thread-safe: pure functions.

#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"

namespace ctkvr {

inline constexpr char kReasonArenaFull[] = "ARENA_FULL";
inline constexpr char kReasonHostMemoryFull[] = "HOST_MEMORY_FULL";
inline constexpr char kReasonQueueFull[] = "QUEUE_FULL";
inline constexpr char kReasonSessionLimit[] = "SESSION_LIMIT";
// What one tenant may hold or ask for is used up.
inline constexpr char kReasonMemoryQuota[] = "MEMORY_QUOTA";
inline constexpr char kReasonSessionQuota[] = "SESSION_QUOTA";
inline constexpr char kReasonQueueQuota[] = "QUEUE_QUOTA";
inline constexpr char kReasonRateQuota[] = "RATE_QUOTA";          // metadata retry_ms
inline constexpr char kReasonWrongPosition[] = "WRONG_POSITION";  // metadata expected_position
inline constexpr char kReasonTokenLimit[] = "TOKEN_LIMIT";        // metadata token_limit
inline constexpr char kReasonDifferentBytes[] = "DIFFERENT_BYTES";
inline constexpr char kReasonEpochMismatch[] = "EPOCH_MISMATCH";  // metadata epoch
inline constexpr char kReasonFingerprintMismatch[] = "FINGERPRINT_MISMATCH";
inline constexpr char kReasonSessionFailed[] = "SESSION_FAILED";
inline constexpr char kReasonSessionUnknown[] = "SESSION_UNKNOWN";  // never opened by this boot
inline constexpr char kReasonSessionClosed[] = "SESSION_CLOSED";
inline constexpr char kReasonLeaseExpired[] = "LEASE_EXPIRED";
inline constexpr char kReasonDraining[] = "DRAINING";
inline constexpr char kReasonBeforeIndex[] = "BEFORE_INDEX";  // metadata indexed_length
inline constexpr char kReasonShorterLayer[] = "SHORTER_LAYER";
inline constexpr char kReasonRowOverflow[] = "ROW_OVERFLOW";
inline constexpr char kReasonCacheTooSmall[] = "CACHE_TOO_SMALL";  // metadata cache_slots

struct ErrorDetail {
  std::string reason;  // empty: none
  std::map<std::string, std::string> metadata;
};

absl::Status MakeError(absl::StatusCode code, const std::string& message, const std::string& reason,
                       const std::map<std::string, std::string>& metadata = {});
ErrorDetail GetErrorDetail(const absl::Status& status);

}  // namespace ctkvr
