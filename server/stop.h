// SPDX-License-Identifier: Apache-2.0
//
// When the process is to end: SIGTERM, SIGINT, or a device that is lost. Signals are waited for, never handled, so that
// nothing runs in a signal handler. Not thread-safe: for main.

#pragma once

#include <signal.h>

#include <functional>

namespace ctkvr {

class StopSignals {
 public:
  // Blocks both signals in this thread and those it starts from now on; a closed pipe is no signal any more, but an
  // error of the write.
  StopSignals();
  ~StopSignals() { Release(); }

  // Returns the signal that came, or 0 soon after `healthy` says no. It is asked about once a second.
  int Await(const std::function<bool()>& healthy) const;

  // From now on a signal ends the process at once.
  void Release() const;

 private:
  sigset_t signals_;
};

}  // namespace ctkvr
