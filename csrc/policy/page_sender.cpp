#include "policy/page_sender.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "base/descriptor.h"
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
  bool stopping = false;                             // guarded, as all below
  std::vector<std::unique_ptr<PageSocket>> arrived;  // not yet the thread's

  void wake() const noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!write(waker.descriptor(), &one, sizeof one));
  }
};

PageSender::PageSender(const char* operation, const std::shared_ptr<PagePool>& pool)
    : sockets_(std::make_shared<Sockets>()) {
  make_call(pool->driver().meter(), operation, Call::socketpair, EMFILE,
            "an eventfd for the thread that answers readers",
            "raise the limit on descriptors (ulimit -n), or close files", [&] {
              sockets_->waker.take(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
              return sockets_->waker.descriptor() >= 0;
            });
  try {
    thread_ =
        start_thread("vtensor-sender", ThreadRole::caller,
                     [pool = std::weak_ptr(pool), sockets = sockets_] { run(pool, sockets); });
  } catch (const std::system_error& error) {
    throw DriverError("pthread_create", error.code().value(), "EAGAIN", "[", operation,
                      "] the system has no thread that answers readers (EAGAIN): raise the "
                      "process's limits (ulimit -u, ulimit -v)");
  }
}

PageSender::~PageSender() {
  {
    const std::lock_guard lock(sockets_->mutex);
    sockets_->stopping = true;
  }
  sockets_->wake();
  thread_->get_id() == std::this_thread::get_id() ? thread_->detach() : thread_->join();
}

int PageSender::connect(const char* operation, PagePool& pool) {
  const auto [ours, theirs] = PageSocket::make(pool.driver().meter(), operation);
  Descriptor reader(theirs);
  auto socket = std::make_unique<PageSocket>(ours);
  {
    const std::lock_guard lock(sockets_->mutex);
    sockets_->arrived.push_back(std::move(socket));
  }
  sockets_->wake();
  return reader.take();
}

void PageSender::run(const std::weak_ptr<PagePool>& weak, const std::shared_ptr<Sockets>& sockets) {
  std::vector<std::unique_ptr<PageSocket>> all;
  std::vector<pollfd> polled;
  for (;;) {
    {
      const std::lock_guard lock(sockets->mutex);
      if (sockets->stopping) return;
      for (auto& socket : sockets->arrived) all.push_back(std::move(socket));
      sockets->arrived.clear();
    }
    polled.assign(1, {.fd = sockets->waker.descriptor(), .events = POLLIN, .revents = 0});
    for (const auto& socket : all)
      polled.push_back({.fd = socket->descriptor(), .events = POLLIN, .revents = 0});
    if (poll(polled.data(), polled.size(), -1) < 0) continue;
    if (polled.front().revents != 0) {
      std::uint64_t woken = 0;
      static_cast<void>(!read(sockets->waker.descriptor(), &woken, sizeof woken));
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (polled[i + 1].revents == 0) continue;
      bool ended = false;
      if (const std::optional<PageMessage> asked = all[i]->receive(ended)) {
        PageMessage answer;
        answer.number = asked->number;
        const std::shared_ptr<PagePool> pool = weak.lock();
        if (!pool) return;
        try {
          pool->export_pages(*asked, answer);
        } catch (const std::exception& refusal) {
          answer.close_pages();
          answer.refusal = refusal.what();
        }
        ended = !all[i]->send(answer);
      }
      if (ended) all[i].reset();
    }
    std::erase(all, nullptr);
  }
}

}  // namespace vtensor
