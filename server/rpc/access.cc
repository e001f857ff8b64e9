// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/access.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpc/grpc_security_constants.h"
#include "kernels/base/status_macros.h"
#include "openssl/crypto.h"
#include "openssl/sha.h"
#include "server/core/error.h"
#include "server/core/limits.h"

namespace ctkvr::rpc {
namespace {

using obs::AccessRefusal;

constexpr char kBearer[] = "bearer ";

// Whoever could tell by time how far this goes learns nothing: digests cannot be chosen.
uint64_t Prefix(const TokenDigest& digest) {
  uint64_t prefix = 0;
  std::memcpy(&prefix, digest.data(), sizeof(prefix));
  return prefix;
}

TokenDigest DigestOf(const std::string& token) {
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

// The token, or nothing where the header is of another kind.
std::optional<std::string> BearerToken(const std::string& header) {
  if (!absl::StartsWithIgnoreCase(header, kBearer)) return std::nullopt;
  std::string token(absl::StripAsciiWhitespace(header.substr(sizeof(kBearer) - 1)));
  if (token.empty() || token.size() > limits::kTokenBytesMax) return std::nullopt;
  return token;
}

std::vector<std::string> CertificateNames(const grpc::ServerContextBase& context) {
  std::vector<std::string> names;
  const auto peer = context.auth_context();
  if (peer == nullptr || !peer->IsPeerAuthenticated()) return names;
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    for (const grpc::string_ref& name : peer->FindPropertyValues(property)) {
      names.emplace_back(name.data(), name.size());
    }
  }
  return names;
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(limits::kAccessFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (!file.is_open() || file.bad()) {
    return absl::InvalidArgumentError(absl::StrCat("access_file is \"", path, "\"; that file cannot be read"));
  }
  if (text.size() > limits::kAccessFileBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("access_file is \"", path, "\"; the limit is ", limits::kAccessFileBytesMax, " bytes"));
  }
  return text;
}

}  // namespace

Access::Access() : Access({.threads = false}, nullptr, nullptr) {}

Access::Access(const Options& options, Engine* engine, obs::Log* log) : options_(options), engine_(engine), log_(log) {}

absl::StatusOr<AccessRules> Access::ReadRules(const Options& options) {
  CTKVR_ASSIGN_OR_RETURN(const std::string text, ReadText(options.file));
  return options.parse(text, options.file);
}

absl::StatusOr<std::unique_ptr<Access>> Access::Create(const Options& options, Engine& engine, obs::Log& log) {
  std::unique_ptr<Access> self(new Access(options, &engine, &log));
  CTKVR_ASSIGN_OR_RETURN(const std::string text, ReadText(options.file));
  CTKVR_RETURN_IF_ERROR(self->Load(text));
  if (options.threads) self->thread_ = std::thread([access = self.get()] { access->Loop(); });
  return self;
}

Access::~Access() {
  {
    const std::lock_guard lock(thread_mutex_);
    stopping_ = true;
  }
  stop_cv_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// ---- Rules ---------------------------------------------------------------------------------------------------------

absl::Status Access::Load(const std::string& text) {
  CTKVR_ASSIGN_OR_RETURN(const AccessRules rules, options_.parse(text, options_.file));
  text_ = text;
  Apply(rules);
  return absl::OkStatus();
}

void Access::Apply(const AccessRules& rules) {
  std::map<TenantId, TenantQuota> quotas;
  const std::lock_guard lock(mutex_);
  tokens_.clear();
  certificates_.clear();
  for (auto& [name, state] : tenants_) state->named = false;
  for (const TenantRule& rule : rules.tenants) {
    std::unique_ptr<State>& state = tenants_[rule.name];
    if (state == nullptr) {
      state = std::make_unique<State>();
      state->tenant = {.id = next_id_++, .name = rule.name};
      by_id_[state->tenant.id] = state.get();
    }
    state->named = true;
    state->role = rule.admin ? Role::kAdmin : Role::kData;
    state->rate.Set(rule.calls_per_second, rule.calls_burst);
    quotas[state->tenant.id] = rule.quota;
    for (const TokenRule& token : rule.tokens) tokens_[Prefix(token.digest)].push_back({token, state.get()});
    for (const std::string& certificate : rule.certificates) certificates_[certificate] = state.get();
  }
  engine_->SetTenantQuotas(quotas);
}

// A tenant that the file names no more keeps its number while it has sessions: should it come back, they are its own.
void Access::ForgetGoneTenants() {
  const std::map<TenantId, TenantUsage> usage = engine_->tenant_usage();
  const std::lock_guard lock(mutex_);
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    const State& state = *it->second;
    if (state.named || usage.contains(state.tenant.id)) {
      ++it;
      continue;
    }
    by_id_.erase(state.tenant.id);
    it = tenants_.erase(it);
  }
}

void Access::RefreshFile() {
  absl::StatusOr<std::string> text = ReadText(options_.file);
  absl::Status status = text.status();
  if (text.ok() && *text == text_) {
    last_error_.clear();
    return;
  }
  if (text.ok()) status = Load(*text);
  if (status.ok()) {
    last_error_.clear();
    log_->Info("access_file_taken", {{"path", options_.file}, {"tenants", uint64_t{Tenants().size()}}});
    return;
  }
  const std::string message(status.message());
  if (message != last_error_) log_->Error("access_file_refused", {{"path", options_.file}, {"message", message}});
  last_error_ = message;
}

void Access::Refresh() {
  const std::lock_guard lock(refresh_mutex_);
  ForgetGoneTenants();  // a look after they left the file, when calls that were let in before have reached the engine
  RefreshFile();
  RefreshStreams();
}

void Access::Loop() {
  std::unique_lock lock(thread_mutex_);
  while (!stop_cv_.wait_for(lock, kRefreshInterval, [this] { return stopping_; })) {
    lock.unlock();
    Refresh();
    lock.lock();
  }
}

// ---- Calls ---------------------------------------------------------------------------------------------------------

absl::StatusOr<Caller> Access::Identify(const Credential& credential, AccessRefusal* why) const {
  const State* found = nullptr;
  const std::shared_lock lock(mutex_);
  if (credential.token.has_value()) {
    *why = AccessRefusal::kUnknownToken;
    const auto candidates = tokens_.find(Prefix(*credential.token));
    if (candidates != tokens_.end()) {
      for (const TokenEntry& entry : candidates->second) {
        if (CRYPTO_memcmp(entry.rule.digest.data(), credential.token->data(), credential.token->size()) != 0) continue;
        if (options_.now() < entry.rule.expires)
          found = entry.state;
        else
          *why = AccessRefusal::kExpiredToken;
      }
    }
  } else {
    *why = credential.certificates.empty() ? AccessRefusal::kNoToken : AccessRefusal::kUnknownCertificate;
    bool ambiguous = false;
    for (const std::string& name : credential.certificates) {
      const auto entry = certificates_.find(name);
      if (entry == certificates_.end()) continue;
      ambiguous = ambiguous || (found != nullptr && found != entry->second);
      found = entry->second;
    }
    if (ambiguous) found = nullptr;
  }
  if (found == nullptr) return absl::UnauthenticatedError(kRefusal);
  return Caller{.tenant = found->tenant, .role = found->role, .credential = credential};
}

absl::Status Access::Refuse(AccessRefusal why) {
  refusals_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  return why == AccessRefusal::kNotAdmin ? absl::PermissionDeniedError("the caller may not administer this server")
                                         : absl::UnauthenticatedError(kRefusal);
}

absl::StatusOr<Caller> Access::Authenticate(const std::vector<std::string>& authorization,
                                            const std::vector<std::string>& certificates) {
  if (!on()) return Caller();
  Credential credential;
  if (authorization.empty()) {
    credential.certificates = certificates;
  } else {
    // A token that is there decides, and two may not contradict each other.
    const std::optional<std::string> token = BearerToken(authorization[0]);
    if (!token.has_value() || authorization.size() > 1) return Refuse(AccessRefusal::kUnknownToken);
    credential.token = DigestOf(*token);
  }
  AccessRefusal why{};
  absl::StatusOr<Caller> caller = Identify(credential, &why);
  if (!caller.ok()) return Refuse(why);
  return caller;
}

absl::StatusOr<Caller> Access::Authenticate(const grpc::ServerContextBase& context) {
  if (!on()) return Caller();
  std::vector<std::string> authorization;
  const auto& metadata = context.client_metadata();
  const auto range = metadata.equal_range("authorization");
  for (auto it = range.first; it != range.second; ++it) {
    authorization.emplace_back(it->second.data(), it->second.size());
  }
  return Authenticate(authorization, authorization.empty() ? CertificateNames(context) : std::vector<std::string>());
}

absl::Status Access::AuthoriseAdmin(const Caller& caller) {
  return caller.role == Role::kAdmin ? absl::OkStatus() : Refuse(AccessRefusal::kNotAdmin);
}

absl::Status Access::TakeCall(const Caller& caller, TimePoint now) {
  if (!on()) {
    calls_of_everybody_.fetch_add(1, std::memory_order_relaxed);
    return absl::OkStatus();
  }
  const std::shared_lock lock(mutex_);
  const auto found = by_id_.find(caller.tenant.id);
  if (found == by_id_.end()) return absl::UnauthenticatedError(kRefusal);
  State& state = *found->second;
  const std::chrono::nanoseconds wait = state.rate.Take(now);
  if (wait.count() == 0) {
    state.calls.fetch_add(1, std::memory_order_relaxed);
    return absl::OkStatus();
  }
  state.rate_refusals.fetch_add(1, std::memory_order_relaxed);
  const int64_t retry_ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
  return MakeError(
      absl::StatusCode::kResourceExhausted,
      absl::StrCat("the tenant calls more often than its quota allows; the next call may come in ", retry_ms, " ms"),
      kReasonRateQuota, {{"retry_ms", absl::StrCat(retry_ms)}});
}

// ---- What is there -------------------------------------------------------------------------------------------------

std::vector<Tenant> Access::Tenants() const {
  if (!on()) return {Tenant()};
  std::vector<Tenant> tenants;
  const std::shared_lock lock(mutex_);
  for (const auto& [name, state] : tenants_) tenants.push_back(state->tenant);
  return tenants;
}

std::optional<TenantId> Access::FindTenant(const std::string& name) const {
  if (!on()) return name == Tenant().name ? std::optional(kDefaultTenant) : std::nullopt;
  const std::shared_lock lock(mutex_);
  const auto found = tenants_.find(name);
  return found == tenants_.end() ? std::nullopt : std::optional(found->second->tenant.id);
}

obs::AccessSample Access::Sample(const std::map<TenantId, TenantUsage>& usage) const {
  obs::AccessSample sample;
  for (size_t i = 0; i < refusals_.size(); ++i) sample.refusals[i] = refusals_[i].load(std::memory_order_relaxed);
  const auto held = [&](TenantId tenant) {
    const auto found = usage.find(tenant);
    return found == usage.end() ? TenantUsage() : found->second;
  };
  if (!on()) {
    sample.tenants.push_back({.name = Tenant().name,
                              .usage = held(kDefaultTenant),
                              .calls = calls_of_everybody_.load(std::memory_order_relaxed)});
    return sample;
  }
  const std::shared_lock lock(mutex_);
  for (const auto& [name, state] : tenants_) {
    sample.tenants.push_back({.name = name,
                              .usage = held(state->tenant.id),
                              .calls = state->calls.load(std::memory_order_relaxed),
                              .rate_refusals = state->rate_refusals.load(std::memory_order_relaxed)});
  }
  return sample;
}

// ---- Streams -------------------------------------------------------------------------------------------------------

void Access::Watch(const Caller& caller, WatchedStream* stream) {
  if (!on()) return;
  const std::lock_guard lock(streams_mutex_);
  streams_.emplace(stream, Watched{.caller = caller});
}

void Access::Unwatch(WatchedStream* stream) {
  const std::lock_guard lock(streams_mutex_);
  streams_.erase(stream);
}

void Access::RefreshStreams() {
  const std::lock_guard lock(streams_mutex_);
  for (auto& [stream, watched] : streams_) {
    AccessRefusal why{};
    const absl::StatusOr<Caller> now = Identify(watched.caller.credential, &why);
    if (now.ok() && now->tenant.id == watched.caller.tenant.id) continue;
    if (watched.ending) {
      stream->Abort();
      continue;
    }
    watched.ending = true;
    stream->EndWith(Refuse(now.ok() ? AccessRefusal::kUnknownToken : why));
  }
}

}  // namespace ctkvr::rpc
