// The host's driver. A handle is a page number in one sparse memfd, and a mapped page is a mapping
// of the memfd. Reserved addresses without a page are a read-only anonymous mapping, so a walk over
// a hole reads zeros.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/descriptor.h"
#include "base/errors.h"
#include "base/fault_report.h"
#include "base/interval.h"
#include "base/make_node.h"
#include "base/process.h"
#include "base/system_errors.h"
#include "base/trace.h"
#include "driver/driver.h"
#include "driver/host_copies.h"
#include "driver/host_map_limit.h"
#include "driver/pagemap.h"

#ifndef MADV_POPULATE_READ  // Linux 5.14
#define MADV_POPULATE_READ 22
#endif

namespace vtensor {
namespace {

constexpr std::size_t kDefaultPageSize = std::size_t{64} << 10;
// Bytes made present in one call, during which the kernel maps nothing else in any thread.
constexpr std::size_t kPopulateBytes = std::size_t{256} << 10;
// The memfd is sparse, so its size costs nothing. Twice this size is too large for a file.
constexpr std::uint64_t kMemfdSize = std::uint64_t{1} << 62;
// Kernel mappings that a new one adds if it replaces the middle of another.
constexpr std::size_t kCut = 2;

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

// Calls `visit(first, n)` for each piece: consecutive handles, which are one kernel mapping. Ends
// early if `visit` returns false.
template <typename Visit>
void each_piece(std::span<const Handle> handles, Visit visit) {
  for (std::size_t i = 0, n; i < handles.size(); i += n) {
    n = 1;
    while (i + n < handles.size() && handles[i + n] == handles[i] + n) ++n;
    if (!visit(i, n)) return;
  }
}

std::size_t count_pieces(std::span<const Handle> handles) {
  std::size_t pieces = 0;
  each_piece(handles, [&](std::size_t, std::size_t) { return ++pieces != 0; });
  return pieces;
}

std::size_t checked_page_size(std::size_t asked, std::size_t granularity) {
  if (asked == 0) return std::max(kDefaultPageSize, granularity);
  if (std::has_single_bit(asked) && asked >= granularity && asked <= kMemfdSize) return asked;
  throw InvalidArgument("[host driver] a page size of ", asked,
                        " bytes was asked for, the host takes powers of two from ", granularity,
                        ": choose one of these, or leave it to the driver");
}

class HostDriver;
std::mutex registry_mutex;
// All host drivers, for fork handlers. Never destroyed: a process may fork while it exits.
std::vector<HostDriver*>& registry() {
  static std::vector<HostDriver*>& all = *new std::vector<HostDriver*>;
  return all;
}

class HostDriver final : public Driver {
 public:
  explicit HostDriver(const HostOptions& options)
      : hole_protection_(options.strict_holes ? PROT_NONE : PROT_READ),
        page_protection_(options.memory < 0 ? PROT_READ | PROT_WRITE : PROT_READ),
        limit_(options.limit != nullptr ? *options.limit : MapLimit::of_process()),
        memfd_(options.memory) {
    if (options.memory < 0) refuse_in_forked_child("host driver");
    const auto granularity = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    page_size_ = checked_page_size(options.page_size, granularity);
    traits_ = {.name = "host",
               .device = {.type = 1, .index = 0},
               .page_size = page_size_,
               .granularity = granularity,
               .budget_part = 8,
               .adjacent_handles = true,
               .kernel_copies_on_write = true,
               .exports = options.shareable ? ExportKind::file : ExportKind::none};
    copy_stream_ = kCopyStream;
    const std::lock_guard no_fork(registry_mutex);
    registry().reserve(registry().size() + 1);
    if (options.memory < 0) open_memfd();
    registry().push_back(this);
  }

  ~HostDriver() override {
    copies_.reset();
    const std::lock_guard no_fork(registry_mutex);
    std::erase(registry(), this);
    // Ranges that are left are a broken pool's, and no work reaches them.
    if (left_behind()) return;
    for (const auto& [range, left] : reservations_) munmap(pointer(left.begin), left.size());
    memfd_ = Descriptor(-1);  // no fork before it is closed
  }

  // For fork handlers: during a fork no range is reserved or freed.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  // Takes the memory from a forked child (I13), whose writes to a shared mapping would reach the
  // parent: maps inaccessible memory over every reserved range, and closes the memfd. The addresses
  // stay taken, so the child allocates nothing where a view of the parent's memory points. System
  // calls only, because a thread of the parent may hold any lock.
  void take_away() {
    if (memfd_.get() < 0) return;  // a grandchild: done in the child
    for (const auto& [at, range] : reservations_) {
      // One mapping replaces all others, and frees private copies that the kernel made for the
      // parent.
      if (mmap(pointer(range.begin), range.size(), PROT_NONE, kHoleFlags | MAP_FIXED, -1, 0) !=
          MAP_FAILED) {
        continue;
      }
      constexpr std::string_view message =
          "vtensor: cannot take the parent's tensors from this forked process; it ends here\n";
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
      _exit(70);
    }
    memfd_ = Descriptor(-1);
    faults::explain_in_child();
  }

  Address reserve(std::size_t pages, Backed) override {
    refuse_if_left("host reserve");
    // Reserves more, to align the range; the surplus stays reserved until the range is freed.
    const std::size_t surplus = page_size_ - traits_.granularity;
    const auto asked = checked_multiply(pages, page_size_);
    std::size_t bytes;
    if (!asked || __builtin_add_overflow(*asked, surplus, &bytes)) throw too_large(pages);

    limit_.admit(1);
    const std::lock_guard lock(mutex_);
    auto node = make_node<decltype(reservations_)>();  // allocated before the call
    void* start = nullptr;
    const Refusal refusal = call(Call::mmap, 0, bytes, [&] {
      start = mmap(nullptr, bytes, hole_protection_, kHoleFlags, -1, 0);
      return start != MAP_FAILED;
    });
    if (refusal) {
      if (refusal.error != ENOMEM) {
        throw refused("host reserve", Call::mmap, refusal.error, "reserving " + count_of(pages),
                      "lower the capacity");
      }
      if (!refusal.injected) limit_.check_now(1);
      throw too_large(pages);
    }
    const auto base = reinterpret_cast<Address>(start);
    const Address range = (base + surplus) & ~(page_size_ - 1);
    node.key() = range;
    node.mapped() = {base, base + bytes};
    reservations_.insert(std::move(node));
    return range;
  }

  void free_range(Address range, std::size_t pages) override {
    if (left_behind()) return;
    const std::lock_guard lock(mutex_);
    const auto it = reservations_.find(range);
    const Interval freed = it->second;
    const Refusal refusal = insist([&] {
      return call(Call::munmap, freed.begin, freed.size(),
                  [&] { return munmap(pointer(freed.begin), freed.size()) == 0; });
    });
    if (refusal) {
      throw refused("host free_range", Call::munmap, refusal.error,
                    "freeing the addresses of " + count_of(pages), limit_.advice());
    }
    reservations_.erase(it);
  }

  Handle create(std::size_t n) override {
    refuse_if_left("host create");
    Handle first = next_handle_.load(std::memory_order_relaxed);
    do {
      if (n > handles_ - first) {
        throw DeviceOutOfMemory("ftruncate", ENOSPC, "ENOSPC", "[host create] need ", n,
                                " new pages, the memfd has ", handles_ - first, " of ", handles_,
                                " left: free tensors, or raise the file size limit (ulimit -f)");
      }
    } while (!next_handle_.compare_exchange_weak(first, first + n, std::memory_order_relaxed));
    return first;
  }

  void destroy(Handle first, std::size_t n) override {
    if (left_behind()) return;
    const std::size_t bytes = n * page_size_;
    const Refusal refusal = call(Call::fallocate, 0, bytes, [&] {
      return fallocate(memfd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(first),
                       static_cast<off_t>(bytes)) == 0;
    });
    if (!refusal) return;
    throw refused("host destroy", Call::fallocate, refusal.error, "giving back " + count_of(n),
                  "free memory");
  }

  void map(std::span<const PageRun> runs, Access access, std::size_t& mapped) override {
    refuse_if_left("host map");
    std::size_t more = 0, pages = 0;
    for (const PageRun& run : runs) {
      more += count_pieces(run.handles) + 1;  // the hole may be cut
      pages += run.handles.size();
    }
    limit_.admit(more);
    for (const PageRun& run : runs) {
      const Refusal refusal = map_run(run, access, mapped);
      if (!refusal) continue;
      throw refused("host map", Call::mmap, refusal.error, "mapping " + count_of(pages),
                    limit_.advice(run.handles.size() * page_size_));
    }
  }

  void unmap(Address at, std::size_t n) override {
    if (left_behind()) return;
    limit_.add(kCut);
    const Refusal refusal = insist([&] {
      return place(Call::munmap, at, n * page_size_, hole_protection_, kHoleFlags, -1, 0);
    });
    if (refusal) {
      throw refused("host unmap", Call::munmap, refusal.error, "unmapping " + count_of(n),
                    limit_.advice());
    }
  }

  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access) override {
    refuse_if_left("host remap");
    if (to.empty()) return;
    limit_.add(kCut);
    if (const std::size_t more = sub_sat(count_pieces(to), count_pieces(from))) limit_.admit(more);
    std::size_t touched = 0;
    const Refusal refusal = map_run({at, to}, to_access, touched);
    if (!refusal) return;
    bool whole = true;  // all that was remapped is put back
    each_piece(from.first(touched), [&](std::size_t first, std::size_t n) {
      whole &= !insist(
          [&] { return place_piece(at + first * page_size_, n, from[first], from_access); });
      return true;
    });
    const DriverError cause =
        refused("host remap", Call::mmap, refusal.error, "remapping " + count_of(to.size()),
                limit_.advice(to.size() * page_size_));
    if (!whole) throw UndoFailed(cause);
    throw cause;
  }

  void zero(Address at, std::size_t bytes, Stream) override {
    refuse_if_left("host zero");
    std::memset(pointer(at), 0, bytes);
  }

  void copy_pages(std::span<const PageCopy> copies) override {
    refuse_if_left("host copy_pages");
    for (const PageCopy& copy : copies) copy_page(copy);
  }

  void populate(Address at, std::size_t n) override {
    refuse_if_left("host populate");
    if (const Refusal refusal = make_present(at, n * page_size_)) {
      throw refused("host populate", Call::madvise, refusal.error, "making present " + count_of(n),
                    "free memory");
    }
  }

  void find_private_copies(Address at, std::span<std::uint8_t> private_copies) override {
    refuse_if_left("host find_private_copies");
    std::fill(private_copies.begin(), private_copies.end(), std::uint8_t{0});
    if (meter_.enter(Call::pagemap) || !pagemap_.find_private(at, page_size_, private_copies))
      std::fill(private_copies.begin(), private_copies.end(), kMaybeCopied);
  }

  std::size_t free_memory() override { return free_host_memory(); }

  ExportedPage export_page(Handle) override {
    refuse_if_left("host export_page");
    return {.descriptor = open_anew(meter_, "host export_page", memfd_.get(), O_RDONLY,
                                    "the memfd of the pool")};
  }
  Handle import_page(const ExportedPage&, ExportKind) override {
    throw Error("[host import_page] memory of the host is read through a file of all its pages");
  }

  void copy(CopyDirection direction, Address at, void* memory, std::size_t bytes, Stream) override {
    refuse_if_left("host copy");
    if (direction == CopyDirection::within) {
      std::memmove(pointer(at), memory, bytes);
      return;
    }
    const bool out = direction == CopyDirection::out;
    if (out) advise_huge_pages(reinterpret_cast<Address>(memory), bytes);
    copies_->copy(direction, out ? memory : pointer(at), out ? pointer(at) : memory, bytes);
  }

  FencePtr fence(Stream stream) override {
    refuse_if_left("host fence");
    return stream == kCopyStream ? copies_->fence() : nullptr;
  }
  bool passed(const Fence& fence) override { return HostCopies::passed(fence); }
  void order(Stream stream, const Fence& fence) override {
    if (stream == kCopyStream || wait_for(*this, fence, kPatience)) return;
    throw TimedOut("host order", kPatience, "copies between pages and host memory have not ended");
  }
  bool capturing(const char*, Stream) override { return false; }
  void keep_for_graph(Stream, void (*)(void*), void*) override {}

 private:
  static constexpr Stream kCopyStream = 1;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::chrono::seconds kPatience{60};

  // Whether the driver belongs to a process that this process was forked from.
  bool left_behind() const { return fork_depth.load(std::memory_order_relaxed) != fork_depth_; }
  void refuse_if_left(const char* operation) const {
    if (left_behind()) refuse_in_forked_child(operation);
  }

  // A copy into new memory in small pages takes three times as long. If the hint is refused, the
  // copy is only slower. Covers whole huge pages inside the range: memory beside it is not ours.
  void advise_huge_pages(Address at, std::size_t bytes) {
    const Address begin = ceil_div(at, kHugePage) * kHugePage;
    const Address end = (at + bytes) / kHugePage * kHugePage;
    if (begin >= end) return;
    call(Call::madvise, begin, end - begin,
         [&] { return madvise(pointer(begin), end - begin, MADV_HUGEPAGE) == 0; });
  }

  static constexpr int kHoleFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  struct Refusal {
    int error = 0;
    bool injected = false;  // the call was not made
    bool gone = false;      // the kernel removed the old mapping before it refused
    explicit operator bool() const { return error != 0; }
  };

  void open_memfd() {
    make_call(meter_, "host driver", Call::memfd_create, EMFILE, "the memfd that a pool needs",
              "close files or raise the limit on them (ulimit -n), and allow memfd_create where a "
              "sandbox filters system calls",
              [&] {
                memfd_ = Descriptor(memfd_create("vtensor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
                return memfd_.get() >= 0;
              });
    // Past the limit on file sizes the kernel sends a signal.
    rlimit limit{};
    std::uint64_t size = kMemfdSize;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0) size = std::min<std::uint64_t>(size, limit.rlim_cur);
    for (;; size /= 2) {
      handles_ = size / page_size_;
      if (handles_ == 0) {
        throw DriverError("ftruncate", EFBIG, "EFBIG", "[host driver] a memfd of even one page of ",
                          page_size_,
                          " bytes was refused: raise the limit on file sizes (ulimit -f)");
      }
      if (ftruncate(memfd_.get(), static_cast<off_t>(handles_ * page_size_)) == 0) break;
    }
    // No reader's mapping may ever lie past the end.
    if (traits_.exports == ExportKind::file)
      fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  }

  std::string count_of(std::size_t pages) const {
    return text(pages, " pages of ", page_size_, " bytes");
  }

  DriverError too_large(std::size_t pages) const {
    rlimit limit{};
    const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return {"mmap", ENOMEM, "ENOMEM",
            text("[host reserve] need addresses for ", count_of(pages), ", ",
                 limited ? text("the process may have ", limit.rlim_cur,
                                " bytes of them in all (RLIMIT_AS): lower the capacity, or raise "
                                "the limit (ulimit -v)")
                         : "more than the process has left: lower the capacity")};
  }

  off_t offset_of(Handle handle) const { return static_cast<off_t>(handle * page_size_); }

  // Makes a driver call about `bytes` bytes at `at`: counted, traced, and refused if a test asks
  // for that. `made` returns whether the kernel did it, with the reason in errno if not.
  template <typename Make>
  Refusal call(Call which, Address at, std::size_t bytes, Make made) {
    const trace::Span span(trace::What::driver_call, at, bytes, 0, which);
    if (meter_.enter(which)) return {.error = ENOMEM, .injected = true};
    return {.error = made() ? 0 : errno};
  }

  // Reading makes shared memory present as writing does, and maps 16 present small pages a fault. A
  // later write to a writable mapping does not fault. The call gets whole small pages, so that
  // EINVAL means a kernel without it: memory is then made present at first touch.
  Refusal make_present(Address at, std::size_t bytes) {
    Refusal refusal;
    for (const Address end = at + bytes; at < end && !refusal; at += kPopulateBytes) {
      const std::size_t before = at % traits_.granularity;
      const std::size_t some = std::min(kPopulateBytes, end - at);
      refusal = call(Call::madvise, at, some, [&] {
        return madvise(pointer(at - before), before + some, MADV_POPULATE_READ) == 0 ||
               errno == EINVAL;
      });
    }
    return refusal;
  }

  // For calls that unmap or undo: tries again, without ballast, if the limit on mappings refused
  // it.
  template <typename Try>
  Refusal insist(Try call) {
    const Refusal refusal = call();
    const bool again = refusal.error == ENOMEM && !refusal.injected && limit_.throw_off_ballast();
    return again ? call() : refusal;
  }

  // One mmap over [at, at + bytes).
  Refusal place(Call which, Address at, std::size_t bytes, int protection, int flags, int file,
                off_t offset) {
    Refusal refusal = call(which, at, bytes, [&] {
      return mmap(pointer(at), bytes, protection, flags | MAP_FIXED, file, offset) != MAP_FAILED;
    });
    if (refusal && !refusal.injected) {
      // Before Linux 6.12 the kernel may remove the old mapping and then refuse.
      unsigned char resident;
      refusal.gone = mincore(pointer(at), traits_.granularity, &resident) != 0 && errno == ENOMEM;
    }
    return refusal;
  }

  Refusal place_piece(Address at, std::size_t pages, Handle first, Access access) {
    const int flags = access == Access::copy_on_write ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
    return place(Call::mmap, at, pages * page_size_, page_protection_, flags, memfd_.get(),
                 offset_of(first));
  }

  // Maps piece after piece, up to the first refusal. Adds to `touched` the first pages, whose old
  // mapping is gone. A private copy is lost only when its piece is reached.
  Refusal map_run(const PageRun& run, Access access, std::size_t& touched) {
    Refusal refusal;
    each_piece(run.handles, [&](std::size_t first, std::size_t n) {
      refusal = place_piece(run.at + first * page_size_, n, run.handles[first], access);
      if (!refusal || refusal.gone) touched += n;
      return !refusal;
    });
    return refusal;
  }

  void copy_page(const PageCopy& copy) {
    for (std::size_t done = 0; done < page_size_;) {
      const Address from = copy.from + done;
      const off_t to = offset_of(copy.to) + static_cast<off_t>(done);
      ssize_t n = 0;
      const Refusal refusal = call(Call::pwrite, from, page_size_ - done, [&] {
        n = pwrite(memfd_.get(), pointer(from), page_size_ - done, to);
        if (n == 0) errno = ENOSPC;
        return n > 0 || errno == EINTR;
      });
      if (refusal) {
        throw refused("host copy_pages", Call::pwrite, refusal.error,
                      text("copying a page of ", page_size_, " bytes"), "free memory");
      }
      if (n > 0) done += static_cast<std::size_t>(n);
    }
  }

  const std::uint32_t fork_depth_ = fork_depth.load(std::memory_order_relaxed);  // when it was made
  const int hole_protection_, page_protection_;
  MapLimit& limit_;
  std::size_t page_size_ = 0;
  std::uint64_t handles_ = 0;  // in the memfd
  std::atomic<Handle> next_handle_{0};
  // Held while a range is reserved or freed, and during a fork.
  std::mutex mutex_;
  std::map<Address, Interval> reservations_;  // all reserved addresses, by the range's first
  Descriptor memfd_;                          // -1 in a forked child
  Pagemap pagemap_;
  // Ignores refusals: the faults of the copy make memory present too.
  std::unique_ptr<HostCopies, DeleteUnlessForked> copies_{
      new HostCopies([this](std::byte* to, std::size_t bytes) {
        make_present(reinterpret_cast<Address>(to), bytes);
      })};
};

void prepare() {
  registry_mutex.lock();
  for (HostDriver* driver : registry()) driver->lock();
  MapLimit::of_process().lock();  // last, as drivers do
}

void resume() {
  MapLimit::of_process().unlock();
  for (HostDriver* driver : registry()) driver->unlock();
  registry_mutex.unlock();
}

void resume_in_child() {
  for (HostDriver* driver : registry()) driver->take_away();
  resume();
}

const int refused_handlers = pthread_atfork(prepare, resume, resume_in_child);

}  // namespace

std::unique_ptr<Driver> make_host_driver(const HostOptions& options) {
  if (refused_handlers != 0)
    throw std::system_error(refused_handlers, std::generic_category(), "pthread_atfork");
  watch_forks();
  return std::make_unique<HostDriver>(options);
}

}  // namespace vtensor
