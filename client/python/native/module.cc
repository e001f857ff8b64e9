// SPDX-License-Identifier: Apache-2.0
//
// ctkvr._engine: the engine inside a Python process. Serialised messages in and out; ctkvr/embedded.py makes a channel
// of it. The interpreter's lock is let go wherever something is parsed, computed or waited for, and the engine's
// threads never take it: who waits is woken by a condition variable, an event loop by a file descriptor.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/embedded/service.h"
#include "server/embedded/streams.h"
#include "server/rpc/codec_status.h"

namespace ctkvr::python {
namespace {

namespace nb = nanobind;

// Destroys what belongs to the process that made it. After a fork the child has the engine's memory and none of its
// threads: nothing there can be waited for, so it is left alone.
struct InOwnProcess {
  pid_t process = getpid();
  template <typename T>
  void operator()(T* owned) const {
    if (getpid() == process) delete owned;
  }
};

template <typename T, typename... Arguments>
std::shared_ptr<T> MakeInOwnProcess(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), InOwnProcess()};
}

TimePoint Deadline(std::optional<double> seconds) {
  if (!seconds.has_value()) return TimePoint::max();
  const std::chrono::duration<double> left(*seconds);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(left);
}

// Tells an event loop which calls are done. Thread-safe.
class Notifier {
 public:
  Notifier() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Notifier() { close(descriptor_); }
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  int descriptor() const { return descriptor_; }
  void Add(uint64_t token) {
    {
      std::lock_guard lock(mutex_);
      done_.push_back(token);
    }
    eventfd_write(descriptor_, 1);
  }
  // The tokens of calls that were done since the last time.
  std::vector<uint64_t> Take() {
    eventfd_t count = 0;
    eventfd_read(descriptor_, &count);
    std::lock_guard lock(mutex_);
    return std::exchange(done_, {});
  }

 private:
  const int descriptor_;
  std::mutex mutex_;
  std::vector<uint64_t> done_;
};

// Whom to tell, beside those who wait, that a call is done.
struct Notice {
  std::shared_ptr<Notifier> notifier;  // null: nobody
  uint64_t token = 0;
};

// One call on its way. The engine's callback and the Python object hold it together: either may go first.
class Pending {
 public:
  explicit Pending(Notice notice) : notice_(std::move(notice)) {}

  embedded::Done Callback(const std::shared_ptr<Pending>& self) {
    return [self](embedded::Outcome outcome) { self->Finish(std::move(outcome)); };
  }
  std::function<bool()> Cancelled(const std::shared_ptr<Pending>& self) {
    return [self] { return self->cancelled_.load(std::memory_order_relaxed); };
  }

  bool Wait(double seconds) {
    const nb::gil_scoped_release unlocked;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return outcome_.has_value(); });
  }
  void Cancel() { cancelled_ = true; }

  // (0, reply), (0, None) at the end of a stream, or (code, google.rpc.Status). REQUIRES: done, and not taken before.
  nb::tuple Take() {
    embedded::Outcome outcome;
    {
      std::lock_guard lock(mutex_);
      outcome = *std::exchange(outcome_, embedded::Outcome());
    }
    const int code = static_cast<int>(outcome.status.code());
    if (code != 0) return nb::make_tuple(code, Serialize(rpc::EncodeStatus(outcome.status)));
    if (outcome.reply == nullptr) return nb::make_tuple(code, nb::none());
    return nb::make_tuple(code, Serialize(*outcome.reply));
  }

 private:
  void Finish(embedded::Outcome outcome) {
    {
      std::lock_guard lock(mutex_);
      outcome_ = std::move(outcome);
      changed_.notify_all();
    }
    if (notice_.notifier != nullptr) notice_.notifier->Add(notice_.token);
  }

  // Straight into the bytes object: rows are copied once.
  static nb::bytes Serialize(const google::protobuf::Message& message) {
    const size_t size = message.ByteSizeLong();
    nb::bytes bytes(nullptr, size);
    auto* begin = reinterpret_cast<uint8_t*>(PyBytes_AsString(bytes.ptr()));
    const nb::gil_scoped_release unlocked;
    message.SerializeWithCachedSizesToArray(begin);
    return bytes;
  }

  const Notice notice_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<embedded::Outcome> outcome_;  // guarded by mutex_
};

std::string_view View(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Starts what answers by a callback: `start(done, pending)`, with the interpreter's lock let go.
template <typename Start>
std::shared_ptr<Pending> Begin(const std::shared_ptr<Notifier>& notifier, uint64_t token, Start start) {
  auto pending = std::make_shared<Pending>(Notice{notifier, token});
  const nb::gil_scoped_release unlocked;
  start(pending->Callback(pending), pending);
  return pending;
}

class Upload {
 public:
  Upload(std::shared_ptr<embedded::Service> service, std::optional<double> seconds)
      : service_(std::move(service)),
        stream_(MakeInOwnProcess<embedded::AppendStream>(*service_, CallContext{.deadline = Deadline(seconds)})) {}

  std::shared_ptr<Pending> Append(const nb::bytes& request, const std::shared_ptr<Notifier>& notifier, uint64_t token) {
    const std::string_view view = View(request);
    return Begin(notifier, token, [&](embedded::Done done, const auto&) { stream_->Append(view, std::move(done)); });
  }
  std::shared_ptr<Pending> Finish(const std::shared_ptr<Notifier>& notifier, uint64_t token) {
    return Begin(notifier, token, [&](embedded::Done done, const auto&) { stream_->Finish(std::move(done)); });
  }

 private:
  std::shared_ptr<embedded::Service> service_;  // outlives the stream
  std::shared_ptr<embedded::AppendStream> stream_;
};

class Stream {
 public:
  Stream(std::shared_ptr<embedded::Service> service, std::optional<double> seconds)
      : service_(std::move(service)), stream_(MakeInOwnProcess<embedded::DecodeStream>(*service_, Deadline(seconds))) {}

  void Write(const nb::bytes& request) {
    const std::string_view view = View(request);
    const nb::gil_scoped_release unlocked;
    stream_->Write(view);
  }
  void EndWrites() {
    const nb::gil_scoped_release unlocked;
    stream_->EndWrites();
  }
  std::shared_ptr<Pending> Read(const std::shared_ptr<Notifier>& notifier, uint64_t token) {
    return Begin(notifier, token, [&](embedded::Done done, const auto&) { stream_->Read(std::move(done)); });
  }
  void Cancel() {
    const nb::gil_scoped_release unlocked;
    stream_->Cancel();
  }

 private:
  std::shared_ptr<embedded::Service> service_;  // outlives the stream
  std::shared_ptr<embedded::DecodeStream> stream_;
};

class EngineHandle {
 public:
  explicit EngineHandle(std::shared_ptr<embedded::Service> service) : service_(std::move(service)) {}

  std::shared_ptr<Pending> Call(const std::string& method, const nb::bytes& request, std::optional<double> seconds,
                                const std::shared_ptr<Notifier>& notifier, uint64_t token) {
    const std::string_view view = View(request);
    const TimePoint deadline = Deadline(seconds);
    return Begin(notifier, token, [&](embedded::Done done, const std::shared_ptr<Pending>& pending) {
      service_->Call(method, view, {.deadline = deadline, .cancelled = pending->Cancelled(pending)}, std::move(done));
    });
  }
  Upload OpenUpload(std::optional<double> seconds) { return {service_, seconds}; }
  Stream OpenStream(std::optional<double> seconds) { return {service_, seconds}; }

 private:
  std::shared_ptr<embedded::Service> service_;
};

// The engine, or the text of what is wrong with its settings.
nb::object Open(const std::map<std::string, std::string>& settings, const std::string& version) {
  absl::StatusOr<std::unique_ptr<embedded::Service>> service;
  {
    const nb::gil_scoped_release unlocked;
    service = embedded::Service::Create(settings, version);
  }
  if (!service.ok()) return nb::str(std::string(service.status().message()).c_str());
  return nb::cast(EngineHandle({service->release(), InOwnProcess()}));
}

}  // namespace

NB_MODULE(_engine, module) {
  using nb::arg;
  nb::set_leak_warnings(false);  // a client that is open when the program ends is no fault
  nb::class_<Notifier>(module, "Notifier")
      .def(nb::init<>())
      .def_prop_ro("descriptor", &Notifier::descriptor)
      .def("take", &Notifier::Take);
  nb::class_<Pending>(module, "Pending")
      .def("wait", &Pending::Wait, arg("seconds"))
      .def("take", &Pending::Take)
      .def("cancel", &Pending::Cancel);
  nb::class_<Upload>(module, "Upload")
      .def("append", &Upload::Append, arg("request"), arg("notifier").none(), arg("token"))
      .def("finish", &Upload::Finish, arg("notifier").none(), arg("token"));
  nb::class_<Stream>(module, "Stream")
      .def("write", &Stream::Write, arg("request"))
      .def("end_writes", &Stream::EndWrites)
      .def("read", &Stream::Read, arg("notifier").none(), arg("token"))
      .def("cancel", &Stream::Cancel);
  nb::class_<EngineHandle>(module, "Engine")
      .def("call", &EngineHandle::Call, arg("method"), arg("request"), arg("seconds").none(), arg("notifier").none(),
           arg("token"))
      .def("open_upload", &EngineHandle::OpenUpload, arg("seconds").none())
      .def("open_stream", &EngineHandle::OpenStream, arg("seconds").none());
  module.def("open", &Open, arg("settings"), arg("version"));
}

}  // namespace ctkvr::python
