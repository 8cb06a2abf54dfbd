#include "bind/sleep.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fault_report.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/torch_bridge.h"
#include "policy/make_room.h"

namespace vtensor::bind {

namespace {

constexpr const char* kSleep = "Pool.sleep";
constexpr const char* kWake = "Pool.wake";

class WakeCore {
 public:
  WakeCore(const std::shared_ptr<PagePool>& pool, const std::vector<std::uint64_t>& numbers)
      : pool_(pool) {
    refuse_in_forked_child(kWake);
    const Caller caller = caller_of(kWake, {}, *pool);
    // Before a refusal, caches give up prefixes that no slot uses.
    waking_ = with_memory(
        *pool, caller, [&] { return std::make_unique<WakeUp>(pool, caller, numbers); },
        [&pool](unsigned) { return without_gil([&] { return MakeRoom(*pool).run_shrinkers(); }); });
  }
  ~WakeCore() { give_up(); }

  // Brings contents back. `images` are those of the sleeps whose contents are not given up.
  std::unique_ptr<SleepCopy> copy(SleepCopy::Images images) const {
    return std::make_unique<SleepCopy>(pool_, kWake, CopyDirection::in, waking_->parts(),
                                       std::move(images));
  }
  // `restored`: the sleeps whose contents are back.
  void finish(const std::vector<std::uint64_t>& restored) {
    const ReleasedGil released;
    waking_->finish(restored);
    waking_.reset();
  }
  void give_up() {
    const ReleasedGil released;
    waking_.reset();
  }

 private:
  const std::shared_ptr<PagePool> pool_;
  std::unique_ptr<WakeUp> waking_;
};

std::shared_ptr<SleepImage> image_in_memory(PagePool& pool, std::size_t bytes) {
  const bool pinned = pool.traits().device.type == 2;
  return std::make_shared<SleepImage>(TorchBridge::get().host_memory(
      kSleep, bytes, pinned, "free some, or keep the contents in a folder"));
}

std::shared_ptr<SleepImage> image_in_folder(const nb::bytes& path, std::size_t bytes) {
  const std::string folder(path.c_str(), path.size());
  return without_gil([&] { return std::make_shared<SleepImage>(kSleep, folder, bytes); });
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

void SleepCore::add(const std::shared_ptr<Client>& client) {
  clients_.reserve(clients_.size() + 1);
  std::uint64_t awake = 0;
  if (client->asleep.compare_exchange_strong(awake, number_)) clients_.push_back(client);
}

std::set<std::uint64_t> SleepCore::numbers() const {
  std::set<std::uint64_t> numbers;
  for (const std::shared_ptr<Client>& client : clients_) numbers.insert(client->asleep);
  return numbers;
}

void SleepCore::begin() {
  const Caller caller = caller_of(kSleep, {}, *pool_);
  with_memory(*pool_, caller, [&] { asleep_.emplace(pool_, caller, clients_); });
}

std::unique_ptr<SleepCopy> SleepCore::copy(const std::shared_ptr<SleepImage>& image) const {
  SleepCopy::Images images;
  for (const SleepPart& part : asleep_->parts()) images.emplace(part.sleep, image);
  return std::make_unique<SleepCopy>(pool_, kSleep, CopyDirection::out, asleep_->parts(),
                                     std::move(images));
}

std::size_t SleepCore::bytes() const {
  std::size_t bytes = 0;
  for (const SleepPart& part : asleep_->parts()) bytes += part.bytes;
  return bytes;
}

std::size_t SleepCore::finish() {
  const ReleasedGil released;
  const std::size_t pages = asleep_->finish();
  finished_ = true;
  asleep_.reset();
  clients_.clear();
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
}

void bind_sleep(nb::module_& module) {
  module.def("is_asleep", &faults::asleep_at, "address"_a,
             "Whether memory of a pool at this address is away.");
  nb::class_<SleepImage>(module, "SleepImage")
      .def_static("in_memory", &image_in_memory, "pool"_a, "nbytes"_a)
      .def_static("in_folder", &image_in_folder, "path"_a, "nbytes"_a);
  nb::class_<SleepCopy>(module, "SleepCopy")
      .def_prop_ro("nbytes", &SleepCopy::bytes)
      .def("step", [](SleepCopy& copy) { return without_gil([&] { return copy.step(); }); });
  nb::class_<SleepCore>(module, "SleepCore")
      .def(nb::init<const std::shared_ptr<PagePool>&>(), "pool"_a)
      .def("next_number", &SleepCore::next_number)
      .def_prop_ro("numbers", &SleepCore::numbers)
      .def("begin", &SleepCore::begin)
      .def_prop_ro("nbytes", &SleepCore::bytes)
      .def("copy", &SleepCore::copy, "image"_a)
      .def("finish", &SleepCore::finish)
      .def_prop_ro("finished", &SleepCore::finished)
      .def(
          "__enter__", [](nb::object sleep) { return sleep; },
          nb::sig("def __enter__(self) -> SleepCore"))
      .def(
          "__exit__", [](SleepCore& sleep, const nb::args&) { sleep.give_up(); },
          nb::sig("def __exit__(self, *raised: object) -> None"));
  nb::class_<WakeCore>(module, "WakeCore")
      .def(nb::init<const std::shared_ptr<PagePool>&, const std::vector<std::uint64_t>&>(),
           "pool"_a, "numbers"_a)
      .def("copy", &WakeCore::copy, "images"_a)
      .def("finish", &WakeCore::finish, "restored"_a)
      .def(
          "__enter__", [](nb::object waking) { return waking; },
          nb::sig("def __enter__(self) -> WakeCore"))
      .def(
          "__exit__", [](WakeCore& waking, const nb::args&) { waking.give_up(); },
          nb::sig("def __exit__(self, *raised: object) -> None"));
}

}  // namespace vtensor::bind
