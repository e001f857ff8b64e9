// SPDX-License-Identifier: Apache-2.0
#include "client/cli/credentials.h"

#include <fstream>
#include <iterator>

#include "grpcpp/security/credentials.h"

namespace ctkvr::cli {
namespace {

absl::Status ReadPem(const char* flag, const std::string& path, std::string* text) {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  *text = {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!text->empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(flag) + " is \"" + path + "\"; that file cannot be read, or is empty");
}

}  // namespace

void AddTlsFlags(CLI::App* app, TlsFlags* flags) {
  app->add_option("--tls-ca", flags->ca, "PEM file of who signed the server's certificate; without it plaintext")
      ->envname("CTKVR_TLS_CA");
  app->add_option("--tls-certificate", flags->certificate, "PEM file of this client's certificate")
      ->envname("CTKVR_CLIENT_CERTIFICATE");
  app->add_option("--tls-key", flags->key, "PEM file of its private key")->envname("CTKVR_CLIENT_KEY");
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const TlsFlags& flags) {
  if (flags.certificate.empty() != flags.key.empty()) {
    return absl::InvalidArgumentError("--tls-certificate and --tls-key go together: give both or none");
  }
  if (flags.ca.empty() && !flags.key.empty()) return absl::InvalidArgumentError("--tls-key needs --tls-ca");
  if (flags.ca.empty()) return std::shared_ptr<grpc::ChannelCredentials>();
  grpc::SslCredentialsOptions options;
  absl::Status status = ReadPem("--tls-ca", flags.ca, &options.pem_root_certs);
  if (status.ok()) status = ReadPem("--tls-certificate", flags.certificate, &options.pem_cert_chain);
  if (status.ok()) status = ReadPem("--tls-key", flags.key, &options.pem_private_key);
  if (!status.ok()) return status;
  return grpc::SslCredentials(options);
}

}  // namespace ctkvr::cli
