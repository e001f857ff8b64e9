// SPDX-License-Identifier: Apache-2.0
//
// Proves who gets in: with TLS only clients that encrypt and trust the right authority, with mutual TLS only those
// whose certificate the right authority signed and that has not expired; and that changed files are taken without a
// restart.

#include "server/rpc/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "tests/server/rpc/details.h"
#include "tests/testing/certificates.h"
#include "tests/testing/test_server.h"

namespace ctkvr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CredentialsTest : public ::testing::Test {
 protected:
  CredentialsTest() {
    rpc::RouteGrpcLog(nullptr);  // refused handshakes
    pem_.MakeAuthority("ours");
    pem_.MakeAuthority("foreign");
    pem_.Sign("ours", "server");
  }

  std::string Path(const std::string& name) const { return pem_.Path(name); }
  rpc::TlsFiles Tls() const { return {.certificate = Path("server.pem"), .key = Path("server.key"), .client_ca = ""}; }
  rpc::TlsFiles MutualTls() const {
    rpc::TlsFiles files = Tls();
    files.client_ca = Path("ours.pem");
    return files;
  }

  // A call on a connection of its own. `name`: of the client's key and certificate; empty: none.
  grpc::Status Call(const TestServer& server, const std::string& authority, const std::string& name = "") const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = pem_.Text(authority + ".pem");
    if (!name.empty()) {
      options.pem_private_key = pem_.Text(name + ".key");
      options.pem_cert_chain = pem_.Text(name + ".pem");
    }
    return Call(server, grpc::SslCredentials(options));
  }
  static grpc::Status Call(const TestServer& server, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = v1::Cache::NewStub(grpc::CreateCustomChannel(server.address(), credentials, arguments));
    v1::GetServerInfoReply reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    return stub->GetServerInfo(&context, {}, &reply);
  }

  const Certificates pem_;
};

TEST_F(CredentialsTest, WithTlsOnlyClientsThatEncryptAndTrustTheAuthorityGetIn) {
  const TestServer server({.tls = Tls()});
  EXPECT_THAT(Call(server, "ours"), IsRpcOk());
  EXPECT_EQ(Call(server, "foreign").error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(server, grpc::InsecureChannelCredentials()).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(CredentialsTest, WithMutualTlsOnlyClientsOfTheAuthorityGetIn) {
  pem_.Sign("ours", "worker");
  pem_.Sign("foreign", "stranger");
  pem_.Sign("ours", "late", /*days=*/0);
  // Its time ends in the second in which it was made.
  while (std::system(("openssl x509 -checkend 0 -noout -in '" + Path("late.pem") + "' >/dev/null").c_str()) == 0) {
  }
  const TestServer server({.tls = MutualTls()});
  EXPECT_THAT(Call(server, "ours", "worker"), IsRpcOk());
  for (const char* name : {"", "stranger", "late"}) {
    EXPECT_EQ(Call(server, "ours", name).error_code(), grpc::StatusCode::UNAVAILABLE) << name;
  }
  EXPECT_THAT(Call(server, "ours", "worker"), IsRpcOk());
}

TEST_F(CredentialsTest, ChangedFilesAreTakenWithoutARestart) {
  const TestServer server({.tls = Tls()});
  ASSERT_THAT(Call(server, "ours"), IsRpcOk());
  pem_.Sign("foreign", "next");
  fs::rename(Path("next.key"), Path("server.key"));
  fs::rename(Path("next.pem"), Path("server.pem"));
  while (!Call(server, "foreign").ok()) std::this_thread::yield();
  EXPECT_EQ(Call(server, "ours").error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(CredentialsTest, ARevokedAuthorityOfClientsIsForgottenWithoutARestart) {
  pem_.Sign("ours", "worker");
  rpc::TlsFiles files = MutualTls();
  files.client_ca = Path("clients.pem");
  fs::copy(Path("ours.pem"), Path("clients.pem"));
  const TestServer server({.tls = files});
  ASSERT_THAT(Call(server, "ours", "worker"), IsRpcOk());
  fs::copy(Path("foreign.pem"), Path("clients.new"));
  fs::rename(Path("clients.new"), Path("clients.pem"));
  while (Call(server, "ours", "worker").ok()) std::this_thread::yield();
}

TEST_F(CredentialsTest, FilesThatCannotServeAreRefusedByName) {
  rpc::Access off;
  const auto refusal = [&off](const rpc::TlsFiles& files) {
    const auto credentials = rpc::MakeServerCredentials(files, off);
    EXPECT_EQ(credentials.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(credentials.status().message());
  };
  EXPECT_THAT(refusal({.certificate = Path("server.pem"), .key = "", .client_ca = ""}), HasSubstr("tls_key"));
  EXPECT_THAT(refusal({.certificate = "", .key = Path("server.key"), .client_ca = ""}), HasSubstr("tls_certificate"));
  EXPECT_THAT(refusal({.certificate = "", .key = "", .client_ca = Path("ours.pem")}), HasSubstr("tls_client_ca"));
  EXPECT_THAT(refusal({.certificate = Path("gone.pem"), .key = Path("server.key"), .client_ca = ""}),
              AllOf(HasSubstr("tls_certificate"), HasSubstr(Path("gone.pem"))));
  EXPECT_THAT(refusal({.certificate = Path("server.key"), .key = Path("server.key"), .client_ca = ""}),
              HasSubstr("tls_certificate"));
  EXPECT_THAT(refusal({.certificate = Path("server.pem"), .key = Path("server.pem"), .client_ca = ""}),
              HasSubstr("tls_key"));
  pem_.OpenSsl("pkcs8 -topk8 -passout pass:x -in server.key -out locked.key");
  EXPECT_THAT(refusal({.certificate = Path("server.pem"), .key = Path("locked.key"), .client_ca = ""}),
              HasSubstr("not encrypted"));
  EXPECT_TRUE(rpc::MakeServerCredentials({}, off).ok());
}

}  // namespace
}  // namespace ctkvr::testing
