// SPDX-License-Identifier: Apache-2.0

#include "server/stop.h"

#include <time.h>

namespace ctkvr {

StopSignals::StopSignals() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGTERM);
  sigaddset(&signals_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int StopSignals::Await(const std::function<bool()>& healthy) const {
  const timespec second = {.tv_sec = 1, .tv_nsec = 0};
  while (healthy()) {
    const int number = sigtimedwait(&signals_, nullptr, &second);
    if (number > 0) return number;
  }
  return 0;
}

void StopSignals::Release() const { pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr); }

}  // namespace ctkvr
