// What the conformance suite runs against: every driver, with a way to look at its memory from
// outside.
//
// A subject has: name; unavailable() (a reason, or empty); prepare(), for the start of a test;
// open(), a new driver; fill and holds, which go through mapped addresses; stores(at), whether a
// store there would be let through; leaks(), what is not given back once its drivers are gone
// (empty: nothing).
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "simcuda/client.h"
#include "support.h"

namespace vtensor::conformance {

// Memory that this process reads and writes by pointer.
struct HostPages {
  static void fill(Address at, std::size_t bytes, std::uint8_t value);
  static bool holds(Address at, std::size_t bytes, std::uint8_t value);
  static bool stores(Address at);
};

struct Host : HostPages {
  static constexpr const char* name = "host";
  static constexpr bool is_cuda = false;
  static std::string unavailable() { return {}; }
  static void prepare() {}
  static std::unique_ptr<Driver> open() { return make_host_driver({}); }
  static std::string leaks() { return host_leaks(); }
};

struct SimulatedCuda : HostPages {
  static constexpr const char* name = "CUDA driver over the simulated libcuda";
  static constexpr bool is_cuda = true;
  // 64 KiB instead of 2 MiB: what is tested does not depend on it, and it is quicker.
  static constexpr std::size_t kPageSize = std::size_t{64} << 10;
  static std::string unavailable() { return {}; }
  static void prepare();  // starts the simulation anew
  // Work in streams runs as late as it may: these have it run first.
  static void fill(Address at, std::size_t bytes, std::uint8_t value);
  static bool holds(Address at, std::size_t bytes, std::uint8_t value);
  static std::unique_ptr<Driver> open();
  static std::string leaks();
  static std::string library() { return simcuda_library(); }
  static const SimcudaControl& control();
};

struct RealCuda {
  static constexpr const char* name = "CUDA";
  static constexpr bool is_cuda = true;
  static std::string unavailable();
  static std::string library() { return "libcuda.so.1"; }
  static void prepare() {}
  static std::unique_ptr<Driver> open() { return make_cuda_driver({}); }
  static void fill(Address at, std::size_t bytes, std::uint8_t value);
  static bool holds(Address at, std::size_t bytes, std::uint8_t value);
  static bool stores(Address at);
  // The device reports free memory to other processes too, so a leak looks like their use.
  static std::string leaks() { return {}; }
};

// Says why a test is skipped.
template <class Subject>
bool is_available() {
  const std::string reason = Subject::unavailable();
  if (reason.empty()) return true;
  MESSAGE("skipped on " << std::string(Subject::name) << ": " << reason);
  return false;
}

// A test of each subject T that there is here.
#define SUBJECTS_TEST(function, name, ...)   \
  template <class T>                         \
  void function();                           \
  TEST_CASE_TEMPLATE(name, T, __VA_ARGS__) { \
    if (is_available<T>()) function<T>();    \
  }                                          \
  template <class T>                         \
  static void function()
#define DRIVER_TEST(name) \
  SUBJECTS_TEST(DOCTEST_ANONYMOUS(driver_test_), name, Host, SimulatedCuda, RealCuda)
#define CUDA_DRIVER_TEST(name) \
  SUBJECTS_TEST(DOCTEST_ANONYMOUS(driver_test_), name, SimulatedCuda, RealCuda)

// One run or one page at a time; whole or not at all.
inline void map_run(Driver& driver, Address at, std::span<const Handle> handles, Access access) {
  const PageRun run{at, handles};
  std::size_t mapped = 0;
  try {
    driver.map({&run, 1}, access, mapped);
  } catch (...) {
    if (mapped != 0) driver.unmap(at, mapped);
    throw;
  }
}
inline void copy_page(Driver& driver, Handle to, Address from) {
  const PageCopy copy{to, from};
  driver.copy_pages({&copy, 1});
}
// Returns when the work launched in `stream` so far is done.
inline void await_work(Driver& driver, Stream stream) {
  const FencePtr fence = driver.fence(stream);
  if (fence != nullptr) CHECK(comes_true([&] { return driver.passed(*fence); }));
}
// Complete on return.
inline void zero_now(Driver& driver, Address at, std::size_t bytes) {
  driver.zero(at, bytes, driver.side_stream());
  await_work(driver, driver.side_stream());
}

// A driver with handles to play with, and the checks that look at them.
template <class Subject>
class Bench {
 public:
  Bench() {
    Subject::prepare();
    driver = Subject::open();
    page_size = driver->traits().page_size;
  }
  ~Bench() {
    for (const auto& [range, pages] : mapped_) {
      if (driver == nullptr) return;
      CHECK_NOTHROW(driver->unmap(range, pages));
      CHECK_NOTHROW(driver->free_range(range, pages));
    }
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // A range with these pages. At the end of the bench as many are unmapped, and it goes.
  Address mapped(std::span<const Handle> handles, Access access) {
    const Address range = driver->reserve(handles.size());
    map(range, handles, access);
    mapped_.emplace_back(range, handles.size());
    return range;
  }

  std::vector<Handle> make_handles(std::size_t n, std::uint8_t first_mark) {
    std::vector<Handle> handles;
    if (driver->traits().adjacent_handles) {
      const Handle first = driver->create(n);
      for (std::size_t i = 0; i < n; ++i) handles.push_back(first + i);
    } else {
      for (std::size_t i = 0; i < n; ++i) handles.push_back(driver->create(1));
    }
    for (std::size_t i = 0; i < n; ++i) {
      mark(handles[i], static_cast<std::uint8_t>(first_mark + i));
    }
    return handles;
  }

  // Writes and reads a handle through a mapping of its own.
  void mark(Handle handle, std::uint8_t value) {
    with_mapping(handle, [&](Address at) { Subject::fill(at, page_size, value); });
  }
  bool is_marked(Handle handle, std::uint8_t value) {
    bool marked = false;
    with_mapping(handle, [&](Address at) { marked = Subject::holds(at, page_size, value); });
    return marked;
  }

  bool holds(Address range, std::size_t page, std::uint8_t value) {
    return Subject::holds(range + page * page_size, page_size, value);
  }
  void fill(Address range, std::size_t page, std::uint8_t value) {
    Subject::fill(range + page * page_size, page_size, value);
  }

  void map(Address at, std::span<const Handle> handles, Access access) {
    map_run(*driver, at, handles, access);
  }
  void unmap(Address at, std::size_t n) { driver->unmap(at, n); }

  std::uint64_t calls() const {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < kCallCount; ++i) sum += calls(static_cast<Call>(i));
    return sum;
  }
  std::uint64_t calls(Call call) const {
    return driver->meter().count(ThreadRole::caller, call) +
           driver->meter().count(ThreadRole::mapper, call);
  }

  std::unique_ptr<Driver> driver;
  std::size_t page_size = 0;

 private:
  template <class Look>
  void with_mapping(Handle handle, Look look) {
    const Address at = driver->reserve(1);
    this->map(at, {&handle, 1}, Access::writable);
    look(at);
    this->unmap(at, 1);
    driver->free_range(at, 1);
  }

  std::vector<std::pair<Address, std::size_t>> mapped_;
};

}  // namespace vtensor::conformance
