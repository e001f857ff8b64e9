// SPDX-License-Identifier: Apache-2.0
//
// Callers of a server with access control: tokens, the rules that know them, calls that carry them.
// Thread-safe: pure functions.

#pragma once

#include <grpcpp/grpcpp.h>
#include <openssl/sha.h>

#include <chrono>
#include <memory>
#include <string>

#include "server/rpc/access_rules.h"

namespace ctkvr::testing {

inline constexpr char kRedToken[] = "ctkvr_red-4f1f6a6f0e";
inline constexpr char kBlueToken[] = "ctkvr_blue-93b2c5d8a1";
inline constexpr char kAdminToken[] = "ctkvr_admin-77aa01c3ef";
inline constexpr char kExpiredToken[] = "ctkvr_expired-5512aabbcc";
inline constexpr char kUnknownToken[] = "ctkvr_unknown-0099887766";

inline rpc::TokenRule RuleOf(const std::string& token, rpc::WallTime expires = rpc::WallTime::max()) {
  rpc::TokenRule rule{.digest = {}, .expires = expires};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), rule.digest.data());
  return rule;
}

// Two tenants, and one that may administer and has a token whose time is over.
inline rpc::AccessRules MakeRules() {
  rpc::AccessRules rules;
  rules.tenants.push_back({.name = "red", .tokens = {RuleOf(kRedToken)}, .certificates = {"red.example"}});
  rules.tenants.push_back({.name = "blue", .tokens = {RuleOf(kBlueToken)}});
  rules.tenants.push_back(
      {.name = "operators", .admin = true, .tokens = {RuleOf(kAdminToken), RuleOf(kExpiredToken, rpc::WallTime())}});
  return rules;
}

inline std::unique_ptr<grpc::ClientContext> ContextOf(const std::string& token) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  return context;
}

}  // namespace ctkvr::testing
