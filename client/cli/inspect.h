// SPDX-License-Identifier: Apache-2.0
//
// What `info` and `sessions` print. Thread-safe: pure functions.

#pragma once

#include <string>
#include <vector>

#include "ctkvr/v1/cache.pb.h"

namespace ctkvr::cli {

std::string InfoText(const v1::GetServerInfoReply& info);
std::string SessionListText(const std::vector<v1::ListSessionsReply::Entry>& sessions);
// One session: geometry, memory by kind, layers.
std::string SessionText(const v1::SessionInfo& session);

}  // namespace ctkvr::cli
