// SPDX-License-Identifier: Apache-2.0
//
// Proves that the command line's flags reach a server with mutual TLS, and that wrong ones are refused by name.
#include "client/cli/credentials.h"

#include "ctkvr/client/client.h"
#include "tests/testing/certificates.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_server.h"

namespace ctkvr::cli {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;

class CliCredentialsTest : public ::testing::Test {
 protected:
  CliCredentialsTest() {
    rpc::RouteGrpcLog(nullptr);  // refused handshakes
    pem_.MakeAuthority("ca");
    pem_.Sign("ca", "server");
    pem_.Sign("ca", "me");
  }
  std::string Refusal(const TlsFlags& flags) {
    const auto credentials = MakeCredentials(flags);
    EXPECT_EQ(credentials.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(credentials.status().message());
  }

  const testing::Certificates pem_;
};

TEST_F(CliCredentialsTest, AServerThatWantsACertificateIsReachedWithOne) {
  const testing::TestServer server(
      {.tls = {
           .certificate = pem_.Path("server.pem"), .key = pem_.Path("server.key"), .client_ca = pem_.Path("ca.pem")}});
  const auto reach = [&](const TlsFlags& flags) {
    auto credentials = MakeCredentials(flags);
    EXPECT_THAT(credentials, IsOk());
    const auto client = client::Client::Connect({.address = server.address(), .credentials = *credentials});
    return client.ok() ? (*client)->ServerInfo().status() : client.status();
  };
  EXPECT_THAT(reach({.ca = pem_.Path("ca.pem"), .certificate = pem_.Path("me.pem"), .key = pem_.Path("me.key")}),
              IsOk());
}

TEST_F(CliCredentialsTest, NoFlagsMeanPlaintext) {
  const auto credentials = MakeCredentials({});
  ASSERT_THAT(credentials, IsOk());
  EXPECT_EQ(*credentials, nullptr);
}

TEST_F(CliCredentialsTest, WrongFlagsAreRefusedByName) {
  const std::string ca = pem_.Path("ca.pem");
  EXPECT_THAT(Refusal({.ca = ca, .certificate = pem_.Path("me.pem"), .key = ""}), HasSubstr("--tls-key"));
  EXPECT_THAT(Refusal({.ca = ca, .certificate = "", .key = pem_.Path("me.key")}), HasSubstr("--tls-certificate"));
  EXPECT_THAT(Refusal({.ca = "", .certificate = ca, .key = ca}), HasSubstr("--tls-ca"));
  EXPECT_THAT(Refusal({.ca = pem_.Path("gone"), .certificate = "", .key = ""}), HasSubstr(pem_.Path("gone")));
}

}  // namespace
}  // namespace ctkvr::cli
