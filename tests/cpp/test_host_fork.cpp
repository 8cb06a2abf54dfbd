// Forked children: they keep what they see, and cannot reach the parent (I13).
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <sys/mman.h>

#include <array>
#include <thread>

#include "base/process.h"
#include "host_fixture.h"

namespace vtensor {
namespace {

// Lets parent and child take turns.
class Turns {
 public:
  Turns() {
    REQUIRE(pipe(there_.data()) == 0);
    REQUIRE(pipe(back_.data()) == 0);
  }
  ~Turns() {
    for (const int fd : {there_[0], there_[1], back_[0], back_[1]}) close(fd);
  }
  void tell_child() { put(there_[1]); }
  void tell_parent() { put(back_[1]); }
  void wait_for_parent() { take(there_[0]); }
  void wait_for_child() { take(back_[0]); }

 private:
  static void put(int fd) {
    if (write(fd, "x", 1) != 1) std::abort();
  }
  static void take(int fd) {
    char byte;
    alarm(60);  // the wait has a bound
    if (read(fd, &byte, 1) != 1) std::abort();
    alarm(0);
  }
  std::array<int, 2> there_, back_;
};

// Which of `operations` does not throw Error; -1 where all do.
int first_allowed(const std::vector<std::function<void()>>& operations) {
  for (std::size_t i = 0; i < operations.size(); ++i) {
    try {
      operations[i]();
    } catch (const Error& error) {
      if (contains(error.what(), "forked")) continue;
    }
    return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

TEST_CASE_FIXTURE(HostFixture, "a child sees what was there, and its writes stay its own") {
  const Address range = driver->reserve(40);
  const Handle h = driver->create(100);
  const auto handles = scattered(h, 10);
  map_run(*driver, range, adjacent(h + 50, 20), Access::writable);
  map_run(*driver, range + 20 * kPage, handles, Access::writable);
  std::memset(bytes_at(range), 1, 30 * kPage);
  CHECK(in_child([&] {
          for (std::size_t i = 0; i < 30; ++i) {
            if (byte_at(range + i * kPage + 5) != 1) return 1;
          }
          std::memset(bytes_at(range), 2, 30 * kPage);
          for (std::size_t i = 0; i < 30; ++i) {
            if (byte_at(range + i * kPage + 5) != 2) return 2;
          }
          if (memfd_mappings(range, 40 * kPage, "rw-s") != 0) return 3;
          return memfds().empty() ? 0 : 4;
        }) == 0);
  for (std::size_t i = 0; i < 30 * kPage; ++i) REQUIRE(byte_at(range + i) == 1);
}

TEST_CASE_FIXTURE(HostFixture,
                  "what the parent writes later does not reach what is the child's own") {
  const Address range = driver->reserve(3);
  const Handle h = driver->create(3);
  map_run(*driver, range, adjacent(h, 3), Access::writable);
  std::memset(bytes_at(range), 1, 3 * kPage);
  driver->remap(range + kPage, {{h + 1}}, Access::writable, {{h + 1}}, Access::copy_on_write);
  byte_at(range + kPage) = 2;  // copied before the fork
  Turns turns;
  std::thread parent([&] {
    turns.wait_for_child();
    std::memset(bytes_at(range), 9, 2 * kPage);
    turns.tell_child();
  });
  const int status = in_child([&] {
    byte_at(range) = 3;
    turns.tell_parent();
    turns.wait_for_parent();
    if (byte_at(range) != 3 || byte_at(range + 100) != 1) return 1;  // written here before
    if (byte_at(range + kPage) != 2 || byte_at(range + kPage + 100) != 1) return 2;  // copied
    if (byte_at(range + 2 * kPage) != 1) return 3;  // nobody wrote it
    return 0;
  });
  parent.join();
  CHECK(status == 0);
  CHECK(byte_at(range) == 9);
}

TEST_CASE_FIXTURE(HostFixture,
                  "private copies of copy-on-write pages stays with parent and child apart") {
  const Address range = driver->reserve(2);
  const Handle h = driver->create(1);
  map_run(*driver, range, {{h}}, Access::copy_on_write);
  map_run(*driver, range + kPage, {{h}}, Access::copy_on_write);
  byte_at(range) = 5;
  CHECK(in_child([&] {
          if (byte_at(range) != 5 || byte_at(range + kPage) != 0) return 1;
          byte_at(range) = 6;
          byte_at(range + kPage) = 7;
          return byte_at(range) == 6 && byte_at(range + kPage) == 7 ? 0 : 2;
        }) == 0);
  CHECK(byte_at(range) == 5);
  CHECK(byte_at(range + kPage) == 0);
}

TEST_CASE_FIXTURE(HostFixture,
                  "a child cannot operate, and its end takes nothing from the parent") {
  const Address range = driver->reserve(4);
  const Handle h = driver->create(4);
  const std::vector<Handle> one = {h};
  map_run(*driver, range, one, Access::writable);
  byte_at(range) = 1;
  CHECK(in_child([&] {
          const auto calls_before = calls(Call::mmap) + calls(Call::munmap) + calls(Call::pwrite);
          std::uint8_t private_copies;
          const int allowed = first_allowed({
              [&] { driver->reserve(1); },
              [&] { driver->create(1); },
              [&] { map_run(*driver, range + kPage, {{h + 1}}, Access::writable); },
              [&] { driver->remap(range, one, Access::writable, {{h + 1}}, Access::writable); },
              [&] { driver->zero(range, kPage, 0); },
              [&] { copy_page(*driver, h + 1, range); },
              [&] { driver->populate(range, 1); },
              [&] { driver->find_private_copies(range, {&private_copies, 1}); },
              [&] { make_host_driver(HostOptions{}); },
          });
          if (allowed != -1) return 10 + allowed;
          // What destructors use does nothing.
          unmap_run(*driver, range, one, Access::writable);
          driver->destroy(h, 1);
          driver->free_range(range, 4);
          if (byte_at(range) != 1) return 1;
          if (calls_before != calls(Call::mmap) + calls(Call::munmap) + calls(Call::pwrite))
            return 2;
          driver.reset();
          return byte_at(range) == 1 ? 0 : 3;
        }) == 0);
  CHECK(byte_at(range) == 1);
  CHECK(bytes_in_memfd() > 0);
  byte_at(range + 1) = 2;
  unmap_run(*driver, range, one, Access::writable);
  map_run(*driver, range, one, Access::writable);
  CHECK(byte_at(range + 1) == 2);
}

TEST_CASE_FIXTURE(HostFixture, "a grandchild is apart from both") {
  const Address range = driver->reserve(1);
  map_run(*driver, range, {{driver->create(1)}}, Access::writable);
  byte_at(range) = 1;
  CHECK(in_child([&] {
          byte_at(range) = 2;
          const int status = in_child([&] {
            if (byte_at(range) != 2) return 1;
            byte_at(range) = 3;
            return 0;
          });
          if (status != 0) return status;
          return byte_at(range) == 2 ? 0 : 2;
        }) == 0);
  CHECK(byte_at(range) == 1);
}

TEST_CASE_FIXTURE(HostFixture, "what cannot be isolated is taken away from the child") {
  const Address range = driver->reserve(2);
  map_run(*driver, range, {{driver->create(1)}}, Access::writable);
  byte_at(range) = 1;
  const int memfd = *memfds().begin();
  const int kept = dup(memfd);
  close(memfd);  // the child's private mapping will be refused
  const int status = in_child([&] { return byte_at(range); });
  const int other_status = in_child([&] { return byte_at(range + kPage); });
  REQUIRE(dup2(kept, memfd) == memfd);
  close(kept);
  CHECK(status == -SIGSEGV);
  CHECK(other_status == 0);
  CHECK(byte_at(range) == 1);
}

TEST_CASE("forks beside threads that map and unmap find every driver whole") {
  std::array<std::unique_ptr<Driver>, 2> drivers;
  for (auto& driver : drivers) driver = make_host_driver({.page_size = 4096});
  constexpr std::size_t kBytes = std::size_t{64} * 4096;
  std::array<Address, 2> ranges;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 2; ++t) {
    ranges[t] = drivers[t]->reserve(64);
    threads.emplace_back([&, t] {
      Driver& driver = *drivers[t];
      const Handle h = driver.create(128);
      while (!stop) {
        map_run(driver, ranges[t], scattered(h, 64), Access::writable);
        driver.remap(ranges[t], scattered(h, 64), Access::writable, adjacent(h, 64),
                     Access::writable);
        unmap_run(driver, ranges[t], adjacent(h, 64), Access::writable);
      }
    });
  }
  int wrong = 0;
  for (int i = 0; i < 30; ++i) {
    wrong += in_child([&] {
               int shared = 0;
               for (const Address range : ranges)
                 shared += memfd_mappings(range, kBytes, "rw-s") != 0;
               return shared;
             }) != 0;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

}  // namespace vtensor
