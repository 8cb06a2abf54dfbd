// Bindings of the steps of Pool.sleep and Pool.wake. In between, the contents of the pages are
// copied.
#include "policy/sleep.h"

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
#include "policy/sleep_copy.h"

namespace vtensor::bind {

namespace {

constexpr const char* kSleep = "Pool.sleep";
constexpr const char* kWake = "Pool.wake";

void wake_up(WakeUp* waking, const std::shared_ptr<PagePool>& pool,
             const std::vector<std::uint64_t>& numbers) {
  refuse_in_forked_child(kWake);
  const Caller caller = caller_of(kWake, {}, *pool);
  with_memory(*pool, caller, [&] { new (waking) WakeUp(pool, caller, numbers); });
}

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

void bind_sleep(nb::module_& module) {
  module.def("is_asleep", &faults::asleep_at, "address"_a,
             "Whether memory of a pool at this address is away.");
  nb::class_<SleepImage>(module, "SleepImage")
      .def_static("in_memory", &image_in_memory, "pool"_a, "nbytes"_a)
      .def_static("in_folder", &image_in_folder, "path"_a, "nbytes"_a);
  nb::class_<SleepCopy>(module, "SleepCopy")
      .def_prop_ro("nbytes", &SleepCopy::bytes)
      .def("step", [](SleepCopy& copy) { return without_gil([&] { return copy.step(); }); });
  const auto released = nb::call_guard<ReleasedGil>();
  nb::class_<FallAsleep>(module, "FallAsleep")
      .def(
          "__init__",
          [](FallAsleep* falling, const std::shared_ptr<PagePool>& pool) {
            refuse_in_forked_child(kSleep);
            new (falling) FallAsleep(pool);
          },
          "pool"_a)
      .def("next_number", &FallAsleep::next_number, released)
      .def_prop_ro("numbers", &FallAsleep::numbers)
      .def("begin",
           [](FallAsleep& falling) {
             const Caller caller = caller_of(kSleep, {}, *falling.pool());
             with_memory(*falling.pool(), caller, [&] { falling.begin(caller); });
           })
      .def_prop_ro("nbytes", &FallAsleep::bytes)
      // The copies of the bytes that are to be kept.
      .def(
          "copy",
          [](FallAsleep& falling, const std::shared_ptr<SleepImage>& image) {
            SleepCopy::Images images;
            for (const SleepPart& part : falling.parts()) images.emplace(part.sleep, image);
            return std::make_unique<SleepCopy>(falling.pool(), kSleep, CopyDirection::out,
                                               falling.parts(), std::move(images));
          },
          "image"_a)
      .def("finish", &FallAsleep::finish, released)
      .def_prop_ro("finished", &FallAsleep::finished)
      .def(
          "__enter__", [](nb::object falling) { return falling; },
          nb::sig("def __enter__(self) -> FallAsleep"))
      .def(
          "__exit__",
          [](FallAsleep& falling, const nb::args&) { without_gil([&] { falling.give_up(); }); },
          nb::sig("def __exit__(self, *raised: object) -> None"));
  nb::class_<WakeUp>(module, "WakeUp")
      .def("__init__", &wake_up, "pool"_a, "numbers"_a)
      // The copies that bring contents back. `images` are those of the sleeps whose contents are
      // not given up.
      .def(
          "copy",
          [](WakeUp& waking, SleepCopy::Images images) {
            return std::make_unique<SleepCopy>(waking.pool(), kWake, CopyDirection::in,
                                               waking.parts(), std::move(images));
          },
          "images"_a)
      // `restored`: the sleeps whose contents are back.
      .def(
          "finish",
          [](WakeUp& waking, const std::vector<std::uint64_t>& restored) {
            without_gil([&] { waking.finish(restored); });
          },
          "restored"_a)
      .def(
          "__enter__", [](nb::object waking) { return waking; },
          nb::sig("def __enter__(self) -> WakeUp"))
      .def(
          "__exit__",
          [](WakeUp& waking, const nb::args&) { without_gil([&] { waking.give_up(); }); },
          nb::sig("def __exit__(self, *raised: object) -> None"));
}

}  // namespace vtensor::bind
