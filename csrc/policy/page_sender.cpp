#include "policy/page_sender.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/system_errors.h"
#include "base/thread.h"
#include "policy/page_pool.h"
#include "vmm/page_socket.h"
#include "vmm/shared_file.h"

namespace vtensor {

struct PageSender::Sockets {
  SharedFile waker;  // an eventfd
  std::mutex mutex;
  bool stopping = false;                             // guarded by `mutex`, as is `arrived`
  std::vector<std::unique_ptr<SharedFile>> arrived;  // new ones, which the thread takes

  void wake() const noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!write(waker.descriptor(), &one, sizeof one));
  }
};

PageSender::PageSender(const char* operation, const std::shared_ptr<PagePool>& pool)
    : sockets_(std::make_shared<Sockets>()) {
  make_call(pool->driver().meter(), operation, Call::eventfd, EMFILE,
            "an eventfd for the thread that answers readers",
            "raise the limit on descriptors (ulimit -n), or close files", [&] {
              sockets_->waker.take(Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
              return sockets_->waker.descriptor() >= 0;
            });
  thread_ = start_thread("vtensor-sender", ThreadRole::caller,
                         text("[", operation,
                              "] the system has no thread that answers readers (EAGAIN): raise the "
                              "process's limits (ulimit -u, ulimit -v)"),
                         [pool = std::weak_ptr(pool), sockets = sockets_] { run(pool, sockets); });
}

PageSender::~PageSender() {
  {
    const std::lock_guard lock(sockets_->mutex);
    sockets_->stopping = true;
  }
  sockets_->wake();
  thread_->get_id() == std::this_thread::get_id() ? thread_->detach() : thread_->join();
}

Descriptor PageSender::connect(const char* operation, PagePool& pool) {
  Descriptor reader(-1);
  auto socket = std::make_unique<SharedFile>();
  make_call(pool.driver().meter(), operation, Call::socketpair, EMFILE, "a socket for a reader",
            "raise the limit on descriptors (ulimit -n), or close files",
            [&] { return socket->make_socket(reader); });
  {
    const std::lock_guard lock(sockets_->mutex);
    sockets_->arrived.push_back(std::move(socket));
  }
  sockets_->wake();
  return reader;
}

// Answers one question of a reader. False if the socket is of no more use.
bool PageSender::serve(const SharedFile& socket, const std::weak_ptr<PagePool>& weak) {
  bool ended = false;
  const std::optional<PageMessage> asked = PageMessage::receive(socket, ended);
  if (!asked) return !ended;
  const std::shared_ptr<PagePool> pool = weak.lock();
  if (!pool) return false;
  PageMessage answer;
  answer.content.number = asked->content.number;
  try {
    pool->export_pages(*asked, answer);
  } catch (const std::exception& refusal) {
    answer.refuse(refusal.what());
  }
  const int error = answer.send(socket);
  if (error == 0 || answer.pages.empty()) return error == 0;
  answer.refuse("the system does not send the descriptors (" + errno_name(error) +
                "): raise the limit on them (ulimit -n) in the writer, and sync again");
  return answer.send(socket) == 0;
}

void PageSender::run(const std::weak_ptr<PagePool>& pool, const std::shared_ptr<Sockets>& sockets) {
  std::vector<std::unique_ptr<SharedFile>> all;
  std::vector<pollfd> polled;
  for (;;) {
    try {
      {
        const std::lock_guard lock(sockets->mutex);
        if (sockets->stopping) return;
        all.reserve(all.size() + sockets->arrived.size());
        for (auto& socket : sockets->arrived) all.push_back(std::move(socket));
        sockets->arrived.clear();
      }
      polled.assign(1, {.fd = sockets->waker.descriptor(), .events = POLLIN, .revents = 0});
      for (const auto& socket : all)
        polled.push_back({.fd = socket->descriptor(), .events = POLLIN, .revents = 0});
      if (poll(polled.data(), polled.size(), -1) < 0)
        throw std::system_error(errno, std::generic_category());
      if (polled.front().revents != 0) {
        std::uint64_t woken = 0;
        static_cast<void>(!read(sockets->waker.descriptor(), &woken, sizeof woken));
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (polled[i + 1].revents != 0 && !serve(*all[i], pool)) all[i].reset();
      }
      std::erase(all, nullptr);
    } catch (const std::exception&) {  // no memory
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::erase(all, nullptr);
    }
  }
}

}  // namespace vtensor
