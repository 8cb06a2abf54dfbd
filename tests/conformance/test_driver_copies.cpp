// What every driver promises of copies between its pages and memory of the host: they run beside
// their caller, in their order, in a stream of their own.
#include <doctest/doctest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "base/align.h"
#include "base/errors.h"
#include "conformance/refusals.h"
#include "conformance/streams.h"
#include "conformance/subject.h"

using namespace vtensor;
using namespace vtensor::conformance;

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A part of one block that was drawn once: another one for each seed.
Bytes random_bytes(std::size_t n, unsigned seed) {
  constexpr std::size_t kMost = 5 * kMiB + 4096, kStep = 4093;
  static const std::vector<std::uint64_t> block = [] {
    std::vector<std::uint64_t> numbers(2 * kMost / sizeof(std::uint64_t));
    std::mt19937_64 random(1);
    std::generate(numbers.begin(), numbers.end(), std::ref(random));
    return numbers;
  }();
  const auto* const from = reinterpret_cast<const std::uint8_t*>(block.data());
  const std::size_t begin = seed * kStep % kMost;
  return {from + begin, from + begin + n};
}

// Mapped pages, and copies of them.
template <class T>
class Pages : public Bench<T> {
 public:
  explicit Pages(std::size_t bytes = 1)
      : at(this->mapped(this->make_handles(ceil_div(bytes, this->page_size), 0),
                        Access::writable)) {}
  ~Pages() {
    if (this->driver != nullptr) await_copies();
  }

  // What is named lasts until `await_copies`.
  void in(std::size_t offset, const Bytes& from) {
    this->driver->copy(CopyDirection::in, at + offset, const_cast<std::uint8_t*>(from.data()),
                       from.size(), this->driver->copy_stream());
  }
  void in(std::size_t offset, Bytes&& from) = delete;
  void out(Bytes& to, std::size_t offset) {
    this->driver->copy(CopyDirection::out, at + offset, to.data(), to.size(),
                       this->driver->copy_stream());
  }
  void await_copies() { await_work(*this->driver, this->driver->copy_stream()); }
  Bytes read(std::size_t offset, std::size_t n) {
    Bytes bytes(n);
    if (n != 0) out(bytes, offset);
    await_copies();
    return bytes;
  }

  const Address at;
};

template <class T>
struct CopyScene : Pages<T> {
  Bytes memory = Bytes(this->page_size, 7);
};

}  // namespace

DRIVER_TEST("bytes are copied in and out, from and to anywhere") {
  const std::size_t sizes[] = {1, 4095, 4097, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB + 3};
  Pages<T> pages(6 * kMiB);
  for (const std::size_t size : sizes) {
    CAPTURE(size);
    for (const std::size_t offset : {std::size_t{0}, std::size_t{777}}) {
      const Bytes from = random_bytes(size, static_cast<unsigned>(size + offset));
      const Bytes before = pages.read(0, offset), behind = pages.read(offset + size, 9);
      pages.in(offset, from);
      CHECK(pages.read(offset, size) == from);
      CHECK(pages.read(0, offset) == before);  // and nothing beside it
      CHECK(pages.read(offset + size, 9) == behind);
    }
  }
  std::uint8_t byte = 1;
  pages.driver->copy(CopyDirection::out, pages.at, &byte, 0, pages.driver->copy_stream());
  pages.driver->copy(CopyDirection::in, pages.at, &byte, 0, pages.driver->copy_stream());
  pages.await_copies();
  CHECK(byte == 1);
}

DRIVER_TEST("bytes are copied within the device, in the order of a stream") {
  Pages<T> pages(2 * kMiB);
  Driver& driver = *pages.driver;
  const Bytes bytes = random_bytes(kMiB - 3, 5);
  pages.in(0, bytes);
  pages.await_copies();
  driver.copy(CopyDirection::within, pages.at + kMiB + 3, reinterpret_cast<void*>(pages.at),
              bytes.size(), driver.side_stream());
  await_work(driver, driver.side_stream());
  CHECK(pages.read(kMiB + 3, bytes.size()) == bytes);
}

DRIVER_TEST("behind a fence of the copying stream all copies before it are done") {
  Pages<T> pages(2 * kMiB);
  Driver& driver = *pages.driver;
  CHECK_FALSE(driver.capturing("test", driver.copy_stream()));
  for (unsigned round = 0; round < 6; ++round) {
    const Bytes from = random_bytes(2 * kMiB, round);
    std::vector<Bytes> to(4, Bytes(2 * kMiB));
    pages.in(0, from);
    for (Bytes& each : to) pages.out(each, 0);
    const FencePtr fence = driver.fence(driver.copy_stream());
    if (fence != nullptr) {
      driver.order(driver.copy_stream(), *fence);
      CHECK(comes_true([&] { return driver.passed(*fence); }));
      CHECK(driver.passed(*fence));
    }
    for (const Bytes& each : to) CHECK(each == from);
  }
  // The host has nothing to wait for where all is copied.
  if (!T::is_cuda) CHECK(driver.fence(driver.copy_stream()) == nullptr);
}

TEST_CASE("a fence of the copying stream passes no earlier than the copies before it") {
  Pages<SimulatedCuda> pages(kMiB);
  Driver& driver = *pages.driver;
  const SimcudaControl& control = SimulatedCuda::control();
  const Stream stream = driver.copy_stream();
  CHECK(stream != driver.side_stream());
  control.hold(stream);
  const Bytes from = random_bytes(kMiB, 1);
  pages.in(0, from);
  const FencePtr fence = driver.fence(stream);
  pages.in(0, from);
  for (int items = 0; items < 2; ++items) {
    CHECK_FALSE(driver.passed(*fence));
    control.step(stream);
  }
  CHECK(driver.passed(*fence));
  CHECK(control.pending(stream) == 1);
  control.release(stream);
  pages.await_copies();
}

DRIVER_TEST("copies in opposite directions over the same memory keep their order") {
  for (const std::size_t size : {3 * kMiB + 5, std::size_t{4097}, 2 * kMiB, std::size_t{1}}) {
    CAPTURE(size);
    const std::size_t rounds = size < kMiB ? 20 : 4;
    Pages<T> pages(4 * (size + 1));
    const std::size_t one = 0, two = size, three = 2 * size, four = 3 * size;
    for (unsigned round = 0; round < rounds; ++round) {
      const Bytes first = random_bytes(size, 2 * round), second = random_bytes(size, 2 * round + 1);
      Bytes memory(size), last(size);
      // Through the same memory of the host, and through the same pages.
      pages.in(one, first);
      pages.in(three, second);
      pages.out(memory, one);
      pages.in(two, memory);
      pages.out(memory, three);
      pages.in(four, memory);
      pages.out(last, four);
      pages.in(four, first);
      pages.await_copies();
      CHECK(memory == second);
      CHECK(last == second);
      CHECK(pages.read(two, size) == first);
      CHECK(pages.read(four, size) == first);
    }
  }
}

DRIVER_TEST("what is ordered behind copies finds them done") {
  constexpr std::size_t kSize = 4 * kMiB;
  Pages<T> pages(kSize);
  Driver& driver = *pages.driver;
  for (unsigned round = 0; round < 3; ++round) {
    const Bytes from = random_bytes(kSize, round);
    pages.in(0, from);
    Bytes to(kSize);
    pages.out(to, 0);
    if (const FencePtr fence = driver.fence(driver.copy_stream())) {
      driver.order(0, *fence);
      if (!T::is_cuda) CHECK(driver.passed(*fence));  // the caller is what works there
    }
    driver.zero(pages.at, kSize, 0);
    pages.await_copies();
    CHECK(to == from);
    await_work(driver, 0);
    CHECK(pages.read(0, kSize) == Bytes(kSize));
  }
}

TEST_CASE("copies wait for what the copying stream was ordered behind") {
  Pages<SimulatedCuda> pages(kMiB);
  Driver& driver = *pages.driver;
  const SimcudaControl& control = SimulatedCuda::control();
  pages.fill(pages.at, 0, 1);
  control.hold(0);
  driver.zero(pages.at, kMiB, 0);
  const FencePtr fence = driver.fence(0);
  driver.order(driver.copy_stream(), *fence);
  Bytes to(kMiB, 9);
  pages.out(to, 0);
  control.run();
  CHECK(control.pending(driver.copy_stream()) != 0);
  CHECK(to == Bytes(kMiB, 9));
  control.release(0);
  pages.await_copies();
  CHECK(to == Bytes(kMiB));
}

CUDA_DRIVER_TEST("a refused copy launches nothing") {  // I8
  using Copying = CopyScene<T>;
  const auto each = [&](auto operation, std::uint8_t memory, std::uint8_t page) {
    refuse_each_call<T, Copying>(
        [](Copying& s) { s.fill(s.at, 0, 3); }, operation,
        [&](Copying& s, Outcome outcome) {
          CHECK(outcome != Outcome::broken);
          s.await_copies();
          const bool done = outcome == Outcome::done;
          CHECK(s.memory == Bytes(s.page_size, done ? memory : 7));
          CHECK(s.read(0, s.page_size) == Bytes(s.page_size, done ? page : 3));
        });
  };
  each([](Copying& s) { s.out(s.memory, 0); }, 3, 3);
  each([](Copying& s) { s.in(0, s.memory); }, 7, 7);
}

// With a default stack as large as all addresses, no thread can be made.
TEST_CASE("where the host gives no thread for copies, that is said, and nothing is copied") {
  Pages<Host> pages(kMiB);
  Bytes memory(kMiB, 7);
  pthread_attr_t before, huge;
  REQUIRE(pthread_getattr_default_np(&before) == 0);
  REQUIRE(pthread_getattr_default_np(&huge) == 0);
  REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 47) == 0);
  REQUIRE(pthread_setattr_default_np(&huge) == 0);
  std::string said;
  try {
    pages.out(memory, 0);
  } catch (const DriverError& error) {
    said = error.what();
  }
  CHECK(pthread_setattr_default_np(&before) == 0);
  CHECK(said.starts_with("[host copy] a thread for copies was refused with E"));
  CHECK(pages.driver->fence(pages.driver->copy_stream()) == nullptr);
  CHECK(memory == Bytes(kMiB, 7));
  pages.out(memory, 0);
  pages.await_copies();
  CHECK(memory == pages.read(0, kMiB));
}

DRIVER_TEST("many threads copy at once") {
  constexpr std::size_t kSize = 3 * kMiB / 2;
  Pages<T> pages(4 * kSize);
  std::atomic<int> wrong{0};
  in_threads(4, [&](std::size_t t) {
    Driver& driver = *pages.driver;
    for (unsigned round = 0; round < 5; ++round) {
      const Bytes from = random_bytes(kSize, static_cast<unsigned>(t) + 4 * round);
      Bytes to(kSize);
      pages.in(t * kSize, from);
      pages.out(to, t * kSize);
      const FencePtr fence = driver.fence(driver.copy_stream());
      if (fence != nullptr) wrong += !comes_true([&] { return driver.passed(*fence); });
      wrong += to != from;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("a child that is forked beside copies is refused, and ends", T, Host,
                   SimulatedCuda) {  // I13
  constexpr std::size_t kSize = 4 * kMiB;
  Pages<T> pages(kSize);
  const Bytes from = random_bytes(kSize, 1);
  pages.in(0, from);
  pages.await_copies();
  if (T::is_cuda) SimulatedCuda::control().hold(pages.driver->copy_stream());
  std::vector<Bytes> to(20, Bytes(kSize));
  for (Bytes& each : to) pages.out(each, 0);

  const int failed = in_child([&] {
    alarm(30);
    int failures = 0;
    const auto refused = [&failures](auto operation) {
      try {
        operation();
        ++failures;
      } catch (const Error&) {
      }
    };
    const std::uint64_t before = pages.calls();
    Driver& driver = *pages.driver;
    refused([&] { pages.out(to[0], 0); });
    refused([&] { pages.in(0, from); });
    refused([&] { driver.fence(driver.copy_stream()); });
    failures += pages.calls() != before;
    pages.driver.reset();
    return failures;
  });
  CHECK(failed == 0);
  if (T::is_cuda) SimulatedCuda::control().release(pages.driver->copy_stream());
  pages.await_copies();
  for (const Bytes& each : to) CHECK(each == from);
  pages.in(0, to[0]);
  CHECK(pages.read(0, kSize) == from);
}

DRIVER_TEST("a driver that ends finishes its copies first") {  // I14
  T::prepare();
  const std::string before = T::leaks();
  constexpr std::size_t kSize = 4 * kMiB;
  const Bytes from = random_bytes(kSize, 1);
  std::vector<Bytes> to(10, Bytes(kSize));
  {
    Pages<T> pages(kSize);
    pages.in(0, from);
    for (Bytes& each : to) pages.out(each, 0);
    pages.driver.reset();
  }
  for (const Bytes& each : to) CHECK(each == from);
  CHECK(T::leaks() == before);
}
