#include "base/fault_report.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <mutex>
#include <optional>

#include "base/process.h"

namespace vtensor::faults {

Text& Text::operator<<(std::string_view text) noexcept {
  size_ += text.copy(characters_.data() + size_, characters_.size() - size_);
  return *this;
}

Text& Text::write(std::size_t number, int digits) noexcept {
  std::array<char, 20> written;  // the digits of 2^64
  const auto end =
      std::to_chars(written.data(), written.data() + written.size(), number, digits).ptr;
  return *this << std::string_view(written.data(), static_cast<std::size_t>(end - written.data()));
}

// A list that threads change under a lock and handlers read without it. A range that leaves the
// list is deleted, unless a handler reads the list at that moment: then it is left over.
class Ranges {
 public:
  void add(Range* range, std::uintptr_t base, std::size_t bytes, bool on_device) {
    range->base_ = base;
    range->bytes_ = bytes;
    range->on_device_ = on_device;
    range->made_in_ = fork_depth.load(std::memory_order_relaxed);
    const std::lock_guard lock(changing_);
    Range* const next = newest_.load(std::memory_order_relaxed);
    range->next_.store(next, std::memory_order_relaxed);
    if (next != nullptr) next->previous_ = range;
    newest_.store(range);
  }

  void remove(Range* range) {
    {
      const std::lock_guard lock(changing_);
      Range* const next = range->next_.load(std::memory_order_relaxed);
      (range->previous_ == nullptr ? newest_ : range->previous_->next_).store(next);
      if (next != nullptr) next->previous_ = range->previous_;
    }
    if (readers_.load() == 0) delete range;
  }

  // The range that has `at`; null if there is none. Requires: the lock, or a call of `read`.
  Range* at(std::uintptr_t at) const noexcept {
    Range* range = newest_.load();
    while (range != nullptr && at - range->base_ >= range->bytes_) range = range->next_.load();
    return range;
  }
  // For handlers: calls `body` with the range that has `at`, if there is one.
  template <typename Body>
  void read(std::uintptr_t at, Body body) noexcept {
    ++readers_;
    if (Range* const range = this->at(at)) body(*range);
    --readers_;
  }

  // For fork(2): the child may make ranges, for readers, and finds the lock free.
  void lock() { changing_.lock(); }
  void unlock() { changing_.unlock(); }

 private:
  std::mutex changing_;
  std::atomic<Range*> newest_{nullptr};
  std::atomic<unsigned> readers_{0};
};

bool Range::is_first_report(std::uintptr_t at) noexcept {
  for (std::atomic<std::uintptr_t>& place : reported_) {
    std::uintptr_t there = 0;
    if (place.compare_exchange_strong(there, at, std::memory_order_relaxed)) return true;
    if (there == at) return false;
  }
  return false;
}

namespace {

Ranges ranges;
void lock_ranges() { ranges.lock(); }
void unlock_ranges() { ranges.unlock(); }
[[maybe_unused]] const int refused = pthread_atfork(lock_ranges, unlock_ranges, unlock_ranges);

using Action = struct sigaction;

constexpr int kSignals[] = {SIGSEGV, SIGBUS};
constexpr int kOff = -1;

std::mutex switching;
std::atomic<int> report_to{kOff};
Action before[std::size(kSignals)];   // the handlers that ours hands on to
bool installed[std::size(kSignals)];  // whether ours is, as far as we know

// A page fault as the processor reports it; on x86-64 only.
struct PageFault {
  std::uintptr_t at;
  bool write;
};

std::optional<PageFault> page_fault([[maybe_unused]] const void* context) noexcept {
#if defined(__x86_64__)
  constexpr greg_t kTrap = 14, kWrite = 2;
  const greg_t* const registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  if (registers[REG_TRAPNO] == kTrap) {
    return PageFault{static_cast<std::uintptr_t>(registers[REG_CR2]),
                     (registers[REG_ERR] & kWrite) != 0};
  }
#endif
  return std::nullopt;
}

// The address of the fault. A handler that runs first, such as faulthandler's, may raise the signal
// anew instead of calling ours: then only the context has the address.
std::optional<std::uintptr_t> address_of(const siginfo_t& info, const void* context) noexcept {
  if (info.si_code > 0) return reinterpret_cast<std::uintptr_t>(info.si_addr);
  if (info.si_code != SI_TKILL || info.si_pid != getpid()) return std::nullopt;
  const auto fault = page_fault(context);
  return fault ? std::optional(fault->at) : std::nullopt;
}

void describe(Text& text, const Range& range, std::uintptr_t at, int signal, const siginfo_t& info,
              const void* context) noexcept {
  const auto fault = page_fault(context);
  text << "vtensor: " << (signal == SIGBUS ? "SIGBUS" : "SIGSEGV") << " at ";
  text.address(at) << ", "
                   << (!fault         ? "an access"
                       : fault->write ? "a write"
                                      : "a read")
                   << " to ";
  range.name(text, at);
  text << "\nvtensor: ";
  if (range.on_device()) {
    text << "the memory is a CUDA device's: code on the host cannot touch it; copy it with cpu()";
  } else if (signal == SIGBUS) {
    text << "a page is mapped there, but the system could not give its memory";
    if (info.si_code == BUS_ADRERR) text << ": lower the pool's budget, or give the machine more";
  } else if (in_forked_child()) {
    text << "this process was forked from the one that has the memory, and cannot reach it: take a "
            "clone() before the fork, or start this process with spawn";
  } else if (range.asleep()) {
    text << "no page is mapped there, because it is asleep: call wake() of its pool first";
  } else {
    range.explain(text, at);
  }
  text << "\n";
}

long milliseconds() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// Writes for a second at most. A write may block after poll(), if another writer fills the pipe in
// between: so RWF_NOWAIT. A descriptor that does not know RWF_NOWAIT gets single bytes, for which
// poll() has found room.
void write_in_time(int to, std::string_view text) noexcept {
  struct stat file{};
  const bool on_disk = fstat(to, &file) == 0 && S_ISREG(file.st_mode);
  int flags = on_disk ? 0 : RWF_NOWAIT;
  const long until = milliseconds() + 1000;
  while (!text.empty()) {
    const long left = until - milliseconds();
    pollfd descriptor{to, POLLOUT, 0};
    const int ready = left > 0 ? poll(&descriptor, 1, static_cast<int>(left)) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 || descriptor.revents != POLLOUT) return;
    iovec part{const_cast<char*>(text.data()), on_disk || flags != 0 ? text.size() : 1};
    const ssize_t written = pwritev2(to, &part, 1, -1, flags);
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (written == 0 || (errno != EAGAIN && errno != EINTR)) {
      if (flags == 0) return;
      flags = 0;
    }
  }
}

void report(int to, int signal, const siginfo_t& info, const void* context) noexcept {
  const auto at = address_of(info, context);
  if (!at) return;
  Text text;
  ranges.read(*at, [&](Range& range) {
    if (range.is_first_report(*at)) describe(text, range, *at, signal, info, context);
  });
  if (!text.view().empty()) write_in_time(to, text.view());
}

// Acts as the kernel would without our handler. A fault without another handler happens again,
// under the default action: the core dump shows it, and the exit status is the signal's.
void hand_on(int signal, siginfo_t* info, void* context) noexcept {
  const auto at = std::find(std::begin(kSignals), std::end(kSignals), signal);
  const Action& next = before[at - std::begin(kSignals)];
  Action end = {};
  end.sa_handler = SIG_DFL;
  const bool raised = info->si_code <= 0;  // by a process: the fault does not happen again
  if (next.sa_handler == SIG_IGN && raised) return;
  if (next.sa_handler == SIG_IGN || next.sa_handler == SIG_DFL) {
    sigaction(signal, &end, nullptr);
    if (raised) raise(signal);
    return;
  }
  if ((next.sa_flags & SA_RESETHAND) != 0) sigaction(signal, &end, nullptr);
  if ((next.sa_flags & SA_NODEFER) != 0) {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, signal);
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  }
  if ((next.sa_flags & SA_SIGINFO) != 0) {
    next.sa_sigaction(signal, info, context);
  } else {
    next.sa_handler(signal);
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const int to = report_to.load(std::memory_order_relaxed);
  if (to != kOff) report(to, signal, *info, context);
  errno = error;
  hand_on(signal, info, context);
}

bool is_ours(const Action& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == handle;
}

void install() noexcept {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    Action now = {};
    sigaction(kSignals[i], nullptr, &now);
    // A handler installed after ours may call ours. If ours then called it too, neither would
    // return.
    const bool none = now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN;
    if (is_ours(now) || (installed[i] && !none)) continue;
    before[i] = now;
    Action ours = {};
    ours.sa_sigaction = handle;
    ours.sa_mask = now.sa_mask;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(kSignals[i], &ours, nullptr);
    installed[i] = true;
  }
}

}  // namespace

Known know(std::unique_ptr<Range> range, std::uintptr_t base, std::size_t bytes,
           bool on_device) noexcept {
  ranges.add(range.get(), base, bytes, on_device);
  return Known(range.release());
}

void Forget::operator()(Range* range) const noexcept {
  // A forked child frees no addresses of its parent, and explains faults there to the end.
  if (range->made_in_ == fork_depth.load(std::memory_order_relaxed)) ranges.remove(range);
}

bool asleep_at(std::uintptr_t at) noexcept {
  const std::lock_guard lock(ranges);  // beside `read`, a removed range would be left over
  const Range* const range = ranges.at(at);
  return range != nullptr && range->asleep();
}

void explain(int to) {
  const std::lock_guard lock(switching);
  install();
  report_to.store(to, std::memory_order_relaxed);
}

void explain_in_child() noexcept {
  install();
  if (report_to.load(std::memory_order_relaxed) == kOff)
    report_to.store(STDERR_FILENO, std::memory_order_relaxed);
}

void explain_nothing() {
  const std::lock_guard lock(switching);
  report_to.store(kOff, std::memory_order_relaxed);
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    Action now = {};
    sigaction(kSignals[i], nullptr, &now);
    if (!is_ours(now)) continue;
    sigaction(kSignals[i], &before[i], nullptr);
    installed[i] = false;
  }
}

}  // namespace vtensor::faults
