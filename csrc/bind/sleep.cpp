#include "bind/sleep.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "policy/reclaim.h"
#include "vmm/wait.h"

namespace vtensor::bind {

namespace {

constexpr const char* kSleep = "Pool.sleep";
constexpr const char* kWake = "Pool.wake";

class WakeCore {
 public:
  WakeCore(const std::shared_ptr<PagePool>& pool, const std::vector<std::uint64_t>& numbers) {
    refuse_in_forked_child(kWake);
    const Caller caller = caller_of(kWake, {}, *pool);
    // Before a refusal, caches give up prefixes that no slot uses.
    waking_ = with_memory(
        *pool, caller, [&] { return std::make_unique<WakeUp>(pool, caller, numbers); },
        [&pool](unsigned) { return without_gil([&] { return Reclaim(*pool).shrink(); }); });
  }
  ~WakeCore() { give_up(); }

  const std::vector<SleepPart>& parts() const { return waking_->parts(); }
  void finish() {
    const ReleasedGil released;
    waking_->finish();
    waking_.reset();
  }
  void give_up() {
    const ReleasedGil released;
    waking_.reset();
  }

 private:
  std::unique_ptr<WakeUp> waking_;
};

// Runs a copy between pages and memory of the host, which is complete on return.
template <typename Copy>
void copy(PagePool& pool, const char* operation, Copy launch) {
  const ReleasedGil released;
  Driver& driver = pool.driver();
  launch(driver);
  if (wait_for(driver, driver.fence(driver.copy_stream()), pool.options().patience)) return;
  throw TimedOut(operation, pool.options().patience, "a copy has not ended");
}

void read_pages(PagePool& pool, Address from, std::uintptr_t to, std::size_t bytes) {
  copy(pool, kSleep,
       [&](Driver& driver) { driver.copy_out(reinterpret_cast<void*>(to), from, bytes); });
}

void write_pages(PagePool& pool, Address to, std::uintptr_t from, std::size_t bytes) {
  copy(pool, kWake,
       [&](Driver& driver) { driver.copy_in(to, reinterpret_cast<const void*>(from), bytes); });
}

}  // namespace

SleepCore::SleepCore(const std::shared_ptr<PagePool>& pool) : pool_(pool) {
  refuse_in_forked_child(kSleep);
}

std::uint64_t SleepCore::next_number() {
  const ReleasedGil released;
  const PoolLock lock(pool_);
  return number_ = pool_->next_id();
}

SleepCore::~SleepCore() { give_up(); }

bool SleepCore::add(const std::shared_ptr<Client>& client) {
  clients_.reserve(clients_.size() + 1);
  std::uint64_t awake = 0;
  if (!client->asleep.compare_exchange_strong(awake, number_)) return false;
  clients_.push_back(client);
  return true;
}

void SleepCore::begin() {
  const Caller caller = caller_of(kSleep, {}, *pool_);
  with_memory(*pool_, caller, [&] { asleep_.emplace(pool_, caller, clients_); });
}

std::size_t SleepCore::finish() {
  const ReleasedGil released;
  const std::size_t pages = asleep_->finish();
  finished_ = true;
  asleep_.reset();
  clients_.clear();
  undo_.clear();
  try {
    pool_->trim();  // cached pages became spare ones
  } catch (const Error&) {
    // The memory stays with the pool.
  }
  return pages;
}

void SleepCore::give_up() noexcept {
  const ReleasedGil released;
  asleep_.reset();
  for (const std::shared_ptr<Client>& client : clients_) client->asleep = 0;
  clients_.clear();
  for (const std::function<void()>& awake : undo_) awake();
  undo_.clear();
}

void bind_sleep(nb::module_& module) {
  using Part = SleepPart;
  bind_fields(nb::class_<Part>(module, "SleepPart"), VT_FIELD(Part, at), VT_FIELD(Part, sleep),
              VT_FIELD(Part, offset), VT_FIELD(Part, bytes));
  nb::class_<SleepCore>(module, "SleepCore")
      .def(nb::init<const std::shared_ptr<PagePool>&>(), "pool"_a)
      .def("next_number", &SleepCore::next_number)
      .def("begin", &SleepCore::begin)
      .def("parts", &SleepCore::parts)
      .def("finish", &SleepCore::finish)
      .def_prop_ro("finished", &SleepCore::finished)
      .def("give_up", &SleepCore::give_up);
  nb::class_<WakeCore>(module, "WakeCore")
      .def(nb::init<const std::shared_ptr<PagePool>&, const std::vector<std::uint64_t>&>(),
           "pool"_a, "numbers"_a)
      .def("parts", &WakeCore::parts)
      .def("finish", &WakeCore::finish)
      .def("give_up", &WakeCore::give_up);
  module.def("read_pages", &read_pages, "pool"_a, "address"_a, "to"_a, "nbytes"_a);
  module.def("write_pages", &write_pages, "pool"_a, "address"_a, "source"_a, "nbytes"_a);
}

}  // namespace vtensor::bind
