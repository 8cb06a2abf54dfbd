// The half of an Arena that Python does not see.
#include "arena/arena.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena/blocks.h"
#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/operation_lock.h"
#include "bind/released_gil.h"
#include "bind/sleep.h"
#include "bind/torch_bridge.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

class ArenaCore {
 public:
  ArenaCore(const std::shared_ptr<PagePool>& pool, std::size_t bytes, bool zeros) : pool_(pool) {
    refuse_in_forked_child("Arena");
    const Caller asking = caller_of("Arena", {}, *pool);
    with_memory(*pool, asking, [&] { arena_ = Arena::make(pool, bytes, zeros, asking); });
    bytes_ = bytes;
  }
  ~ArenaCore() {
    if (arena_) arena_->abandon();
  }
  ArenaCore(const ArenaCore&) = delete;
  ArenaCore& operator=(const ArenaCore&) = delete;

  struct Operation : SoleOperation {
    Operation(ArenaCore& core, const char* name)
        : SoleOperation(core.mutex_, core.arena_, "arena", name) {}
  };

  std::vector<bool> map(nb::handle intervals) {
    constexpr const char* name = "Arena.map";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, {}, *pool_);
    std::vector<char> kept;
    arena_->raise_error();
    with_memory(*pool_, asking, [&] { kept = arena_->map(asking, all); });
    return {kept.begin(), kept.end()};
  }

  void unmap(nb::handle intervals, std::optional<Stream> stream) {
    constexpr const char* name = "Arena.unmap";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, stream, *pool_);
    const ReleasedGil released;
    arena_->unmap(asking, all);
  }

  void prepare(nb::handle intervals) {
    constexpr const char* name = "Arena.prepare";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    arena_->raise_error();
    const ReleasedGil released;
    arena_->prepare(all);
  }

  std::size_t trim(nb::handle intervals) {
    constexpr const char* name = "Arena.trim";
    const std::vector<Interval> all =
        intervals.is_none() ? std::vector<Interval>{{0, bytes_}} : read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, {}, *pool_);
    const ReleasedGil released;
    return arena_->trim(asking, all);
  }

  std::vector<bool> holds(nb::handle intervals) {
    constexpr const char* name = "Arena.holds";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const ReleasedGil released;
    const std::vector<char> held = arena_->holds(all);
    return {held.begin(), held.end()};
  }

  void record_stream(std::optional<Stream> stream) {
    constexpr const char* name = "Arena.record_stream";
    const Operation operation(*this, name);
    // Not as a named one, which may end: it is asked again when pages go.
    arena_->use({name, caller_of(name, stream, *pool_).stream});
  }

  // The whole range, as bytes; it keeps the addresses reserved, and no page.
  nb::object storage() {
    const Operation operation(*this, "Arena");
    Generation* generation;
    {
      const ReleasedGil released;
      generation = arena_->publish();
    }
    return TorchBridge::get().storage_over(generation, arena_->base(), arena_->bytes(),
                                           pool_->traits().device);
  }

  void fall_asleep(SleepCore& sleep) {
    const Operation operation(*this, "Pool.sleep");
    sleep.add(arena_);
  }

  ArenaCounts counts() {
    const Operation operation(*this, "Arena.stats");
    const ReleasedGil released;
    return arena_->counts();
  }

  std::vector<PageRecord> pages() {
    const Operation operation(*this, "Arena.pages");
    const ReleasedGil released;
    return arena_->pages();
  }

  void close(std::optional<Stream> stream) {
    const OperationLock lock(mutex_, "Arena.close");
    if (!arena_) return;
    const Caller asking = caller_of("Arena.close", stream, *pool_);
    const ReleasedGil released;
    arena_->use(asking);
    closed_ = true;
    std::exchange(arena_, nullptr)->abandon();
    pool_.reset();
  }
  bool closed() const { return closed_; }

  // During an operation.
  Arena& arena() { return *arena_; }
  PagePool& pool() { return *pool_; }
  std::size_t bytes() const { return bytes_; }

 private:
  // Pairs of bytes, from and up to.
  std::vector<Interval> read(const char* operation, nb::handle intervals) const {
    const auto bytes = static_cast<std::int64_t>(bytes_);
    return each(operation, "intervals", intervals, [&](nb::handle interval) {
      if (PySequence_Check(interval.ptr()) == 0) {
        refuse(operation, "an interval is " + type_text(interval) +
                              ": give pairs of bytes, such as [(0, 4096)]");
      }
      const std::vector<std::int64_t> ends = integers(operation, "an interval", interval);
      if (ends.size() != 2)
        refuse(operation, "an interval has " + std::to_string(ends.size()) +
                              " ends: give (first byte, byte after the last)");
      if (ends[0] < 0 || ends[0] > ends[1] || ends[1] > bytes) {
        refuse(operation, "bytes " + std::to_string(ends[0]) + " to " + std::to_string(ends[1]) +
                              " are not in the arena, which has " + std::to_string(bytes));
      }
      return Interval{static_cast<std::size_t>(ends[0]), static_cast<std::size_t>(ends[1])};
    });
  }

  std::shared_ptr<PagePool> pool_;  // both null once closed
  std::shared_ptr<Arena> arena_;
  std::size_t bytes_ = 0;
  std::atomic<bool> closed_{false};
  OperationMutex mutex_;
};

// The blocks of an arena. Every operation on them is one on the arena.
class BlocksCore {
 public:
  using Part = std::tuple<std::size_t, std::size_t, std::size_t>;

  BlocksCore(ArenaCore& core, std::size_t count, const std::vector<Part>& parts) : core_(core) {
    std::vector<Blocks::Part> all;
    all.reserve(parts.size());
    for (const auto& [offset, stride, size] : parts) all.push_back({offset, stride, size});
    blocks_.emplace(count, std::move(all), core.bytes());
  }

  std::vector<std::size_t> hold(nb::handle numbers) {
    constexpr const char* name = "Blocks.hold";
    const std::vector<std::size_t> all = read(name, numbers);
    const ArenaCore::Operation operation(core_, name);
    const Caller asking = caller_of(name, {}, core_.pool());
    std::vector<std::size_t> lost;
    core_.arena().raise_error();
    with_memory(core_.pool(), asking, [&] { lost = blocks_->hold(core_.arena(), asking, all); });
    return lost;
  }

  void prepare(nb::handle numbers) {
    constexpr const char* name = "Blocks.prepare";
    const std::vector<std::size_t> all = read(name, numbers);
    const ArenaCore::Operation operation(core_, name);
    blocks_->require(name, all);
    core_.arena().raise_error();
    const ReleasedGil released;
    core_.arena().prepare(blocks_->bytes_of(all));
  }

  void release(nb::handle numbers, std::optional<Stream> stream) {
    constexpr const char* name = "Blocks.release";
    const std::vector<std::size_t> all = read(name, numbers);
    const ArenaCore::Operation operation(core_, name);
    const Caller asking = caller_of(name, stream, core_.pool());
    const ReleasedGil released;
    blocks_->release(core_.arena(), asking, all);
  }

  void begin_step() {
    const ArenaCore::Operation operation(core_, "Blocks.begin_step");
    blocks_->begin_step();
  }
  void end_step(std::optional<Stream> stream) {
    constexpr const char* name = "Blocks.end_step";
    const ArenaCore::Operation operation(core_, name);
    const Caller asking = caller_of(name, stream, core_.pool());
    const ReleasedGil released;
    blocks_->end_step(core_.arena(), asking);
  }

  std::vector<bool> whole(nb::handle numbers) {
    constexpr const char* name = "Blocks.whole";
    const std::vector<std::size_t> all = read(name, numbers);
    const ArenaCore::Operation operation(core_, name);
    const ReleasedGil released;
    blocks_->require(name, all);
    const std::vector<char> whole = blocks_->whole(core_.arena(), all);
    return {whole.begin(), whole.end()};
  }

  std::size_t trim(nb::handle numbers) {
    constexpr const char* name = "Blocks.trim";
    const std::vector<std::size_t> all = read(name, numbers);
    const ArenaCore::Operation operation(core_, name);
    const Caller asking = caller_of(name, {}, core_.pool());
    const ReleasedGil released;
    blocks_->require(name, all);
    return core_.arena().trim(asking, blocks_->bytes_of(all));
  }

  std::size_t mapped() {
    const ArenaCore::Operation operation(core_, "Blocks.mapped");
    return blocks_->mapped();
  }

 private:
  static std::vector<std::size_t> read(const char* operation, nb::handle numbers) {
    std::vector<std::size_t> all;
    for (const std::int64_t number : integers(operation, "numbers", numbers)) {
      if (number < 0) refuse(operation, "there is no block " + std::to_string(number));
      all.push_back(static_cast<std::size_t>(number));
    }
    return all;
  }

  ArenaCore& core_;  // which the binding keeps alive
  std::optional<Blocks> blocks_;
};

}  // namespace

void bind_arena(nb::module_& module) {
  nb::class_<ArenaCounts>(module, "ArenaCounts")
      .def_ro("active", &ArenaCounts::active)
      .def_ro("cached", &ArenaCounts::cached)
      .def_ro("prefetched", &ArenaCounts::prefetched)
      .def_ro("pinned", &ArenaCounts::pinned)
      .def_ro("quarantined", &ArenaCounts::quarantined)
      .def_ro("evicted", &ArenaCounts::evicted);

  const auto no_stream = nb::arg("stream") = nb::none();
  nb::class_<ArenaCore>(module, "ArenaCore")
      .def(nb::init<const std::shared_ptr<PagePool>&, std::size_t, bool>(), nb::arg("pool"),
           nb::arg("nbytes"), nb::arg("zeros"))
      .def("map", &ArenaCore::map, nb::arg("intervals"))
      .def("unmap", &ArenaCore::unmap, nb::arg("intervals"), no_stream)
      .def("prepare", &ArenaCore::prepare, nb::arg("intervals"))
      .def("trim", &ArenaCore::trim, nb::arg("intervals") = nb::none())
      .def("holds", &ArenaCore::holds, nb::arg("intervals"))
      .def("record_stream", &ArenaCore::record_stream, no_stream)
      .def("storage", &ArenaCore::storage)
      .def("fall_asleep", &ArenaCore::fall_asleep, nb::arg("sleep"))
      .def("counts", &ArenaCore::counts)
      .def("pages", &ArenaCore::pages)
      .def("close", &ArenaCore::close, no_stream)
      .def_prop_ro("closed", &ArenaCore::closed);

  nb::class_<BlocksCore>(module, "BlocksCore")
      .def(nb::init<ArenaCore&, std::size_t, const std::vector<BlocksCore::Part>&>(),
           nb::keep_alive<1, 2>(), nb::arg("arena"), nb::arg("count"), nb::arg("parts"))
      .def("hold", &BlocksCore::hold, nb::arg("numbers"))
      .def("prepare", &BlocksCore::prepare, nb::arg("numbers"))
      .def("release", &BlocksCore::release, nb::arg("numbers"), no_stream)
      .def("begin_step", &BlocksCore::begin_step)
      .def("end_step", &BlocksCore::end_step, no_stream)
      .def("whole", &BlocksCore::whole, nb::arg("numbers"))
      .def("trim", &BlocksCore::trim, nb::arg("numbers"))
      .def_prop_ro("mapped", &BlocksCore::mapped);
}

}  // namespace vtensor::bind
