// Clients of one pool beside threads that use them, a mapper and refused calls, and that fall
// asleep and wake meanwhile. Under ThreadSanitizer and AddressSanitizer.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/errors.h"
#include "cpp/hammered.h"
#include "cpp/owner.h"
#include "cpp/slot_cache_bench.h"
#include "policy/page_pool.h"
#include "policy/sleep.h"
#include "tensor/buffer.h"

namespace vtensor {
namespace {

using slots::kPage;
using slots::OnHost;
using slots::OnSimulation;
using steady_clock = std::chrono::steady_clock;

constexpr std::size_t kBudget = 64;   // pages
constexpr std::size_t kAmple = 4096;  // more than all threads have at a time
constexpr std::size_t kItem = kPage / 2;
constexpr std::size_t kCapacity = 24;  // items: 12 pages
const Caller kCaller{"test"};

// A kernel of the caller's over so many bytes.
using Launch = std::function<void(Address, std::size_t)>;

// What can sleep, and the numbers that were written to its items: one of eight that are its own,
// from `first` on; 0: kernels alone touch it. Its operations follow one another, as those of a
// tensor's core do.
class Subject {
 public:
  virtual ~Subject() = default;
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  virtual std::shared_ptr<Client> client() const = 0;
  virtual Address at(std::size_t item) const = 0;
  virtual void grow(const Caller& caller, std::mt19937& random) = 0;
  virtual void shrink(const Caller& caller, std::mt19937& random) = 0;
  // Readies an item for a write.
  virtual void own(const Caller&, std::size_t) {}
  virtual Generation* publish() = 0;
  virtual std::unique_ptr<Subject> fork(const Caller&) { return nullptr; }
  virtual void prepare(std::mt19937& random) = 0;
  // A lease for `work`; null where there is none.
  virtual Generation* lease(const Caller&) { return nullptr; }
  virtual void work(const Caller&, const Launch&) {}

  void check() {
    if (first_ == 0) return;
    for (const auto& [item, number] : model) {
      const char* const bytes = reinterpret_cast<const char*>(at(item));
      wrong += bytes[0] != number || bytes[kItem - 1] != number;
    }
  }
  void write(const Caller& caller, std::size_t item, std::mt19937& random) {
    const char number = static_cast<char>(first_ + random() % 8);
    own(caller, item);
    if (first_ != 0) std::memset(reinterpret_cast<char*>(at(item)), number, kItem);
    model[item] = number;
  }
  // I7: what is new shows zeros, or what was written there before.
  void write_new(const Caller& caller, std::size_t item, std::mt19937& random) {
    const char* const bytes = reinterpret_cast<const char*>(at(item));
    if (first_ != 0) wrong += !may_show(bytes[0]) || !may_show(bytes[kItem - 1]);
    write(caller, item, random);
  }

  std::mutex operation;
  std::map<std::size_t, char> model;
  std::size_t wrong = 0;

 protected:
  explicit Subject(unsigned first) : first_(first) {}

  const unsigned first_;

 private:
  bool may_show(char byte) const {
    const auto number = static_cast<unsigned char>(byte);
    return number == 0 || (number >= first_ && number < first_ + 8);
  }
};

// Up to three rows of positions [begin, end): an item is one of them.
class Rows final : public Subject {
 public:
  Rows(const std::shared_ptr<PagePool>& pool, std::mt19937& random, unsigned first)
      : Subject(first), rows_(1 + random() % 3), buffer_(Buffer::create(pool, shape(), kCaller)) {}
  ~Rows() override { buffer_->abandon(); }

  std::shared_ptr<Client> client() const override { return buffer_; }
  Address at(std::size_t item) const override {
    return buffer_->address_of(item / kCapacity, item % kCapacity);
  }
  void grow(const Caller& caller, std::mt19937& random) override {
    const Interval after{positions_.begin, further(1 + random() % 8)};
    if (!buffer_->grow_within(caller, after)) buffer_->grow(caller, after, random() % 2 == 0);
    const std::size_t from = std::exchange(positions_, after).end;
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t i = from; i < after.end; ++i) write_new(caller, row * kCapacity + i, random);
    }
  }
  void shrink(const Caller& caller, std::mt19937& random) override {
    const std::size_t n = std::min<std::size_t>(positions_.size(), random() % 8);
    if (random() % 3 == 0) {
      positions_.begin += n;
    } else {
      positions_.end -= n;
    }
    if (positions_.empty()) positions_ = {};
    std::erase_if(model, [this](const auto& one) {
      const std::size_t position = one.first % kCapacity;
      return position < positions_.begin || position >= positions_.end;
    });
    buffer_->use(caller);
    buffer_->shrink_to(positions_);
  }
  void own(const Caller& caller, std::size_t item) override {
    const std::size_t position = item % kCapacity;
    const bool copies = buffer_->pool()->traits().kernel_copies_on_write;
    if (!copies) buffer_->unshare(caller, {position, position + 1});
  }
  Generation* publish() override { return vtensor::publish(*buffer_); }
  std::unique_ptr<Subject> fork(const Caller& caller) override {
    constexpr std::size_t rows[] = {0, 1, 2};
    if (positions_.begin % (kPage / kItem) != 0) return nullptr;  // its positions begin at a page
    return std::unique_ptr<Subject>(
        new Rows(*this, buffer_->share_rows(caller, shape(), std::span(rows).first(rows_), false)));
  }
  void prepare(std::mt19937& random) override { buffer_->prepare(further(random() % 24)); }
  Generation* lease(const Caller& caller) override {
    return positions_.empty() ? nullptr : buffer_->lease(caller);
  }
  void work(const Caller& caller, const Launch& launch) override {
    for (std::size_t row = 0; row < rows_; ++row)
      launch(at(row * kCapacity + positions_.begin), positions_.size() * kItem);
    buffer_->end_lease(caller, buffer_->pool()->driver().fence(caller.stream));
  }

 private:
  RowShape shape() const { return {.rows = rows_, .item_bytes = kItem, .capacity = kCapacity}; }
  Rows(const Rows& parent, std::shared_ptr<Buffer> buffer)
      : Subject(parent.first_),
        rows_(parent.rows_),
        buffer_(std::move(buffer)),
        positions_{0, parent.positions_.size()} {
    for (const auto& [item, number] : parent.model) model[item - parent.positions_.begin] = number;
  }
  std::size_t further(std::size_t n) const {
    return std::min<std::size_t>(kCapacity, positions_.end + n);
  }

  const std::size_t rows_;
  const std::shared_ptr<Buffer> buffer_;
  Interval positions_;
};

class Pieces final : public Subject {
 public:
  Pieces(const std::shared_ptr<PagePool>& pool, unsigned first)
      : Subject(first), arena_(Arena::make(pool, kCapacity * kItem, false, kCaller)) {}
  ~Pieces() override { arena_->abandon(); }

  std::shared_ptr<Client> client() const override { return arena_; }
  Address at(std::size_t item) const override { return arena_->base() + item * kItem; }
  void grow(const Caller& caller, std::mt19937& random) override {
    const std::size_t item = random() % kCapacity;
    if (model.contains(item)) return;
    const Interval bytes{item * kItem, (item + 1) * kItem};
    arena_->map(caller, {&bytes, 1});
    write_new(caller, item, random);
  }
  void shrink(const Caller& caller, std::mt19937& random) override {
    if (model.empty()) return;
    const auto one = std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
    const Interval bytes{one->first * kItem, (one->first + 1) * kItem};
    arena_->unmap(caller, {&bytes, 1});
    model.erase(one);
  }
  Generation* publish() override { return arena_->publish(); }
  void prepare(std::mt19937& random) override {
    const std::size_t item = random() % kCapacity;
    const Interval bytes{item * kItem, (item + 1) * kItem};
    arena_->prepare({&bytes, 1});
  }

 private:
  const std::shared_ptr<Arena> arena_;
};

using Registry = std::vector<std::weak_ptr<Subject>>;
using Lease = std::unique_ptr<Generation, std::function<void(Generation*)>>;

struct Outcome {
  std::size_t wrong = 0, refused = 0, done = 0;
  std::string first;  // of what was refused
};

// What all threads share.
struct Stage {
  std::shared_ptr<PagePool> pool;
  std::mutex mutex;
  Registry all;
  std::vector<Generation*> views;

  // To be ended by any thread.
  void hand(Generation* view) {
    const std::lock_guard lock(mutex);
    views.push_back(view);
  }
  void end_views(std::size_t left, bool later) {
    std::vector<Generation*> ended;
    {
      const std::lock_guard lock(mutex);
      for (; views.size() > left; views.pop_back()) ended.push_back(views.back());
    }
    for (Generation* const view : ended) later ? pool->end_later(view) : pool->end(view);
  }
  void add(const std::shared_ptr<Subject>& subject) {
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](const auto& one) { return one.expired(); });
    all.push_back(subject);
  }
  bool any() {
    const std::lock_guard lock(mutex);
    return !all.empty();
  }
  Registry some(std::mt19937& random) {
    const std::lock_guard lock(mutex);
    Registry chosen;
    for (const auto& one : all) {
      if (random() % 3 != 0) chosen.push_back(one);
    }
    return chosen;
  }
};

struct Load {
  PoolOptions options = {};
  std::size_t pages = kBudget;
  bool refuse = false;    // some driver calls
  bool busy = false;      // the streams of a device, so that no thread but theirs may touch pages
  bool blocking = false;  // unmap and set-access wait for the device
  bool sleeps = true;
};

// Random operations of one thread on subjects of its own, until `done`.
template <class T>
Outcome drive(Stage& stage, const Load& load, const std::atomic<bool>& done, Stream stream,
              unsigned seed) {
  std::mt19937 random(seed);
  Outcome outcome;
  const Caller caller{"test", stream, seed % 3 == 0};  // one that names it works in leases alone
  const Launch launch = [&](Address at, std::size_t bytes) {
    if constexpr (T::is_cuda) CHECK(T::control().launch(stream, at, bytes, 0) == 0);
  };
  std::vector<std::shared_ptr<Subject>> mine;
  while (!done) {
    try {
      if (mine.size() < 4) {
        const unsigned first = load.busy ? 0 : 1 + 8 * (random() % 15);
        if (random() % 2 == 0) {
          mine.push_back(std::make_shared<Rows>(stage.pool, random, first));
        } else {
          mine.push_back(std::make_shared<Pieces>(stage.pool, first));
        }
        stage.add(mine.back());
      }
      const std::size_t which = random() % mine.size();
      const std::shared_ptr<Subject> subject = mine[which];
      if (random() % 40 == 0) {  // whether it sleeps or not
        mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(which));
        continue;
      }
      if (random() % 10 == 0) stage.end_views(random() % 3, random() % 2 == 0);
      const std::lock_guard lock(subject->operation);
      subject->client()->raise_error(caller.operation);
      subject->check();
      switch (random() % 8) {
        case 0:
          subject->shrink(caller, random);
          break;
        case 1:
          stage.hand(subject->publish());
          break;
        case 2:
          if (mine.size() < 6) {
            if (std::shared_ptr<Subject> child = subject->fork(caller)) {
              mine.push_back(child);
              stage.add(child);
            }
          }
          break;
        case 3:
          if (!subject->model.empty())
            subject->write(caller, subject->model.begin()->first, random);
          break;
        case 4:
          subject->prepare(random);
          break;
        case 5:
          if constexpr (T::is_cuda) {
            const double most = load.blocking ? 0.1 : 1;  // ms
            if (load.busy) T::control().occupy(stream, most * (random() % 4));
          }
          if (const Lease lease(subject->lease(caller), [&](auto* ended) { stage.hand(ended); });
              lease != nullptr)
            subject->work(caller, launch);
          break;
        default:
          subject->grow(caller, random);
      }
      if (T::is_cuda && !caller.named) {
        subject->client()->use(caller);
        for (const auto& [item, number] : subject->model) launch(subject->at(item), kItem);
      }
      outcome.wrong += std::exchange(subject->wrong, 0);
      ++outcome.done;
    } catch (const Asleep&) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } catch (const Error& error) {
      if (outcome.refused++ == 0) outcome.first = error.what();
      if (mine.size() > 1 && random() % 2 == 0) mine.pop_back();
    }
  }
  return outcome;
}

// What Python does: marks, keeps, brings back.
class Sleep {
 public:
  explicit Sleep(const std::shared_ptr<PagePool>& pool) : pool_(pool), falling_(pool) {}

  std::uint64_t next_number() {
    numbers.push_back(falling_.next_number());
    return numbers.back();
  }
  void add(Subject& subject) {
    const std::lock_guard lock(subject.operation);
    falling_.add(subject.client());
  }
  // How many pages' memory went; nothing if it was refused, and all is awake then.
  std::optional<std::size_t> begin() {
    try {
      falling_.begin(kCaller);
      for (const SleepPart& part : falling_.parts()) {
        for (std::size_t i = 0; i < part.bytes; i += kPage)
          std::memcpy(&kept_[part.offset + i], reinterpret_cast<const void*>(part.at + i), kPage);
      }
      return falling_.finish();
    } catch (const Error&) {
    }
    falling_.give_up();
    return std::nullopt;
  }
  bool wake(std::span<const std::uint64_t> some) {
    try {
      WakeUp waking(pool_, kCaller, some);
      for (const SleepPart& part : waking.parts()) {
        for (std::size_t i = 0; i < part.bytes; i += kPage) {
          const auto kept = kept_.find(part.offset + i);
          wrong += kept == kept_.end();
          if (kept != kept_.end())
            std::memcpy(reinterpret_cast<void*>(part.at + i), &kept->second, kPage);
        }
      }
      waking.finish(some);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  std::vector<std::uint64_t> numbers;
  std::size_t wrong = 0;

 private:
  struct Bytes {
    char bytes[kPage];
  };
  const std::shared_ptr<PagePool> pool_;
  FallAsleep falling_;
  std::map<std::size_t, Bytes> kept_;  // by their place
};

struct Hammered {
  std::size_t given = 0;  // pages whose memory went
  std::size_t done = 0;   // operations beside
  std::size_t early = 0;  // pools whose first sleeps had nothing to give, and could not wake
};

// Up to `cycles` of sleeping and waking, or of waiting, beside what else uses the pool; returns how
// many. A pool that breaks ends them, and all threads.
template <class T>
std::size_t hammer_one(const Load& load, std::size_t cycles, unsigned seed, Hammered& all) {
  std::weak_ptr<PagePool> last;
  std::size_t cycle = 0;
  bool alone = false;  // the last woke once the others had ended
  {
    Stage stage;
    stage.pool = slots::Bench<T>::open(load.pages, load.options);
    const std::shared_ptr<PagePool>& pool = stage.pool;
    std::size_t illegal = 0;
    std::vector<Stream> streams(3, 0);
    if constexpr (T::is_cuda) {
      for (Stream& stream : streams) stream = T::control().make_stream(0);
      illegal = T::control().illegal_accesses();
      T::control().unseen_events(2);
      T::control().configure("blocking", load.blocking);
    }
    std::atomic<bool> done{false};
    std::vector<Outcome> outcomes(streams.size());
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < outcomes.size(); ++i) {
      threads.emplace_back(
          [&, i] { outcomes[i] = drive<T>(stage, load, done, streams[i], seed + i); });
    }
    std::thread watcher([&] {
      for (unsigned i = 0; !done; ++i) {
        hammered::check_counts(*pool);
        try {
          if (i % 8 == 0) pool->trim();
        } catch (const DriverError&) {
          CHECK(load.refuse);
        }
        if (load.refuse) pool->driver().meter().fail_after(i % 32, 1 + i % 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });

    // On a machine that is busy the threads may begin late.
    CHECK(comes_true([&] { return stage.any(); }));
    std::mt19937 random(17 + seed);
    std::size_t slept = 0, woke = 0;
    const auto goes_on = [&] {  // the others may be late
      return cycle < cycles || (load.sleeps && all.given == 0 && cycle < 40 * cycles);
    };
    for (; goes_on() && !alone && !pool->store().broken(); ++cycle) {
      if (!load.sleeps) {
        std::this_thread::sleep_for(std::chrono::milliseconds(4));
        continue;
      }
      Sleep sleep(pool);
      for (std::size_t sleeps = 1 + random() % 2; sleeps != 0; --sleeps) {
        sleep.next_number();
        for (const std::weak_ptr<Subject>& one : stage.some(random)) {
          if (const std::shared_ptr<Subject> subject = one.lock()) sleep.add(*subject);
        }
      }
      const std::optional<std::size_t> pages = sleep.begin();
      CHECK_NOTHROW(pool->check_invariants());
      if (!pages) continue;
      ++slept;
      all.given += *pages;
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
      std::vector<std::uint64_t> left = sleep.numbers;
      for (int tries = 0; !left.empty() && tries < 2000 && !pool->store().broken(); ++tries) {
        const std::size_t some = 1 + random() % left.size();
        const bool awake = sleep.wake(std::span(left).last(some));
        CHECK_NOTHROW(pool->check_invariants());
        if (awake) left.resize(left.size() - some);
        if (!awake) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      CHECK(sleep.wrong == 0);
      if (pool->store().broken()) continue;
      if (!left.empty()) {  // the others have what it needs: they end
        done = true;
        for (std::thread& thread : threads) thread.join();
        threads.clear();
        stage.end_views(0, false);
        pool->driver().meter().disarm();
        CHECK(sleep.wake(left));
        alone = true;
      }
      ++woke;
    }
    done = true;
    for (std::thread& thread : threads) thread.join();
    watcher.join();
    pool->driver().meter().disarm();
    const bool broken = pool->store().broken() != nullptr;
    CHECK((load.refuse || !broken));
    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.wrong == 0);
      if (!load.refuse && load.pages == kAmple) CHECK(outcome.first == "");
      all.done += outcome.done;
    }
    stage.end_views(0, false);
    if constexpr (T::is_cuda) T::control().unseen_events(0);
    if (broken) {
      CHECK(slept - woke <= 1);
      pool->retire();
    } else {
      CHECK(woke == slept);
      hammered::come_to_rest(*pool);
      CHECK(hammered::check_end(*pool).asleep == 0);
    }
    if constexpr (T::is_cuda) {
      CHECK(T::control().illegal_accesses() == illegal);
      for (const Stream stream : streams) CHECK(T::control().destroy_stream(stream) == 0);
    }
    last = pool;
  }
  check_gone<T>(last);
  if (alone && all.given != 0) return cycles;
  all.early += alone;
  return std::min(cycle, cycles);
}

template <class T>
void hammer(const Load& load) {
  unsigned pools = 0;
  Hammered all;
  for (std::size_t cycles = 60; cycles != 0; ++pools)
    cycles -= hammer_one<T>(load, cycles, 3 * pools, all);
  CHECK((load.refuse || pools == 1 + all.early));
  CHECK(pools < 40);
  CHECK((all.given > 0) == load.sleeps);
  CHECK(all.done > 60);
}

// A pool with one buffer of `pages` pages, and what puts it to sleep.
template <class T>
struct One {
  explicit One(std::size_t pages, PoolOptions options = {})
      : pool(slots::Bench<T>::open(kBudget, options)),
        buffer(Buffer::create(pool, {.rows = 1, .item_bytes = kPage, .capacity = kBudget + 1},
                              kCaller)) {
    buffer->grow(kCaller, {0, pages}, true);
    std::memset(bytes(), 7, pages * kPage);
  }
  ~One() {
    if (buffer) buffer->abandon();
    buffer.reset();
    pool->retire();
    if (!pool->store().broken()) pool->wait_idle(kPatience);
    let_go<T>(pool);
  }
  One(const One&) = delete;
  One& operator=(const One&) = delete;

  char* bytes() const { return reinterpret_cast<char*>(buffer->address_of(0, 0)); }
  std::size_t sleep() {
    FallAsleep falling(pool);
    number = falling.next_number();
    falling.add(buffer);
    falling.begin(kCaller);
    return falling.finish();
  }
  void wake() {
    WakeUp waking(pool, kCaller, std::span(&number, 1));
    waking.finish(std::span(&number, 1));
  }

  std::uint64_t number = 0;
  std::shared_ptr<PagePool> pool;
  std::shared_ptr<Buffer> buffer;
};

}  // namespace

const PoolOptions kAhead{.prefetch = 64 * kPage, .cache = 48 * kPage};
const PoolOptions kShort{
    .zero = ZeroPolicy::always, .prefetch = 64 * kPage, .cache = 16 * kPage, .spare = 4 * kPage};

TEST_CASE_TEMPLATE("what uses a pool beside its mapper", T, OnHost, OnSimulation) {
  SUBCASE("which works only when asked") { hammer<T>({.pages = kAmple, .sleeps = false}); }
  SUBCASE("which looks ahead and caches") {
    hammer<T>({.options = kAhead, .pages = kAmple, .sleeps = false});
  }
  SUBCASE("where memory is short, and ages") { hammer<T>({.options = kShort, .sleeps = false}); }
  SUBCASE("whose calls are refused now and then") {
    hammer<T>({.options = kAhead, .pages = kAmple, .refuse = true, .sleeps = false});
  }
}

TEST_CASE("what uses a pool with streams that are busy") {
  Load load{.pages = kAmple, .busy = true, .sleeps = false};
  SUBCASE("with driver calls that do not wait for them") {}
  SUBCASE("with driver calls that wait for the device") { load.blocking = true; }
  hammer<OnSimulation>(load);
  load.options = kAhead;
  hammer<OnSimulation>(load);
  load.options = kShort;
  load.pages = kBudget;
  hammer<OnSimulation>(load);
}

TEST_CASE_TEMPLATE("what uses a pool beside what sleeps and wakes", T, OnHost, OnSimulation) {
  hammer<T>({});
  hammer<T>({.options = {.prefetch = 16 * kPage, .cache = 48 * kPage}});
}

TEST_CASE_TEMPLATE("the same while the driver refuses calls (I8)", T, OnHost, OnSimulation) {
  hammer<T>({.refuse = true});
  hammer<T>({.options = {.prefetch = 16 * kPage, .cache = 48 * kPage}, .refuse = true});
}

TEST_CASE_TEMPLATE("memory that the driver did not take back shows zeros all the same", T, OnHost,
                   OnSimulation) {
  std::size_t kept = 0;  // rounds that slept, and whose memory was not taken back
  for (std::uint64_t skip = 0; skip < 24; ++skip) {
    CAPTURE(skip);
    One<T> one(5);
    one.pool->driver().meter().fail_after(skip, 100);
    try {
      one.sleep();
    } catch (const Error&) {
      one.buffer->asleep = 0;
    }
    one.pool->driver().meter().disarm();
    if (one.pool->store().broken()) continue;
    const bool slept = one.buffer->asleep.load() != 0;
    CHECK_NOTHROW(one.pool->check_invariants());
    const Call give_back = T::is_cuda ? Call::cuMemRelease : Call::fallocate;
    kept += slept && one.pool->driver().meter().refused(give_back) != 0;
    one.wake();
    for (std::size_t i = 0; i < 5 * kPage; ++i) REQUIRE(one.bytes()[i] == (slept ? 0 : 7));
  }
  CHECK(kept > 0);
}

TEST_CASE_TEMPLATE("what died asleep needs no memory, and nothing waits for it", T, OnHost,
                   OnSimulation) {
  One<T> one(40, {.prefetch = 4 * kPage});
  const std::shared_ptr<Buffer> other =
      Buffer::create(one.pool, {.rows = 1, .item_bytes = kPage, .capacity = 40}, kCaller);
  Generation* const view = publish(*one.buffer);
  CHECK(one.sleep() == 40);
  other->grow(kCaller, {0, 40}, true);
  CHECK_THROWS_AS(one.wake(), OutOfPages);
  const auto began = steady_clock::now();
  {
    const PoolLock lock(one.pool);
    one.buffer->abandon();
    one.pool->end_locked(view);
  }
  one.buffer.reset();
  one.wake();
  CHECK(steady_clock::now() - began < kPatience / 2);
  CHECK(one.pool->counts().used == 40);
  other->abandon();
}

TEST_CASE_TEMPLATE("no tensor gets what a freed one left, after a sleep either (I7)", T, OnHost,
                   OnSimulation) {
  One<T> one(12, {.prefetch = 16 * kPage, .cache = 64 * kPage});
  const std::shared_ptr<PagePool>& pool = one.pool;
  const std::shared_ptr<Buffer>& next = one.buffer;
  std::optional<Client::Busy> busy;
  {
    PoolLock lock(pool);
    one.buffer->abandon();
    pool->drain_ended();
    busy.emplace(*next, lock, kCaller);  // so that the mapper zeroes nothing
  }
  std::thread owner([&] { CHECK(next->reuse_cached(kCaller)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    PoolLock lock(pool);
    busy.reset();
  }
  owner.join();
  {
    PoolLock lock(pool);
    busy.emplace(*next, lock, kCaller);  // as the mapper does for a step of its
    next->announce(12);                  // its next step zeroes the pages
  }
  FallAsleep falling(pool);
  const std::vector<std::uint64_t> numbers{falling.next_number()};
  falling.add(next);
  std::thread sleeper([&] { falling.begin(kCaller); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    PoolLock lock(pool);
    busy.reset();
  }
  sleeper.join();
  std::vector<std::vector<std::byte>> saved;
  for (const SleepPart& part : falling.parts()) {
    const auto* const at = reinterpret_cast<const std::byte*>(part.at);
    saved.emplace_back(at, at + part.bytes);
  }
  falling.finish();
  const auto zeroings = [&pool] {
    return pool->driver().meter().count(ThreadRole::mapper, Call::cuMemsetD8Async);
  };
  const std::uint64_t before = zeroings();
  pool->wait_idle(kPatience);
  CHECK(zeroings() == before);
  {
    WakeUp waking(pool, kCaller, numbers);
    for (std::size_t i = 0; i < saved.size(); ++i)
      std::memcpy(reinterpret_cast<void*>(waking.parts()[i].at), saved[i].data(), saved[i].size());
    waking.finish(numbers);
  }
  next->grow(kCaller, {0, 12}, false);
  for (std::size_t page = 0; page < 12; ++page)
    CHECK(*reinterpret_cast<const char*>(next->address_of(0, page)) == 0);
}

TEST_CASE_TEMPLATE("what sleeps is not mapped ahead, and not leased", T, OnHost, OnSimulation) {
  One<T> one(4, {.prefetch = 16 * kPage});
  one.sleep();
  one.buffer->prepare(10);
  one.pool->wait_idle(kPatience);
  CHECK(one.pool->counts().used == 0);
  CHECK_THROWS_AS(one.buffer->lease(kCaller), Asleep);
  CHECK_NOTHROW(one.pool->check_invariants());
  one.wake();
  one.pool->end(one.buffer->lease(kCaller));
}

TEST_CASE_TEMPLATE("parts of two sleeps stay apart where they meet in memory", T, OnHost,
                   OnSimulation) {
  One<T> one(1);
  std::vector<std::shared_ptr<Buffer>> all;
  std::pair<std::shared_ptr<Buffer>, std::shared_ptr<Buffer>> meet;
  while (meet.first == nullptr && all.size() < kBudget / 2) {
    all.push_back(
        Buffer::create(one.pool, {.rows = 1, .item_bytes = kPage, .capacity = 1}, kCaller));
    for (const auto& below : all) {
      for (const auto& above : all) {
        if (below->address_of(0, 0) + kPage == above->address_of(0, 0)) meet = {below, above};
      }
    }
  }
  CHECK(meet.first != nullptr);
  if (meet.first != nullptr) {
    FallAsleep falling(one.pool);
    std::vector<std::uint64_t> numbers;
    for (const auto& buffer : {meet.first, meet.second}) {
      buffer->grow(kCaller, {0, 1}, true);
      numbers.push_back(falling.next_number());
      falling.add(buffer);
    }
    const auto sleeps = [](std::span<const SleepPart> parts) {
      std::vector<std::uint64_t> each;
      for (const SleepPart& part : parts) each.push_back(part.sleep);
      return each;
    };
    falling.begin(kCaller);
    CHECK(sleeps(falling.parts()) == numbers);
    CHECK(falling.finish() == 2);
    WakeUp waking(one.pool, kCaller, numbers);
    CHECK(waking.parts().size() == 2);
    waking.finish(numbers);
  }
  for (const auto& buffer : all) buffer->abandon();
}

TEST_CASE("what wakes is not unmapped under a copy that still runs") {
  One<OnSimulation> one(3, {.patience = std::chrono::milliseconds(500)});
  const SimcudaControl& control = OnSimulation::control();
  one.sleep();
  const std::size_t illegal = control.illegal_accesses();
  std::thread end;
  {
    WakeUp waking(one.pool, kCaller, std::span(&one.number, 1));
    const Stream stream = one.pool->driver().copy_stream();
    control.hold(stream);
    CHECK(control.launch(stream, waking.parts().front().at, 3 * kPage, 1) == 0);
    CHECK_THROWS_AS(waking.finish(std::span(&one.number, 1)), TimedOut);
    end = std::thread([&control, stream] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      control.release(stream);
    });
  }
  end.join();
  CHECK(control.illegal_accesses() == illegal);
  CHECK_FALSE(one.pool->store().broken());
  one.wake();
}

}  // namespace vtensor
