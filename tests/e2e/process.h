// SPDX-License-Identifier: Apache-2.0
//
// A child process with its standard error read line by line as it comes, so that a test waits for an event and never
// for a time. Thread-safe: AwaitLine and text.

#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ctkvr::testing {

class Process {
 public:
  // `environment` is added to this process's own.
  Process(const std::string& path, const std::vector<std::string>& arguments,
          const std::map<std::string, std::string>& environment = {});
  ~Process();  // kills the child when it still runs

  void Signal(int number) const;
  // The exit code, or minus the signal that ended the process.
  int Wait();

  // The first line of standard error that contains `part`; "" when the process closed it without one.
  std::string AwaitLine(const std::string& part);
  // Standard error and output so far; all of it after Wait.
  std::string text();

 private:
  void ReadOutput(int fd);

  pid_t pid_ = -1;
  int exit_ = 0;
  std::thread reader_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;  // guarded by mutex_, as closed_ is
  bool closed_ = false;
};

// The body of an HTTP reply, "" where there is none. `address` is "ip4:port".
std::string HttpGet(const std::string& address, const std::string& path);

}  // namespace ctkvr::testing
