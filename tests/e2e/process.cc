// SPDX-License-Identifier: Apache-2.0

#include "tests/e2e/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/check.h"

namespace ctkvr::testing {

Process::Process(const std::string& path, const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& environment) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);
  int ends[2];
  CTKVR_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  // Spawned, not forked: other threads of this process may hold locks.
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  CTKVR_CHECK(posix_spawn(&pid_, path.c_str(), &actions, nullptr, argv.data(), envp.data()) == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  reader_ = std::thread([this, fd = ends[0]] { ReadOutput(fd); });
}

Process::~Process() {
  if (pid_ > 0) kill(pid_, SIGKILL);
  Wait();
}

void Process::Signal(int number) const { CTKVR_CHECK(pid_ > 0 && kill(pid_, number) == 0); }

int Process::Wait() {
  if (pid_ <= 0) return exit_;
  int status = 0;
  CTKVR_CHECK(waitpid(pid_, &status, 0) == pid_);
  pid_ = -1;
  reader_.join();
  exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return exit_;
}

void Process::ReadOutput(int fd) {
  FILE* const stream = fdopen(fd, "r");
  char* line = nullptr;
  size_t capacity = 0;
  while (getline(&line, &capacity, stream) > 0) {
    const std::lock_guard lock(mutex_);
    lines_.emplace_back(line);
    changed_.notify_all();
  }
  free(line);
  fclose(stream);
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::string Process::AwaitLine(const std::string& part) {
  std::unique_lock lock(mutex_);
  size_t next = 0;
  for (;;) {
    for (; next < lines_.size(); ++next) {
      if (lines_[next].find(part) != std::string::npos) return lines_[next];
    }
    if (closed_) return "";
    changed_.wait(lock);
  }
}

std::string Process::text() {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const std::string& line : lines_) text += line;
  return text;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  CTKVR_CHECK(inet_pton(AF_INET, address.substr(0, colon).c_str(), &peer.sin_addr) == 1);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string reply;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&peer), sizeof peer) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: " + address + "\r\n\r\n";
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t got; (got = recv(fd, buffer, sizeof buffer, 0)) > 0;) reply.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  const size_t body = reply.find("\r\n\r\n");
  return reply.find(" 200 ") == std::string::npos || body == std::string::npos ? "" : reply.substr(body + 4);
}

}  // namespace ctkvr::testing
