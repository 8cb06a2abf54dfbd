// Every operation with a refusal injected at every driver call it makes: whole or not at all (I8).
// What `map` does is in test_driver_batches.cpp.
#include <doctest/doctest.h>

#include "base/errors.h"
#include "conformance/refusals.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

namespace {

// A range with pages [1, 3) free to operate on, between two neighbours that must never change.
template <class T>
struct Scene : Bench<T> {
  std::vector<Handle> neighbours = this->make_handles(2, 100);
  std::vector<Handle> from = this->make_handles(2, 1);
  std::vector<Handle> to = this->make_handles(2, 11);
  Address range = this->driver->reserve(4);
  Address at = range + this->page_size;

  Scene() {
    this->map(range, {&neighbours[0], 1}, Access::writable);
    this->map(range + 3 * this->page_size, {&neighbours[1], 1}, Access::writable);
  }

  // `handles` stand at `at`, with that access, and hold marks that count up from `mark`.
  void check_mapped(const std::vector<Handle>& handles, Access access, std::uint8_t mark) {
    for (std::size_t i = 0; i < handles.size(); ++i) {
      const auto value = static_cast<std::uint8_t>(mark + i);
      CHECK(this->holds(at, i, value));
      if (access == Access::writable) {
        this->fill(at, i, 55);
        CHECK(this->is_marked(handles[i], 55));
        this->fill(at, i, value);
      } else if (this->driver->traits().kernel_copies_on_write) {
        CHECK(this->is_marked(handles[i], value));
      } else {
        CHECK_FALSE(T::stores(at + i * this->page_size));
      }
    }
    check_neighbours();
  }

  // Nothing stands at these pages of `at`: they can be mapped.
  void check_unmapped(std::vector<std::size_t> pages) {
    for (const std::size_t i : pages) {
      const Address page = at + i * this->page_size;
      this->map(page, {&to[i], 1}, Access::writable);
      CHECK(this->holds(at, i, static_cast<std::uint8_t>(11 + i)));
      this->unmap(page, 1);
    }
    check_neighbours();
  }

  void check_neighbours() {
    CHECK(this->holds(range, 0, 100));
    CHECK(this->holds(range, 3, 101));
  }
};

}  // namespace

DRIVER_TEST("unmap is whole or not at all") {
  for (const Access access : {Access::writable, Access::copy_on_write}) {
    refuse_each_call<T, Scene<T>>([&](Scene<T>& s) { s.map(s.at, s.from, access); },
                                  [&](Scene<T>& s) { s.unmap(s.at, s.from.size()); },
                                  [&](Scene<T>& s, Outcome outcome) {
                                    REQUIRE(outcome != Outcome::broken);
                                    if (outcome == Outcome::done) {
                                      s.check_unmapped({0, 1});
                                    } else {
                                      s.check_mapped(s.from, access, 1);
                                    }
                                  });
  }
}

DRIVER_TEST("remap is whole or not at all") {
  for (const bool same_handles : {true, false}) {
    for (const Access before : {Access::writable, Access::copy_on_write}) {
      for (const Access after : {Access::writable, Access::copy_on_write}) {
        refuse_each_call<T, Scene<T>>(
            [&](Scene<T>& s) { s.map(s.at, s.from, before); },
            [&](Scene<T>& s) {
              s.driver->remap(s.at, s.from, before, same_handles ? s.from : s.to, after);
            },
            [&](Scene<T>& s, Outcome outcome) {
              if (outcome == Outcome::done) {
                s.check_mapped(same_handles ? s.from : s.to, after, same_handles ? 1 : 11);
              } else if (outcome == Outcome::refused) {
                s.check_mapped(s.from, before, 1);
              } else {
                s.check_neighbours();
              }
            });
      }
    }
  }
}

DRIVER_TEST("content operations leave other pages and all mappings alone") {
  const auto arrange = [](Scene<T>& s) { s.map(s.at, s.from, Access::writable); };
  refuse_each_call<T, Scene<T>>(
      arrange, [](Scene<T>& s) { s.driver->zero(s.at, s.page_size, s.driver->side_stream()); },
      [](Scene<T>& s, Outcome outcome) {
        CHECK(outcome != Outcome::broken);
        if (outcome == Outcome::done) CHECK(s.holds(s.at, 0, 0));
        await_work(*s.driver, s.driver->side_stream());
        s.unmap(s.at, s.from.size());
        s.map(s.at, s.from, Access::writable);
        s.fill(s.at, 0, 1);
        s.check_mapped(s.from, Access::writable, 1);
      });
  refuse_each_call<T, Scene<T>>(
      arrange, [](Scene<T>& s) { copy_page(*s.driver, s.to[0], s.at); },
      [](Scene<T>& s, Outcome outcome) {
        CHECK(outcome != Outcome::broken);
        if (outcome == Outcome::done) CHECK(s.is_marked(s.to[0], 1));
        // It may be copied into again, and mapped; after a time-out others may.
        const std::size_t next = outcome == Outcome::timed_out ? 1 : 0;
        copy_page(*s.driver, s.to[next], s.at + s.page_size);
        CHECK(s.is_marked(s.to[next], 2));
        s.check_mapped(s.from, Access::writable, 1);
      });
  refuse_each_call<T, Scene<T>>(
      arrange, [](Scene<T>& s) { s.driver->populate(s.at, 2); },
      [](Scene<T>& s, Outcome outcome) {
        CHECK(outcome != Outcome::broken);
        s.check_mapped(s.from, Access::writable, 1);
      });
}

DRIVER_TEST("a refused create is out of memory, and costs nothing") {  // I9
  Bench<T> bench;
  if (!T::is_cuda) return;  // handles of the host are made without a call
  // The first call of each operation has the thread relaxed beside captures.
  bench.driver->meter().fail_after(0);
  CHECK_THROWS_AS(bench.driver->create(1), DriverError);
  bench.driver->meter().fail_after(1);
  CHECK_THROWS_AS(bench.driver->create(1), DeviceOutOfMemory);
  const Handle handle = bench.driver->create(1);
  bench.driver->meter().fail_after(1);
  CHECK_THROWS_AS(bench.driver->destroy(handle, 1), DriverError);
  bench.mark(handle, 3);  // still there
  CHECK(bench.is_marked(handle, 3));
  bench.driver->destroy(handle, 1);
}

DRIVER_TEST("refused ranges are as before") {
  {
    Bench<T> bench;
    bench.driver->meter().fail_after(0);
    CHECK_THROWS_AS(bench.driver->reserve(2), DriverError);
    const Address range = bench.driver->reserve(2);
    bench.driver->meter().fail_after(0);
    CHECK_THROWS_AS(bench.driver->free_range(range, 2), DriverError);
    const auto handles = bench.make_handles(2, 1);
    bench.map(range, handles, Access::writable);
    CHECK(bench.holds(range, 1, 2));
    bench.unmap(range, handles.size());
    bench.driver->free_range(range, 2);
  }
  if (T::is_cuda) CHECK(T::leaks() == "");
}
