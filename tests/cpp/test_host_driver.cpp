// The host driver against the kernel: what is really mapped, shared, parted and given back.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "driver/host_driver.h"

namespace vtensor {
namespace {

constexpr std::size_t kPage = 65536;

char* bytes_at(Address at) { return reinterpret_cast<char*>(at); }
volatile char& byte_at(Address at) { return *reinterpret_cast<volatile char*>(at); }

std::vector<Handle> adjacent(Handle first, std::size_t n) {
  std::vector<Handle> handles(n);
  std::iota(handles.begin(), handles.end(), first);
  return handles;
}

// Lines of /proc/self/maps inside [at, at + bytes), as text.
std::vector<std::string> maps_of(Address at, std::size_t bytes) {
  std::ifstream file("/proc/self/maps");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    const Address begin = std::strtoull(line.c_str(), nullptr, 16);
    const Address end = std::strtoull(line.c_str() + line.find('-') + 1, nullptr, 16);
    if (begin < at + bytes && end > at) lines.push_back(line);
  }
  return lines;
}

std::size_t mappings_of_memfd(Address at, std::size_t bytes) {
  std::size_t n = 0;
  for (const auto& line : maps_of(at, bytes)) n += line.find("memfd:vtensor") != std::string::npos;
  return n;
}

std::set<int> memfds() {
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

struct Fixture {
  std::unique_ptr<Driver> driver = make_host_driver({.page_size = kPage, .strict_holes = false});

  std::uint64_t calls(Call call) const { return driver->meter().count(ThreadRole::caller, call); }
  std::size_t bytes_in_memfd() const {
    struct stat status {};
    const auto fds = memfds();
    REQUIRE(fds.size() == 1);
    REQUIRE(fstat(*fds.begin(), &status) == 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }
};

// Runs `body` in a forked child and returns its exit status, or -signal.
int in_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("traits") {
  const auto driver = make_host_driver(HostOptions{});
  const DriverTraits& traits = driver->traits();
  CHECK(traits.name == "host");
  CHECK(traits.device.type == 1);
  CHECK(traits.page_size == 65536);
  CHECK(traits.page_size % traits.granularity == 0);
  CHECK(traits.available > 0);
  CHECK(traits.available % traits.page_size == 0);
}

TEST_CASE("page sizes that are no power of two, or below the granularity, are refused") {
  for (const std::size_t size : {std::size_t{1}, std::size_t{2048}, std::size_t{12288}, SIZE_MAX}) {
    CHECK_THROWS_AS(make_host_driver({.page_size = size}), InvalidArgument);
  }
  for (const std::size_t size : {std::size_t{4096}, std::size_t{1} << 21, std::size_t{1} << 30}) {
    const auto driver = make_host_driver({.page_size = size});
    const Address range = driver->reserve(2);
    CHECK(range % size == 0);
    driver->free_range(range, 2);
  }
}

TEST_CASE_FIXTURE(Fixture, "a range is aligned, reads as zeros, and is freed whole") {
  const Address range = driver->reserve(100);
  CHECK(range % kPage == 0);
  CHECK(byte_at(range) == 0);
  CHECK(byte_at(range + 100 * kPage - 1) == 0);
  driver->free_range(range, 100);
  CHECK(maps_of(range, 100 * kPage).empty());
}

TEST_CASE_FIXTURE(Fixture, "adjacent handles at adjacent pages are one mmap and one mapping") {
  const Address range = driver->reserve(1100);
  const auto handles = adjacent(driver->create(1100), 1100);
  const auto before = calls(Call::mmap);
  driver->map(range, std::span(handles).first(1000), Access::writable);
  CHECK(calls(Call::mmap) == before + 1);
  CHECK(mappings_of_memfd(range, 1100 * kPage) == 1);
  for (std::size_t i = 1000; i < 1100; ++i) {
    driver->map(range + i * kPage, std::span(handles).subspan(i, 1), Access::writable);
  }
  CHECK(mappings_of_memfd(range, 1100 * kPage) == 1);
  driver->unmap(range, handles, Access::writable);
  driver->free_range(range, 1100);
}

TEST_CASE_FIXTURE(Fixture, "one handle at two addresses is the same memory") {
  const Address range = driver->reserve(4);
  const Handle h = driver->create(1);
  driver->map(range, {{h}}, Access::writable);
  driver->map(range + 3 * kPage, {{h}}, Access::writable);
  byte_at(range + 17) = 42;
  CHECK(byte_at(range + 3 * kPage + 17) == 42);
  CHECK(byte_at(range + kPage + 17) == 0);
}

TEST_CASE_FIXTURE(Fixture,
                  "a write to a guarded page parts it, from the handle and from the other") {  // I6
  const Address range = driver->reserve(3);
  const Handle h = driver->create(1);
  driver->map(range, {{h}}, Access::writable);
  std::memset(bytes_at(range), 1, kPage);
  driver->remap(range, {{h}}, Access::writable, {{h}}, Access::guarded);
  driver->map(range + kPage, {{h}}, Access::guarded);
  std::uint8_t parted[2];
  driver->find_parted(range, parted);
  CHECK(parted[0] == 0);
  CHECK(parted[1] == 0);

  byte_at(range + 5000) = 2;
  CHECK(byte_at(range + kPage + 5000) == 1);
  driver->find_parted(range, parted);
  CHECK(parted[0] == 1);
  CHECK(parted[1] == 0);
  byte_at(range + kPage + 5000) = 3;
  CHECK(byte_at(range + 5000) == 2);
  driver->find_parted(range, parted);
  CHECK(parted[1] == 1);

  driver->map(range + 2 * kPage, {{h}}, Access::writable);
  CHECK(byte_at(range + 2 * kPage + 5000) == 1);
}

}  // namespace vtensor
