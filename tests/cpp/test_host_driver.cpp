// The host driver's operations against the kernel: what is really mapped, shared, copied and given
// back.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <cstdio>
#include <random>

#include "driver/pagemap.h"
#include "host_fixture.h"
#include "qemu.h"

namespace vtensor {
namespace {

// Everything that an operation that failed must have left alone (I8).
struct Picture {
  std::vector<std::string> maps;
  std::string content;

  Picture(Address at, std::size_t pages)
      : maps(maps_of(at, pages * kPage)), content(bytes_at(at), pages * kPage) {}
  bool operator==(const Picture&) const = default;
};

// Refuses the first driver call of `operation`, then the second, and so on, until it succeeds.
// Returns how many refusals it took; each must have left [at, at + pages) as it was.
int refuse_each_call(Driver& driver, Address at, std::size_t pages,
                     const std::function<void()>& operation) {
  const Picture before(at, pages);
  for (int n = 0;; ++n) {
    CAPTURE(n);
    driver.meter().fail_after(n);
    try {
      operation();
      driver.meter().disarm();
      return n;
    } catch (const DriverError& error) {
      CHECK(dynamic_cast<const UndoFailed*>(&error) == nullptr);
      CHECK(error.name == "ENOMEM");
    }
    driver.meter().disarm();
    CHECK(Picture(at, pages) == before);
  }
}

}  // namespace

TEST_CASE("a page size is a power of two from the granularity on") {
  for (const std::size_t size : {std::size_t{1}, std::size_t{2048}, std::size_t{12288}, SIZE_MAX}) {
    const auto error =
        error_of<InvalidArgument>([&] { make_host_driver(HostOptions{.page_size = size}); });
    CHECK(contains(error.what(), std::to_string(size)));
  }
  const auto granularity = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (const std::size_t size : {granularity, std::size_t{1} << 21, std::size_t{1} << 30}) {
    const auto driver = make_host_driver({.page_size = size});
    const Address range = driver->reserve(2);
    CHECK(range % size == 0);
    const Handle h = driver->create(2);
    map_run(*driver, range + size, {{h + 1}}, Access::writable);
    byte_at(range + size) = 1;
    CHECK(byte_at(range) == 0);
    driver->unmap(range + size, 1);
    driver->free_range(range, 2);
  }
}

TEST_CASE_FIXTURE(HostFixture, "one mmap a run, whatever the order of the runs") {
  const Address range = driver->reserve(6);
  const Handle h = driver->create(10);
  const std::vector<Handle> handles = {h + 7, h + 8, h + 2, h + 1, h + 4, h + 5};
  const auto before = calls(Call::mmap);
  map_run(*driver, range, handles, Access::writable);
  CHECK(calls(Call::mmap) == before + 4);
  for (std::size_t i = 0; i < 6; ++i) byte_at(range + i * kPage) = static_cast<char>(i + 1);
  driver->remap(range, handles, Access::writable, adjacent(h, 6), Access::writable);
  CHECK(memfd_mappings(range, 6 * kPage) == 1);
  const char expected[] = {0, 4, 3, 0, 5, 6};  // what stands behind h, h + 1, ...
  for (std::size_t i = 0; i < 6; ++i) CHECK(byte_at(range + i * kPage) == expected[i]);
}

TEST_CASE_FIXTURE(HostFixture, "a copy comes in through any mapping, whatever is refused") {
  constexpr std::size_t kPages = 80;  // of 5 MiB: several pieces of a copy
  std::vector<char> source(kPages * kPage - 1000);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 31 + i / 4096);
  for (const bool refuses : {false, true}) {
    const Address range = driver->reserve(kPages + 1);
    std::vector<Handle> handles = scattered(driver->create(40), 20);
    for (const Handle h : adjacent(driver->create(61), 61)) handles.push_back(h);
    map_run(*driver, range, handles, Access::writable);
    const Handle shared = handles[50];
    driver->remap(range + 50 * kPage, {{shared}}, Access::writable, {{shared}},
                  Access::copy_on_write);
    const Address seen = driver->reserve(1);
    map_run(*driver, seen, {{shared}}, Access::writable);
    if (refuses) driver->meter().fail_after(0, 1000);
    copy(CopyDirection::in, range + 500, source.data(), source.size());
    CHECK((driver->meter().refused(Call::madvise) != 0) == refuses);
    driver->meter().disarm();
    CHECK(std::memcmp(bytes_at(range + 500), source.data(), source.size()) == 0);
    for (const std::size_t i : {std::size_t{499}, kPages * kPage - 500, kPages * kPage})
      CHECK(byte_at(range + i) == 0);
    CHECK(byte_at(seen + 5000) == 0);  // stores do not reach a copy-on-write page

    std::reverse(source.begin(), source.end());
    copy(CopyDirection::in, range + 500, source.data(), source.size());  // to memory that is there
    CHECK(std::memcmp(bytes_at(range + 500), source.data(), source.size()) == 0);
  }
}

// How many small pages from `at` on are in this process's page tables.
std::size_t present(Address at, std::size_t n) {
  std::vector<std::uint64_t> entries(n);
  const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const ssize_t bytes = pread(file, entries.data(), n * 8, static_cast<off_t>(at / 4096 * 8));
  close(file);
  REQUIRE(bytes == static_cast<ssize_t>(n * 8));
  return static_cast<std::size_t>(
      std::count_if(entries.begin(), entries.end(), [](auto entry) { return entry >> 63 != 0; }));
}

TEST_CASE_FIXTURE(HostFixture, "what a copy brings in is present, wherever it begins and ends") {
  if (sysconf(_SC_PAGESIZE) != 4096 || under_qemu("ignores MADV_POPULATE_READ")) return;
  constexpr std::size_t kPages = 20, kSmall = kPages * kPage / 4096;
  std::vector<char> source(kPages * kPage, 5);
  for (const std::size_t first : {0, 1, 4096, 5000, 65535}) {
    for (const std::size_t last : {0, 1, 4095, 4096, 70000}) {
      const Address range = driver->reserve(kPages);
      map_run(*driver, range, adjacent(driver->create(kPages), kPages), Access::writable);
      copy(CopyDirection::in, range + first, source.data(), kPages * kPage - first - last);
      CHECK(present(range, kSmall) >= kSmall - first / 4096 - last / 4096);
    }
  }
}

TEST_CASE_FIXTURE(HostFixture, "huge pages are asked for inside of the memory that a copy fills") {
  if (access("/sys/kernel/mm/transparent_hugepage", F_OK) != 0) {
    MESSAGE("skipped: the kernel has no huge pages");
    return;
  }
  if (under_qemu("ignores MADV_HUGEPAGE")) return;
  constexpr std::size_t kHuge = std::size_t{2} << 20, kBytes = 6 * kHuge;
  const Address range = driver->reserve(kBytes / kPage);
  map_run(*driver, range, adjacent(driver->create(kBytes / kPage), kBytes / kPage),
          Access::writable);
  void* const made = mmap(nullptr, kBytes + kHuge, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(made != MAP_FAILED);
  const Address to = (reinterpret_cast<Address>(made) + kHuge - 1) / kHuge * kHuge;
  // The addresses with the advice ("hg" in smaps) among those of the mapping.
  const auto advised = [&] {
    std::vector<Address> found;
    std::ifstream file("/proc/self/smaps");
    Address begin = 0, end = 0;
    for (std::string line; std::getline(file, line);) {
      char* after = nullptr;
      const Address at = std::strtoull(line.c_str(), &after, 16);
      if (*after == '-') {
        begin = at;
        end = std::strtoull(after + 1, nullptr, 16);
      } else if (line.starts_with("VmFlags:") && contains(line + " ", " hg ") &&
                 begin < to + kBytes && end > to) {
        found.insert(found.end(), {begin - to, end - to});
      }
    }
    return found;
  };
  copy(CopyDirection::out, range, bytes_at(to + kHuge / 2), kHuge);  // has no whole one
  CHECK(advised().empty());
  copy(CopyDirection::out, range, bytes_at(to + kHuge / 2), 3 * kHuge);
  CHECK(advised() == std::vector<Address>{kHuge, 3 * kHuge});
  munmap(made, kBytes + kHuge);
}

TEST_CASE_FIXTURE(HostFixture, "private copies are found in spans longer than one read") {
  constexpr std::size_t kPages = 1000;  // 16,000 entries of pagemap at 4 KiB
  const Address range = driver->reserve(kPages);
  map_run(*driver, range, adjacent(driver->create(kPages), kPages), Access::copy_on_write);
  std::set<std::size_t> written = {0, 255, 256, 257, 700, 999};
  for (const std::size_t i : written) byte_at(range + (i + 1) * kPage - 1) = 1;
  std::vector<std::uint8_t> private_copies(kPages, 7);
  driver->find_private_copies(range, private_copies);
  for (std::size_t i = 0; i < kPages; ++i) CHECK(private_copies[i] == written.count(i));

  driver->meter().fail_after(0);  // a pagemap that cannot be read costs copies, not correctness
  driver->find_private_copies(range, private_copies);
  CHECK(std::count(private_copies.begin(), private_copies.end(), Driver::kMaybeCopied) == kPages);
}

TEST_CASE_FIXTURE(HostFixture, "both ways to ask the kernel find the pages that were written to") {
  constexpr std::size_t kPages = 1000;
  const Address range = driver->reserve(kPages);
  map_run(*driver, range, adjacent(driver->create(kPages), kPages), Access::copy_on_write);
  std::mt19937 random(0);
  std::vector<std::uint8_t> written(kPages, 0);
  Pagemap scanning, reading(/*may_scan=*/false);
  for (int round = 0; round < 40; ++round) {
    // From nothing over more pieces than one call returns to everything; some are only read.
    for (std::size_t i = 0; i < kPages; ++i) {
      volatile char& byte = byte_at(range + i * kPage + random() % kPage);
      if (random() % 4 == 0) CHECK((byte == 0 || written[i]));
      if (round > 0 && random() % (200 / static_cast<unsigned>(round)) == 0) {
        byte = 1;
        written[i] = 1;
      }
    }
    const std::size_t first = random() % kPages, n = random() % (kPages - first + 1);
    const std::vector<std::uint8_t> wanted(
        written.begin() + static_cast<std::ptrdiff_t>(first),
        written.begin() + static_cast<std::ptrdiff_t>(first + n));
    for (Pagemap* pagemap : {&scanning, &reading}) {
      std::vector<std::uint8_t> found(n, 0);
      CHECK(pagemap->find_private(range + first * kPage, kPage, found));
      CHECK(found == wanted);
    }
  }
  utsname kernel;
  REQUIRE(uname(&kernel) == 0);
  int major = 0, minor = 0;
  REQUIRE(std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2);
  if (major > 6 || (major == 6 && minor >= 7)) CHECK(scanning.scans());
}

TEST_CASE_FIXTURE(HostFixture,
                  "memory comes at the first touch or by populate, and goes by destroy") {
  const Address range = driver->reserve(10);
  const auto handles = adjacent(driver->create(10), 10);
  map_run(*driver, range, handles, Access::writable);
  CHECK(bytes_in_memfd() == 0);
  driver->populate(range, 4);
  if (!under_qemu("ignores MADV_POPULATE_READ")) CHECK(bytes_in_memfd() == 4 * kPage);
  CHECK(byte_at(range) == 0);
  std::memset(bytes_at(range), 5, 10 * kPage);
  CHECK(bytes_in_memfd() == 10 * kPage);
  driver->zero(range + 3 * kPage, 2 * kPage, 0);
  CHECK(byte_at(range + 3 * kPage - 1) == 5);
  CHECK(byte_at(range + 3 * kPage) == 0);
  CHECK(byte_at(range + 5 * kPage - 1) == 0);
  CHECK(byte_at(range + 5 * kPage) == 5);

  driver->unmap(range, handles.size());
  const auto before = calls(Call::fallocate);
  driver->destroy(handles[2], 7);
  CHECK(calls(Call::fallocate) == before + 1);
  CHECK(bytes_in_memfd() == 3 * kPage);
  map_run(*driver, range, handles, Access::writable);
  CHECK(byte_at(range + kPage) == 5);
  CHECK(byte_at(range + 2 * kPage) == 0);
  CHECK(byte_at(range + 9 * kPage) == 5);
}

TEST_CASE_FIXTURE(HostFixture, "a refusal of any driver call leaves all as it was") {  // I8
  constexpr std::size_t kPages = 8;
  const Address range = driver->reserve(kPages);
  const Handle h = driver->create(100);
  const std::vector<Handle> first = {h, h + 1, h + 4, h + 6, h + 7, h + 9};
  const std::vector<Handle> second = {h + 20, h + 22, h + 23, h + 4, h + 30, h + 9};

  SUBCASE("unmap of private copies") {
    map_run(*driver, range + kPage, first, Access::copy_on_write);
    std::memset(bytes_at(range + kPage), 3, 6 * kPage);
    CHECK(refuse_each_call(*driver, range, kPages,
                           [&] { driver->unmap(range + kPage, first.size()); }) == 1);
    CHECK(memfd_mappings(range, kPages * kPage) == 0);
  }
  SUBCASE("remap") {
    map_run(*driver, range + kPage, second, Access::writable);
    std::memset(bytes_at(range + kPage), 4, 6 * kPage);
    driver->remap(range + kPage, second, Access::writable, first, Access::writable);
    std::memset(bytes_at(range + kPage), 3, 6 * kPage);
    CHECK(refuse_each_call(*driver, range, kPages, [&] {
            driver->remap(range + kPage, first, Access::writable, second, Access::copy_on_write);
          }) == 5);
    CHECK(byte_at(range + kPage) == 4);
  }
  SUBCASE("remap of copy-on-write pages keeps private copies in pages that it did not reach") {
    map_run(*driver, range + kPage, first, Access::copy_on_write);
    std::memset(bytes_at(range + 3 * kPage), 3, 4 * kPage);
    driver->meter().fail_after(1);
    CHECK_THROWS_AS(
        driver->remap(range + kPage, first, Access::copy_on_write, second, Access::writable),
        DriverError);
    for (std::size_t i = 3; i < 7; ++i) CHECK(byte_at(range + i * kPage) == 3);
    CHECK(memfd_mappings(range, kPages * kPage, "rw-p") > 0);
    CHECK(memfd_mappings(range, kPages * kPage, "rw-s") == 0);
  }
  SUBCASE("destroy, copy_page and populate") {
    map_run(*driver, range, first, Access::writable);
    byte_at(range) = 9;
    CHECK(refuse_each_call(*driver, range, kPages, [&] { copy_page(*driver, h + 50, range); }) ==
          1);
    CHECK(refuse_each_call(*driver, range, kPages, [&] { driver->populate(range, 6); }) == 2);
    CHECK(bytes_in_memfd() == 7 * kPage);
    CHECK(refuse_each_call(*driver, range, kPages, [&] { driver->destroy(h + 50, 1); }) == 1);
    CHECK(bytes_in_memfd() == 6 * kPage);
  }
}

TEST_CASE_FIXTURE(HostFixture, "a refused map counts its pages, a remap puts back what it can") {
  const Address range = driver->reserve(6);
  const Handle h = driver->create(100);
  const std::vector<Handle> handles = {h, h + 1, h + 3, h + 10, h + 11, h + 13};
  const std::vector<Handle> others = {h + 20, h + 22, h + 24, h + 26, h + 28, h + 30};

  SUBCASE("map") {
    const PageRun run{range, handles};
    std::size_t mapped = 0;
    driver->meter().fail_after(2);
    const auto error =
        error_of<DriverError>([&] { driver->map({&run, 1}, Access::writable, mapped); });
    CHECK(mapped == 3);
    CHECK(error.call == "mmap");
    driver->unmap(range, 3);
  }
  SUBCASE("remap") {
    map_run(*driver, range, handles, Access::writable);
    std::memset(bytes_at(range), 3, 6 * kPage);
    driver->meter().fail_after(4, 2);  // the fifth run, and the first of the undoing
    error_of<UndoFailed>(
        [&] { driver->remap(range, handles, Access::writable, others, Access::writable); });
    CHECK(byte_at(range) == 0);
    for (std::size_t i = 2; i < 6; ++i) CHECK(byte_at(range + i * kPage) == 3);
  }
  driver->meter().disarm();
  driver->free_range(range, 6);
  CHECK(maps_of(range, 6 * kPage).empty());
}

}  // namespace vtensor
