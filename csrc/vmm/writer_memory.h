// The memory of another process's pool, as its readers map it: a file that has all pages, or pages
// of a device, which a reader requests from the writer (vmm/page_socket.h) and keeps while they are
// mapped.
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
  // `descriptor`: from PagePool::open_for_readers in the writer. `facts`: of a range of the pool.
  // `cuda`: how to reach a device; its number and page size are ignored. Throws InvalidArgument if
  // the two do not belong together or there is no such device, DriverError.
  WriterMemory(Descriptor descriptor, const shared::Facts& facts, CudaOptions cuda);

  Driver& driver() const { return *driver_; }
  // The access of readers' mappings. On the host the driver maps a writer's file read-only.
  Access access() const {
    return exports_ == ExportKind::file ? Access::writable : Access::copy_on_write;
  }

  // A refused undo has left mappings unknown: raise_if_broken() throws `cause` from now on.
  void break_down(std::exception_ptr cause) { broken_ = std::move(cause); }
  void raise_if_broken() const {
    if (broken_) std::rethrow_exception(broken_);
  }

  // Work in the caller's stream reads the mapped pages. As PendingWork::note.
  void note(const Caller& caller) { work_.note(caller); }
  // Waits until the noted work has ended: then pages may be unmapped. Throws TimedOut, DriverError.
  void await_own_work();

  // Pages that stay imported while the object lives.
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
  // Waits until all work that the writer has launched has ended; on the host there is none. Throws
  // as `fetch`, and TimedOut.
  void await_writer();
  // Gets the pages of `theirs`, handles of the writer. Throws Closed if the writer has ended,
  // TimedOut if it is stopped, DriverError, and Error if the writer sends no pages.
  void fetch(std::vector<Handle> theirs, Fetched& fetched);
  // This process's handle. Requires: the page is fetched, or mapped.
  Handle at(Handle theirs) const;
  // The page is mapped at one more address, or at one less. Requires: as `at`.
  void add(Handle theirs) noexcept;
  void drop(Handle theirs) noexcept;

 private:
  struct Import {
    Handle ours = 0;       // 0 until the page is imported
    std::size_t uses = 0;  // addresses that map the page, and Fetched objects that have it
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

// For files from other processes. keeps_size: the file is a memfd that never gets shorter, so that
// no access to its mapping is SIGBUS. size_of: its bytes. refuse_received throws InvalidArgument.
bool keeps_size(const Descriptor& file);
std::uint64_t size_of(const Descriptor& file);
[[noreturn]] void refuse_received(const char* why);

}  // namespace vtensor
