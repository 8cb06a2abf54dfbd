// What the tests of the host driver share: a driver, and looks at what the kernel really holds.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/errors.h"
#include "conformance/subject.h"
#include "driver/driver.h"

namespace vtensor {

constexpr std::size_t kPage = 65536;

inline char* bytes_at(Address at) { return reinterpret_cast<char*>(at); }
inline volatile char& byte_at(Address at) { return *reinterpret_cast<volatile char*>(at); }

using conformance::copy_page;
using conformance::map_run;

inline std::vector<Handle> adjacent(Handle first, std::size_t n) {
  std::vector<Handle> handles(n);
  std::iota(handles.begin(), handles.end(), first);
  return handles;
}

// Every second handle, so that no two merge.
inline std::vector<Handle> scattered(Handle first, std::size_t n) {
  std::vector<Handle> handles(n);
  for (std::size_t i = 0; i < n; ++i) handles[i] = first + 2 * i;
  return handles;
}

// The lines of /proc/self/maps that reach into [at, at + bytes).
inline std::vector<std::string> maps_of(Address at, std::size_t bytes) {
  std::ifstream file("/proc/self/maps");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    const Address begin = std::strtoull(line.c_str(), nullptr, 16);
    const Address end = std::strtoull(line.c_str() + line.find('-') + 1, nullptr, 16);
    if (begin < at + bytes && end > at) lines.push_back(line);
  }
  return lines;
}

// How many of them are mappings of a driver's memfd with the given permissions ("rw-s", or "" for
// all).
inline std::size_t memfd_mappings(Address at, std::size_t bytes,
                                  const std::string& permissions = "") {
  std::size_t n = 0;
  for (const std::string& line : maps_of(at, bytes)) {
    n += line.find("memfd:vtensor") != std::string::npos &&
         line.find(" " + permissions) != std::string::npos;
  }
  return n;
}

// The descriptors that are memfds of host drivers.
inline std::set<int> memfds() {
  std::set<int> found;
  for (int fd = 0; fd < 256; ++fd) {
    char target[64] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (readlink(link.c_str(), target, sizeof target - 1) > 0 &&
        std::string(target).find("memfd:vtensor") != std::string::npos) {
      found.insert(fd);
    }
  }
  return found;
}

// The error that `call` throws; fails the test where it throws none.
template <typename E>
E error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  }
  FAIL("no error was thrown");
  std::abort();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct HostFixture {
  std::unique_ptr<Driver> driver = make_host_driver({.page_size = kPage});

  std::uint64_t calls(Call call) const { return driver->meter().count(ThreadRole::caller, call); }

  // Returns once it is done.
  void copy(CopyDirection direction, Address at, void* host, std::size_t bytes) const {
    driver->copy(direction, at, host, bytes, driver->copy_stream());
    conformance::await_work(*driver, driver->copy_stream());
  }

  std::size_t bytes_in_memfd() const {
    const auto fds = memfds();
    REQUIRE(fds.size() == 1);
    struct stat status = {};
    REQUIRE(fstat(*fds.begin(), &status) == 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }
};

}  // namespace vtensor
