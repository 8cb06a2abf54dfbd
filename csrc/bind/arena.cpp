// The C++ half of an Arena and of the blocks in it.
#include "arena/arena.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "arena/blocks.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/sharing.h"
#include "bind/torch_bridge.h"
#include "policy/sleep.h"

namespace vtensor::bind {

namespace {

std::vector<bool> as_bools(const std::vector<char>& flags) { return {flags.begin(), flags.end()}; }

class ArenaCore {
 public:
  ArenaCore(const std::shared_ptr<PagePool>& pool, std::size_t bytes, bool zeros) : bytes_(bytes) {
    refuse_in_forked_child("Arena");
    const Caller caller = caller_of("Arena", {}, *pool);
    arena_ = with_memory(*pool, caller, [&] { return Arena::make(pool, bytes, zeros, caller); });
  }
  ~ArenaCore() {
    if (arena_) arena_->abandon();
  }

  // Runs `body` as one operation, without the GIL.
  template <typename Body>
  auto run(const char* name, std::optional<Stream> stream, const Body& body) {
    const SoleOperation operation(mutex_, arena_, name, stream);
    return without_gil([&] { return body(*arena_, operation.caller()); });
  }
  // `run` with memory. First raises the mapper's error for the arena, if there is one.
  template <typename Body>
  auto run_with_memory(const char* name, const Body& body) {
    const SoleOperation operation(mutex_, arena_, name);
    arena_->raise_error(name);
    return operation.with_memory([&] { return body(*arena_, operation.caller()); });
  }

  std::vector<bool> map(nb::handle intervals) {
    const std::vector<Interval> all = read("Arena.map", intervals);
    return as_bools(run_with_memory(
        "Arena.map", [&](Arena& arena, const Caller& caller) { return arena.map(caller, all); }));
  }
  void unmap(nb::handle intervals, std::optional<Stream> stream) {
    const std::vector<Interval> all = read("Arena.unmap", intervals);
    run("Arena.unmap", stream,
        [&](Arena& arena, const Caller& caller) { arena.unmap(caller, all); });
  }
  void prepare(nb::handle intervals) {
    const std::vector<Interval> all = read("Arena.prepare", intervals);
    run("Arena.prepare", {}, [&](Arena& arena, const Caller& caller) {
      arena.raise_error(caller.operation);
      arena.prepare(all);
    });
  }
  std::size_t trim(nb::handle intervals) {
    const std::vector<Interval> all =
        intervals.is_none() ? std::vector<Interval>{{0, bytes_}} : read("Arena.trim", intervals);
    return run("Arena.trim", {},
               [&](Arena& arena, const Caller& caller) { return arena.trim(caller, all); });
  }
  std::vector<bool> holds(nb::handle intervals) {
    const std::vector<Interval> all = read("Arena.holds", intervals);
    return as_bools(
        run("Arena.holds", {}, [&](Arena& arena, const Caller&) { return arena.holds(all); }));
  }
  void record_stream(std::optional<Stream> stream) {
    const SoleOperation operation(mutex_, arena_, "Arena.record_stream", stream);
    without_gil([&] { arena_->use(operation.recorded()); });
  }
  // The whole range, as bytes. It keeps the addresses reserved, and no page.
  nb::object storage() {
    const SoleOperation operation(mutex_, arena_, "Arena");
    Generation* const generation = without_gil([&] { return arena_->publish(); });
    return TorchBridge::get().storage_over(generation, arena_->base(), arena_->bytes());
  }
  ReaderFiles open_for_readers() {
    return run("Arena.share", {}, [](Arena& arena, const Caller& caller) {
      arena.share(caller.operation, 0);
      return reader_files(caller.operation, std::array{&arena});
    });
  }
  void fall_asleep(FallAsleep& sleep) {
    const SoleOperation operation(mutex_, arena_, "Pool.sleep");
    sleep.add(arena_);
  }
  PoolCounts counts() {
    return run("Arena.stats", {}, [](Arena& arena, const Caller&) { return arena.counts(); });
  }
  std::vector<PageRecord> pages() {
    return run("Arena.pages", {}, [](Arena& arena, const Caller&) { return arena.pages(); });
  }

  void close(std::optional<Stream> stream) {
    const auto lock = mutex_.hold("Arena.close");
    if (!arena_) return;
    const Caller caller = caller_of("Arena.close", stream, *arena_->pool());
    without_gil([&] { arena_->use(caller); });
    std::shared_ptr<Arena> arena = std::move(arena_);  // with the GIL, as `closed` reads it
    const ReleasedGil released;
    std::exchange(arena, nullptr)->abandon();
  }
  bool closed() const { return arena_ == nullptr; }
  std::size_t bytes() const { return bytes_; }

 private:
  // Converts pairs (first byte, byte after the last).
  std::vector<Interval> read(const char* operation, nb::handle intervals) const {
    const auto bytes = static_cast<std::int64_t>(bytes_);
    return each(operation, "intervals", intervals, [&](nb::handle interval) {
      if (PySequence_Check(interval.ptr()) == 0)
        refuse(operation, "an interval is ", type_text(interval),
               ": give pairs of bytes, such as [(0, 4096)]");
      const std::vector<std::int64_t> ends = integers(operation, "an interval", interval);
      if (ends.size() != 2)
        refuse(operation, "an interval has ", ends.size(),
               " ends: give (first byte, byte after the last)");
      if (ends[0] < 0 || ends[0] > ends[1] || ends[1] > bytes)
        refuse(operation, "bytes ", ends[0], " to ", ends[1], " are not in the arena, which has ",
               bytes, ": give (first byte, byte after the last) of it");
      return Interval{static_cast<std::size_t>(ends[0]), static_cast<std::size_t>(ends[1])};
    });
  }

  std::shared_ptr<Arena> arena_;  // null once closed
  const std::size_t bytes_;
  OperationMutex mutex_{"arena"};
};

// The blocks of an arena. Every operation on them is one on the arena.
class BlocksCore {
 public:
  BlocksCore(ArenaCore& core, std::size_t count, const std::vector<Blocks::Part>& parts)
      : core_(core), blocks_(count, parts, core.bytes()) {}

  Blocks::Held hold(nb::handle numbers) {
    const std::vector<std::size_t> all = read("Blocks.hold", numbers);
    return core_.run_with_memory("Blocks.hold", [&](Arena& arena, const Caller& caller) {
      return blocks_.hold(arena, caller, all);
    });
  }
  void prepare(nb::handle numbers) {
    const std::vector<std::size_t> all = read("Blocks.prepare", numbers);
    core_.run("Blocks.prepare", {}, [&](Arena& arena, const Caller& caller) {
      arena.raise_error(caller.operation);
      arena.prepare(blocks_.bytes_of(all));
    });
  }
  void release(nb::handle numbers, std::optional<Stream> stream) {
    const std::vector<std::size_t> all = read("Blocks.release", numbers);
    core_.run("Blocks.release", stream,
              [&](Arena& arena, const Caller& caller) { blocks_.release(arena, caller, all); });
  }
  void begin_step() {
    core_.run("Blocks.begin_step", {}, [&](Arena&, const Caller&) { blocks_.begin_step(); });
  }
  void end_step(std::optional<Stream> stream) {
    core_.run("Blocks.end_step", stream,
              [&](Arena& arena, const Caller& caller) { blocks_.end_step(arena, caller); });
  }
  std::vector<bool> whole(nb::handle numbers) {
    const std::vector<std::size_t> all = read("Blocks.whole", numbers);
    return as_bools(core_.run("Blocks.whole", {}, [&](Arena& arena, const Caller&) {
      return blocks_.whole(arena, all);
    }));
  }
  std::size_t trim(nb::handle numbers) {
    const std::vector<std::size_t> all = read("Blocks.trim", numbers);
    return core_.run("Blocks.trim", {}, [&](Arena& arena, const Caller& caller) {
      return arena.trim(caller, blocks_.bytes_of(all));
    });
  }
  std::size_t mapped() {
    return core_.run("Blocks.mapped", {}, [&](Arena&, const Caller&) { return blocks_.mapped(); });
  }

 private:
  std::vector<std::size_t> read(const char* operation, nb::handle numbers) const {
    auto all = each(operation, "numbers", numbers, [&](nb::handle given) {
      const std::int64_t number = integer(operation, "numbers", given);
      if (number < 0)
        refuse(operation, "there is no block ", number, ": blocks are numbered from 0");
      return static_cast<std::size_t>(number);
    });
    blocks_.require(operation, all);
    return all;
  }

  ArenaCore& core_;  // which the binding keeps alive
  Blocks blocks_;
};

}  // namespace

void bind_arena(nb::module_& module) {
  const auto intervals = "intervals"_a.none(), numbers = "numbers"_a.none();
  const auto no_stream = "stream"_a = nb::none();
  nb::class_<ArenaCore>(module, "ArenaCore")
      .def(nb::init<const std::shared_ptr<PagePool>&, std::size_t, bool>(), "pool"_a, "nbytes"_a,
           "zeros"_a)
      .def("map", &ArenaCore::map, intervals)
      .def("unmap", &ArenaCore::unmap, intervals, no_stream)
      .def("prepare", &ArenaCore::prepare, intervals)
      .def("trim", &ArenaCore::trim, "intervals"_a = nb::none())
      .def("holds", &ArenaCore::holds, intervals)
      .def("record_stream", &ArenaCore::record_stream, no_stream)
      .def("open_for_readers", &ArenaCore::open_for_readers)
      .def("storage", &ArenaCore::storage)
      .def("fall_asleep", &ArenaCore::fall_asleep, "sleep"_a)
      .def("counts", &ArenaCore::counts)
      .def("pages", &ArenaCore::pages)
      .def("close", &ArenaCore::close, no_stream)
      .def_prop_ro("closed", &ArenaCore::closed);

  nb::class_<BlocksCore>(module, "BlocksCore")
      .def(nb::init<ArenaCore&, std::size_t, const std::vector<Blocks::Part>&>(),
           nb::keep_alive<1, 2>(), "arena"_a, "count"_a, "parts"_a)
      .def("hold", &BlocksCore::hold, numbers)
      .def("prepare", &BlocksCore::prepare, numbers)
      .def("release", &BlocksCore::release, numbers, no_stream)
      .def("begin_step", &BlocksCore::begin_step)
      .def("end_step", &BlocksCore::end_step, no_stream)
      .def("whole", &BlocksCore::whole, numbers)
      .def("trim", &BlocksCore::trim, numbers)
      .def_prop_ro("mapped", &BlocksCore::mapped);
}

}  // namespace vtensor::bind
