// The host: a handle is a page number in one sparse memfd, a mapped page a mapping of it. What is
// reserved and not mapped is a read-only anonymous mapping, so that a walk over a hole reads zeros.
#include "driver/host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/system_errors.h"
#include "base/trace.h"
#include "driver/host_copies.h"
#include "driver/host_fork.h"
#include "driver/host_memory.h"
#include "driver/pagemap.h"

#ifndef MADV_POPULATE_READ  // Linux 5.14
#define MADV_POPULATE_READ 22
#endif

namespace vtensor {
namespace {

constexpr std::size_t kDefaultPageSize = std::size_t{64} << 10;
// Made present in one call: the kernel maps nothing else meanwhile, in whatever thread.
constexpr std::size_t kPopulateBytes = std::size_t{256} << 10;
// The memfd is sparse, so its size costs nothing; twice this is no longer a file size.
constexpr std::uint64_t kMemfdSize = std::uint64_t{1} << 62;

std::string count_of(std::size_t pages, std::size_t page_size) {
  return std::to_string(pages) + " pages of " + std::to_string(page_size) + " bytes";
}

std::size_t granularity_of_kernel() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// How many handles at the front follow one another: one kernel mapping, called a piece here.
std::size_t piece_length(std::span<const Handle> handles) {
  std::size_t n = 1;
  while (n < handles.size() && handles[n] == handles[0] + n) ++n;
  return n;
}

std::size_t count_pieces(std::span<const Handle> handles) {
  std::size_t pieces = 0;
  for (; !handles.empty(); ++pieces) handles = handles.subspan(piece_length(handles));
  return pieces;
}

std::size_t pages_in(std::span<const PageRun> runs) {
  std::size_t pages = 0;
  for (const PageRun& run : runs) pages += run.handles.size();
  return pages;
}

std::size_t checked_page_size(std::size_t asked, std::size_t granularity) {
  if (asked == 0) return std::max(kDefaultPageSize, granularity);
  if (is_power_of_two(asked) && asked >= granularity && asked <= kMemfdSize) return asked;
  throw InvalidArgument("[host driver] a page size of " + std::to_string(asked) +
                        " bytes was asked for, the host takes powers of two from " +
                        std::to_string(granularity) +
                        ": choose one of these, or leave it to the driver");
}

class HostDriver final : public Driver {
 public:
  HostDriver(const HostOptions& options, MapLimit& limit)
      : hole_protection_(options.strict_holes ? PROT_NONE : PROT_READ), limit_(limit) {
    refuse_in_forked_child("host driver");
    const std::size_t granularity = granularity_of_kernel();
    page_size_ = checked_page_size(options.page_size, granularity);
    open_memfd();
    traits_ = {.name = "host",
               .device = {.type = 1, .index = 0},
               .page_size = page_size_,
               .granularity = granularity,
               .available = default_host_budget() / page_size_ * page_size_,
               .adjacent_handles = true,
               .created_zero = true,
               .kernel_copies_on_write = true,
               .remaps_in_one_step = true};
  }

  ~HostDriver() override {
    copies_.stop();
    // What is left holds quarantined pages, and is out of reach.
    if (!in_forked_child) {
      for (const auto& [range, left] : reservations_)
        munmap(reinterpret_cast<void*>(left.base), left.bytes);
    }
    limit_.add(-static_cast<std::ptrdiff_t>(state_.mirror.size()));
  }

  const DriverTraits& traits() const override { return traits_; }

  void back_holes(std::span<const Address>) override {}  // kernels take any address

  Address reserve(std::size_t pages) override {
    refuse_in_forked_child("host reserve");
    // Longer by what alignment may need; the surplus stays reserved until the range is freed.
    const std::size_t surplus = page_size_ - traits_.granularity;
    const auto asked = checked_multiply(pages, page_size_);
    std::size_t bytes;
    if (!asked || __builtin_add_overflow(*asked, surplus, &bytes)) throw too_large(pages);

    const std::lock_guard lock(state_.mutex);
    limit_.admit(1);
    state_.mirror.provide(2);
    const auto reservation = reservations_.try_emplace(0).first;
    const trace::Span span(trace::What::driver_call, 0, bytes, 0, Call::mmap);
    Refusal refusal = ask(Call::mmap);
    void* start = nullptr;
    if (!refusal) {
      start = mmap(nullptr, bytes, hole_protection_, kHoleFlags, -1, 0);
      if (start == MAP_FAILED) refusal.error = errno;
    }
    if (refusal) {
      reservations_.erase(reservation);
      if (refusal.error != ENOMEM) {
        throw refused("host reserve", Call::mmap, refusal.error,
                      "reserving " + count_of(pages, page_size_), "lower the capacity");
      }
      if (!refusal.injected) limit_.check_now(1);
      throw too_large(pages);
    }
    const auto base = reinterpret_cast<Address>(start);
    const Address range = (base + surplus) & ~(page_size_ - 1);
    auto node = reservations_.extract(reservation);
    node.key() = range;
    node.mapped() = {base, bytes};
    reservations_.insert(std::move(node));
    record([&] { state_.mirror.assign({base, bytes, 0, MappingKind::hole}); });
    return range;
  }

  void free_range(Address range, std::size_t pages) override {
    if (in_forked_child) return;
    const std::lock_guard lock(state_.mutex);
    const auto it = reservations_.find(range);
    const Reservation freed = it->second;
    state_.mirror.provide(2);
    const Refusal refusal = insist([&] {
      const trace::Span span(trace::What::driver_call, freed.base, freed.bytes, 0, Call::munmap);
      Refusal r = ask(Call::munmap);
      if (!r && munmap(reinterpret_cast<void*>(freed.base), freed.bytes) != 0) r.error = errno;
      return r;
    });
    if (refusal) {
      throw refused("host free_range", Call::munmap, refusal.error,
                    "freeing the addresses of " + count_of(pages, page_size_), limit_.advice());
    }
    reservations_.erase(it);
    record([&] { state_.mirror.erase(freed.base, freed.base + freed.bytes); });
  }

  Handle create(std::size_t n) override {
    refuse_in_forked_child("host create");
    Handle first = next_handle_.load(std::memory_order_relaxed);
    do {
      if (n > handles_ - first) {
        throw DeviceOutOfMemory(
            "ftruncate", ENOSPC, "ENOSPC",
            "[host create] need " + std::to_string(n) + " new pages, the memfd has " +
                std::to_string(handles_ - first) + " of " + std::to_string(handles_) +
                " left: free tensors, or raise the file size limit (ulimit -f)");
      }
    } while (!next_handle_.compare_exchange_weak(first, first + n, std::memory_order_relaxed));
    return first;
  }

  void destroy(Handle first, std::size_t n) override {
    if (in_forked_child) return;
    const trace::Span span(trace::What::driver_call, 0, n * page_size_, 0, Call::fallocate);
    Refusal refusal = ask(Call::fallocate);
    if (!refusal && fallocate(state_.memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                              offset_of(first), static_cast<off_t>(n * page_size_)) != 0) {
      refusal.error = errno;
    }
    if (refusal) {
      throw refused("host destroy", Call::fallocate, refusal.error,
                    "giving back " + count_of(n, page_size_), "free memory");
    }
  }

  void map(std::span<const PageRun> runs, Access access) override {
    refuse_in_forked_child("host map");
    const std::lock_guard lock(state_.mutex);
    std::size_t pieces = 0;
    std::ptrdiff_t growth = 0;
    for (const PageRun& run : runs) {
      const std::size_t of_run = count_pieces(run.handles);
      growth += mirror_growth(run.at, run.handles.size(), of_run);
      pieces += of_run + 1;
    }
    limit_.admit(growth);
    state_.mirror.provide(pieces + 2 * runs.size());
    for (std::size_t done = 0; done < runs.size(); ++done) {
      const Progress progress = map_run(runs[done], access);
      if (!progress.refusal) continue;
      const DriverError cause = refused("host map", Call::mmap, progress.refusal.error,
                                        "mapping " + count_of(pages_in(runs), page_size_),
                                        limit_.advice(runs[done].handles.size() * page_size_));
      take_down(runs.first(done), runs[done], progress.touched, cause);
      throw cause;
    }
  }

  void unmap(std::span<const PageRun> runs, Access access) override {
    if (in_forked_child) return;
    const std::lock_guard lock(state_.mutex);
    std::size_t pieces = 0;
    for (const PageRun& run : runs) pieces += count_pieces(run.handles) + 1;
    state_.mirror.provide(2 * runs.size() + pieces);
    for (std::size_t done = 0; done < runs.size(); ++done) {
      if (runs[done].handles.empty()) continue;
      const Refusal refusal = place_hole(runs[done].at, runs[done].handles.size());
      if (!refusal) continue;
      const DriverError cause =
          refused("host unmap", Call::munmap, refusal.error,
                  "unmapping " + count_of(pages_in(runs), page_size_), limit_.advice());
      put_back(runs.first(done + refusal.gone), access, cause);
      throw cause;
    }
  }

  void remap(Address at, std::span<const Handle> from, Access from_access,
             std::span<const Handle> to, Access to_access) override {
    refuse_in_forked_child("host remap");
    if (to.empty()) return;
    const std::lock_guard lock(state_.mutex);
    const std::size_t pieces = count_pieces(to);
    limit_.admit(mirror_growth(at, to.size(), pieces));
    state_.mirror.provide((pieces + 1) + 2 * count_pieces(from));
    const Progress progress = map_run({at, to}, to_access);
    if (!progress.refusal) return;
    const DriverError cause = refused("host remap", Call::mmap, progress.refusal.error,
                                      "remapping " + count_of(to.size(), page_size_),
                                      limit_.advice(to.size() * page_size_));
    const PageRun touched{at, from.first(progress.touched)};
    put_back({&touched, 1}, from_access, cause);
    throw cause;
  }

  void zero(Address at, std::size_t bytes, Stream) override {
    refuse_in_forked_child("host zero");
    std::memset(reinterpret_cast<void*>(at), 0, bytes);
  }

  void copy_pages(std::span<const PageCopy> copies, std::span<const FencePtr>) override {
    refuse_in_forked_child("host copy_pages");
    for (const PageCopy& copy : copies) copy_page(copy);
  }

  void populate(Address at, std::size_t n) override {
    refuse_in_forked_child("host populate");
    const std::size_t pages_at_once = std::max(kPopulateBytes / page_size_, std::size_t{1});
    for (std::size_t done = 0; done < n; done += pages_at_once) {
      const std::size_t pages = std::min(pages_at_once, n - done);
      const Refusal refusal = populate_some(at + done * page_size_, pages * page_size_);
      if (refusal) {
        throw refused("host populate", Call::madvise, refusal.error,
                      "making " + count_of(n, page_size_) + " present", "free memory");
      }
    }
  }

  void fill(Handle first, std::size_t n) override {
    refuse_in_forked_child("host fill");
    const trace::Span span(trace::What::driver_call, 0, n * page_size_, 0, Call::fallocate);
    Refusal refusal = ask(Call::fallocate);
    if (!refusal && fallocate(state_.memfd, FALLOC_FL_KEEP_SIZE, offset_of(first),
                              static_cast<off_t>(n * page_size_)) != 0) {
      refusal.error = errno;
    }
    if (refusal) {
      throw refused("host fill", Call::fallocate, refusal.error,
                    "making " + count_of(n, page_size_) + " present", "free memory");
    }
  }

  void find_private_copies(Address at, std::span<std::uint8_t> private_copies) override {
    refuse_in_forked_child("host find_private_copies");
    std::fill(private_copies.begin(), private_copies.end(), std::uint8_t{0});
    // Not knowing costs copies, not correctness.
    if (ask(Call::pagemap) || !pagemap_.find_private(at, page_size_, private_copies))
      std::fill(private_copies.begin(), private_copies.end(), std::uint8_t{1});
  }

  std::size_t free_memory() override { return free_host_memory(); }

  Stream side_stream() override { return 0; }
  Stream copy_stream() override { return kCopyStream; }

  void copy_out(void* to, Address from, std::size_t bytes) override {
    refuse_in_forked_child("host copy_out");
    if (bytes >= kHugePage) advise_huge_pages(reinterpret_cast<Address>(to), bytes);
    copy(HostCopies::Direction::out, to, reinterpret_cast<const void*>(from), bytes);
  }
  void copy_in(Address to, const void* from, std::size_t bytes) override {
    refuse_in_forked_child("host copy_in");
    copy(HostCopies::Direction::in, reinterpret_cast<void*>(to), from, bytes);
  }

  // Nothing but copies runs behind the caller's back.
  FencePtr fence(Stream stream) override {
    refuse_in_forked_child("host fence");
    return stream == kCopyStream ? copies_.fence() : nullptr;
  }
  bool passed(const Fence& fence) override { return HostCopies::passed(fence); }
  void order(Stream stream, const Fence& fence) override {
    if (stream == kCopyStream || HostCopies::wait(fence, kPatience)) return;
    throw TimedOut("host order", kPatience, "copies between pages and host memory have not ended");
  }
  void require_own(const char*, Stream) override {}
  bool capturing(Stream) override { return false; }
  void keep_for_graph(Stream, void (*)(void*), void*) override {}
  void enter_worker() override {}
  void quiesce() override {}

 private:
  static constexpr Stream kCopyStream = 1;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::chrono::seconds kPatience{60};

  // Memory that a copy is the first to touch takes three times the copy's own time in small pages.
  // A hint: refused, the copy is slower.
  void advise_huge_pages(Address at, std::size_t bytes) {
    const Address begin = at / kHugePage * kHugePage;
    const std::size_t length = ceil_div(at + bytes, kHugePage) * kHugePage - begin;
    const trace::Span span(trace::What::driver_call, begin, length, 0, Call::madvise);
    if (!ask(Call::madvise)) madvise(reinterpret_cast<void*>(begin), length, MADV_HUGEPAGE);
  }

  void copy(HostCopies::Direction direction, void* to, const void* from, std::size_t bytes) {
    try {
      copies_.copy(direction, to, from, bytes);
    } catch (const std::system_error& error) {
      const int code = error.code().value();
      throw DriverError("pthread_create", code, errno_name(code),
                        "[host copy] a thread for copies was refused with " + errno_name(code) +
                            ": raise the limit on threads (ulimit -u) or on address space "
                            "(ulimit -v), or end some threads");
    }
  }

  static constexpr int kHoleFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  struct Refusal {
    int error = 0;
    bool injected = false;  // the call was not made
    bool gone = false;      // the kernel took away what was mapped there, and then refused
    explicit operator bool() const { return error != 0; }
  };

  // How far a loop over runs came.
  struct Progress {
    std::size_t touched;  // pages from the first on that are no longer as before
    Refusal refusal;
  };

  struct Reservation {
    Address base;
    std::size_t bytes;
  };

  void open_memfd() {
    int error = meter_.enter(Call::memfd_create) ? EMFILE : 0;
    if (!error && (state_.memfd = memfd_create("vtensor", MFD_CLOEXEC)) < 0) error = errno;
    if (error) {
      throw refused(
          "host driver", Call::memfd_create, error, "the memfd that a pool needs",
          "close files or raise the limit on them (ulimit -n), and allow memfd_create where "
          "a sandbox filters system calls");
    }
    // Past the limit on file sizes the kernel sends a signal instead of an error.
    rlimit limit{};
    std::uint64_t size = kMemfdSize;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0) size = std::min<std::uint64_t>(size, limit.rlim_cur);
    for (;; size /= 2) {
      handles_ = size / page_size_;
      if (handles_ == 0) {
        throw DriverError("ftruncate", EFBIG, "EFBIG",
                          "[host driver] a memfd of even one page of " +
                              std::to_string(page_size_) +
                              " bytes was refused: raise the limit on file sizes (ulimit -f)");
      }
      if (ftruncate(state_.memfd, static_cast<off_t>(handles_ * page_size_)) == 0) return;
    }
  }

  DriverError too_large(std::size_t pages) const {
    rlimit limit{};
    const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    const std::string there_is =
        limited ? "the process may have " + std::to_string(limit.rlim_cur) +
                      " bytes of them in all (RLIMIT_AS): lower the capacity, or raise the limit "
                      "(ulimit -v)"
                : "more than the process has left: lower the capacity";
    return {"mmap", ENOMEM, "ENOMEM",
            "[host reserve] need addresses for " + count_of(pages, page_size_) + ", " + there_is};
  }

  off_t offset_of(Handle handle) const { return static_cast<off_t>(handle * page_size_); }

  // Goes before every driver call: counts it, and may put a test's refusal in its place.
  Refusal ask(Call call) {
    const bool injected = meter_.enter(call);
    return {.error = injected ? ENOMEM : 0, .injected = injected};
  }

  Refusal populate_some(Address at, std::size_t bytes) {
    const trace::Span span(trace::What::driver_call, at, bytes, 0, Call::madvise);
    Refusal refusal = ask(Call::madvise);
    // Reading makes shared memory present as writing does, and takes 16 small pages at a fault
    // where they exist; what is mapped for writing may then be written to without another.
    if (!refusal && madvise(reinterpret_cast<void*>(at), bytes, MADV_POPULATE_READ) != 0 &&
        errno != EINVAL) {  // EINVAL: a kernel without it; the first touch does it then
      refusal.error = errno;
    }
    return refusal;
  }

  // Writes to mapped pages, and makes them present.
  void write_pages(std::byte* to, const std::byte* from, std::size_t bytes) {
    const auto at = reinterpret_cast<Address>(to);
    const std::size_t written = write_memfd(at, from, bytes);
    // Refused, the copy's own faults do it, or those of the next that reads there.
    for (std::size_t done = 0; done < bytes; done += kPopulateBytes)
      populate_some(at + done, std::min(kPopulateBytes, bytes - done));
    std::memcpy(to + written, from + written, bytes - written);
  }

  // Writes to what writable pages map; memory that is not there yet is then neither zeroed nor
  // taken in one fault a small page. Returns the bytes before the first refusal, or other page.
  std::size_t write_memfd(Address at, const std::byte* from, std::size_t bytes) {
    const std::lock_guard one_at_a_time(writing_);
    for (std::size_t done = 0; done < bytes;) {
      KernelMapping mapping;
      {
        const std::lock_guard lock(state_.mutex);
        const KernelMapping* const found = state_.mirror.find(at + done);
        if (found == nullptr || found->kind != MappingKind::writable) return done;
        mapping = *found;
      }
      const std::size_t n = std::min(bytes - done, mapping.end() - (at + done));
      const trace::Span span(trace::What::driver_call, at + done, n, 0, Call::pwrite);
      if (ask(Call::pwrite)) return done;
      const std::uint64_t offset = mapping.offset + (at + done - mapping.begin);
      const ssize_t written = pwrite(state_.memfd, from + done, n, static_cast<off_t>(offset));
      if (written > 0) {
        done += static_cast<std::size_t>(written);
      } else if (written == 0 || errno != EINTR) {
        return done;
      }
    }
    return bytes;
  }

  // For calls that take down or undo: tries once more, where the limit on mappings was in the way.
  template <typename Try>
  Refusal insist(Try call) {
    const Refusal refusal = call();
    const bool again = refusal.error == ENOMEM && !refusal.injected && limit_.throw_off_ballast();
    return again ? call() : refusal;
  }

  // Changes the mirror, and has the limit know.
  template <typename Change>
  void record(Change change) {
    const auto before = static_cast<std::ptrdiff_t>(state_.mirror.size());
    change();
    limit_.add(static_cast<std::ptrdiff_t>(state_.mirror.size()) - before);
  }

  // By how many mappings `pieces` in the place of `pages` pages could grow their number.
  std::ptrdiff_t mirror_growth(Address at, std::size_t pages, std::size_t pieces) {
    return state_.mirror.growth(at, at + pages * page_size_, pieces);
  }

  // One mmap over [at, at + pages), and its record.
  Refusal place(Call call, Address at, std::size_t pages, int protection, int flags,
                MappingKind kind, Handle first) {
    const std::size_t bytes = pages * page_size_;
    const trace::Span span(trace::What::driver_call, at, bytes, 0, call);
    Refusal refusal = ask(call);
    if (refusal) return refusal;
    void* const address = reinterpret_cast<void*>(at);
    const bool hole = kind == MappingKind::hole;
    const off_t offset = hole ? 0 : offset_of(first);
    if (mmap(address, bytes, protection, flags | MAP_FIXED, hole ? -1 : state_.memfd, offset) ==
        MAP_FAILED) {
      refusal.error = errno;
      // Before Linux 6.12 a refusal may come after the old mapping was removed.
      unsigned char resident;
      refusal.gone = mincore(address, traits_.granularity, &resident) != 0 && errno == ENOMEM;
      return refusal;
    }
    record([&] { state_.mirror.assign({at, bytes, static_cast<std::uint64_t>(offset), kind}); });
    return refusal;
  }

  Refusal place_piece(Address at, std::size_t pages, Handle first, Access access) {
    const bool copy_on_write = access == Access::copy_on_write;
    return place(Call::mmap, at, pages, PROT_READ | PROT_WRITE,
                 copy_on_write ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED,
                 copy_on_write ? MappingKind::copy_on_write : MappingKind::writable, first);
  }

  Refusal place_hole(Address at, std::size_t pages) {
    return insist([&] {
      return place(Call::munmap, at, pages, hole_protection_, kHoleFlags, MappingKind::hole, 0);
    });
  }

  // Maps piece after piece, up to the first refusal. A copy-on-write page loses its copied content
  // only when its piece is reached.
  Progress map_run(const PageRun& run, Access access) {
    for (std::size_t i = 0; i < run.handles.size();) {
      const std::size_t n = piece_length(run.handles.subspan(i));
      if (const Refusal r = place_piece(run.at + i * page_size_, n, run.handles[i], access)) {
        return {r.gone ? i + n : i, r};
      }
      i += n;
    }
    return {run.handles.size(), {}};
  }

  // Undoes a map: unmaps the runs `whole` and the first `touched` pages of `begun`, and throws
  // UndoFailed where some of that is refused.
  void take_down(std::span<const PageRun> whole, const PageRun& begun, std::size_t touched,
                 const DriverError& cause) {
    std::vector<std::size_t> stuck;
    std::size_t index = 0;
    const auto take = [&](Address at, std::size_t pages) {
      if (pages != 0 && place_hole(at, pages)) {
        for (std::size_t i = 0; i < pages; ++i) stuck.push_back(index + i);
      }
      index += pages;
    };
    for (const PageRun& run : whole) take(run.at, run.handles.size());
    take(begun.at, touched);
    if (!stuck.empty()) throw UndoFailed(cause, std::move(stuck));
  }

  // Undoes an unmap or a remap: maps `runs` again, and throws UndoFailed where some of that is
  // refused.
  void put_back(std::span<const PageRun> runs, Access access, const DriverError& cause) {
    std::vector<std::size_t> stuck;
    std::size_t index = 0;
    for (const PageRun& run : runs) {
      for (std::size_t i = 0; i < run.handles.size();) {
        const std::size_t n = piece_length(run.handles.subspan(i));
        const Address at = run.at + i * page_size_;
        if (insist([&] { return place_piece(at, n, run.handles[i], access); })) {
          for (std::size_t k = i; k < i + n; ++k) stuck.push_back(index + k);
        }
        i += n;
      }
      index += run.handles.size();
    }
    if (!stuck.empty()) throw UndoFailed(cause, std::move(stuck));
  }

  void copy_page(const PageCopy& copy) {
    const trace::Span span(trace::What::driver_call, copy.from, page_size_, 0, Call::pwrite);
    for (std::size_t done = 0; done < page_size_;) {
      Refusal refusal = ask(Call::pwrite);
      if (!refusal) {
        const ssize_t n = pwrite(state_.memfd, reinterpret_cast<const char*>(copy.from) + done,
                                 page_size_ - done, offset_of(copy.to) + static_cast<off_t>(done));
        if (n > 0) {
          done += static_cast<std::size_t>(n);
        } else if (n == 0) {
          refusal.error = ENOSPC;
        } else if (errno != EINTR) {
          refusal.error = errno;
        }
      }
      if (refusal) {
        throw refused("host copy_pages", Call::pwrite, refusal.error,
                      "copying a page of " + std::to_string(page_size_) + " bytes", "free memory");
      }
    }
  }

  const int hole_protection_;
  MapLimit& limit_;
  std::size_t page_size_ = 0;
  DriverTraits traits_;
  std::uint64_t handles_ = 0;  // in the memfd
  std::atomic<Handle> next_handle_{0};
  std::map<Address, Reservation> reservations_;  // what the kernel knows of each range
  ForkedState state_;
  Pagemap pagemap_;
  std::mutex writing_;  // the kernel lets one thread at a time write to a file, and others spin
  HostCopies copies_{[this](std::byte* to, const std::byte* from, std::size_t bytes) {
    write_pages(to, from, bytes);
  }};
};

}  // namespace

std::unique_ptr<Driver> make_host_driver(const HostOptions& options, MapLimit& limit) {
  return std::make_unique<HostDriver>(options, limit);
}

std::unique_ptr<Driver> make_host_driver(const HostOptions& options) {
  return make_host_driver(options, MapLimit::of_process());
}

}  // namespace vtensor
