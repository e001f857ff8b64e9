// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/certificates.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace ctkvr::testing {

Certificates::Certificates() : folder_(::testing::TempDir() + "certificates." + std::to_string(getpid()) + "/") {
  std::filesystem::create_directory(folder_);
}

Certificates::~Certificates() { std::filesystem::remove_all(folder_); }

std::string Certificates::Text(const std::string& file) const {
  std::ifstream in(Path(file));
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

bool Certificates::OpenSsl(const std::string& arguments) const {
  const std::string command = "cd '" + folder_ + "' && openssl " + arguments + " >openssl.log 2>&1";
  const bool good = std::system(command.c_str()) == 0;
  EXPECT_TRUE(good) << command << "\n" << Text("openssl.log");
  return good;
}

void Certificates::MakeKey(const std::string& name) const {
  OpenSsl("genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out " + name + ".key");
}

void Certificates::MakeAuthority(const std::string& name) const {
  MakeKey(name);
  OpenSsl("req -x509 -new -key " + name + ".key -days 2 -subj /CN=" + name + " -out " + name + ".pem");
}

void Certificates::Sign(const std::string& authority, const std::string& name, int days) const {
  MakeKey(name);
  OpenSsl("req -new -key " + name + ".key -subj /CN=" + name + " -out " + name + ".csr");
  std::ofstream(Path("names")) << "subjectAltName=IP:127.0.0.1\n";
  OpenSsl("x509 -req -in " + name + ".csr -CA " + authority + ".pem -CAkey " + authority +
          ".key -CAcreateserial -extfile names -days " + std::to_string(days) + " -out " + name + ".pem");
}

}  // namespace ctkvr::testing
