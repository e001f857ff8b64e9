// SPDX-License-Identifier: Apache-2.0
//
// Authorities, and certificates of theirs that are good for 127.0.0.1, as PEM files of a folder that goes with the
// object. Made by the program openssl. Not thread-safe.

#pragma once

#include <string>

namespace ctkvr::testing {

class Certificates {
 public:
  Certificates();
  ~Certificates();

  std::string Path(const std::string& file) const { return folder_ + file; }
  std::string Text(const std::string& file) const;  // "" where there is none

  // NAME.key and NAME.pem: a key, and a certificate by itself or by an authority made before. `days` 0: its time ends
  // in the second in which it is made.
  void MakeAuthority(const std::string& name) const;
  void Sign(const std::string& authority, const std::string& name, int days = 2) const;
  // `openssl ARGUMENTS` in the folder. Returns whether it went well; a failure of the test too when it did not.
  bool OpenSsl(const std::string& arguments) const;

 private:
  void MakeKey(const std::string& name) const;

  const std::string folder_;
};

}  // namespace ctkvr::testing
