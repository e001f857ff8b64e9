// SPDX-License-Identifier: Apache-2.0
//
// When the process is to end: SIGTERM, SIGINT, a request (of service Admin), or a device that is lost. Signals are read
// from a descriptor, never handled, so that nothing runs in a signal handler. For main; Request is thread-safe.

#pragma once

#include <signal.h>

#include <functional>
#include <thread>

namespace ctkvr {

class StopSignals {
 public:
  static constexpr int kRequested = -1;

  // Blocks both signals in this thread and those it starts from now on; a closed pipe is no signal any more, but an
  // error of the write.
  StopSignals();
  ~StopSignals();

  // Returns the signal that came, kRequested after Request, or 0 soon after `healthy` says no. It is asked about once a
  // second.
  int Await(const std::function<bool()>& healthy) const;
  // As a signal would, but for Await alone, whether it runs already or later.
  void Request();

  // From now on a signal ends the process at once; after `tolerated` that do nothing.
  void Release(int tolerated = 0);

 private:
  void Tolerate(int count) const;

  sigset_t signals_;
  int signal_fd_;
  int request_fd_;
  int end_fd_;
  std::thread tolerant_;
};

}  // namespace ctkvr
