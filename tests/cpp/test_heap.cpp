// Spans against a plain model, and heaps of one pool, each used by several threads and streams,
// beside an arena that wants their memory, a mapper and refused calls. Under ThreadSanitizer and
// AddressSanitizer.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "cpp/hammered.h"
#include "cpp/slot_cache_bench.h"
#include "heap/heap.h"
#include "heap/spans.h"
#include "policy/page_pool.h"

namespace vtensor {
namespace {

using slots::kPage;
using slots::OnHost;
using slots::OnSimulation;

constexpr std::size_t kBudget = 64;  // pages
constexpr char kForeign = 0x7f;
// Each heap writes its own bytes.
constexpr int kBytesOfAHeap = 50;

struct Outcome {
  std::size_t wrong = 0;  // contents that changed, or were another's; addresses given twice
  std::size_t granted = 0;
};

// What lives in a heap: its threads give one another allocations to free.
class Living {
 public:
  // False if it overlaps with what lives.
  bool add(Address address, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto after = all_.lower_bound(address);
    const bool free =
        (after == all_.end() || address + bytes <= after->first) &&
        (after == all_.begin() || std::prev(after)->first + std::prev(after)->second <= address);
    return all_.emplace(address, bytes).second && free;
  }
  // Any of them, which lives no more; {0, 0} if there is none.
  std::pair<Address, std::size_t> take(std::mt19937& random) {
    const std::lock_guard lock(mutex_);
    if (all_.empty()) return {};
    const auto one = std::next(all_.begin(), static_cast<std::ptrdiff_t>(random() % all_.size()));
    const auto taken = *one;
    all_.erase(one);
    return taken;
  }
  std::size_t size() {
    const std::lock_guard lock(mutex_);
    return all_.size();
  }

 private:
  std::mutex mutex_;
  std::map<Address, std::size_t> all_;
};

// One heap and what is known of it.
struct Subject {
  std::shared_ptr<Heap> heap;
  int first;  // of its bytes
  Living living;

  char mark(Address address) const {
    return static_cast<char>(first + static_cast<int>(address / Heap::kAlignment % kBytesOfAHeap));
  }
  bool is_own(char byte) const {
    return byte == 0 || (byte >= first && byte < first + kBytesOfAHeap);
  }
};

std::size_t draw_size(std::mt19937& random) {
  switch (random() % 8) {
    case 0:
      return random() % 2;
    case 1:
    case 2:
    case 3:
      return random() % kPage;
    case 4:
      return (kBudget + 1 + random() % 1000) * kPage;  // never to be had
    default:
      return random() % (10 * kPage);
  }
}

std::size_t checked_free(Subject& subject, const Caller& caller, std::mt19937& random) {
  const auto [address, bytes] = subject.living.take(random);
  if (address == 0) return 0;
  std::size_t wrong = 0;
  const char* const at = reinterpret_cast<const char*>(address);
  if (bytes != 0)  // each byte is as the one before it
    wrong += *at != subject.mark(address) || std::memcmp(at, at + 1, bytes - 1) != 0;
  if (random() % 4 == 0) {
    subject.heap->pool()->end(subject.heap->publish(address));
  } else {
    wrong += !subject.heap->free(caller, address);
  }
  return wrong;
}

// Random operations of one thread in one stream. `read` launches a kernel that reads the bytes.
Outcome drive(Subject& subject, const Caller& caller, unsigned seed,
              const std::function<void(Address, std::size_t)>& read) {
  std::mt19937 random(seed);
  Outcome outcome;
  for (std::size_t step = 0; step < 600; ++step) {
    if (random() % 50 == 0) {
      try {
        subject.heap->trim(caller);
      } catch (const DriverError&) {
        // Pages of a refused operation that cannot go.
      }
    }
    if (random() % 2 == 0) {
      outcome.wrong += checked_free(subject, caller, random);
      continue;
    }
    const std::size_t bytes = draw_size(random);
    Address address;
    try {
      address = subject.heap->allocate(caller, bytes);
    } catch (const Error&) {
      if (random() % 2 == 0) outcome.wrong += checked_free(subject, caller, random);
      continue;
    }
    ++outcome.granted;
    char* const at = reinterpret_cast<char*>(address);
    for (std::size_t i = 0; i < bytes; ++i) outcome.wrong += !subject.is_own(at[i]);  // I7
    std::memset(at, subject.mark(address), bytes);
    if (bytes == 0) at[0] = subject.mark(address);
    read(address, bytes);
    outcome.wrong += address % Heap::kAlignment != 0;
    outcome.wrong += !subject.living.add(address, std::max<std::size_t>(bytes, 1));
  }
  return outcome;
}

// Another client that wants the pool's memory, and writes bytes that no heap does.
void rival(const std::shared_ptr<PagePool>& pool, const std::atomic<bool>& done) {
  const Caller caller{"rival"};
  std::mt19937 random(99);
  while (!done) {
    const std::size_t bytes = (1 + random() % 40) * kPage;
    const Interval all{0, bytes};
    std::shared_ptr<Arena> arena;
    try {
      arena = Arena::make(pool, bytes, false, caller);
      arena->map(caller, {&all, 1});
      std::memset(reinterpret_cast<char*>(arena->base()), kForeign, bytes);
      arena->unmap(caller, {&all, 1});
    } catch (const Error&) {
    }
    if (arena) arena->abandon();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

template <class T>
void hammer(PoolOptions options, bool refuse) {
  std::weak_ptr<PagePool> last;
  std::vector<Stream> streams(6, 0);
  {
    const std::shared_ptr<PagePool> pool = slots::Bench<T>::open(kBudget, options);
    std::size_t illegal = 0;
    if constexpr (T::is_cuda) {
      for (Stream& stream : streams) stream = T::control().make_stream(0);
      illegal = T::control().illegal_accesses();
    }
    std::vector<Subject> subjects(2);
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      subjects[i].heap = std::make_shared<Heap>(pool);
      subjects[i].first = 1 + static_cast<int>(i) * kBytesOfAHeap;
    }
    std::atomic<bool> done{false};
    std::vector<Outcome> outcomes(streams.size());
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < outcomes.size(); ++i) {
      threads.emplace_back([&, i] {
        const Stream stream = streams[i];
        outcomes[i] = drive(subjects[i % 2], {"test", stream}, i,
                            [&]([[maybe_unused]] Address at, [[maybe_unused]] std::size_t bytes) {
                              if constexpr (T::is_cuda) {
                                if (bytes != 0)
                                  CHECK(T::control().launch(stream, at, bytes, 0) == 0);
                              }
                            });
      });
    }
    std::thread other([&] { rival(pool, done); });
    std::thread watcher([&] {
      for (unsigned i = 0; !done; ++i) {
        const PoolCounts counts = hammered::check_counts(*pool);
        CHECK(counts.used <= counts.budget_pages);  // I5
        if (refuse) pool->driver().meter().fail_after(i % 16, 1 + i % 3);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    for (std::thread& thread : threads) thread.join();
    done = true;
    other.join();
    watcher.join();
    pool->driver().meter().disarm();

    std::size_t granted = 0;
    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.wrong == 0);
      granted += outcome.granted;
    }
    CHECK(granted > 300);
    std::mt19937 random(5);
    for (Subject& subject : subjects) {
      while (subject.living.size() != 0)
        CHECK(checked_free(subject, {"test", streams[0]}, random) == 0);
      pool->counts();  // drains what has ended
      const HeapCounts left = subject.heap->counts();
      CHECK(left.allocations == 0);
      CHECK(left.allocated == 0);
      CHECK(left.pages.active == 0);
      subject.heap->trim({"test", streams[0]});
    }
    hammered::come_to_rest(*pool);
    for (Subject& subject : subjects) {
      const PoolCounts left = subject.heap->counts().pages;
      CHECK(left.active + left.cached + left.prefetched + left.pinned == 0);
    }
    subjects.clear();
    hammered::check_end(*pool);
    if constexpr (T::is_cuda) {
      CHECK(T::control().illegal_accesses() == illegal);
      for (const Stream stream : streams) CHECK(T::control().destroy_stream(stream) == 0);
    }
    last = pool;
  }
  check_gone<T>(last);
}

}  // namespace

TEST_CASE("spans against a list of bytes") {
  constexpr std::size_t kBytes = 200;
  for (unsigned seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Spans spans(kBytes);
    std::vector<std::size_t> owner(kBytes, 0);  // 0: free
    std::map<std::size_t, Interval> taken;
    for (std::size_t step = 1; step < 300; ++step) {
      if (random() % 2 == 0 && !taken.empty()) {
        const auto one = std::next(taken.begin(), random() % taken.size());
        CHECK(spans.at(one->first) == one->second);
        for (std::size_t i = one->second.begin; i < one->second.end; ++i) owner[i] = 0;
        spans.give_back(one->first);
        taken.erase(one);
      } else {
        const std::size_t bytes = 1 + random() % 40;
        // The smallest free run that fits, the lowest of several.
        std::size_t least = SIZE_MAX, at = SIZE_MAX;
        for (std::size_t i = 0; i < kBytes;) {
          std::size_t end = i;
          while (end < kBytes && owner[end] == 0) ++end;
          if (end - i >= bytes && end - i < least) {
            least = end - i;
            at = i;
          }
          i = end + 1;
        }
        const std::size_t fit = spans.fit(bytes);
        CHECK((fit == 0) == (at == SIZE_MAX));
        if (fit == 0) continue;
        CHECK(fit == least);
        const Interval got = spans.take(bytes);
        REQUIRE(got.begin == at);
        REQUIRE(got.size() == bytes);
        for (std::size_t i = got.begin; i < got.end; ++i) owner[i] = step;
        taken[got.begin] = got;
      }
      std::size_t bytes = 0;
      for (const auto& [begin, span] : taken) bytes += span.size();
      CHECK(spans.taken_bytes() == bytes);
      CHECK(spans.count() == taken.size());
      CHECK(spans.all_free() == taken.empty());
    }
  }
}

TEST_CASE_TEMPLATE("heaps beside one another, with and without a mapper", T, OnHost, OnSimulation) {
  hammer<T>({}, false);
  hammer<T>({.prefetch = 16 * kPage, .cache = 48 * kPage, .spare = 4 * kPage}, false);
}

TEST_CASE_TEMPLATE("heaps while the driver refuses calls (I8)", T, OnHost, OnSimulation) {
  hammer<T>({}, true);
  hammer<T>({.prefetch = 16 * kPage, .cache = 48 * kPage}, true);
}

TEST_CASE("a size that was freed makes no driver call, whatever became of its neighbours") {
  const std::shared_ptr<PagePool> pool =
      slots::Bench<OnHost>::open(kBudget, {.prefetch = 16 * kPage, .cache = 48 * kPage});
  const Caller caller{"test"};
  Heap heap(pool);
  std::vector<Address> made;
  for (int i = 0; i < 5; ++i) made.push_back(heap.allocate(caller, 3 * kPage + 512));
  const auto calls = [&] { return pool->driver().meter().count(ThreadRole::caller, Call::mmap); };
  const auto before = calls();
  for (const int i : {1, 3, 2}) heap.free(caller, made[i]);
  for (const int i : {1, 3, 2}) made[i] = heap.allocate(caller, 3 * kPage + 512);
  CHECK(calls() == before);
  for (const Address address : made) CHECK(heap.free(caller, address));
  CHECK(!heap.free(caller, made[0]));
}

TEST_CASE("an allocation takes the smallest room of all regions") {
  const std::shared_ptr<PagePool> pool = slots::Bench<OnHost>::open(700, {});
  const Caller caller{"test"};
  Heap heap(pool);
  static_cast<void>(heap.allocate(caller, 504 * kPage));  // with the next two all of a region
  const Address four = heap.allocate(caller, 4 * kPage);
  static_cast<void>(heap.allocate(caller, 4 * kPage));
  static_cast<void>(heap.allocate(caller, 100 * kPage));
  const Address two = heap.allocate(caller, 2 * kPage);
  static_cast<void>(heap.allocate(caller, 2 * kPage));
  CHECK(heap.regions().size() == 2);
  heap.free(caller, four);
  heap.free(caller, two);
  CHECK(heap.allocate(caller, 2 * kPage) == two);
  CHECK(heap.allocate(caller, 4 * kPage) == four);
}

TEST_CASE("a region whose pages are still mapped stays") {
  const std::shared_ptr<PagePool> pool =
      slots::Bench<OnHost>::open(kBudget, {.prefetch = 16 * kPage, .cache = 48 * kPage});
  const Caller caller{"test"};
  Heap heap(pool);
  const Address whole = heap.allocate(caller, 3 * kPage);
  heap.free(caller, whole);
  static_cast<void>(heap.allocate(caller, 512));  // shares its page, so it needs another region
  CHECK(heap.regions().size() == 2);
  const auto calls = pool->driver().meter().count(ThreadRole::caller, Call::mmap);
  CHECK(heap.allocate(caller, 3 * kPage) == whole);
  CHECK(pool->driver().meter().count(ThreadRole::caller, Call::mmap) == calls);
}

}  // namespace vtensor
