// The host's limits: mappings, addresses, descriptors, file sizes, memory. Each is met by an error
// that says what to do, before anything has changed.
#include <sys/mman.h>
#include <sys/resource.h>

#include <filesystem>

#include "base/process.h"
#include "driver/host_map_limit.h"
#include "driver/host_memory.h"
#include "host_fixture.h"
#include "qemu.h"

namespace vtensor {
namespace {

// A driver under a limit over numbers of our own. Of 1,600 mappings 100 are headroom.
struct FakeLimit {
  std::size_t limit = 1600;
  std::size_t others = 1000;
  std::size_t drivers = 0;  // what the drivers under test hold
  int samples = 0;
  MapLimit checked{{[this] { return limit; },
                    [this] {
                      ++samples;
                      return others + drivers;
                    }}};

  const std::unique_ptr<Driver> driver = make_host_driver({.page_size = kPage, .limit = &checked});
  const Address range = driver->reserve(2000);
  const Handle h = driver->create(4000);

  // Counts the driver's range as the kernel does.
  void count() { drivers = maps_of(range, 2000 * kPage).size(); }
};

bool limit_is_out_of_reach() {
#ifdef __SANITIZE_THREAD__
  MESSAGE("skipped: at the kernel's limit ThreadSanitizer is refused its own memory");
  return true;
#else
  const std::size_t limit = MapLimit::kernel().limit();
  if (limit > 200000) MESSAGE("skipped: vm.max_map_count is too high to fill, " << limit);
  return limit > 200000;
#endif
}

// Mappings of our own, up to `count` in the whole process; none of them merge.
class Filler {
 public:
  explicit Filler(std::size_t count) {
    // Errors are worded while nothing can be mapped, and a sanitizer's heap maps memory for each
    // size that it has not at hand.
    for (std::size_t bytes = 16; bytes <= 1024; bytes += 16) std::string(bytes, ' ').swap(heap_);
    const std::size_t have = MapLimit::kernel().count();
    REQUIRE(count > have);
    const std::size_t wanted = count - have;
    bytes_ = (wanted + 1) * unit_;
    start_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    REQUIRE(start_ != MAP_FAILED);
    for (std::size_t i = 1; i < wanted; i += 2) {
      if (mprotect(start_ + i * unit_, unit_, PROT_READ) != 0) break;
    }
  }
  ~Filler() { munmap(start_, bytes_); }
  Filler(const Filler&) = delete;

 private:
  const std::size_t unit_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  char* start_;
  std::size_t bytes_;
  std::string heap_;
};

void set_limit(int resource, std::size_t value) {
  const rlimit limit = {value, value};
  if (setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) std::abort();
}

// A tree of files in the place of /proc and /sys/fs/cgroup.
class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (std::filesystem::temp_directory_path() / "vtensor-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~FakeRoot() { std::filesystem::remove_all(root_); }
  FakeRoot(const FakeRoot&) = delete;

  void write(const std::string& path, const std::string& text) const {
    const auto file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::size_t available() const {
    return free_host_memory((root_ / "proc").string(), (root_ / "cgroup").string()) / 5 * 4;
  }

 private:
  std::filesystem::path root_;
};

}  // namespace

TEST_CASE_FIXTURE(FakeLimit,
                  "a map that would pass the limit on mappings is refused, and says so") {
  std::size_t mapped = 0;
  std::string message;
  try {
    for (; mapped < 2000; ++mapped) {
      count();
      map_run(*driver, range + mapped * kPage, {{h + 2 * mapped}}, Access::writable);
    }
  } catch (const DriverError& error) {
    message = error.what();
    CHECK(error.call == "mmap");
    CHECK(error.name == "ENOMEM");
  }
  CHECK(mapped > 490);
  CHECK(mapped < 500);
  CHECK(contains(message, "at most 1600"));
  CHECK(contains(message, "a pool of larger pages"));
  CHECK(contains(message, "sysctl vm.max_map_count"));
  CHECK(memfd_mappings(range, 2000 * kPage) == mapped);
  CHECK(samples < 20);

  SUBCASE("what takes no more mappings still goes") {
    driver->remap(range, scattered(h, mapped), Access::writable, scattered(h + 1, mapped),
                  Access::writable);
    driver->unmap(range, mapped);
  }
  SUBCASE("after room was made it goes again") {
    driver->unmap(range, mapped);
    count();
    map_run(*driver, range, scattered(h, mapped), Access::writable);
  }
  SUBCASE("a raised limit counts at once") {
    limit = 3200;
    map_run(*driver, range + mapped * kPage, {{h + 2 * mapped}}, Access::writable);
  }
  SUBCASE("a second driver has no room either") {
    count();
    others += 10;
    const auto other = make_host_driver({.page_size = kPage, .limit = &checked});
    CHECK_THROWS_AS(other->reserve(1), DriverError);
  }
}

TEST_CASE_FIXTURE(FakeLimit, "a batch over the limit is refused before its first mapping") {
  const auto before = driver->meter().count(ThreadRole::caller, Call::mmap);
  CHECK_THROWS_AS(map_run(*driver, range, scattered(h, 600), Access::writable), DriverError);
  CHECK(driver->meter().count(ThreadRole::caller, Call::mmap) == before);
  map_run(*driver, range, adjacent(h, 2000), Access::writable);  // one mapping
  CHECK_THROWS_AS(driver->remap(range, adjacent(h, 600), Access::writable, scattered(h + 1000, 600),
                                Access::copy_on_write),
                  DriverError);
  CHECK(memfd_mappings(range, 2000 * kPage) == 1);
}

TEST_CASE_FIXTURE(FakeLimit, "what unmapping and remapping cut is counted") {
  map_run(*driver, range, adjacent(h, 800), Access::writable);
  SUBCASE("unmapping") {
    for (std::size_t i = 1; i < 400; i += 2) {
      driver->unmap(range + i * kPage, 1);
    }
  }
  SUBCASE("remapping") {
    for (std::size_t i = 1; i < 400; i += 2) {
      driver->remap(range + i * kPage, {{h + i}}, Access::writable, {{h + i}},
                    Access::copy_on_write);
    }
  }
  count();
  CHECK(drivers > 400);
  CHECK_THROWS_AS(map_run(*driver, range + 800 * kPage, scattered(h + 2000, 150), Access::writable),
                  DriverError);
}

TEST_CASE_FIXTURE(FakeLimit, "mappings that others make meanwhile are noticed") {
  map_run(*driver, range, scattered(h, 100), Access::writable);
  count();
  others = 1300;
  CHECK_THROWS_AS(map_run(*driver, range + 200 * kPage, scattered(h + 400, 300), Access::writable),
                  DriverError);
}

// The driver saw a lot of room, and then others took all of it.
TEST_CASE_FIXTURE(FakeLimit, "what could not be read is looked at again soon") {
  const auto [limit_read, others_read] = std::pair{limit, others};
  for (const bool of_limit : {false, true}) {
    of_limit ? limit = std::size_t{1} << 40 : others = 0;
    checked.check_now(1);
    limit = limit_read, others = others_read;
    const int before = samples;
    for (std::size_t n = 0; n < 64; ++n) checked.admit(1);
    CHECK(samples == before + 1);
  }
}

TEST_CASE("at the kernel's limit a refusal leaves all as it was, and taking down works") {  // I8
  if (limit_is_out_of_reach() || under_qemu("takes mappings that the process cannot count")) return;
  constexpr std::size_t kPages = 200;
  MapLimit checked(MapLimit::kernel());
  const auto driver = make_host_driver({.page_size = kPage, .limit = &checked});
  const Address range = driver->reserve(kPages);
  const Handle h = driver->create(4 * kPages);
  const auto from = adjacent(h, 100);
  const auto to = scattered(h + kPages, 40);
  map_run(*driver, range, from, Access::writable);
  std::memset(bytes_at(range), 7, 100 * kPage);
  const auto before = maps_of(range, kPages * kPage);
  const auto made_before = driver->meter().count(ThreadRole::caller, Call::mmap);
  std::function<void()> operation;

  SUBCASE("map") {
    operation = [&] { map_run(*driver, range + 120 * kPage, to, Access::writable); };
  }
  SUBCASE("remap") {
    operation = [&] {
      driver->remap(range + 30 * kPage, std::span(from).subspan(30, 40), Access::writable, to,
                    Access::copy_on_write);
    };
  }
  std::string message;
  {
    const Filler filler(MapLimit::kernel().limit() - 10);
    try {
      operation();
    } catch (const UndoFailed&) {
      message = "the undoing failed";
    } catch (const DriverError& error) {
      message = error.what();
    }
    CHECK(driver->meter().count(ThreadRole::caller, Call::mmap) > made_before);
    // Close: first pages out of the middle, then all. More than one can be split off.
    for (std::size_t i = 1; i < 12; i += 2) {
      driver->unmap(range + i * kPage, 1);
    }
    for (std::size_t i = 0; i < 12; i += 2) {
      CHECK(byte_at(range + i * kPage) == 7);
      driver->unmap(range + i * kPage, 1);
    }
    for (std::size_t i = 12; i < 100; ++i) CHECK(byte_at(range + i * kPage) == 7);
  }
  CHECK(contains(message, "vm.max_map_count"));
  map_run(*driver, range, std::span(from).first(12), Access::writable);
  CHECK(maps_of(range, kPages * kPage) == before);
  driver->unmap(range, from.size());
  driver->free_range(range, kPages);
}

TEST_CASE("too many addresses are refused") {
  const auto driver = make_host_driver({.page_size = kPage});
  for (const std::size_t pages :
       {SIZE_MAX, SIZE_MAX / kPage, SIZE_MAX / kPage + 1, (std::size_t{1} << 47) / kPage}) {
    const auto error = error_of<DriverError>([&] { driver->reserve(pages); });
    CHECK(error.call == "mmap");
    CHECK(error.name == "ENOMEM");
    CHECK(contains(error.what(), "lower the capacity"));
  }
  driver->free_range(driver->reserve(1), 1);
}

TEST_CASE("a limit on file sizes bounds the handles, and raises no signal") {
  CHECK(in_child([] {
          fork_depth = 0;
          set_limit(RLIMIT_FSIZE, 10 * kPage + 5);
          const auto driver = make_host_driver({.page_size = kPage});
          const Handle h = driver->create(10);
          const Address range = driver->reserve(10);
          map_run(*driver, range, adjacent(h, 10), Access::writable);
          byte_at(range + 9 * kPage) = 1;
          copy_page(*driver, h + 9, range);
          if (byte_at(range + 9 * kPage) != 0) return 1;
          try {
            driver->create(1);
          } catch (const DeviceOutOfMemory& error) {
            return contains(error.what(), "ulimit -f") ? 0 : 2;
          }
          return 3;
        }) == 0);
  CHECK(in_child([] {
          fork_depth = 0;
          set_limit(RLIMIT_FSIZE, kPage - 1);
          try {
            make_host_driver({.page_size = kPage});
          } catch (const DriverError& error) {
            return contains(error.what(), "ulimit -f") ? 0 : 1;
          }
          return 2;
        }) == 0);
}

TEST_CASE("available memory is 80% of what the machine and all cgroups leave") {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    1000 kB\nCached: 5 kB\n");
  CHECK(root.available() == 1000 * 1024 / 5 * 4);  // no cgroups

  SUBCASE("version 2") {
    root.write("proc/self/cgroup", "0::/a/b\n");
    root.write("cgroup/a/b/memory.max", "max\n");
    root.write("cgroup/a/b/memory.current", "100\n");
    CHECK(root.available() == 1000 * 1024 / 5 * 4);
    root.write("cgroup/a/memory.max", "50000\n");  // an ancestor's limit
    root.write("cgroup/a/memory.current", "30000\n");
    CHECK(root.available() == 20000 / 5 * 4);
    root.write("cgroup/a/memory.stat", "anon 1\ninactive_file 5000\n");
    CHECK(root.available() == 25000 / 5 * 4);
    root.write("cgroup/a/b/memory.max", "90\n");  // below what is used
    CHECK(root.available() == 0);
  }
  SUBCASE("version 2, whose path is the host's, seen from a container") {
    root.write("proc/self/cgroup", "0::/../docker/x\n");
    root.write("cgroup/memory.max", "40000\n");
    root.write("cgroup/memory.current", "30000\n");
    CHECK(root.available() == 10000 / 5 * 4);
  }
  SUBCASE("version 1") {
    root.write("proc/self/cgroup", "3:cpuset:/z\n2:cpu,memory:/a\n0::/\n");
    root.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    root.write("cgroup/memory/memory.usage_in_bytes", "777\n");
    CHECK(root.available() == 1000 * 1024 / 5 * 4);
    root.write("cgroup/memory/a/memory.limit_in_bytes", "70000\n");
    root.write("cgroup/memory/a/memory.usage_in_bytes", "60000\n");
    root.write("cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 10000\n");
    CHECK(root.available() == 20000 / 5 * 4);
  }
}

}  // namespace vtensor
