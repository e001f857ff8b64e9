// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/gate.h"

#include <string>
#include <vector>

#include "grpc/grpc.h"

namespace ctkvr::rpc {
namespace {

std::string Text(const grpc_slice& slice) {
  return {reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(slice)), GRPC_SLICE_LENGTH(slice)};
}

std::vector<std::string> CertificateNames(const grpc_auth_context* peer) {
  std::vector<std::string> names;
  if (grpc_auth_context_peer_is_authenticated(peer) == 0) return names;
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(peer, property);
    while (const grpc_auth_property* name = grpc_auth_property_iterator_next(&it)) {
      names.emplace_back(name->value, name->value_length);
    }
  }
  return names;
}

absl::Status Admit(Access& access, const grpc_auth_context* peer, const grpc_metadata* metadata, size_t count) {
  std::vector<std::string> authorization;
  for (size_t i = 0; i < count; ++i) {
    const std::string key = Text(metadata[i].key);
    if (key == ":path" && Text(metadata[i].value).starts_with(kHealthPath)) return absl::OkStatus();
    if (key == "authorization") authorization.push_back(Text(metadata[i].value));
  }
  return access.Authenticate(authorization, CertificateNames(peer)).status();
}

void Process(void* state, grpc_auth_context* peer, const grpc_metadata* metadata, size_t count,
             grpc_process_auth_metadata_done_cb done, void* user_data) {
  const absl::Status status = Admit(*static_cast<Access*>(state), peer, metadata, count);
  const std::string message(status.message());
  done(user_data, nullptr, 0, nullptr, 0, static_cast<grpc_status_code>(status.code()),
       status.ok() ? nullptr : message.c_str());
}

class GuardedCredentials final : public grpc::ServerCredentials {
 public:
  GuardedCredentials(grpc_server_credentials* credentials, Access& access) : credentials_(credentials) {
    if (access.on()) grpc_server_credentials_set_auth_metadata_processor(credentials_, {Process, nullptr, &access});
  }
  ~GuardedCredentials() override { grpc_server_credentials_release(credentials_); }
  // Nobody asks for another door.
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> GuardCredentials(grpc_server_credentials* credentials, Access& access) {
  return std::make_shared<GuardedCredentials>(credentials, access);
}

}  // namespace ctkvr::rpc
