// SPDX-License-Identifier: Apache-2.0
//
// Who calls: the tenant whose sessions a call may see, whether it may administer the server, and how often it may call.
//
//   call ─▶ gate.h: Admits ─▶ refused (UNAUTHENTICATED), whatever service or method it names; health goes through
//                 └─▶ Call: Authenticate ─▶ Caller ─▶ CallContext.tenant ─▶ the engine knows no other sessions
//
// A caller proves itself by a token in the metadata, "authorization: Bearer TOKEN", or, where it sends none, by a name
// of its client certificate (mutual TLS). Of tokens the server knows digests alone. Rules come from a file that is
// looked at every second: one that cannot be read or does not hold leaves what was before. Streams whose caller has
// lost its right end within two looks.
//
// Thread-safe.

#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"
#include "server/core/engine.h"
#include "server/obs/logging.h"
#include "server/obs/metrics.h"
#include "server/rpc/access_rules.h"
#include "server/rpc/rate_limiter.h"

namespace ctkvr::rpc {

enum class Role : uint8_t {
  kData,  // its own tenant's sessions
  kAdmin  // these, and service ctkvr.v1.Admin
};

struct Tenant {
  TenantId id = kDefaultTenant;
  std::string name = "default";
};

// What a caller showed: at most one of both.
struct Credential {
  std::optional<TokenDigest> token;
  std::vector<std::string> certificates;  // names of the verified certificate
};

struct Caller {
  Tenant tenant;
  Role role = Role::kAdmin;
  Credential credential;  // by which it is looked at again while a stream is open
};

// A stream that ends with its caller's right to it.
class WatchedStream {
 public:
  virtual ~WatchedStream() = default;
  // No message is read from now on; what was read is answered.
  virtual void EndWith(const absl::Status& status) = 0;
  // Ends at once: the client did not take what was written.
  virtual void Abort() = 0;
};

class Access {
 public:
  // What all refused calls are told, whatever was wrong.
  static constexpr char kRefusal[] = "the call carries no valid token and no certificate of a tenant";
  // How often the file is looked at, and streams' callers.
  static constexpr std::chrono::milliseconds kRefreshInterval{1000};

  struct Options {
    std::string file;
    // What the text of the file says; `path` stands in errors.
    std::function<absl::StatusOr<AccessRules>(const std::string& text, const std::string& path)> parse;
    std::function<WallTime()> now = std::chrono::system_clock::now;
    bool threads = true;  // false: tests call Refresh
  };

  // Access is off: every caller is the tenant "default" and may administer.
  Access();
  // What the file says now. INVALID_ARGUMENT: it cannot be read, or does not hold.
  static absl::StatusOr<AccessRules> ReadRules(const Options& options);
  // The same errors. `engine` and `log` must outlive it.
  static absl::StatusOr<std::unique_ptr<Access>> Create(const Options& options, Engine& engine, obs::Log& log);
  ~Access();

  bool on() const { return engine_ != nullptr; }

  // UNAUTHENTICATED, with one text whatever is wrong; counted by what it was.
  absl::StatusOr<Caller> Authenticate(const grpc::ServerContextBase& context);
  // `authorization`: the values of that metadata. `certificates`: names of the peer's verified certificate.
  absl::StatusOr<Caller> Authenticate(const std::vector<std::string>& authorization,
                                      const std::vector<std::string>& certificates);
  // PERMISSION_DENIED unless the caller may administer; counted.
  absl::Status AuthoriseAdmin(const Caller& caller);
  // One call, or message of a stream. RESOURCE_EXHAUSTED (RATE_QUOTA, metadata retry_ms).
  absl::Status TakeCall(const Caller& caller, TimePoint now);

  // Those of the file, and those that left it and still hold sessions, by name.
  std::vector<Tenant> Tenants() const;
  std::optional<TenantId> FindTenant(const std::string& name) const;
  // What the page of metrics tells. `usage`: the engine's.
  obs::AccessSample Sample(const std::map<TenantId, TenantUsage>& usage) const;

  // REQUIRES: Unwatch before the stream goes.
  void Watch(const Caller& caller, WatchedStream* stream);
  void Unwatch(WatchedStream* stream);

  // Looks at the file and at the streams once.
  void Refresh();

 private:
  // Of a tenant that the rules name, or that still holds sessions.
  struct State {
    Tenant tenant;
    Role role = Role::kData;
    bool named = false;  // in the rules
    RateLimiter rate;
    std::atomic<uint64_t> calls{0};
    std::atomic<uint64_t> rate_refusals{0};
  };
  struct TokenEntry {
    TokenRule rule;
    State* state = nullptr;
  };
  struct Watched {
    Caller caller;
    bool ending = false;
  };

  Access(const Options& options, Engine* engine, obs::Log* log);
  absl::Status Load(const std::string& text);
  void Apply(const AccessRules& rules);
  void ForgetGoneTenants();
  void RefreshFile();
  void RefreshStreams();
  void Loop();
  absl::StatusOr<Caller> Identify(const Credential& credential, obs::AccessRefusal* why) const;  // takes mutex_
  absl::Status Refuse(obs::AccessRefusal why);

  const Options options_;
  Engine* const engine_;  // null: access is off
  obs::Log* const log_;
  std::array<std::atomic<uint64_t>, obs::kAccessRefusalCount> refusals_{};
  std::atomic<uint64_t> calls_of_everybody_{0};  // while access is off

  mutable std::shared_mutex mutex_;                        // guards the rules:
  std::map<std::string, std::unique_ptr<State>> tenants_;  // by name
  std::map<TenantId, State*> by_id_;
  std::unordered_map<uint64_t, std::vector<TokenEntry>> tokens_;  // by the first 8 bytes of the digest
  std::map<std::string, State*> certificates_;
  TenantId next_id_ = kDefaultTenant + 1;

  // Of Refresh alone.
  std::mutex refresh_mutex_;
  std::string text_;        // that the rules are from
  std::string last_error_;  // logged already

  std::mutex streams_mutex_;
  std::map<WatchedStream*, Watched> streams_;

  std::mutex thread_mutex_;
  std::condition_variable stop_cv_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ctkvr::rpc
