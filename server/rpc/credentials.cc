// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/credentials.h"

#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "grpc/grpc_security.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/gate.h"

namespace ctkvr::rpc {
namespace {

// gRPC itself would serve and refuse every connection.
absl::Status CheckPem(const char* setting, const std::string& path, const char* kind) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const bool encrypted = text.find("ENCRYPTED PRIVATE KEY-----") != std::string::npos;
  if (!file.is_open() || text.find(absl::StrCat(kind, "-----")) == std::string::npos || encrypted) {
    return absl::InvalidArgumentError(absl::StrCat(setting, " is \"", path,
                                                   "\"; it must be a readable file of PEM with a ", kind,
                                                   encrypted ? ", not encrypted" : ""));
  }
  return absl::OkStatus();
}

absl::Status CheckFiles(const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError("tls_certificate and tls_key go together: give both or none");
  }
  if (files.certificate.empty()) return absl::InvalidArgumentError("tls_client_ca needs tls_certificate and tls_key");
  CTKVR_RETURN_IF_ERROR(CheckPem("tls_certificate", files.certificate, "CERTIFICATE"));
  CTKVR_RETURN_IF_ERROR(CheckPem("tls_key", files.key, "PRIVATE KEY"));
  if (files.client_ca.empty()) return absl::OkStatus();
  return CheckPem("tls_client_ca", files.client_ca, "CERTIFICATE");
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const TlsFiles& files, Access& access) {
  namespace experimental = grpc::experimental;
  if (files.certificate.empty() && files.key.empty() && files.client_ca.empty()) {
    return GuardCredentials(grpc_insecure_server_credentials_create(), access);
  }
  CTKVR_RETURN_IF_ERROR(CheckFiles(files));
  auto provider = std::make_shared<experimental::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.client_ca, kCertificateRefreshSeconds);
  experimental::TlsServerCredentialsOptions options(std::move(provider));
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return GuardCredentials(grpc_tls_server_credentials_create(options.c_credentials_options()), access);
}

}  // namespace ctkvr::rpc
