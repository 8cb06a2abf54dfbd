// Forked children: they have no access, and cannot reach the parent (I13).
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <iterator>
#include <thread>

#include "base/process.h"
#include "driver/host_map_limit.h"
#include "host_fixture.h"
#include "qemu.h"

namespace vtensor {
namespace {

// Called in each fork, once the drivers are ready for it: their handler was registered later.
std::function<void()> in_fork;
[[maybe_unused]] const int registered = pthread_atfork(
    [] {
      if (in_fork) in_fork();
    },
    nullptr, nullptr);

}  // namespace

TEST_CASE_FIXTURE(HostFixture, "a driver made after the fork is the child's own") {
  const Address theirs = driver->reserve(4);
  map_run(*driver, theirs, {{driver->create(1)}}, Access::writable);
  CHECK(in_child([&] {
          driver.reset();
          if (maps_of(theirs, 4 * kPage).size() != 1) return 1;  // the addresses stay taken
          fork_depth = 0;  // as in a process that was not forked
          const auto own = make_host_driver({.page_size = kPage});
          const Address range = own->reserve(1);
          map_run(*own, range, {{own->create(1)}}, Access::writable);
          byte_at(range) = 2;
          return byte_at(range) - 2;
        }) == 0);
}

TEST_CASE_FIXTURE(HostFixture, "a child from which the memory cannot be taken ends") {
  if (under_qemu("refuses filters of system calls")) return;
  CHECK(in_child([&] {
          fork_depth = 0;
          const auto own = make_host_driver({.page_size = kPage});
          own->reserve(1);
          sock_filter no_mmap[] = {
              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
              BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 3),
              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
              BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PROT_NONE, 0, 1),
              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
          };
          const sock_fprog filter{std::size(no_mmap), no_mmap};
          if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return 1;
          if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) return 2;
          return in_child([] { return 0; });
        }) == 70);
}

TEST_CASE_FIXTURE(HostFixture, "no thread reserves a range in the middle of a fork") {
  std::atomic<bool> reserved{false};
  bool early = true;
  std::thread other;
  in_fork = [&] {
    other = std::thread([&] {
      driver->reserve(1);
      reserved = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    early = reserved;
  };
  CHECK(in_child([] { return 0; }) == 0);
  in_fork = nullptr;
  other.join();
  CHECK_FALSE(early);
  CHECK(reserved);
}

TEST_CASE("a fork beside threads that map and unmap takes all of every driver") {
  std::array<std::unique_ptr<Driver>, 2> drivers;
  for (auto& driver : drivers) driver = make_host_driver({.page_size = 4096});
  constexpr std::size_t kBytes = std::size_t{64} * 4096;
  std::array<Address, 2> ranges;
  std::vector<std::unique_ptr<Beside>> threads;
  for (std::size_t t = 0; t < 2; ++t) {
    Driver& driver = *drivers[t];
    const Address range = ranges[t] = driver.reserve(64);
    const Handle h = driver.create(128);
    // A step allocates nothing: AddressSanitizer's allocator may stay locked in the child.
    threads.push_back(std::make_unique<Beside>(
        [&driver, range, apart = scattered(h, 64), together = adjacent(h, 64)] {
          map_run(driver, range, apart, Access::writable);
          driver.remap(range, apart, Access::writable, together, Access::writable);
          driver.unmap(range, 64);
        }));
  }
  check_children(30, [&] {
    alarm(20);  // a lock that no thread has any more is never free
    int left = 0;
    for (const Address range : ranges) left += memfd_mappings(range, kBytes) != 0;
    return left;
  });
}

TEST_CASE_FIXTURE(HostFixture,
                  "a fork beside a count of the mappings leaves the limit on them to the child") {
  const Beside counting([] { MapLimit::of_process().check_now(1); });
  check_children(30, [] {
    alarm(20);  // a lock that no thread has any more is never free
    MapLimit::of_process().check_now(1);
    return 0;
  });
}

}  // namespace vtensor
