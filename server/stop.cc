// SPDX-License-Identifier: Apache-2.0

#include "server/stop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "kernels/base/check.h"

namespace ctkvr {
namespace {

constexpr int kSecondMs = 1000;

int ReadSignal(int fd) {
  signalfd_siginfo info;
  return read(fd, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo) : 0;
}

void Wake(int fd) {
  const uint64_t one = 1;
  CTKVR_CHECK(write(fd, &one, sizeof(one)) == sizeof(one));
}

}  // namespace

StopSignals::StopSignals() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGTERM);
  sigaddset(&signals_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal_fd_ = signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
  request_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  end_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  CTKVR_CHECK(signal_fd_ >= 0 && request_fd_ >= 0 && end_fd_ >= 0);
}

StopSignals::~StopSignals() {
  Wake(end_fd_);
  if (tolerant_.joinable()) tolerant_.join();
  for (int fd : {signal_fd_, request_fd_, end_fd_}) close(fd);
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
}

int StopSignals::Await(const std::function<bool()>& healthy) const {
  while (healthy()) {
    std::array<pollfd, 2> ready = {
        {{.fd = signal_fd_, .events = POLLIN, .revents = 0}, {.fd = request_fd_, .events = POLLIN, .revents = 0}}};
    poll(ready.data(), ready.size(), kSecondMs);
    // First, for a supervisor's signal often follows a request.
    uint64_t requests = 0;
    if (read(request_fd_, &requests, sizeof(requests)) == sizeof(requests)) return kRequested;
    if (const int number = ReadSignal(signal_fd_); number > 0) return number;
  }
  return 0;
}

void StopSignals::Request() { Wake(request_fd_); }

void StopSignals::Release(int tolerated) {
  if (tolerated == 0) {
    pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
  } else {
    tolerant_ = std::thread([this, tolerated] { Tolerate(tolerated); });
  }
}

// One thread that does not block a signal is enough for it to end the process.
void StopSignals::Tolerate(int count) const {
  std::array<pollfd, 2> ready = {
      {{.fd = end_fd_, .events = POLLIN, .revents = 0}, {.fd = signal_fd_, .events = POLLIN, .revents = 0}}};
  while (count > 0) {
    poll(ready.data(), ready.size(), -1);
    if (ready[0].revents != 0) return;
    if (ReadSignal(signal_fd_) > 0) --count;
  }
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
  poll(ready.data(), 1, -1);
}

}  // namespace ctkvr
