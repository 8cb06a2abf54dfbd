// Readers of shared ranges beside their writers: C++ threads drive buffers as tensors do, and
// others read them as processes do, through files of their own. Pages come and go between the
// writers, calls are refused now and then, and readers come and go. Under ThreadSanitizer and
// AddressSanitizer.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/errors.h"
#include "cpp/hammered.h"
#include "driver/driver.h"
#include "kv/slot_cache.h"
#include "owner.h"
#include "policy/page_pool.h"
#include "simcuda/client.h"
#include "tensor/buffer.h"
#include "vmm/page_socket.h"
#include "vmm/range_reader.h"
#include "vmm/shared_file.h"
#include "vmm/shared_layout.h"

namespace vtensor {
namespace {

constexpr std::size_t kBytes = 4096;  // of a page
constexpr std::size_t kItem = kBytes / 2;
constexpr std::size_t kRows = 2, kCapacity = 64;
constexpr int kSteps = 1500;
const Caller kCaller{"test"};

// A pool of the host, or of the simulated device.
std::shared_ptr<PagePool> open_pool(bool on_device, std::size_t pages, std::size_t prefetch) {
  PoolOptions options;
  options.budget = pages * kBytes;
  options.prefetch = prefetch;
  options.cache = prefetch;
  options.patience = kPatience;
  auto driver = on_device ? make_cuda_driver(simulated(kBytes, true))
                          : make_host_driver({.page_size = kBytes, .shareable = true});
  return PagePool::create(std::move(driver), options);
}

// As another process gets them, of ranges of the pool.
std::unique_ptr<RangeReaders> readers_of(std::span<const Descriptor> ranges, Descriptor memory,
                                         std::size_t words = 2) {
  return std::make_unique<RangeReaders>(ranges, std::move(memory), words, simulated(kBytes, true));
}

// Every position of every row holds the writer's number.
class Writer : public Owner {
 public:
  Writer(const std::shared_ptr<PagePool>& pool, char number, std::size_t words = 2)
      : Owner(pool, kCaller, {kRows, kItem, kCapacity, 0, false}), number_(number) {
    buffer_->share("test", words);
  }

  // Shows what it adds once it is written.
  void grow(std::size_t n) {
    const Interval added = Owner::grow(n, false);
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t i = added.begin; i < added.end; ++i)
        std::memset(reinterpret_cast<char*>(buffer_->address_of(row, i)), number_, kItem);
    }
    buffer_->show_positions();
  }
  Descriptor open_memory() const { return buffer_->pool()->open_for_readers("test"); }
  Descriptor open_range() const { return buffer_->range().shared()->open_for_reader("test"); }
  std::unique_ptr<RangeReaders> read() const {
    const Descriptor range = open_range();
    return readers_of({&range, 1}, open_memory());
  }
  // A change of the table that has not ended. Requires: the pool's lock.
  void show_page_0_again() VT_LOCKED { buffer_->range().show({0, {0, 1}}); }
  char number() const { return number_; }
  std::size_t row_bytes() const { return buffer_->range().row_bytes(); }

 private:
  const char number_;
};

// Whether all that the reader shows is the writer's.
bool shows(const RangeReader& reader, const Writer& writer) {
  const std::size_t begin = reader.words()[0], end = reader.words()[1];
  for (std::size_t row = 0; row < kRows; ++row) {
    const auto* const at = reinterpret_cast<const char*>(reader.base() + row * writer.row_bytes());
    const auto is_number = [&](char byte) { return byte == writer.number(); };
    if (!std::all_of(at + begin * kItem, at + end * kItem, is_number)) return false;
  }
  return true;
}

void write(Writer& writer, unsigned seed) {
  std::mt19937 random(seed);
  for (int step = 0; step < kSteps; ++step) {
    try {
      const std::size_t n = 1 + random() % 9;
      switch (random() % 5) {
        case 0:
          writer.shrink(n, false);
          break;
        case 1:
          writer.shrink(writer.length() == kCapacity ? writer.length() : 0, true);
          break;
        case 2:
          writer.prepare(n);
          break;
        default:
          writer.grow(n);
      }
    } catch (const Error&) {  // no page, or a refused call
      try {
        writer.shrink(4, false);
      } catch (const Error&) {
      }
    }
  }
}

void read(const Writer& writer, unsigned seed, const std::atomic<bool>& over,
          std::atomic<std::size_t>& wrong, std::atomic<std::size_t>& syncs) {
  std::mt19937 random(seed);
  while (!over) {
    try {
      const std::unique_ptr<RangeReaders> reader = writer.read();
      CallMeter& meter = reader->memory().driver().meter();
      for (int i = static_cast<int>(random() % 60); i > 0 && !over; --i) {
        if (random() % 8 == 0) meter.fail_after(random() % 3);
        bool synced = false;  // else it may show pages of the next length, and of the last one
        try {
          syncs += reader->sync(kCaller, reader->stale());
          synced = true;
        } catch (const Error&) {  // also what was refused the writer as it handed pages over
        }
        meter.disarm();
        if (synced) wrong += !shows(reader->at(0), writer);
        if (random() % 4 == 0) std::this_thread::yield();
      }
    } catch (const Error&) {  // the writer's pool has refused a descriptor
    }
  }
}

TEST_CASE("I3, I7: readers see whole and lasting contents while pages go between writers") {
  for (const bool on_device : {false, true}) {
    for (const std::size_t prefetch : {std::size_t{0}, 16 * kBytes}) {
      CAPTURE(on_device);
      CAPTURE(prefetch);
      const FreshDevice device(kBytes);
      const auto pool = open_pool(on_device, 80, prefetch);
      std::atomic<bool> over{false};
      std::atomic<std::size_t> wrong{0}, syncs{0};
      {
        Writer first(pool, 'a'), second(pool, 'b');
        std::vector<std::thread> readers, writers;
        for (unsigned i = 0; i < 3; ++i) {
          Writer& writer = i == 0 ? second : first;
          readers.emplace_back(
              [&, i, &writer = writer] { read(writer, 100 + i, over, wrong, syncs); });
        }
        writers.emplace_back([&] { write(first, 1); });
        writers.emplace_back([&] { write(second, 2); });
        for (int i = 0; i < 40; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          pool->driver().meter().fail_after(static_cast<std::uint64_t>(i));
          hammered::check_counts(*pool);
        }
        pool->driver().meter().disarm();
        for (std::thread& thread : writers) thread.join();
        over = true;
        for (std::thread& thread : readers) thread.join();
        CHECK(pool->counts().held_by_readers == 0);
      }
      CHECK(wrong == 0);
      CHECK(syncs > 0);
      hammered::come_to_rest(*pool);
      hammered::check_end(*pool);
    }
  }
}

TEST_CASE("what a reader takes is of one moment, however often it changes") {
  constexpr std::size_t kWords = 1024;  // and pages
  const auto pool = open_pool(false, 8, 0);
  const std::shared_ptr<Buffer> buffer =
      Buffer::create(pool, {1, kBytes, kWords, 0, false}, kCaller);
  buffer->share("test", kWords);
  const std::shared_ptr<SharedRange> shared = buffer->range().shared();
  const Descriptor range = shared->open_for_reader("test");
  const auto readers = readers_of({&range, 1}, pool->open_for_readers("test"), kWords);
  const RangeReader& reader = readers->at(0);
  const auto change = [&](bool table, std::size_t number) {
    if (!table) {
      std::array<std::int64_t, kWords> words;
      words.fill(static_cast<std::int64_t>(number));
      return shared->set_words(0, words);
    }
    const PoolLock lock(pool);
    for (std::size_t n = 0; n < kWords; ++n) {
      const Page page{.handle = n + number % 1000};
      shared->came(n, &page);
    }
  };
  const auto torn = [&](std::size_t n) {
    return reader.words()[n] != reader.words()[0] ||
           reader.handle_at(n) - reader.handle_at(0) != static_cast<std::int64_t>(n);
  };
  change(true, 0);
  for (const bool table : {false, true}) {
    CAPTURE(table);
    std::atomic<bool> over{false};
    std::size_t changes = 0, seen = 0, wrong = 0;
    std::thread writer([&] {
      while (!over) {
        change(table, ++changes);
        // Several times as long as the reader takes, whose copy must fit in between.
        if (changes % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    while (seen < 300) {
      seen += readers->sync(kCaller, readers->stale());
      for (std::size_t n = 0; n < kWords && wrong == 0; ++n) wrong += torn(n);
    }
    over = true;
    writer.join();
    CHECK(wrong == 0);
  }
  buffer->abandon();
}

TEST_CASE("a large table is read while it changes, and only where it ever had pages") {
  constexpr std::size_t kPages = std::size_t{1} << 19;
  for (const bool full : {false, true}) {
    CAPTURE(full);
    const auto pool = open_pool(false, 8, 0);
    const std::shared_ptr<Buffer> buffer =
        Buffer::create(pool, {1, kBytes, kPages, 0, false}, kCaller);
    buffer->share("test", 2);
    const std::shared_ptr<SharedRange> shared = buffer->range().shared();
    const Descriptor range = shared->open_for_reader("test");
    const auto kept = [&range] {
      struct stat found{};
      REQUIRE(fstat(range.get(), &found) == 0);
      return static_cast<std::size_t>(found.st_blocks) * 512;
    };
    std::size_t changes = 0;
    const auto handle = [&changes](std::size_t n) { return n + (n == kPages / 2) * (changes % 2); };
    // Pages far apart, as those of several rows, of which one in the middle is another each time.
    const auto change = [&](std::size_t step) {
      const PoolLock lock(pool);
      for (std::size_t n = 0; n < kPages; n += step) {
        changes += n == kPages / 2;
        const Page page{.handle = handle(n)};
        shared->came(n, &page);
      }
    };
    change(full ? 1 : kPages / 4);
    std::atomic<bool> over{false};
    std::thread writer([&] {
      while (!over) {
        change(kPages / 4);
        const std::array words{static_cast<std::int64_t>(changes),
                               static_cast<std::int64_t>(changes)};
        shared->set_words(0, words);
        // Longer than the reader looks at the blocks, shorter than it copies all of them (under
        // TSan).
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
    const std::size_t before = kept();
    const auto readers = readers_of({&range, 1}, pool->open_for_readers("test"));
    const RangeReader& reader = readers->at(0);
    const auto sync = [&readers] { return readers->sync(kCaller, readers->stale()); };
    const auto read_often = [&sync] {
      for (int seen = 0; seen < 20;) seen += sync();
    };
    CHECK_NOTHROW(read_often());
    over = true;
    writer.join();
    sync();
    CHECK(reader.words()[0] == changes);
    CHECK(reader.mapped() == (full ? kPages : 4));
    std::size_t wrong = 0;
    for (std::size_t n = 0; n < kPages; n += full ? 1 : kPages / 4)
      wrong += static_cast<std::size_t>(reader.handle_at(n)) != handle(n);
    CHECK(wrong == 0);
    CHECK(kept() - before < kPages);  // of 8 bytes a page: what is only read takes memory too
    buffer->abandon();
  }
}

// Descriptors that this process has.
std::ptrdiff_t descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

// A memfd as the writer's is, but that it says `facts` of its range.
Descriptor copy_with(const Descriptor& file, const shared::Facts& facts) {
  std::vector<char> bytes(size_of(file));
  REQUIRE(pread(file.get(), bytes.data(), bytes.size(), 0) >= 0);
  std::memcpy(bytes.data() + shared::Sizes::kHeader, &facts, sizeof facts);
  Descriptor copy(memfd_create("copy", MFD_ALLOW_SEALING));
  REQUIRE(pwrite(copy.get(), bytes.data(), bytes.size(), 0) >= 0);
  REQUIRE(fcntl(copy.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  return copy;
}

shared::Facts facts_of(const Descriptor& file) {
  shared::Facts facts{};
  REQUIRE(pread(file.get(), static_cast<void*>(&facts), sizeof facts, shared::Sizes::kHeader) > 0);
  return facts;
}

TEST_CASE("a range of pages that the host does not have is refused, and nothing stays open") {
  const auto pool = open_pool(false, 80, 0);
  const Writer writer(pool, 'a');
  const Descriptor real = writer.open_range();
  shared::Facts facts = facts_of(real);
  facts.page_size = 3 * kBytes;
  const Descriptor wrong = copy_with(real, facts);
  const std::ptrdiff_t before = descriptors();
  CHECK_THROWS_AS(readers_of({&wrong, 1}, writer.open_memory()), InvalidArgument);
  CHECK(descriptors() == before);
}

TEST_CASE("a range whose holes would lie past its end is refused") {
  const FreshDevice device(kBytes);
  const auto pool = open_pool(true, 80, 0);
  const Writer writer(pool, 'a');
  const Descriptor real = writer.open_range();
  shared::Facts facts = facts_of(real);
  for (const std::size_t every : {facts.pages - 1, 2 * facts.pages}) {
    facts.backed = {.first = every, .every = every};
    const Descriptor wrong = copy_with(real, facts);
    CHECK_THROWS_AS(readers_of({&wrong, 1}, writer.open_memory()), InvalidArgument);
  }
}

TEST_CASE("ranges of two pools are no object that a reader takes") {  // I7
  const auto pool = open_pool(false, 80, 0), other = open_pool(false, 80, 0);
  const Writer writer(pool, 'a');
  for (const auto& [of, fits] : {std::pair(pool, true), std::pair(other, false)}) {
    const Writer second(of, 'b', 0);
    const std::array ranges{writer.open_range(), second.open_range()};
    const auto take = [&] { readers_of(ranges, writer.open_memory()); };
    if (fits) CHECK_NOTHROW(take());
    if (!fits) CHECK_THROWS_AS(take(), InvalidArgument);
  }
}

TEST_CASE("a table that is being changed is of no version that a reader takes") {  // I3
  const auto pool = open_pool(false, 80, 0);
  Writer writer(pool, 'a');
  writer.grow(8);
  const auto reader = writer.read();
  CHECK(reader->sync(kCaller, reader->stale()));
  CHECK_FALSE(reader->stale());
  std::atomic<bool> taken{false};
  std::thread other;
  {
    const PoolLock lock(pool);
    writer.show_page_0_again();
    CHECK(reader->stale());
    other = std::thread([&] { taken = reader->sync(kCaller, true); });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK_FALSE(taken);
  }
  other.join();
  CHECK(taken);
  CHECK(shows(reader->at(0), writer));
}

TEST_CASE("a reader holds the pages that it could not unmap") {  // I7
  const auto pool = open_pool(false, 80, 0);
  Writer writer(pool, 'a');
  writer.grow(16);
  const auto reader = writer.read();
  CHECK(reader->sync(kCaller, true));
  writer.shrink(8, false);
  const std::size_t kept = pool->counts().held_by_readers;
  CHECK(kept != 0);
  CallMeter& meter = reader->memory().driver().meter();
  meter.fail_after(0, 100);
  CHECK_THROWS_AS(reader->sync(kCaller, true), DriverError);
  CHECK(meter.refused(Call::munmap) != 0);
  meter.disarm();
  CHECK(pool->counts().held_by_readers == kept);
  CHECK(reader->sync(kCaller, reader->stale()));
  CHECK(pool->counts().held_by_readers == 0);
}

// Its last pages leave together with the owner, in one change of the table.
TEST_CASE("what a closed range shows stays while a reader lives") {  // I7
  const auto pool = open_pool(false, 80, 0);
  auto writer = std::make_unique<Writer>(pool, 'a');
  writer->grow(16);
  const std::size_t pages = pool->counts().used;
  SharedFile range;
  range.take(writer->open_range());
  REQUIRE(range.map(shared::Sizes::kWords, shared::Sizes::kWords));
  const shared::Parts parts{range.at(), {}};
  {
    const auto reader = writer->read();
    CHECK(reader->sync(kCaller, true));
    {
      const PoolLock lock(pool);
      writer->show_page_0_again();
      writer.reset();
    }
    // As a sync that began before and copies the table now.
    parts.place(0).held = parts.header().table_version.load();
    CHECK(pool->counts().held_by_readers == pages);
  }
  CHECK(pool->counts().held_by_readers == 0);
}

TEST_CASE("a slot that is cut is shown shorter before its pages go") {
  SlotCache cache(open_pool(false, 16, 0), {1, kCapacity, 1, 0, {{1, kBytes, 0}}}, kCaller);
  cache.share(kCaller);
  const auto shown = [&] { return cache.buffers().range(0)->range().shared()->word(0); };
  const std::size_t slot = cache.alloc(kCaller, 0);
  cache.step(kCaller, std::vector<std::int64_t>{8});
  cache.show_lengths();
  CHECK(shown() == 8);
  cache.truncate(kCaller, slot, 3);  // does not wait for the lengths to be shown again
  CHECK(shown() == 3);
  cache.free(kCaller, slot);
  CHECK(shown() == 0);
}

TEST_CASE("ranges that are gone leave no descriptor, also if they never had a page") {  // I14
  const auto pool = open_pool(false, 80, 0);
  const std::ptrdiff_t before = descriptors();
  for (int i = 0; i < 50; ++i) Writer(pool, 'a');
  CHECK(descriptors() <= before + 1);  // the last one goes with the next
}

TEST_CASE("descriptors that come with an empty message are closed") {
  Descriptor other(-1);
  SharedFile socket;
  REQUIRE(socket.make_socket(other));
  const std::ptrdiff_t before = descriptors();
  msghdr sent{};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  sent.msg_control = control.data();
  sent.msg_controllen = control.size();
  cmsghdr* const rights = CMSG_FIRSTHDR(&sent);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int descriptor = other.get();
  std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  REQUIRE(sendmsg(other.get(), &sent, 0) == 0);
  bool ended = false;
  CHECK(!PageMessage::receive(socket, ended));
  CHECK(ended);
  CHECK(descriptors() == before);
}

}  // namespace
}  // namespace vtensor
