// The memory of another process's pool, as readers map it: a file that has all pages, or pages of a
// device, which it asks the writer for (vmm/page_socket.h) and keeps while they are mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "driver/driver.h"
#include "vmm/page_socket.h"
#include "vmm/pending_work.h"
#include "vmm/shared_file.h"
#include "vmm/shared_layout.h"

namespace vtensor {

class WriterMemory {
 public:
  // `descriptor`: what PagePool::open_for_readers returned in the writer. `facts`: of one of its
  // ranges. `cuda`: how to reach a device; its number and page size do not matter. Throws
  // InvalidArgument if the two do not belong together or there is no such device, DriverError.
  WriterMemory(Descriptor descriptor, const shared::Facts& facts, CudaOptions cuda);

  Driver& driver() const { return *driver_; }
  // What readers map with: nothing is written.
  Access access() const {
    return exports_ == ExportKind::file ? Access::writable : Access::copy_on_write;
  }

  // The driver has left pages that are neither mapped nor not.
  void break_down(std::exception_ptr cause) { broken_ = std::move(cause); }
  void raise_if_broken() const {
    if (broken_) std::rethrow_exception(broken_);
  }

  // Work in `stream` reads what is mapped. As PendingWork::note.
  void note(const Caller& caller) { work_.note(caller); }
  // Waits until that work has ended, after which pages may be unmapped. Throws TimedOut,
  // DriverError.
  void await_own_work();

  // Pages that are at hand while it lives.
  class Fetched {
   public:
    explicit Fetched(WriterMemory& memory) : memory_(memory) {}
    ~Fetched() {
      for (const Handle page : pages_) memory_.drop(page);
    }
    Fetched& operator=(Fetched&&) = delete;

   private:
    friend class WriterMemory;

    WriterMemory& memory_;
    std::vector<Handle> pages_;  // the writer's handles, each once
  };
  // Waits until all work that the writer has launched has ended. On the host there is none. Throws
  // as `fetch`, and TimedOut.
  void await_writer();
  // Gets these pages. Throws Closed if the writer has ended, TimedOut if it is stopped,
  // DriverError, and Error if the writer hands them not over.
  void fetch(std::vector<Handle> theirs, Fetched& fetched);
  // The handle in this process. Requires: fetched, or mapped.
  Handle at(Handle theirs) const;
  // A page is mapped at one more address, or one less. Requires: as `at`.
  void add(Handle theirs) noexcept;
  void drop(Handle theirs) noexcept;

 private:
  struct Import {
    Handle ours = 0;       // 0 until it is imported
    std::size_t uses = 0;  // addresses, and those that fetch it
  };

  PageMessage ask(std::span<const Handle> theirs);

  const ExportKind exports_;
  const FileId memory_;
  std::uint64_t file_pages_ = 0;
  SharedFile socket_;        // to the writer, unless its memory is a file
  std::uint64_t asked_ = 0;  // the number of the last question
  std::unique_ptr<Driver> driver_;
  std::exception_ptr broken_;
  PendingWork work_;
  std::unordered_map<Handle, Import> imports_;  // by the writer's handle
};

// For a file from another process: whether it is a memfd that never gets shorter, so that no access
// to a mapping of it is SIGBUS; its bytes; and its refusal.
bool keeps_size(const Descriptor& file);
std::uint64_t size_of(const Descriptor& file);
[[noreturn]] void refuse_received(const char* why);

}  // namespace vtensor
