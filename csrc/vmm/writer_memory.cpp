#include "vmm/writer_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/system_errors.h"
#include "vmm/pending_work.h"

namespace vtensor {

namespace {

using std::chrono::steady_clock;

constexpr char kOperation[] = "reader";
// The bound of waits for work on the device, of the writer and of the reader (I12).
constexpr std::chrono::seconds kPatience{60};

std::unique_ptr<Driver> make_driver(Descriptor& descriptor, const shared::Facts& facts,
                                    CudaOptions cuda) {
  if (facts.exports == ExportKind::file) {
    if (!keeps_size(descriptor) || !(facts.memory == id_of(descriptor.get())))
      refuse_received("the second file is not the memory that the first one tells of");
    return make_host_driver({.page_size = facts.page_size, .memory = descriptor.take()});
  }
  struct stat found{};
  if (fstat(descriptor.get(), &found) != 0 || !S_ISSOCK(found.st_mode))
    refuse_received("there is no socket to ask the writer on");
  cuda.uuid = facts.device;
  cuda.page_size = facts.page_size;
  return make_cuda_driver(cuda);
}

}  // namespace

bool keeps_size(const Descriptor& file) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

std::uint64_t size_of(const Descriptor& file) {
  struct stat found{};
  return fstat(file.get(), &found) == 0 ? static_cast<std::uint64_t>(found.st_size) : 0;
}

void refuse_received(const char* why) {
  throw InvalidArgument("[", kOperation, "] what was received cannot be read: ", why,
                        ": send the object of a shareable pool again, with the same release of "
                        "vtensor in both processes");
}

WriterMemory::WriterMemory(Descriptor descriptor, const shared::Facts& facts, CudaOptions cuda)
    : exports_(facts.exports),
      memory_(facts.memory),
      file_pages_(size_of(descriptor) / facts.page_size),
      driver_(make_driver(descriptor, facts, std::move(cuda))),
      work_(*driver_) {
  if (exports_ != ExportKind::file) socket_.take(std::move(descriptor));
}

void WriterMemory::await_own_work() {
  for (const FencePtr& fence : work_.fences()) {
    if (!wait_for(*driver_, fence, kPatience))
      throw TimedOut(kOperation, kPatience, "kernels that read these pages have not ended");
  }
}

void WriterMemory::fetch(std::vector<Handle> theirs, Fetched& fetched) {
  if (exports_ == ExportKind::file) {
    if (std::ranges::any_of(theirs, [this](Handle page) { return page >= file_pages_; }))
      refuse_received("an entry of its table lies past the memory");
    return;
  }
  std::ranges::sort(theirs);
  theirs.erase(std::ranges::unique(theirs).begin(), theirs.end());
  fetched.pages_.reserve(theirs.size());
  std::erase_if(theirs, [&](Handle page) {
    if (!imports_.contains(page)) return false;
    add(page);
    fetched.pages_.push_back(page);
    return true;
  });
  for (std::span<const Handle> rest(theirs), some; !rest.empty();
       rest = rest.subspan(some.size())) {
    some = rest.first(std::min(rest.size(), PageMessage::kMost));
    const PageMessage answer = ask(some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      Import& import = imports_[some[i]];
      fetched.pages_.push_back(some[i]);  // has room
      import.uses = 1;
      import.ours = driver_->import_page(answer.pages[i], exports_);
    }
  }
}

void WriterMemory::await_writer() {
  if (exports_ != ExportKind::file) ask({});
}

PageMessage WriterMemory::ask(std::span<const Handle> theirs) {
  const auto ended = [] {
    return Closed("[", kOperation,
                  "] the process that wrote has ended, or its pool has: what was read last stays "
                  "readable, and nothing more comes");
  };
  PageMessage question;
  question.content.number = ++asked_;
  question.content.memory = memory_;
  question.content.count = static_cast<std::uint32_t>(theirs.size());
  std::ranges::copy(theirs, question.content.handles.begin());
  const bool injected = driver_->meter().enter(Call::sendmsg);
  if (const int error = injected ? ENOBUFS : question.send(socket_)) {
    if (error == EPIPE || error == ECONNRESET) throw ended();
    throw refused(kOperation, Call::sendmsg, error, "a question to the writer", "try again");
  }
  const auto until = steady_clock::now() + kPatience;
  for (;;) {  // passes over answers to questions that timed out
    bool gone = false;
    std::optional<PageMessage> answer = PageMessage::receive(socket_, gone);
    if (gone) throw ended();
    if (answer && answer->content.number == asked_) {
      if (answer->content.refusal.front() != 0) {
        throw Error("[", kOperation,
                    "] no pages came from the writer: ", answer->content.refusal.data());
      }
      if (answer->pages.size() != theirs.size() || answer->content.kind != exports_)
        refuse_received("the writer's answer does not fit the question");
      return std::move(*answer);
    }
    if (steady_clock::now() >= until) {
      throw TimedOut(kOperation, kPatience,
                     "the writer has not answered: its process is stopped, or a kernel does not "
                     "end");
    }
    pollfd polled{.fd = socket_.descriptor(), .events = POLLIN, .revents = 0};
    poll(&polled, 1, 50);
  }
}

Handle WriterMemory::at(Handle theirs) const {
  return exports_ == ExportKind::file ? theirs : imports_.at(theirs).ours;
}

void WriterMemory::add(Handle theirs) noexcept {
  if (exports_ != ExportKind::file) ++imports_.find(theirs)->second.uses;
}

void WriterMemory::drop(Handle theirs) noexcept {
  if (exports_ == ExportKind::file) return;
  const auto found = imports_.find(theirs);
  if (--found->second.uses != 0) return;
  try {
    if (found->second.ours != 0) driver_->destroy(found->second.ours, 1);
  } catch (const DriverError&) {
    // The driver's end frees the handle. The writer's handle may stand for another page by then.
  }
  imports_.erase(found);
}

}  // namespace vtensor
